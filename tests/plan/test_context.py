"""What our own runtime sends over cp: padded equal shares, a ring or all_to_all, merged decode steps."""

from __future__ import annotations

from meshwright.engines.own.profile import OWN
from meshwright.ledger.schema import Entry
from meshwright.plan.cores import Batch
from meshwright.plan.forward import forward_entries
from meshwright.specs.build import decoder
from meshwright.specs.layout import parse_layout
from meshwright.specs.placement import place

SPEC = decoder(hidden=64, layers=2, heads=8, kv_heads=2, vocab=128, ffn=96)


def sent(layout: str, batch: Batch) -> list[tuple[str, str | None, tuple[int, ...]]]:
    """``(op, group, shape)`` of what the first layer sends, and what follows the layers."""
    entries = forward_entries(place(SPEC, parse_layout(layout), OWN), batch)
    kept = [e for e in entries if e.group and e.layer in {0, None}]
    return [(e.op, e.group, shape) for e in kept for shape in e.shapes or ()]


def test_a_prompt_of_13_tokens_takes_4_rows_of_each_chunk_on_two_places() -> None:
    """Chunks of ceil(13 / 4) = 4: 8 rows a place, keys and values of 2 heads of 8 side by side."""
    block = (8, 2, 16)
    assert sent("cp=2", Batch("prefill", 1, 13)) == [
        ("send", "cp", block),
        ("recv", "cp", block),
        ("all_reduce", "cp", (1, 64)),
    ]
    ring = sent("cp=3", Batch("prefill", 1, 13))
    assert [op for op, _, _ in ring] == ["send", "recv"] * 2 + ["all_reduce"]
    assert ring[0][2] == (6, 2, 16)


def test_unequal_prompts_are_filled_up_one_by_one() -> None:
    """13, 1 and 8 tokens on two places: 8 + 2 + 4 rows; of each product too."""
    batch = Batch("prefill", 3, 13, each=((13, 0), (1, 0), (8, 0)))
    assert sent("cp=2", batch)[0][2] == (14, 2, 16)
    entries = forward_entries(place(SPEC, parse_layout("cp=2"), OWN), batch)
    assert next(e for e in entries if e.name == "attention.q").shapes == ((14, 64), (64, 64))


def test_a_later_chunk_hands_on_what_lies_before_it() -> None:
    """Chunks of 5 in a prompt of 13: 4 + 4 rows cached before, 2 x ceil(3 / 4) new."""
    batch = Batch("prefill", 1, 3, 10, sampled=1, chunk=5)
    assert sent("cp=2", batch)[0][2] == (4 + 4 + 2, 2, 16)
    assert sent("cp=2", Batch("prefill", 1, 5, 5, sampled=0, chunk=5))[-1] == ("recv", "cp", (8, 2, 16))


def test_all_to_all_of_heads() -> None:
    """Query heads 8 / 4; two KV heads travel in copies to four places."""
    assert sent("cp=4,cp_kind=ulysses", Batch("prefill", 1, 16))[:-1] == [
        ("all_to_all", "cp", (4, 4, 2, 8)),
        ("all_to_all", "cp", (4, 4, 1, 8)),
        ("all_to_all", "cp", (4, 4, 1, 8)),
        ("all_to_all", "cp", (4, 4, 2, 8)),
    ]


def test_a_decode_step_gathers_outputs_with_their_log_sums() -> None:
    for kind in ("ring", "ulysses"):
        assert sent(f"cp=4,cp_kind={kind}", Batch("decode", 3, 1, 20)) == [("all_gather", "cp", (3, 8, 9))]


def test_sequence_parallel_rows_are_filled_up() -> None:
    """7 tokens over tp 2: 4 rows each, 8 in the sum."""
    assert sent("tp=2,sp=on", Batch("prefill", 1, 7))[:4] == [
        ("reduce_scatter", "tp", (8, 64)),
        ("all_gather", "tp", (4, 64)),
        ("reduce_scatter", "tp", (8, 64)),
        ("all_gather", "tp", (4, 64)),
    ]


def flops(entries: list[Entry]) -> int:
    return sum(e.flops or 0 for e in entries)


def test_rows_by_sequence_count_as_equal_ones_do() -> None:
    placement = place(SPEC, parse_layout("tp=2"), OWN)
    equal = forward_entries(placement, Batch("prefill", 2, 5, 3))
    assert forward_entries(placement, Batch("prefill", 2, 5, 3, each=((5, 3), (5, 3)))) == equal
    assert flops(forward_entries(placement, Batch("prefill", 2, 5, 3, each=((5, 3), (4, 3))))) < flops(equal)
    without = forward_entries(placement, Batch("prefill", 2, 5, 3, sampled=0))
    assert [e.name for e in equal if e not in without] == ["final norm", "head", "logits"]
