"""The executor of schedules: gradients of every schedule are those of one chunk, actions are those of the table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.moves.pipeline import Action, Table, refusal, schedule, simulate
from meshwright.runtime.launch.local import run_local
from meshwright.runtime.mesh import Group
from meshwright.runtime.train.pipeline import Outcome, Pipeline
from meshwright.runtime.train.stage import Stage
from tests.runtime.train.toy import Sleeper, Toy, micro_batches

#: Ranks share cores with whatever else runs.
pytestmark = pytest.mark.timeout(600)

LAYERS = 8
#: Name, micro-batches, chunks a rank; fewer micro-batches than ranks, and numbers that ranks do not divide, included.
CASES = (
    ("gpipe", 3, 1),
    ("gpipe", 1, 1),
    ("1f1b", 7, 1),
    ("1f1b", 2, 1),
    ("interleaved", 4, 2),
    ("interleaved", 1, 2),
    ("zb-h1", 5, 1),
    ("zb-h1", 4, 2),
    ("zbv", 1, 2),
    ("zbv", 7, 2),
    ("dualpipev", 6, 2),
    ("dualpipev", 9, 2),
)


def _chunks(table: Table, rank: int) -> dict[int, Toy]:
    """The rank's chunks of a model of ``LAYERS`` layers, dealt unevenly."""
    bounds = [round(LAYERS * (place / table.chunks) ** 0.9) for place in range(table.chunks + 1)]
    return {
        place: Toy(tuple(range(bounds[place], bounds[place + 1])), place == 0, place == table.chunks - 1)
        for place in range(table.chunks)
        if table.rank_of(place) == rank
    }


def _step(
    table: Table, rank: int, group: Group, back: Group | None = None, **options: Any
) -> tuple[dict[str, Tensor], Outcome]:
    chunks = _chunks(table, rank)
    stages = {place: Stage(chunk) for place, chunk in chunks.items()}
    pipeline = Pipeline(table, stages, group, torch.device("cpu"), back)
    outcome = pipeline.run(micro_batches(table.microbatches), 0.125, **options)
    return {n: p.grad for c in chunks.values() for n, p in c.names.items()}, outcome


def _cases(rank: int, stages: int) -> list[Any]:
    """Every schedule on the same ranks: gradients, loss, actions of this rank."""
    members = list(range(stages))
    group, back = (Group("pp", tuple(members), rank, dist.new_group(members, group_desc="pp")) for _ in range(2))
    out = []
    for number, (name, microbatches, virtual) in enumerate(CASES):
        if not refusal(name, stages, microbatches, virtual):
            table, apart = schedule(name, stages, microbatches, virtual), back if number % 2 else None
            gradients, outcome = _step(table, rank, group, apart)
            out.append(((name, microbatches, virtual), gradients, outcome.loss, outcome.actions))
    return out


@pytest.mark.parametrize("stages", [2, 3])
def test_every_schedule_gives_the_gradients_of_one_chunk(stages: int) -> None:
    ranks = run_local(_cases, stages, (stages,), 500)
    assert len(ranks[0]) >= 8
    for results in zip(*ranks, strict=True):
        case = results[0][0]
        want, alone = _step(schedule("gpipe", 1, case[1]), 0, Group("pp", (0,), 0, None))
        found = {name: gradient for _, gradients, _, _ in results for name, gradient in gradients.items()}
        assert found.keys() == want.keys()
        for name, gradient in want.items():
            assert torch.dist(found[name], gradient) < 1e-12 * gradient.norm(), (case, name)
        assert sum(loss for _, _, loss, _ in results) == pytest.approx(alone.loss, rel=1e-14)
        assert tuple(actions for _, _, _, actions in results) == schedule(case[0], stages, *case[1:]).actions


def test_a_split_backward_leaves_matrices_to_the_weight_action() -> None:
    """After the input gradients no matrix has a gradient; vectors have; both halves together give the whole."""
    batch = micro_batches(1)[0]
    whole, split = Toy((0, 1), True, True), Toy((0, 1), True, True)
    stages = Stage(whole), Stage(split)
    for stage in stages:
        stage.forward(0, None, batch)
    one = torch.ones((), dtype=torch.float64)
    stages[0].backward(0, one, split=False)
    stages[1].backward(0, one, split=True)
    matrices = {n for n, p in split.names.items() if p.dim() == 2 and n != "table"}
    assert matrices == {n for n, p in split.names.items() if p.grad is None}
    assert stages[1].under_way == 1
    stages[1].weights(0)
    assert stages[1].under_way == 0
    for name, parameter in whole.names.items():
        torch.testing.assert_close(split.names[name].grad, parameter.grad, rtol=1e-13, atol=1e-15)


class _Seen:
    """Notes what a watcher is told."""

    def __init__(self) -> None:
        self.before_: list[tuple[Action, bool]] = []
        self.after_: list[tuple[Action, bool]] = []

    def before(self, action: Action, final: bool) -> None:
        self.before_.append((action, final))

    def after(self, action: Action, final: bool) -> None:
        self.after_.append((action, final))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_watcher_hears_every_action_and_which_is_the_last_of_a_chunk(name: str) -> None:
    seen = _Seen()
    table = schedule(name, 1, 3)
    _step(table, 0, Group("pp", (0,), 0, None), watch=seen)
    assert tuple(a for a, _ in seen.before_) == table.actions[0]
    assert seen.before_ == seen.after_
    assert [a.microbatch for a, final in seen.after_ if final] == [2]
    assert [a.kind for a, final in seen.after_ if final] == ["B" if name == "1f1b" else "W"]


def test_a_gradient_scaled_by_micro_batches_is_found() -> None:
    """Planted: the loss scale once a micro-batch too often (picotron); the comparison above does not pass it."""
    group = Group("pp", (0,), 0, None)
    want, _ = _step(schedule("gpipe", 1, 3), 0, group)
    chunks = _chunks(schedule("gpipe", 1, 3), 0)
    pipeline = Pipeline(schedule("gpipe", 1, 3), {0: Stage(chunks[0])}, group, torch.device("cpu"))
    pipeline.run(micro_batches(3), 0.125 * 3)
    assert all(torch.dist(p.grad, want[n]) > want[n].norm() for n, p in chunks[0].names.items())


#: Hidden states of 64 KiB.
ROWS, COLUMNS = 64, 256
#: Schedules of which the time is measured, with 6 micro-batches.
TIMED = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zbv", 2), ("dualpipev", 2))


def _sleep(rank: int, stages: int) -> list[list[tuple[int, int]]]:
    """Every schedule three times with chunks that sleep: begin and end of the rank's actions."""
    members = list(range(stages))
    group = Group("pp", tuple(members), rank, dist.new_group(members, group_desc="pp"))
    out = []
    for name, virtual in TIMED * 3:
        table = schedule(name, stages, 6, virtual)
        places = [place for place in range(table.chunks) if table.rank_of(place) == rank]
        own = {place: Stage(Sleeper(place == 0, place == table.chunks - 1)) for place in places}
        pipeline = Pipeline(table, own, group, torch.device("cpu"))
        dist.barrier()
        outcome = pipeline.run([torch.ones(ROWS, COLUMNS)] * 6, 1.0)
        out.append([(span.began_ns, span.ended_ns) for span in outcome.spans])
    return out


@pytest.mark.slow
def test_the_bubble_is_that_of_the_simulation() -> None:
    """Idle share of three ranks, the best of three runs: within a tenth of the simulated one, or a point."""
    ranks = run_local(_sleep, 3, (3,), 500)
    for number, (name, virtual) in enumerate(TIMED):
        runs = [[rank[turn] for rank in ranks] for turn in range(number, len(ranks[0]), len(TIMED))]
        measured = min(map(_idle, runs))
        foretold = simulate(schedule(name, 3, 6, virtual), 1.0, 2.0).bubble
        assert measured == pytest.approx(foretold, rel=0.1, abs=0.01), name


def _idle(ranks: list[list[tuple[int, int]]]) -> float:
    """Share of the time between the first begin and the last end in which ranks did nothing."""
    lasted = max(end for spans in ranks for _, end in spans) - min(began for spans in ranks for began, _ in spans)
    return 1 - sum(end - began for spans in ranks for began, end in spans) / (len(ranks) * lasted)
