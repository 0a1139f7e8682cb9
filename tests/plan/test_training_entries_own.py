"""The step of our own trainer, rank by rank: counts and bytes made by hand for tp, sp, cp, pp, dp and ZeRO."""

from __future__ import annotations

from collections import Counter

import pytest

from meshwright.engines.own.profile import OWN
from meshwright.ledger.schema import Entry
from meshwright.moves.pipeline import SCHEDULES
from meshwright.plan.executed.holdings import holdings
from meshwright.plan.executed.step import step_entries
from meshwright.specs.build import decoder
from meshwright.specs.layout import parse_layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import place
from meshwright.specs.workload import Train

#: 4 layers of width 64: 8 heads and 2 KV heads of 8, 96 columns, 128 rows of vocabulary.
SIZES = {"hidden": 64, "layers": 4, "heads": 8, "kv_heads": 2, "head_dim": 8, "vocab": 128, "ffn": 96}
DENSE, TIED = decoder(**SIZES), decoder(**SIZES, tied=True)
#: 64 sequences of 16 tokens, everything in fp32.
TRAIN = Train(seq=16, global_batch=8, param_dtype="f32", grad_dtype="f32", master_weights=False)

LAYER = 2 * 64 + 2 * 64 * 64 + 2 * 64 * 16 + 3 * 64 * 96
ENDS = 128 * 64 + 64 + 128 * 64


def step(spec: ModelSpec, layout: str, rank: int = 0, train: Train = TRAIN) -> list[Entry]:
    return step_entries(place(spec, parse_layout(layout), OWN), train, rank)


def counts(entries: list[Entry], **where: object) -> Counter[tuple[str | None, str, str | None]]:
    """(phase, op, group) -> how often, of all that communicates."""
    out: Counter[tuple[str | None, str, str | None]] = Counter()
    for e in entries:
        if e.group and all(getattr(e, k) == v for k, v in where.items()):
            out[e.phase, e.op, e.group] += e.count
    return out


def of(entries: list[Entry], name: str) -> list[Entry]:
    return [e for e in entries if e.name == name]


def test_one_rank_sends_nothing_and_multiplies_three_times_its_forward() -> None:
    """Seven products a layer and the head, each with an input and a weight gradient, in 8 micro-batches."""
    entries = step(DENSE, "tp=1")
    assert not counts(entries)
    products = [e for e in entries if e.op == "matmul"]
    assert len(products) == 8 * 3 * (4 * 7 + 1)
    q = [e for e in products if e.layer == 2 and e.microbatch == 5 and (e.name or "").startswith("attention.q")]
    assert [(e.phase, e.shapes) for e in q] == [
        ("forward", ((16, 64), (64, 64))),
        ("backward", ((16, 64), (64, 64))),
        ("backward", ((64, 16), (16, 64))),
    ]


def test_tensor_parallel_sums_of_a_micro_batch() -> None:
    """Two sums a layer both ways; the embedding; the head's input backward; three numbers a token for the loss."""
    entries = step(DENSE, "tp=2")
    assert counts(entries, microbatch=3) == {
        ("forward", "all_reduce", "tp"): 1 + 2 * 4 + 3,
        ("backward", "all_reduce", "tp"): 1 + 2 * 4,
    }
    assert {e.payload_bytes for e in entries if e.group == "tp" and e.layer == 1} == {16 * 64 * 4}
    assert [e.payload_bytes for e in of(entries, "loss maximum")] == [16 * 4] * 8
    # Once a step: the norm for clipping in fp64, and the loss.
    assert [(e.name, e.dtype, e.payload_bytes) for e in entries if e.phase == "optimizer"] == [
        ("gradient norm", "f64", 8),
        ("loss", "f64", 8),
    ]


def test_copies_of_a_kv_head_are_summed_and_so_are_norms_under_sequence_parallelism() -> None:
    """tp=4 on 2 KV heads: two ranks hold each, K and V of 8 rows in every layer. sp: two norms a layer and the last."""
    kv = of(step(DENSE, "tp=4", 3), "kv sums")
    assert [(e.group, e.shapes) for e in kv] == [("kv", ((4 * 2 * 8 * 64,),))]
    norms = of(step(DENSE, "tp=2,sp=on"), "tp sums")
    assert [e.shapes for e in norms] == [(((2 * 4 + 1) * 64,),)]
    assert not of(step(DENSE, "tp=2"), "tp sums")
    assert counts(step(DENSE, "tp=2,sp=on"), layer=1, microbatch=0) == {
        ("forward", "all_gather", "tp"): 2,
        ("forward", "reduce_scatter", "tp"): 2,
        ("backward", "all_gather", "tp"): 2,
        ("backward", "reduce_scatter", "tp"): 2,
    }


@pytest.mark.parametrize(
    ("zero", "op", "numel"), [(0, "all_reduce", 0), (1, "reduce_scatter", 0), (2, "reduce_scatter", 8)]
)
def test_gradients_over_data_ranks_by_zero_stage(zero: int, op: str, numel: int) -> None:
    """All parameters in one flat, once a step or (ZeRO-2) after each of the 4 micro-batches; then the parameters."""
    entries = step(DENSE, f"dp=2,zero={zero}" if zero else "dp=2")
    flats = of(entries, "gradients")
    assert [e.op for e in flats] == [op] * (4 if numel else 1)
    assert {e.shapes for e in flats} == {((4 * LAYER + ENDS,),)}
    gathered = [((4 * LAYER + ENDS) // 2,)]
    assert [e.shapes for e in of(entries, "parameters")] == ([tuple(gathered)] if zero else [])
    assert entries[0].name == "token count"
    assert (entries[0].group, entries[0].dtype, entries[0].payload_bytes) == ("dp", "i64", 8)


def test_uneven_flats_are_padded_to_equal_pieces() -> None:
    entries = step(DENSE, "dp=3,zero=1", train=Train(**{**_fields(TRAIN), "global_batch": 9}))
    whole = 4 * LAYER + ENDS
    assert whole % 3 == 2
    assert [e.shapes for e in of(entries, "gradients")] == [((whole + 1,),)]
    assert [e.shapes for e in of(entries, "parameters")] == [(((whole + 1) // 3,),)]


def _fields(train: Train) -> dict[str, object]:
    return {name: getattr(train, name) for name in Train.__dataclass_fields__}


def test_states_by_zero_stage() -> None:
    """4 bytes of weight, 4 of gradient, 8 of moments; on two ranks ZeRO-1 halves moments, ZeRO-2 gradients too."""
    whole = 4 * LAYER + ENDS

    def held(layout: str) -> dict[str, int]:
        return {h.term: h.bytes for h in holdings(place(DENSE, parse_layout(layout), OWN), TRAIN, 0)}

    assert held("dp=2") == {"weights": 4 * whole, "gradients": 4 * whole, "optimizer": 8 * whole}
    assert held("dp=2,zero=1") == {"weights": 4 * whole, "gradients": 4 * whole, "optimizer": 4 * whole}
    assert held("dp=2,zero=2") == {"weights": 4 * whole, "gradients": 2 * whole, "optimizer": 4 * whole}


def test_the_tied_table_is_summed_over_both_ends_once() -> None:
    """Its gradient is reduced apart, over the data ranks first, then over first and last stage."""
    for rank in (0, 7):
        entries = step(TIED, "pp=4,dp=2", rank)
        assert [(e.group, e.shapes) for e in of(entries, "pp_tied sums")] == [("pp_tied", ((128 * 64,),))]
        assert [e.shapes for e in of(entries, "replicated gradients")] == [((128 * 64,),)]
    assert not of(step(TIED, "pp=4,dp=2", 3), "pp_tied sums")
    folded = step(TIED, "pp=2,dp=2,schedule=zbv,virtual=2")
    assert not of(folded, "pp_tied sums"), "both ends lie on stage 0"


@pytest.mark.parametrize("name", SCHEDULES)
def test_hand_offs_meet_and_every_micro_batch_passes(name: str) -> None:
    """What a stage sends its neighbour receives in the same order; activations and gradients of 8 micro-batches."""
    layout = f"pp=2,schedule={name}" + (",virtual=2" if name in {"interleaved", "zbv", "dualpipev"} else "")
    ranks = [step(DENSE, layout, rank) for rank in (0, 1)]
    for one, two in (ranks, reversed(ranks)):
        sent = [(e.name, e.microbatch, e.shapes) for e in one if e.op == "send"]
        assert sent == [(e.name, e.microbatch, e.shapes) for e in two if e.op == "recv"]
        assert {e.shapes for e in one if e.op == "send"} <= {((16, 64),)}
    boundaries = {"interleaved": 3, "zbv": 2, "dualpipev": 2}.get(name, 1)
    assert sum(e.op == "send" for rank in ranks for e in rank) == 2 * 8 * boundaries
    products = sum(e.op == "matmul" for rank in ranks for e in rank)
    assert products == 8 * 3 * (4 * 7 + 1)


def test_ring_hands_blocks_round_twice_and_their_gradients_home() -> None:
    """cp=4: three blocks forward; backward three again and four gradients, of 4 rows, 2 KV heads, keys and values."""
    entries = step(DENSE, "cp=4")
    layer = [e for e in entries if e.layer == 2 and e.microbatch == 1 and e.group == "cp"]
    names = Counter((e.phase, e.name, e.op) for e in layer)
    assert names == {
        ("forward", "K and V block", "send"): 3,
        ("forward", "K and V block", "recv"): 3,
        ("backward", "K and V block", "send"): 3,
        ("backward", "K and V block", "recv"): 3,
        ("backward", "K and V block gradient", "send"): 4,
        ("backward", "K and V block gradient", "recv"): 4,
    }
    assert {e.shapes for e in layer} == {((4, 2, 16),)}


def test_full_recompute_runs_the_layers_again_with_their_sums() -> None:
    full = Train(**{**_fields(TRAIN), "recompute": "full"})
    entries = step(DENSE, "tp=2", train=full)
    assert counts(entries, microbatch=0, layer=3) == {
        ("forward", "all_reduce", "tp"): 2,
        ("backward", "all_reduce", "tp"): 4,
    }
    assert sum(e.op == "matmul" for e in entries) == 8 * (4 * 4 * 7 + 3)
