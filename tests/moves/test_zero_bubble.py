"""Tables with a split backward equal torch's own, are complete, run, and hold what the papers say."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.moves.pipeline import Action, Table, bubble, hand_offs, in_flight, schedule, simulate

SIZES = [(1, 2), (2, 4), (2, 6), (3, 6), (4, 8), (4, 12), (8, 16), (5, 10)]


def flat(actions: list[Any]) -> tuple[Action, ...]:
    """torch's actions without idle slots, overlapped pairs one after the other."""
    out: list[Action] = []
    for a in actions:
        if a is None:
            continue
        if a.sub_actions is not None:
            out += flat(list(a.sub_actions))
        else:
            out.append(Action(a.computation_type.value, a.stage_index, a.microbatch_index))
    return tuple(out)


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize("name", ["zb-h1", "zbv", "dualpipev"])
def test_the_table_of_torch(name: str, stages: int, microbatches: int) -> None:
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    cls = {
        "zb-h1": torch_schedules.ScheduleInterleavedZeroBubble,
        "zbv": torch_schedules.ScheduleZBVZeroBubble,
        "dualpipev": torch_schedules.ScheduleDualPipeV,
    }[name]
    for virtual in (1, 2) if name == "zb-h1" else (2,):
        run = cls.__new__(cls)
        run.__dict__.update(
            pp_group_size=stages,
            num_stages=2 * stages,
            _num_stages=2 * stages,
            n_local_stages=virtual,
            _n_microbatches=microbatches,
            microbatches_per_round=microbatches // max(1, microbatches // stages),
        )
        table = schedule(name, stages, microbatches, virtual)
        for rank in range(stages):
            assert table.actions[rank] == flat(run._calculate_single_rank_operations(rank))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["zb-h1", "zbv", "dualpipev"]), st.integers(1, 8), st.integers(2, 5))
def test_every_table_is_complete_and_runs(name: str, stages: int, rounds: int) -> None:
    m = stages * rounds
    table = schedule(name, stages, m)
    for rank, actions in enumerate(table.actions):
        assert {table.rank_of(a.chunk) for a in actions} == {rank}
        counts = Counter((a.kind, a.chunk) for a in actions)
        assert len(set(actions)) == len(actions)
        for chunk in {a.chunk for a in actions}:
            assert counts["F", chunk] == m
            assert counts["B", chunk] + counts["I", chunk] == m
            assert counts["W", chunk] == counts["I", chunk]
    assert simulate(table, 1, 2).makespan > 0
    sends = Counter(
        (m.kind, m.microbatch, r, m.peer) for r in range(stages) for m in hand_offs(table, r) if m.op == "send"
    )
    recvs = Counter(
        (m.kind, m.microbatch, m.peer, r) for r in range(stages) for m in hand_offs(table, r) if m.op == "recv"
    )
    assert sends == recvs
    boundaries = table.chunks - 1 - (1 if table.virtual == 2 and stages >= 1 else 0)
    assert sum(sends.values()) == 2 * m * boundaries


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_zero_bubble_has_a_third_of_the_bubble_and_the_memory_of_1f1b(stages: int, microbatches: int) -> None:
    table = schedule("zb-h1", stages, microbatches)
    wanted = (stages - 1) / (3 * microbatches + stages - 1)
    assert simulate(table, 1, 2).bubble == pytest.approx(wanted) == bubble("zb-h1", stages, microbatches)
    assert max(in_flight(table, r) for r in range(stages)) == stages
    assert simulate(schedule("1f1b", stages, microbatches), 1, 2).bubble > wanted


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_folded_schedules_hold_the_same_on_every_rank(stages: int) -> None:
    """ZBV: two half-size chunks of p micro-batches on every rank; DualPipeV: one more. Both idle less than 1F1B."""
    m = 4 * stages
    zbv, dual = schedule("zbv", stages, m), schedule("dualpipev", stages, m)
    assert {in_flight(zbv, r) for r in range(stages)} == {2 * stages}
    assert {in_flight(dual, r) for r in range(stages)} == {2 * stages + 1}
    plain = simulate(schedule("1f1b", stages, m), 1, 2).bubble
    assert simulate(zbv, 0.5, 1).bubble < plain
    assert simulate(dual, 0.5, 1).bubble < plain


def test_a_planted_mistake_is_found() -> None:
    """A weight gradient before its input gradient waits for ever."""
    good = schedule("zb-h1", 2, 4)
    first = list(good.actions[0])
    i, w = first.index(Action("I", 0, 0)), first.index(Action("W", 0, 0))
    first[i], first[w] = first[w], first[i]
    with pytest.raises(InputError, match="wait for ever"):
        simulate(Table("zb-h1", 2, 4, 1, (tuple(first), good.actions[1])))


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "virtual"), [("zbv", 2, 4, 3), ("dualpipev", 4, 7, 2), ("zb-h1", 4, 9, 1)]
)
def test_nonsense_is_refused(name: str, stages: int, microbatches: int, virtual: int) -> None:
    with pytest.raises(InputError):
        schedule(name, stages, microbatches, virtual)


def test_folded_bubbles_have_no_closed_form() -> None:
    with pytest.raises(InputError, match="simulate"):
        bubble("zbv", 4, 8)
