"""What is emitted asks for the layout again, and every word of it is a flag of torchtitan 0.3."""

from __future__ import annotations

import random
import shlex
from collections.abc import Iterator
from dataclasses import replace

import pytest

from meshwright.engines.base import Request
from meshwright.engines.flagtable import rejected
from meshwright.engines.launcher import read_launch
from meshwright.engines.torchtitan import ENGINE
from meshwright.engines.torchtitan.settings import configurations, model_of
from meshwright.errors import InputError
from meshwright.specs.cluster import parse_cluster
from meshwright.specs.hf.read import read_model
from meshwright.specs.layout import Fsdp, Layout
from meshwright.specs.workload import Serve, Train

CLUSTER = parse_cluster("8x8xH100-SXM@ib-400g")
MODELS = {name: read_model(name, allow_online=False) for name in ("llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b")}
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zbv", "dualpipev")


def accepted(words: list[str]) -> list[str]:
    """What the flag table refuses in a command, apart from the word that chooses the checkpointing policy."""
    launch = read_launch(words)
    assert launch is not None
    assert launch.arguments[-1].startswith("activation_checkpoint:")
    return rejected(launch.arguments[:-1], ENGINE.flags(), 0)


def sizes(rng: random.Random, layers: int, pp: int) -> tuple[int, ...]:
    """A hand-made split, or nothing."""
    if pp == 1 or rng.random() < 0.6:
        return ()
    cuts = sorted(rng.sample(range(1, layers), pp - 1))
    found = tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))
    return found if len(set(found)) > 1 else ()


def layouts(seed: int, count: int) -> Iterator[tuple[str, Layout, Train]]:
    """Random layouts that the profile allows."""
    rng = random.Random(seed)
    found = 0
    while found < count:
        name = rng.choice(list(MODELS))
        spec = MODELS[name]
        pp, tp, dp = rng.choice((1, 1, 2, 4)), rng.choice((1, 2, 4)), rng.choice((1, 2, 3, 4, 8))
        cp, ep = rng.choice((1, 1, 2)), rng.choice((1, 2, 4, 8)) if spec.moe else 1
        schedule = rng.choice(SCHEDULES) if pp > 1 else "1f1b"
        split = sizes(rng, len(spec.layers), pp)
        virtual = rng.choice((2, 2, 3, 4)) if schedule == "interleaved" else 1
        replicas = rng.choice([r for r in (1, 2, 3) if dp % r == 0])
        sharded = dp // replicas * cp > 1 and (cp > 1 or rng.random() < 0.8)
        knobs = Fsdp(
            reshard_after_forward=rng.random() < 0.5, param_dtype=rng.choice(("bf16", "f32")), replicas=replicas
        )
        layout = Layout(
            tp=tp,
            pp=pp,
            dp=dp,
            cp=cp,
            ep=ep,
            etp=1 if ep > 1 else None,
            sp=tp > 1 and rng.random() < 0.7,
            zero=3 if sharded else 0,
            fsdp=knobs if sharded and knobs != Fsdp(reshard_after_forward=pp == 1) else None,
            schedule=schedule,  # type: ignore[arg-type]
            virtual=virtual,
            micro_batch=rng.choice((1, 2)),
            stage_layers=split,
        )
        work = Train(
            seq=rng.choice((2048, 4096, 8192)),
            global_batch=dp * layout.micro_batch * pp * rng.choice((1, 2, 3)),
            recompute=rng.choice(("none", "selective", "full")),
            param_dtype=knobs.param_dtype if sharded else "bf16",
            state_dtype=rng.choice(("f32", "bf16")),
            fused_cross_entropy=False,
        )
        broken = ENGINE.profile().check(spec, layout, CLUSTER, work)
        if any(r.severity == "illegal" for r in broken):
            continue
        try:
            ENGINE.emit(Request(name, layout, CLUSTER, work))
        except InputError as error:  # layers that no number of layers a part deals into these parts
            if "cannot be dealt into" in str(error):
                continue
            raise
        found += 1
        yield name, layout, work


def round_trip(seed: int, count: int) -> int:
    """How many of ``count`` layouts come back as they were."""
    for name, layout, work in layouts(seed, count):
        made = ENGINE.emit(Request(name, layout, CLUSTER, work))
        words = shlex.split(made.commands[0].text)
        assert accepted(words) == []
        found = ENGINE.parse(words, {}, lambda path: None)
        assert found.model == name
        found = ENGINE.complete(found, MODELS[name], CLUSTER)
        assert found.layout == layout, made.commands[0].text
        assert found.workload == work, made.commands[0].text
        assert found.devices == layout.world
        assert found.unknown == ()
        refused = [r for r in found.findings if r.severity == "illegal"]
        assert refused == [], (refused, made.commands[0].text)
    return count


def test_layouts_come_back() -> None:
    assert round_trip(1, 100) == 100


@pytest.mark.slow
def test_two_thousand_layouts_come_back() -> None:
    assert round_trip(2, 2000) == 2000


def test_a_planted_mistake_is_seen() -> None:
    """The round trip fails when a degree is not written."""
    name, layout, work = next(item for item in layouts(3, 50) if item[1].tp > 1)
    text = ENGINE.emit(Request(name, layout, CLUSTER, work)).commands[0].text
    words = shlex.split(text.replace(f"--parallelism.tensor_parallel_degree {layout.tp}", ""))
    assert ENGINE.parse(words, {}, lambda path: None).layout != layout
    assert accepted(shlex.split(text.replace("seq_len", "seq_length"))) != []


def test_every_model_of_the_atlas_has_its_configuration() -> None:
    known = {model_of(c) for c in configurations("0.3").values()} - {None}
    assert {"llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "deepseek-v3", "gpt-oss-120b", "qwen3-14b"} <= known
    for name in known:
        made = ENGINE.emit(Request(str(name), Layout(dp=8, zero=3), CLUSTER, Train(seq=2048, global_batch=8)))
        found = ENGINE.parse(shlex.split(made.commands[0].text), {}, lambda path: None)
        assert found.model == name
        assert not [r for r in found.findings if r.severity == "illegal"]


def test_slurm_and_own_configuration() -> None:
    options = {"module": "my.models", "config": "big one", "name": "run_1"}
    request = Request(
        "x", Layout(dp=32, zero=3), CLUSTER, Train(seq=2048, global_batch=32), deployment="slurm", options=options
    )
    (file,) = ENGINE.emit(request).files
    line = next(text for text in file.text.splitlines() if text.startswith("srun"))
    assert "'big one'" in line
    assert "#SBATCH --nodes=4\n" in file.text
    launch = read_launch(shlex.split(line))
    assert launch is not None
    assert (launch.devices, launch.script) == (32, "torchtitan.train")
    assert accepted(shlex.split(line)) == []


def test_what_cannot_be_started() -> None:
    request = Request("llama-3.1-8b", Layout(dp=8, zero=3), CLUSTER, Train(seq=2048, global_batch=8))
    for changed, message in (
        (replace(request, workload=Serve()), "trains"),
        (replace(request, layout=Layout(dp=8, zero=1)), "no ZeRO-1"),
        (replace(request, model="bert-large"), "ships no configuration"),
        (replace(request, workload=Train(seq=2048, global_batch=8, optimizer="muon")), "optimizer muon"),
        (replace(request, options={"name": "a;b"}), "name"),
        (replace(request, layout=Layout(pp=2, dp=4, schedule="zb-h1")), "schedule zb-h1"),
    ):
        with pytest.raises(InputError, match=message):
            ENGINE.emit(changed)
