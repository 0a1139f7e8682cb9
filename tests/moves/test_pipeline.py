"""Schedule tables equal torch's own, hold what the papers say, and leave the bubble of the closed form."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.moves.pipeline import Action, Table, bubble, hand_offs, in_flight, schedule, simulate

SHAPES = [(1, 1), (1, 3), (2, 1), (2, 2), (2, 5), (3, 2), (4, 4), (4, 8), (4, 3), (8, 16)]


class _Stage:
    """Stands in for torch's stage: records the order of forwards and backwards, moves nothing."""

    def __init__(self, index: int, stages: int) -> None:
        self.stage_index = self.group_rank = index
        self.num_stages = self.group_size = stages
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.has_backward = True
        self.order: list[Action] = []

    def no_ops(self, *_: Any, **__: Any) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_ops

    def forward_one_chunk(self, i: int, *_: Any, **__: Any) -> None:
        self.order.append(Action("F", self.stage_index, i))

    def backward_one_chunk(self, i: int, **_: Any) -> None:
        self.order.append(Action("B", self.stage_index, i))

    def perform_reduce_grad(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_the_order_that_torch_executes(name: str, stages: int, microbatches: int, monkeypatch: Any) -> None:
    """torch's ``_step_microbatches`` runs on a stage that records; its list of actions is the table's."""
    pipelining = pytest.importorskip("torch.distributed.pipelining")
    cls = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}[name]
    table = schedule(name, stages, microbatches)
    for rank in range(stages):
        stage = _Stage(rank, stages)
        run = cls.__new__(cls)
        run.__dict__.update(
            _stage=stage, _num_stages=stages, _n_microbatches=microbatches, scale_grads=False, _internal_losses=[]
        )
        for part in ("_check_inputs", "_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
            monkeypatch.setattr(cls, part, lambda *a, **k: ([()] * microbatches, [{}] * microbatches))
        run._step_microbatches()
        assert tuple(stage.order) == table.actions[rank]


@pytest.mark.parametrize(
    ("stages", "microbatches", "virtual"),
    [(2, 2, 2), (2, 4, 2), (4, 4, 2), (4, 8, 2), (4, 8, 3), (4, 3, 2), (4, 10, 2), (8, 8, 4), (3, 6, 2), (1, 3, 2)],
)
def test_the_interleaved_table_of_torch(stages: int, microbatches: int, virtual: int) -> None:
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    cls = torch_schedules.ScheduleInterleaved1F1B
    run = cls.__new__(cls)
    rounds = max(1, microbatches // stages)
    run.__dict__.update(
        pp_group_size=stages,
        n_local_stages=virtual,
        _n_microbatches=microbatches,
        number_of_rounds=rounds,
        microbatches_per_round=microbatches // rounds,
    )
    table = schedule("interleaved", stages, microbatches, virtual)
    for rank in range(stages):
        wanted = [
            Action(a.computation_type.value, a.stage_index, a.microbatch_index)
            for a in run._calculate_single_rank_operations(rank)
            if a is not None
        ]
        assert list(table.actions[rank]) == wanted


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["gpipe", "1f1b", "interleaved"]), st.integers(1, 8), st.integers(1, 4), st.integers(1, 4))
def test_every_table_is_complete_and_runs(name: str, stages: int, rounds: int, virtual: int) -> None:
    virtual = virtual if name == "interleaved" else 1
    table = schedule(name, stages, stages * rounds, virtual)
    for rank, actions in enumerate(table.actions):
        assert len(set(actions)) == len(actions) == 2 * stages * rounds * virtual
        assert {table.rank_of(a.chunk) for a in actions} == {rank}
    assert simulate(table, 1, 2).bubble == pytest.approx(bubble(name, stages, stages * rounds, virtual))
    sends = sorted(
        (m.kind, m.microbatch, m.chunk + (1 if m.kind == "F" else -1), r, m.peer)
        for r in range(stages)
        for m in hand_offs(table, r)
        if m.op == "send"
    )
    recvs = sorted(
        (m.kind, m.microbatch, m.chunk, m.peer, r) for r in range(stages) for m in hand_offs(table, r) if m.op == "recv"
    )
    assert sends == recvs


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (4, 8), (8, 3), (16, 16), (4, 30)])
def test_bubble_of_gpipe_and_1f1b(stages: int, microbatches: int) -> None:
    wanted = (stages - 1) / (microbatches + stages - 1)
    for name in ("gpipe", "1f1b"):
        assert bubble(name, stages, microbatches) == pytest.approx(wanted)
        assert simulate(schedule(name, stages, microbatches), 3, 5).bubble == pytest.approx(wanted)


def test_in_flight() -> None:
    table = schedule("1f1b", 4, 8)
    assert [in_flight(table, r) for r in range(4)] == [4, 3, 2, 1]
    assert in_flight(schedule("1f1b", 4, 2), 0) == 2
    assert [in_flight(schedule("gpipe", 4, 8), r) for r in range(4)] == [8] * 4
    inter = schedule("interleaved", 4, 8, 2)
    assert [in_flight(inter, r) for r in range(4)] == [(2 - 1) * 4 + 2 * (4 - 1 - r) + 1 for r in range(4)]


def test_a_planted_deadlock_is_found() -> None:
    good = schedule("1f1b", 2, 2)
    first = good.actions[1]
    bad = Table("1f1b", 2, 2, 1, (good.actions[0], (first[1], first[0], *first[2:])))
    with pytest.raises(InputError, match="wait for ever"):
        simulate(bad)


def test_transfers_lengthen_the_step() -> None:
    table = schedule("1f1b", 4, 8)
    assert simulate(table, 1, 2, 0.5).makespan > simulate(table, 1, 2).makespan


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "virtual"),
    [("zzz", 2, 2, 1), ("1f1b", 2, 2, 2), ("interleaved", 4, 9, 2), ("gpipe", 0, 1, 1), ("gpipe", 1 << 20, 1 << 20, 1)],
)
def test_nonsense_is_refused(name: str, stages: int, microbatches: int, virtual: int) -> None:
    with pytest.raises(InputError):
        schedule(name, stages, microbatches, virtual)
