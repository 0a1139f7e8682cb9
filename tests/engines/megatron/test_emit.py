"""What is emitted asks for the layout again, and every word of it is a flag of Megatron-core 0.19."""

from __future__ import annotations

import random
import shlex
from collections.abc import Iterator
from dataclasses import replace

import pytest

from meshwright.engines.base import Emission, Request
from meshwright.engines.flagtable import rejected
from meshwright.engines.launcher import read_launch
from meshwright.engines.megatron import ENGINE
from meshwright.engines.megatron.emit import emit
from meshwright.errors import IllegalLayoutError, InputError
from meshwright.plan.train_engine import engine_preset
from meshwright.plan.train_memory import train_memory
from meshwright.specs.build import Mamba, decoder
from meshwright.specs.cluster import parse_cluster
from meshwright.specs.layout import Fsdp, Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.workload import Serve, Train

CLUSTER = parse_cluster("8x8xH100-SXM@ib-400g")
DENSE = decoder(hidden=1024, layers=24, heads=16, kv_heads=8, vocab=32000, ffn=4096, max_positions=8192)
TIED = decoder(
    hidden=1024, layers=30, heads=16, vocab=50257, gated=False, bias=True, norm_bias=True, tied=True,
    learned_positions=8192,
)  # fmt: skip
MIXED = decoder(
    hidden=1024, layers=26, heads=16, vocab=32000, ffn=4096, experts=32, moe_ffn=512, topk=4, shared_ffn=1024,
    moe_layers=range(2, 26), max_positions=8192,
)  # fmt: skip
LATENT = decoder(
    hidden=1024, layers=12, heads=16, head_dim=192, v_head_dim=128, kv_lora_rank=512, rope_head_dim=64,
    q_lora_rank=768, vocab=32000, ffn=4096, max_positions=8192, mtp=1,
)  # fmt: skip
HYBRID = decoder(
    hidden=1024, layers=12, heads=16, vocab=32000, ffn=4096, mamba=Mamba(32, 64, 128, 8), pattern="M-M*-" * 2 + "M-",
    max_positions=8192,
)  # fmt: skip
MODELS = (DENSE, TIED, MIXED, LATENT)


def sizes(rng: random.Random, layers: int, pp: int) -> tuple[int, ...]:
    """A hand-made split: nothing, longer ends, or any."""
    kind = rng.random()
    if pp == 1 or kind < 0.5 or layers < 2 * pp:
        return ()
    if kind < 0.8:
        cuts = sorted(rng.sample(range(1, layers), pp - 1))
        return tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))
    middle = max(1, (layers - 2) // pp)
    rest = layers - middle * (pp - 2)
    first = rng.randint(1, rest - 1) if rest > 1 else 1
    return (first, *(middle,) * (pp - 2), rest - first) if rest > 1 else ()


def layouts(seed: int, count: int) -> Iterator[tuple[ModelSpec, Layout, Train]]:
    """Random layouts that the profile allows."""
    rng = random.Random(seed)
    found = 0
    while found < count:
        spec = rng.choice(MODELS)
        layers = len(spec.layers)
        virtual = rng.choice((1, 1, 2, 3))
        pp = rng.choice((1, 1, 2, 3, 4, 6))
        zero = rng.choice((0, 1, 1, 2, 3, 3))
        layout = Layout(
            tp=rng.choice((1, 2, 4, 8)),
            pp=pp,
            dp=rng.choice((1, 2, 3, 4, 8)),
            cp=rng.choice((1, 1, 1, 2)),
            ep=rng.choice((1, 2, 4, 8)) if spec is MIXED else 1,
            etp=rng.choice((None, None, 1, 2)),
            sp=rng.random() < 0.6,
            zero=zero,
            fsdp=rng.choice((None, Fsdp(), Fsdp(reshard_after_forward=False), Fsdp(replicas=2))) if zero == 3 else None,
            schedule="interleaved" if virtual > 1 else "1f1b",
            virtual=virtual,
            micro_batch=rng.choice((1, 2, 3)),
            stage_layers=sizes(rng, layers, pp),
        )
        if layout.stage_layers and len(set(layout.stage_layers)) == 1:
            layout = layout.with_(stage_layers=())
        each = layout.dp * layout.micro_batch
        recompute = rng.choice(("none", "selective", "full"))
        work = Train(
            seq=rng.choice((1024, 4096, 8192)),
            global_batch=each * rng.choice((pp, 2 * pp, 5 * pp, pp + 1, 2 * pp + 1)),
            optimizer=rng.choice(("adamw", "sgd")),
            recompute=recompute,  # type: ignore[arg-type]
            recompute_layers=rng.choice((1, 2)) if recompute == "full" else None,
            grad_dtype=rng.choice(("f32", "bf16")),
            dropout=rng.choice((0.0, 0.1)),
            fused_cross_entropy=rng.random() < 0.5,
        )
        broken = ENGINE.profile().check(spec, layout, CLUSTER, work)
        if not any(r.severity == "illegal" for r in broken):
            found += 1
            yield spec, layout, work


def emitted(spec: ModelSpec, layout: Layout, work: Train) -> Emission:
    return emit(Request("model", layout, CLUSTER, work), spec)


def round_trip(seed: int, count: int) -> int:
    """How many of ``count`` layouts come back as they were."""
    for spec, layout, work in layouts(seed, count):
        made = emitted(spec, layout, work)
        words = shlex.split(made.commands[0].text)
        launch = read_launch(words)
        assert launch is not None
        assert rejected(launch.arguments, ENGINE.flags(), 0) == []
        found = ENGINE.parse(words, dict(made.commands[0].env), lambda name: None)
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


@pytest.mark.parametrize("spec", [*MODELS, HYBRID], ids=["dense", "tied", "mixed", "latent", "hybrid"])
def test_the_model_comes_back(spec: ModelSpec) -> None:
    layout = Layout(dp=8)
    words = shlex.split(emitted(spec, layout, Train(seq=1024, global_batch=8)).commands[0].text)
    found = ENGINE.model_spec(ENGINE.parse(words, {}, lambda name: None))
    assert found is not None
    assert found.parameters() == spec.parameters()
    assert [layer.ffns for layer in found.layers] == [layer.ffns for layer in spec.layers]
    assert [layer.mixers for layer in found.layers] == [layer.mixers for layer in spec.layers]
    assert found.vocab == spec.vocab


def test_nodes_slurm_and_environment() -> None:
    layout = Layout(tp=8, pp=2, dp=2, sp=True, zero=1)
    work = Train(seq=8192, global_batch=64)
    made = emitted(DENSE, layout, work)
    assert [c.node for c in made.commands] == [0, 1, 2, 3]
    assert all(f"--node-rank={n}" in c.text for n, c in enumerate(made.commands))
    assert made.commands[0].env == (("CUDA_DEVICE_MAX_CONNECTIONS", "1"),)
    assert "asserted" in made.commands[0].note
    slurm = emit(Request("model", layout, CLUSTER, work, deployment="slurm", options={"name": "run-1"}), DENSE)
    (file,) = slurm.files
    assert file.path == "run-1.sbatch"
    assert "#SBATCH --nodes=4\n" in file.text
    line = next(text for text in file.text.splitlines() if text.startswith("srun"))
    launch = read_launch(shlex.split(line))
    assert launch is not None
    assert launch.devices == 32
    assert rejected(launch.arguments, ENGINE.flags(), 0) == []
    fsdp = emitted(DENSE, Layout(tp=2, dp=4, zero=3, sp=True), work)
    assert fsdp.commands[0].env == ()


def test_one_line_stands_for_many_nodes() -> None:
    many = parse_cluster("64x8xH100-SXM@ib-400g")
    made = emit(Request("model", Layout(dp=512), many, Train(seq=1024, global_batch=512)), DENSE)
    assert [c.node for c in made.commands] == [0, None]
    assert "$NODE_RANK" in made.commands[1].text


def test_a_name_is_quoted_and_checked() -> None:
    request = Request("model", Layout(dp=8), CLUSTER, Train(global_batch=8, seq=512))
    for name in ("a b", "x;id", "../up", "$(id)", ""):
        with pytest.raises(InputError, match="name"):
            emit(replace(request, options={"name": name}), DENSE)


def test_what_cannot_be_started() -> None:
    work = Train(global_batch=128, seq=1024)
    with pytest.raises(InputError, match="trains"):
        emit(Request("model", Layout(), CLUSTER, Serve()), DENSE)
    with pytest.raises(InputError, match="128 devices are needed"):
        emit(Request("model", Layout(dp=128), CLUSTER, work), DENSE)
    with pytest.raises(InputError, match="deployment ray"):
        emit(Request("model", Layout(dp=8), CLUSTER, work, deployment="ray"), DENSE)
    with pytest.raises(InputError, match="dealt equally"):
        emit(Request("model", Layout(dp=23), CLUSTER, replace(work, global_batch=23)), DENSE)


def test_a_planted_mistake_is_seen() -> None:
    """The round trip fails when a degree is not written."""
    spec, layout, work = next(item for item in layouts(3, 50) if item[1].tp > 1)
    made = emitted(spec, layout, work).commands[0].text
    words = shlex.split(made.replace(f"--tensor-model-parallel-size {layout.tp}", ""))
    assert ENGINE.parse(words, {}, lambda name: None).layout != layout


def test_the_emitted_command_takes_what_was_planned() -> None:
    """Bytes of the layout with the engine's preset are those of the command that was written for it."""
    for spec, layout, work in layouts(5, 25):
        words = shlex.split(emitted(spec, layout, work).commands[0].text)
        found = ENGINE.parse(words, {}, lambda name: None)
        assert isinstance(found.workload, Train)
        options = dict(found.train_options)
        if "microbatch_group" in options:  # micro-batches that need another group than the preset's
            continue
        engine = engine_preset(str(options.pop("preset")), **options)
        try:
            planned = train_memory(spec, layout, CLUSTER, work, engine_preset("megatron-core"))
        except IllegalLayoutError:  # more parts than layers, which no layout string can fill
            continue
        again = train_memory(spec, found.layout, CLUSTER, found.workload, engine)
        assert again.worst.total_bytes == planned.worst.total_bytes
