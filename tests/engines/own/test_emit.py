"""Commands of our own runtime: the real command line reads them as the point that was asked for, and one is run."""

from __future__ import annotations

import random
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from meshwright.api import emit as emit_plan
from meshwright.api import plan_pools, plan_serve, plan_train
from meshwright.cli.main import app
from meshwright.engines.base import Flag, FlagTable, Request
from meshwright.engines.own import ENGINE
from meshwright.engines.own.emit import MODULE, model_argument
from meshwright.engines.own.flags import SERVE, TRAIN
from meshwright.engines.own.parse import program
from meshwright.errors import InputError
from meshwright.judge.check import check_words
from meshwright.specs.cluster import parse_cluster
from meshwright.specs.layout import Fsdp, Layout, parse_layout
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve, Train
from tests.engines.training import words_of
from tests.specs.clusters import cluster

#: Sizes that two ranks deal unevenly.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "vocab_size": 67,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def command_of(name: str) -> Any:
    run = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    return run.commands[name]


def read(text: str) -> dict[str, Any]:
    """What the real command line makes of an emitted command; nothing is run."""
    found = program(words_of(text))
    assert found is not None, text
    params: dict[str, Any] = command_of(found[0]).make_context(found[0], list(found[1])).params
    return params


@pytest.mark.parametrize(("name", "table"), [("serve", SERVE), ("train", TRAIN)])
def test_the_flag_tables_are_those_of_the_command_line(name: str, table: FlagTable) -> None:
    real = {}
    for p in command_of(name).params:
        if p.param_type_name == "option":
            kinds = {"int": "int", "integer": "int", "float": "float"}
            real[p.opts[0]] = (p.is_flag, kinds.get(p.type.name), tuple(p.secondary_opts))
    ours = {f.name: (f.takes == "switch", _number(f), f.off) for f in table.flags}
    assert ours == real


def _number(flag: Flag) -> str | None:
    return flag.type if flag.type in {"int", "float"} else None


def random_training(rng: random.Random) -> Request:
    zero = rng.choice([0, 1, 2, 3])
    layout = Layout(
        tp=rng.choice([1, 2, 4]),
        pp=1 if zero == 3 else rng.choice([1, 2, 4]),
        dp=rng.choice([1, 2, 4]),
        cp=rng.choice([1, 2]),
        zero=zero,
        fsdp=rng.choice([None, Fsdp(prefetch=2), Fsdp(param_dtype="f32")]) if zero == 3 else None,
        schedule=rng.choice(["1f1b", "gpipe", "zb-h1"]),
        micro_batch=rng.choice([1, 2]),
        sp=rng.random() < 0.5,
    )
    work = Train(
        seq=rng.choice([512, 4096]),
        global_batch=layout.dp * layout.micro_batch * 4,
        optimizer=rng.choice(["adamw", "sgd"]),
        recompute=rng.choice(["none", "selective", "full"]),
        param_dtype=rng.choice(["bf16", "f32"]),
    )
    kind = rng.choice(["H100-SXM", "CPU"])
    on = parse_cluster(f"{max(1, -(-layout.world // 8))}x8x{kind}@ib-400g")
    return Request("m/m", layout, on, work, deployment=rng.choice([None, "mp", "ray"]))


def test_training_commands_start_what_was_asked() -> None:
    rng = random.Random(5)
    for _ in range(60):
        asked = random_training(rng)
        work, layout = asked.workload, asked.layout
        assert isinstance(work, Train)
        command = ENGINE.emit(asked).commands[-1]
        params = read(command.text)
        assert (params["seq"], params["global_batch"], params["optimizer"]) == (
            work.seq,
            work.global_batch,
            work.optimizer,
        )
        assert (params["recompute"], params["dtype"]) == (work.recompute, work.param_dtype)
        assert params["device"] == ("cpu" if asked.cluster.device.kind == "cpu" else "cuda")
        assert params["how"] == ("ray" if asked.deployment == "ray" else "local")
        told = parse_layout(params["layout"]).with_(micro_batch=params["micro_batch"])
        assert told.with_(fsdp=None) == layout.with_(fsdp=None)
        found = ENGINE.parse(words_of(command.text), {}, lambda _: None)
        assert (found.layout.fsdp or Fsdp()) == (layout.fsdp or Fsdp())
        assert (found.layout.with_(fsdp=None), found.workload) == (layout.with_(fsdp=None), work)
        assert not found.findings
        assert found.devices == layout.world


def test_serving_commands_start_what_was_asked() -> None:
    rng = random.Random(6)
    for _ in range(40):
        layout = Layout(tp=rng.choice([1, 2, 3, 8]), pp=rng.choice([1, 2]), dp=rng.choice([1, 2]))
        pools = rng.random() < 0.3
        settings = ServeSettings(
            max_num_seqs=rng.choice([4, 64]),
            max_num_batched_tokens=rng.choice([512, 2048]),
            block_size=rng.choice([16, 32]),
            dtype=rng.choice(["bf16", "f32"]),
        )
        prefill = Layout(tp=2) if pools else None
        asked = Request("m/m", layout, cluster(5, 8), Serve(100, 28), settings, prefill, cache_tokens=300)
        commands = ENGINE.emit(asked).commands
        params = read(commands[-1].text)
        given = params["decode"] if pools else params["layout"]
        assert parse_layout(given) == layout
        assert (params["prefill"], params["layout"] is None) == ("tp=2" if pools else None, pools)
        limits = (params["max_sequences"], params["max_batch_tokens"], params["block_size"], params["dtype"])
        assert limits == (
            settings.max_num_seqs,
            settings.max_num_batched_tokens,
            settings.block_size,
            settings.dtype,
        )
        assert (params["max_len"], params["cache_tokens"]) == (128, 300)
        ranks = layout.world + 2 * pools
        assert params["launch"] == ("local" if ranks <= 8 else "ray")
        assert len(commands) == (1 if ranks <= 8 else 1 + -(-ranks // 8))
        found = ENGINE.parse(words_of(commands[-1].text), {}, lambda _: None)
        assert (found.layout, found.prefill, found.settings) == (layout, prefill, replace(settings, as_typed=True))


def test_a_cache_is_no_larger_than_its_sequences() -> None:
    settings = ServeSettings(max_num_seqs=2)
    asked = Request("m/m", Layout(), cluster(1, 8), Serve(100, 28), settings, cache_tokens=10**9)
    assert read(ENGINE.emit(asked).commands[0].text)["cache_tokens"] == 256


def test_all_nodes_type_one_torchrun() -> None:
    asked = Request("m/m", Layout(tp=8, dp=8), cluster(8, 8), Train(global_batch=64))
    (command,) = ENGINE.emit(asked).commands
    assert command.node is None
    assert command.text.startswith("torchrun --nnodes 8 --nproc-per-node 8 ")
    assert '--rdzv-endpoint "$HEAD_IP:29500"' in command.text
    assert "all nodes share" in command.note
    fewer = command.text.replace("--nnodes 8", "--nnodes 16")
    assert [r.code for r in ENGINE.parse(words_of(fewer), {}, lambda _: None).findings] == ["world_over_degrees"]


TRAINING, SERVING = Train(global_batch=8), Serve()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"workload": replace(TRAINING, optimizer="muon")}, "optimizer muon"),
        ({"workload": replace(TRAINING, param_dtype="f16")}, "parameters in f16"),
        ({"workload": replace(TRAINING, grad_dtype="bf16")}, "bf16 and f32"),
        ({"workload": replace(TRAINING, master_weights=False)}, "without master weights"),
        ({"workload": replace(TRAINING, offload="optimizer")}, "offload of optimizer"),
        ({"workload": replace(TRAINING, attention="unfused")}, "attention unfused"),
        ({"workload": replace(TRAINING, recompute="full", recompute_layers=2)}, "2 layers a stage"),
        ({"workload": replace(TRAINING, dropout=0.1)}, "dropout 0.1"),
        ({"workload": TRAINING, "deployment": "kuberay"}, "single, mp or ray"),
        ({"workload": TRAINING, "layout": Layout(dp=16), "deployment": "single"}, "needs 2 nodes"),
        ({"workload": TRAINING, "layout": Layout(tp=16), "deployment": "ray"}, "tp 16 exceeds its 8 devices"),
        ({"layout": Layout(cp=2)}, "context parallel 2"),
        ({"layout": Layout(tp=16)}, "tp 16 exceeds its 8 devices"),
        ({"layout": Layout(dp=17)}, "needs 17 devices"),
        ({"layout": Layout(dp=16), "deployment": "single"}, "deploy it as ray"),
        ({"deployment": "slurm"}, "use single or ray"),
        ({"settings": ServeSettings(kv_dtype="fp8")}, "a cache in fp8"),
        ({"settings": ServeSettings(quantization="fp8")}, "quantization fp8"),
        ({"settings": ServeSettings(speculative=True)}, "speculative tokens 1"),
        ({"settings": ServeSettings(max_num_seqs=5000)}, "--max-sequences 5000: it takes at most 4096"),
        ({"options": {"image": "x"}}, "no option 'image'"),
    ],
)
def test_what_cannot_be_told_is_refused(change: dict[str, Any], words: str) -> None:
    asked = Request("m/m", Layout(), cluster(2, 8), SERVING)
    with pytest.raises(InputError) as caught:
        ENGINE.emit(replace(asked, **change))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_name_is_the_folder_that_a_download_makes(tmp_path: Path) -> None:
    assert model_argument(str(tmp_path)) == (str(tmp_path), "")
    assert "hf download HuggingFaceTB/SmolLM2-135M --local-dir smollm2-135m" in model_argument("smollm2-135m")[1]
    assert "--local-dir a/b" in model_argument("a/b")[1]
    assert model_argument("./a/b")[1] == "replace ./a/b by the folder of the checkpoint"


def test_a_plan_says_why_there_is_no_command() -> None:
    muon = plan_train("smollm2-135m", "8xH100-SXM", Train(global_batch=64, optimizer="muon"))
    quantized = plan_serve("deepseek-v3", "2x8xH200-SXM", engine="meshwright", layout="tp=16")
    for plan, words in ((muon, "optimizer muon"), (quantized, "fp8 weights")):
        assert plan.legal
        assert not plan.commands
        assert words in plan.notes[-1]
        with pytest.raises(InputError, match=words):
            emit_plan(plan)


def test_check_reads_a_command_back() -> None:
    on = parse_cluster("8xH100-SXM")
    plan = plan_serve("llama-3.1-8b", on, engine="meshwright", layout="tp=2")
    words = shlex.split(plan.commands[0].text)
    verdict = check_words(words, on)
    assert verdict.starts
    assert verdict.plan.settings is not None
    assert plan.settings is not None
    assert verdict.plan.settings.max_num_seqs == plan.settings.max_num_seqs
    assert not check_words([*words, "--tp", "2"], on).starts
    other = [w if w != "llama-3.1-8b" else "deepseek-v3" for w in words]
    assert "fp8 weights" in check_words(other, parse_cluster("8xB200")).verdict
    with pytest.raises(InputError, match="--engine 'vllm' starts that engine"):
        check_words([*words, "--engine", "vllm"], on)


def test_the_planned_server_has_the_planned_cache(tmp_path: Path) -> None:
    from meshwright.runtime.checkpoint import write_random
    from meshwright.runtime.serve.setup import Wishes, engine_config

    write_random(CONFIG, tmp_path / "m")
    asked = {"on": "1x4xCPU", "engine": "meshwright", "workload": Serve(20, 12)}
    first, second = plan_pools(str(tmp_path / "m"), **asked, prefill="tp=1", decode="tp=2")  # type: ignore[arg-type]
    made = emit_plan(second, prefill=first).commands
    params = read(made[0].text)
    wishes = Wishes(
        params["dtype"], params["device"], params["max_sequences"], params["max_batch_tokens"], params["max_len"],
        cache_tokens=params["cache_tokens"], block_size=params["block_size"],
    )  # fmt: skip
    config = engine_config(Path(params["model"]), params["prefill"], ENGINE.profile(), wishes, params["decode"])
    assert config.world == 3
    assert config.dtype == "f32"
    assert config.limits.sequences == params["max_sequences"] == second.settings.max_num_seqs  # type: ignore[union-attr]
    assert config.blocks * config.block_size == params["max_sequences"] * 32


def test_the_planned_training_runs(tmp_path: Path) -> None:
    import numpy as np

    from meshwright.runtime.checkpoint import write_random

    write_random(CONFIG, tmp_path / "m")
    np.save(tmp_path / "ids.npy", np.arange(200, dtype=np.int64) % 67)
    plan = plan_train(str(tmp_path / "m"), "1x2xCPU", Train(seq=16, global_batch=4), layout="dp=2,zero=2")
    words = shlex.split(plan.commands[0].text)
    assert words[:3] == ["meshwright", "run", "train"]
    words[words.index("corpus.txt")] = str(tmp_path / "ids.npy")
    line = [sys.executable, "-m", MODULE, *words[1:], "--steps", "2"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "step 2 of 2 under dp=2,zero=2" in done.stdout
    assert (tmp_path / "run" / "step-00000002").is_dir()
