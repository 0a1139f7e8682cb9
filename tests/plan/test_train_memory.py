"""``train_memory`` as a whole: every rank class, terms, properties, and what it may not import."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.engines.own.profile import OWN
from meshwright.plan import train_memory as module
from meshwright.plan.memory import RankMemory, TrainMemory
from meshwright.plan.train_engine import engine_names, engine_preset
from meshwright.plan.train_memory import DEFAULT_ENGINE, train_memory
from meshwright.specs.atlas.devices import find_device
from meshwright.specs.build import Mamba, decoder
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Fsdp, Layout, parse_layout
from meshwright.specs.placement import place
from meshwright.specs.workload import Train

H100 = find_device("H100-SXM")
CLUSTER = Cluster(8, 8, H100, H100.intra, H100.intra)
LLAMA = decoder(hidden=1024, layers=8, heads=16, kv_heads=4, ffn=2816, vocab=32000)
MIXTURE = decoder(hidden=512, layers=8, heads=8, ffn=1024, vocab=32000, experts=8, topk=2, moe_ffn=512)


def _memory(layout: str, work: Train | None = None, spec: object = LLAMA) -> TrainMemory:
    return train_memory(spec, parse_layout(layout), CLUSTER, work or Train(seq=1024, global_batch=64))  # type: ignore[arg-type]


def test_every_stage_has_a_row_and_its_terms() -> None:
    memory = _memory("tp=2,pp=4,dp=2,zero=1,sp=on")
    assert [(r.rank, r.ranks, r.rank_class) for r in memory.ranks] == [(4 * i, 4, f"pp{i}") for i in range(4)]
    for row in memory.ranks:
        parts = (row.weights_bytes, row.gradients_bytes, row.optimizer_bytes, row.activations_bytes, row.runtime_bytes)
        assert all(parts)
        assert row.total_bytes == sum(parts)
        assert row.capacity_bytes == H100.memory_bytes
        assert {h.source for h in row.holdings} <= {"exact", "calibrated", "modelled"}
    layers = [next(h.bytes for h in r.holdings if h.tensor == "layers") for r in memory.ranks]
    assert [x / layers[3] for x in layers] == [4, 3, 2, 1]
    assert memory.worst.rank_class == "pp0"
    assert memory.fits


def test_chunks_without_a_schedule_are_interleaved() -> None:
    work = Train(seq=1024, global_batch=64)
    named, bare = (_memory(f"pp=4,virtual=2{tail}", work) for tail in (",schedule=interleaved", ""))
    assert named == TrainMemory(bare.ranks, named.notes)


def test_few_stages_hold_the_worst_one() -> None:
    layout = parse_layout("pp=8,dp=2")
    every = train_memory(LLAMA, layout, CLUSTER, Train(seq=1024, global_batch=64))
    few = train_memory(LLAMA, layout, CLUSTER, Train(seq=1024, global_batch=64), few=True)
    assert len(few.ranks) < len(every.ranks)
    assert few.worst == every.worst


def test_placement_and_even_cuts_agree() -> None:
    for text in ("tp=4,dp=2,zero=1", "pp=4,virtual=2,schedule=interleaved", "pp=2,schedule=zbv,tp=2"):
        layout = parse_layout(text)
        by_spec = train_memory(LLAMA, layout, CLUSTER, Train(seq=1024))
        placed = train_memory(place(LLAMA, layout, OWN), layout, CLUSTER, Train(seq=1024))
        assert [r.total_bytes for r in placed.ranks] == [r.total_bytes for r in by_spec.ranks]


def test_uneven_cuts_are_counted_as_placed() -> None:
    """Three ranks of the own runtime share 32000 rows and 16 heads unevenly: their parameters add up exactly."""
    spec = decoder(hidden=128, layers=2, heads=16, head_dim=8, kv_heads=16, ffn=512, vocab=1000, gated=False)
    layout = Layout(tp=3)
    memory = train_memory(place(spec, layout, OWN), layout, CLUSTER, Train(seq=128))
    assert sum(r.ranks for r in memory.ranks) == 3
    replicated = 2 * 2 * (5 * 128)
    held = sum(r.ranks * r.weights_bytes for r in memory.ranks)
    assert held == 2 * spec.parameters() + replicated


@settings(max_examples=40, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    sp=st.booleans(),
    moe=st.booleans(),
    recompute=st.sampled_from(["none", "selective", "full"]),
)
def test_more_of_anything_never_costs_less(tp: int, dp: int, pp: int, sp: bool, moe: bool, recompute: str) -> None:
    spec = MIXTURE if moe else LLAMA
    work = Train(seq=512, global_batch=64, recompute=recompute, attention="unfused")  # type: ignore[arg-type]

    def totals(layout: Layout, work: Train = work) -> list[RankMemory]:
        return list(train_memory(spec, layout, CLUSTER, work).ranks)

    base = Layout(tp=tp, dp=dp, pp=pp, sp=sp)
    rows = totals(base)
    for bigger in (
        totals(base.with_(micro_batch=2)),
        totals(base, Train(seq=1024, global_batch=64, recompute=work.recompute)),
    ):
        assert all(b.activations_bytes > a.activations_bytes for a, b in zip(rows, bigger, strict=True))
    for a, b in zip(rows, totals(base.with_(zero=1)), strict=True):
        assert b.optimizer_bytes <= a.optimizer_bytes
        assert (b.weights_bytes, b.gradients_bytes) == (a.weights_bytes, a.gradients_bytes)
    if tp < 4:
        for a, b in zip(rows, totals(base.with_(tp=2 * tp)), strict=True):
            assert b.weights_bytes < a.weights_bytes
            assert b.activations_bytes <= a.activations_bytes or sp


@settings(max_examples=30, deadline=None)
@given(layout=st.builds(Layout, tp=st.sampled_from([1, 2, 4]), sp=st.booleans(), micro_batch=st.integers(1, 3)))
def test_recompute_modes_are_ordered(layout: Layout) -> None:
    kept = []
    for mode in ("none", "selective", "full"):
        work = Train(seq=2048, recompute=mode, attention="unfused")  # type: ignore[arg-type]
        memory = train_memory(LLAMA, layout, CLUSTER, work)
        kept.append(next(h.bytes for h in memory.ranks[0].holdings if h.tensor == "layers"))
    assert kept[0] > kept[1] > kept[2]


def test_fused_loss_holds_less() -> None:
    plain = _memory("dp=8", Train(seq=1024, fused_cross_entropy=False)).worst
    fused = _memory("dp=8", Train(seq=1024)).worst
    logits = 1024 * 32000
    assert plain.total_bytes - fused.total_bytes == (12 - 6) * logits


def test_offload_moves_what_it_names() -> None:
    here, there = (_memory("dp=8", Train(seq=1024, offload=o)).worst for o in ("none", "optimizer"))
    assert there.optimizer_bytes == 0
    assert here.total_bytes - there.total_bytes == here.optimizer_bytes


def test_interleaved_worst_rank_sees_a_planted_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        memory = _memory("pp=4,dp=2")
        assert memory.ranks[0].activations_bytes > memory.ranks[2].activations_bytes

    check()
    real = module.activations
    monkeypatch.setattr(module, "activations", lambda spec, stage, *rest: real(spec, _last(spec), *rest))
    with pytest.raises(AssertionError):
        check()


def _last(spec: object) -> object:
    return module.train_stages(spec, Layout(pp=4))[3]  # type: ignore[arg-type]


def test_notes_say_what_was_assumed() -> None:
    memory = train_memory(LLAMA, Layout(pp=2), CLUSTER, Train(), engine_preset("megatron-core"))
    assert "megatron-core" in memory.notes[0]
    assert "last stage" in memory.notes[1]
    assert DEFAULT_ENGINE.kernels == "torch"


def test_no_heavy_import_on_the_path() -> None:
    code = (
        "import sys, meshwright.plan.train_memory as t; t.DEFAULT_ENGINE; "
        "bad = {'torch', 'numpy', 'polars', 'plotly', 'pydantic'} & set(sys.modules); sys.exit(','.join(bad) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


HYBRID = decoder(
    hidden=256, layers=8, heads=4, vocab=1000, pattern="M-M*M-ME", mamba=Mamba(heads=8), experts=4, moe_ffn=128,
    ffn=512, shared_ffn=256, mtp=1, tied=True,
)  # fmt: skip
LATENT = decoder(
    hidden=256, layers=8, heads=8, head_dim=48, v_head_dim=32, q_lora_rank=64, kv_lora_rank=32, rope_head_dim=16,
    vocab=1000, experts=8, moe_ffn=128, moe_layers=range(2, 8), moe_latent=64,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    spec=st.sampled_from([LLAMA, MIXTURE, HYBRID, LATENT]),
    layout=st.builds(
        Layout,
        tp=st.sampled_from([1, 2, 3, 8]),
        pp=st.integers(1, 4),
        dp=st.integers(1, 5),
        cp=st.sampled_from([1, 2]),
        ep=st.sampled_from([1, 2, 4]),
        etp=st.sampled_from([None, 1, 2]),
        sp=st.booleans(),
        zero=st.integers(0, 3),
        fsdp=st.one_of(
            st.none(), st.builds(Fsdp, wrap=st.sampled_from(["layer", "model"]), prefetch=st.integers(1, 9))
        ),
        schedule=st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"]),
        micro_batch=st.integers(1, 3),
    ),
    work=st.builds(
        Train,
        seq=st.sampled_from([1, 64, 4096]),
        global_batch=st.integers(1, 64),
        optimizer=st.sampled_from(["adamw", "sgd", "muon"]),
        recompute=st.sampled_from(["none", "selective", "full"]),
        recompute_layers=st.sampled_from([None, 1, 3]),
        param_dtype=st.sampled_from(["bf16", "f16", "f32"]),
        offload=st.sampled_from(["none", "optimizer", "activations"]),
        attention=st.sampled_from(["flash", "unfused"]),
        dropout=st.sampled_from([0.0, 0.1]),
    ),
    engine=st.sampled_from(engine_names()),
)
def test_any_layout_gets_an_answer_of_whole_bytes(spec: object, layout: Layout, work: Train, engine: str) -> None:
    virtual = 2 if layout.schedule in {"interleaved", "zbv", "dualpipev"} else 1
    layout = layout.with_(virtual=virtual)
    memory = train_memory(spec, layout, CLUSTER, work, engine_preset(engine))  # type: ignore[arg-type]
    assert len(memory.ranks) == layout.pp
    assert sum(r.ranks for r in memory.ranks) == layout.world
    for row in memory.ranks:
        assert all(isinstance(h.bytes, int) and h.bytes > 0 for h in row.holdings)
        assert row.weights_bytes > 0
