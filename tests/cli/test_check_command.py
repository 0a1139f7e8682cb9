"""``meshwright check`` on the command line, and the files that ``plan serve --emit`` writes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.cli.main import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["meshwright", *args])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


def test_a_refused_command_exits_1_with_the_way_out(run: Run) -> None:
    code, out, _ = run(
        *("check", "--on", "1x4xRTX-3090", "--", "vllm", "serve", "meta-llama/Llama-2-13b-hf"),
        *("--tensor-parallel-size", "3"),
    )
    assert code == 1
    lines = out.splitlines()
    assert lines[0].startswith("will not start: 40 attention heads are not divisible by tensor parallel size 3")
    assert "Mended" in out


def test_an_unwise_command_exits_0_and_says_so(run: Run) -> None:
    code, out, _ = run(
        *("check", "--on", "2x8xH100-SXM", "--", "vllm", "serve", "meta-llama/Llama-3.1-70B", "-tp", "16"),
        *("--distributed-executor-backend", "ray", "--max-model-len", "8192"),
    )
    assert code == 0
    assert "unwise: tensor parallel 16 crosses nodes" in out


def test_json_has_the_keys_of_plan_and_what_was_understood(run: Run) -> None:
    code, out, _ = run(
        *("check", "--json", "--on", "8xH100-SXM", "--", "vllm serve Qwen/Qwen3-8B -tp=2 --max-model-len 4k"),
    )
    data = json.loads(out)
    assert code == 0
    assert data.keys() >= {"verdict", "layout", "fits", "legal", "memory", "understood", "starts", "mended"}
    assert data["understood"]["layout"]["tp"] == 2
    assert data["workload"]["max_model_len"] in {4000, 4096}


def test_a_deepspeed_file_is_judged(run: Run, tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    code, out, _ = run("check", str(path), "--model", "llama-3.1-8b", "--on", "1x8xA100-40G")
    assert code in {0, 1}
    assert out.startswith(("will start", "will run out of memory", "will not start"))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("check",), "nothing to check"),
        (("check", "--on", "8xH100-SXM", "--", "make", "coffee"), "no engine"),
        (("check", "--on", "8xH100-SXM", "--", "vllm serve 'open"), "cannot be split"),
        (("check", "--on", "8xH100-SXM", "--", "vllm", "serve", "no/such-model-anywhere", "-tp", "2"), "no/such-model"),
        (("check", "--on", "8xH100-SXM", "--", "vllm", "serve", "Qwen/Qwen3-8B", "-tp", "two"), "two"),
        (("check", "--on", "8xH100-SXM", "--engine", "warp", "--", "vllm", "serve", "x"), "warp"),
        (("check", "--on", "8xH100-SXM", "/etc/hostname"), "hostname"),
    ],
)
def test_bad_input_is_one_clear_line(
    run: Run, args: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, out, err = run(*args)
    assert code == 2, (out, err)
    assert said in err
    assert 1 <= len(err.strip().splitlines()) <= 2


def test_nothing_pasted_is_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    marker = tmp_path / "ran"
    command = f"vllm serve Qwen/Qwen3-8B --served-model-name $(touch {marker}) ; touch {marker} `touch {marker}`"
    run("check", "--on", "8xH100-SXM", "--", command)
    run("check", "--on", "8xH100-SXM", "--", "vllm", "serve", f"$(touch {marker})")
    assert not marker.exists()
    assert os.listdir(tmp_path) == []


def test_emit_writes_scripts_of_both_pools(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    code, out, _ = run(
        *("plan", "serve", "deepseek-v3", "--on", "4x8xH200-SXM@ib-400g", "--prefill", "tp=8"),
        *("--decode", "dp=16,ep=16", "--engine", "sglang", "--emit", str(folder)),
    )
    assert code == 0
    names = sorted(p.name for p in folder.iterdir())
    assert any("prefill" in n for n in names)
    assert sum("decode" in n for n in names) == 2
    assert all(str(folder / n) in out for n in names)
    text = "".join(p.read_text() for p in folder.iterdir())
    assert "--disaggregation-mode prefill" in text
    assert "--disaggregation-mode decode" in text


def test_emit_refuses_what_does_not_fit_and_writes_nothing(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    code, _, err = run(
        "plan", "serve", "llama-3.1-405b", "--on", "8xRTX-3090", "--layout", "tp=8", "--emit", str(folder)
    )
    assert code == 1
    assert "nothing is written" in err
    assert not folder.exists()


def test_a_training_plan_of_megatron_comes_with_its_command(run: Run) -> None:
    code, out, _ = run(
        *("plan", "train", "llama-3.1-70b", "--on", "8x8xH100-SXM@ib-400g", "--engine", "megatron", "--seq", "8192"),
        *("--global-batch", "512", "--layout", "tp=8,pp=4,dp=2,zero=1,sp=on"),
    )
    assert code == 0
    assert "--tensor-model-parallel-size 8" in out


def test_a_replica_over_two_nodes_comes_with_and_without_ray(run: Run) -> None:
    code, out, _ = run(
        *("plan", "serve", "llama-3.1-70b", "--on", "2x4xA100-40G@ib-200g", "--isl", "8000", "--osl", "500"),
        *("--concurrency", "32", "--json"),
    )
    texts = [c["text"] for c in json.loads(out)["commands"]]
    assert code == 0
    assert sum("--nnodes 2" in t for t in texts) == 2
    assert sum(t.startswith("ray start") for t in texts) == 2
    assert sum("--distributed-executor-backend ray" in t for t in texts) == 1


def test_a_link_to_a_configuration_is_read(run: Run, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    (tmp_path / "real" / "ds.json").write_text(json.dumps(config))
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "real" / "ds.json")
    code, out, err = run("check", str(link), "--model", "llama-3.2-1b", "--on", "8xH100-SXM")
    assert (code, err) == (0, "")
    assert out.startswith("will start")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("{tmp}",), "is a directory"),
        (("/dev/null",), "is no regular file"),
        (("{tmp}/none.log",), "no such file"),
        (("none.yaml",), "no such file"),
        (("--isl", "0", "--", "vllm", "serve", "Qwen/Qwen3-8B"), "must be 1 to 16,777,216"),
        (("--plan", "p.json", "--", "vllm", "serve", "Qwen/Qwen3-8B"), "go with a boot log"),
    ],
)
def test_what_is_no_file_is_said_so(run: Run, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    code, out, err = run("check", "--on", "8xH100-SXM", *(w.format(tmp=tmp_path) for w in words))
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "allowed"),
    [
        ("vllm serve meta-llama/Llama-3.1-8B --max-model-len 200000", "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 "),
        (
            "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B --context-length 200000",
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 ",
        ),
    ],
)
def test_a_context_beyond_the_model_is_refused_as_the_engine_does(run: Run, command: str, allowed: str) -> None:
    code, out, _ = run("check", "--on", "1xH100-SXM", "--", command)
    assert code == 1
    assert "200000 exceeds the 131072 positions of the model" in out.replace("\n", " ")
    assert "131072" in out.partition("Mended")[2]
    code, out, _ = run("check", "--on", "1xH100-SXM", "--", allowed + command)
    assert (code, out.splitlines()[0][:10]) == (0, "will start")
    assert "unwise: requests of 200,000 tokens" in out


@pytest.mark.parametrize(("factor", "code"), [(None, 1), (4.0, 0), (2.0, 1)])
def test_positions_stretched_by_hand_count(run: Run, tmp_path: Path, factor: float | None, code: int) -> None:
    config: dict[str, object] = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 1024,
        "vocab_size": 32000,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 2048,
        "max_position_embeddings": 32768,
    }
    if factor is not None:
        config["rope_scaling"] = {"type": "yarn", "factor": factor, "original_max_position_embeddings": 32768}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = ("vllm", "serve", str(tmp_path), "--max-model-len", "131072")
    assert run("check", "--on", "1xH100-SXM", "--", *command)[0] == code
    (tmp_path / "serve.yaml").write_text(f"model: {tmp_path}\nmax-model-len: 131072\n")
    assert run("check", str(tmp_path / "serve.yaml"), "--on", "1xH100-SXM")[0] == code


def test_emit_names_the_side_that_does_not_work(run: Run, tmp_path: Path) -> None:
    where = ("plan", "serve", "llama-3.1-70b", "--on", "2x8xH100-SXM@ib-400g", "--emit", str(tmp_path / "out"))
    code, _, err = run(*where, "--prefill", "tp=4", "--decode", "tp=3")
    assert code == 1
    assert "because illegal: 64 attention heads are not divisible by tensor parallel size 3" in err
    code, _, err = run(*where, "--prefill", "tp=3", "--decode", "tp=4")
    assert code == 1
    assert "because prefill side: illegal: 64 attention heads" in err
    assert not (tmp_path / "out").exists()


def test_a_start_that_hangs_on_an_unknown_flag_says_so_first(run: Run) -> None:
    code, out, _ = run("check", "--on", "1xH100-SXM", "--", "vllm serve Qwen/Qwen3-8B --flux 3")
    assert code == 0
    assert out.startswith("will start if the installed version knows --flux, 0.33.0 does not: TP 1")


@pytest.mark.parametrize(
    "words",
    [
        ("--model", "llama-3.1-405b", "--", "deepspeed --num_gpus 8 train.py --deepspeed ds.json"),
        ("--", "vllm serve deepseek-v3 -tp 8"),
    ],
)
def test_where_nothing_fits_the_way_out_is_said(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    code, out, _ = run("check", "--on", "8xH100-SXM", *words)
    assert code == 1
    assert "way out: no layout looked at fits on 1x8xH100-SXM" in out.replace("\n", " ")
