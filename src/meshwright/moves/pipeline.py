"""Pipeline schedules as tables: which rank runs the forward or backward of which chunk and micro-batch, in order.

A *chunk* is a global stage index: with ``virtual`` chunks a rank, rank r of p runs chunks r, r + p, r + 2p, ...;
folded (``zbv``, ``dualpipev``) rank r runs chunks r and 2p - 1 - r. Zero-bubble schedules split the backward into the
input gradient, for which the rank before waits, and the weight gradient, for which nobody does. The same table is
simulated here, executed by the runtime, drawn and tested; the order of every rank is that of
torch.distributed.pipelining, which tests compare (the tables of split backwards lie in ``moves.zero_bubble``).

Sources: GPipe (Huang et al. 2019, arXiv 1811.06965); 1F1B and interleaved 1F1B (Narayanan et al. 2021, arXiv
2104.04473, sections 2.2.1 and 2.2.2, with the bubbles (p-1)/m and (p-1)/(v m) of the ideal time, which are
(p-1)/(m+p-1) and (p-1)/(v m+p-1) of the whole). Interleaving over a micro-batch count that p does not divide
runs in max(1, m // p) rounds of equal size, as torch does. Zero bubble: Qi et al. 2023, arXiv 2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from meshwright.errors import InputError

Kind = Literal["F", "B", "I", "W"]

#: Schedules that have a table.
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev")

#: Schedules that fold the model over the ranks, with two chunks each.
FOLDED = frozenset({"zbv", "dualpipev"})

#: Actions of all ranks together that a table may have.
MAX_ACTIONS = 1 << 22


class Action(NamedTuple):
    """One micro-batch through one chunk: forward ``F``, backward ``B``, or its halves: input gradient ``I`` and
    weight gradient ``W``."""

    kind: Kind
    chunk: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Table:
    """A schedule: ``actions[rank]`` in the order in which the rank runs them."""

    name: str
    stages: int
    microbatches: int
    virtual: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def chunks(self) -> int:
        """Chunks of the whole pipeline."""
        return self.stages * self.virtual

    def rank_of(self, chunk: int) -> int:
        """Rank that runs a chunk."""
        if self.name in FOLDED:
            return min(chunk, 2 * self.stages - 1 - chunk)
        return chunk % self.stages


class HandOff(NamedTuple):
    """A send or receive of a rank: activations (``F``) or gradients (``B``) of a micro-batch between chunks."""

    op: Literal["send", "recv"]
    kind: Literal["F", "B"]
    peer: int
    chunk: int
    microbatch: int


def schedule(name: str, stages: int, microbatches: int, virtual: int = 1) -> Table:
    """The table of a schedule.

    Args:
        name: one of ``SCHEDULES``.
        stages: pipeline ranks p.
        microbatches: micro-batches m of one step.
        virtual: chunks a rank v (interleaved and zb-h1; 1 or 2 means 2 where the model is folded).

    Raises:
        InputError: an unknown schedule, sizes out of range, or micro-batches that do not fill whole rounds.
    """
    virtual = _check(name, stages, microbatches, virtual)
    from meshwright.moves import zero_bubble

    one_rank: Callable[[int, int, int, int], list[Action]] = {
        "gpipe": _gpipe,
        "1f1b": _one_f_one_b,
        "interleaved": _interleaved,
        "zb-h1": zero_bubble.zb_h1,
        "zbv": zero_bubble.zbv,
        "dualpipev": zero_bubble.dualpipev,
    }[name]
    ranks = tuple(tuple(one_rank(stages, microbatches, virtual, rank)) for rank in range(stages))
    return Table(name, stages, microbatches, virtual, ranks)


def refusal(name: str, stages: int, microbatches: int, virtual: int = 1) -> str:
    """Why ``schedule`` has no table for these numbers; empty when it has one."""
    try:
        _check(name, stages, microbatches, virtual)
    except InputError as error:
        return str(error)
    return ""


def _check(name: str, stages: int, microbatches: int, virtual: int) -> int:
    """Refuse what has no table; the chunks a rank otherwise."""
    if name not in SCHEDULES:
        raise InputError(f"no table for schedule {name[:20]!r}; known: {', '.join(SCHEDULES)}")
    if min(stages, microbatches, virtual) < 1 or stages * microbatches * virtual * 2 > MAX_ACTIONS:
        raise InputError(
            f"schedule {name}: {stages} stages x {microbatches} micro-batches x {virtual} chunks is out of range; "
            f"1 to {MAX_ACTIONS // 2} in all"
        )
    if name in FOLDED and virtual > 2:
        raise InputError(f"schedule {name} has 2 chunks a rank, {virtual} are given; take virtual=2")
    if name in {"gpipe", "1f1b"} and virtual != 1:
        raise InputError(f"schedule {name} has 1 chunk a rank, {virtual} are given; take interleaved or virtual=1")
    if name == "dualpipev" and microbatches < 2 * stages:
        raise InputError(f"schedule dualpipev needs {2 * stages} micro-batches on {stages} stages, not {microbatches}")
    rounds = max(1, microbatches // stages)
    if name in {"interleaved", "zb-h1"} and microbatches % rounds:
        raise InputError(
            f"schedule {name}: {microbatches} micro-batches do not fill {rounds} equal rounds over {stages} "
            f"stages; take a multiple of {rounds}"
        )
    return 2 if name in FOLDED else virtual


def _gpipe(stages: int, microbatches: int, virtual: int, rank: int) -> list[Action]:
    forward = [Action("F", rank, i) for i in range(microbatches)]
    return forward + [Action("B", rank, i) for i in range(microbatches)]


def _one_f_one_b(stages: int, microbatches: int, virtual: int, rank: int) -> list[Action]:
    warmup = min(microbatches, stages - rank)
    actions = [Action("F", rank, i) for i in range(warmup)]
    for i in range(microbatches):
        actions.append(Action("B", rank, i))
        if warmup + i < microbatches:
            actions.append(Action("F", rank, warmup + i))
    return actions


def _interleaved(stages: int, microbatches: int, virtual: int, rank: int) -> list[Action]:
    per_round = microbatches // max(1, microbatches // stages)
    total = microbatches * virtual
    warmup = min((virtual - 1) * per_round + 2 * (stages - 1 - rank), total)
    forward, backward = [0] * virtual, [0] * virtual

    def step(kind: Kind, n: int) -> Action:
        local = (n // per_round) % virtual
        done = forward if kind == "F" else backward
        local = local if kind == "F" else virtual - 1 - local
        done[local] += 1
        return Action(kind, local * stages + rank, done[local] - 1)

    actions = [step("F", n) for n in range(warmup)]
    for n in range(total - warmup):
        actions += [step("F", warmup + n), step("B", n)]
    return actions + [step("B", n) for n in range(total - warmup, total)]


def in_flight(table: Table, rank: int) -> int:
    """Largest number of (chunk, micro-batch) pairs whose activations rank ``rank`` holds at once.

    Counted just before each backward (a split one: its weight gradient) frees its pair. gpipe: m; 1f1b:
    min(m, p - rank).
    """
    held = peak = 0
    for action in table.actions[rank]:
        held += {"F": 1, "I": 0}.get(action.kind, -1)
        peak = max(peak, held)
    return peak


def bubble(name: str, stages: int, microbatches: int, virtual: int = 1) -> float:
    """Idle share of a step in closed form: (p-1)/(m+p-1), interleaved (p-1)/(v m+p-1) when p divides m.

    ``zb-h1`` with one chunk: (p-1)/(3m+p-1) when forward and both halves of the backward take equally long (arXiv
    2401.10241, section 2.2: (p-1)(T_F + T_B - T_W)).

    Raises:
        InputError: as ``schedule``; and for schedules without a closed form (``simulate`` them).
    """
    virtual = _check(name, stages, microbatches, virtual)
    if name in FOLDED or (name == "zb-h1" and virtual > 1):
        raise InputError(f"the bubble of schedule {name} with {virtual} chunks has no closed form; simulate it")
    if name == "zb-h1":
        return (stages - 1) / (3 * microbatches + stages - 1)
    return (stages - 1) / (virtual * microbatches + stages - 1)


def hand_offs(table: Table, rank: int) -> list[HandOff]:
    """Every receive and send of one rank in program order: a receive before its action, a send after it.

    Hand-offs between two chunks of the same rank do not appear, and a weight gradient needs none.
    """
    last = table.chunks - 1
    moves: list[HandOff] = []
    for action, chunk, microbatch in table.actions[rank]:
        if action == "W":
            continue
        kind: Literal["F", "B"] = "F" if action == "F" else "B"
        before, after = (chunk - 1, chunk + 1) if kind == "F" else (chunk + 1, chunk - 1)
        if 0 <= before <= last and table.rank_of(before) != rank:
            moves.append(HandOff("recv", kind, table.rank_of(before), chunk, microbatch))
        if 0 <= after <= last and table.rank_of(after) != rank:
            moves.append(HandOff("send", kind, table.rank_of(after), chunk, microbatch))
    return moves


@dataclass(frozen=True, slots=True)
class Simulation:
    """Start and end of every action of every rank, in the unit of the given times."""

    spans: tuple[tuple[tuple[float, float], ...], ...]

    @property
    def makespan(self) -> float:
        """End of the last action."""
        return max(end for rank in self.spans for _, end in rank)

    @property
    def bubble(self) -> float:
        """Idle share over all ranks."""
        busy = sum(end - start for rank in self.spans for start, end in rank)
        return 1 - busy / (len(self.spans) * self.makespan)


def simulate(
    table: Table,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    transfer_s: float = 0.0,
    *,
    seconds_of: Callable[[Action], float] | None = None,
) -> Simulation:
    """Run the table: an action starts when its rank is free and its input is there.

    Args:
        table: what to run. forward_s, backward_s: of one chunk; each half of a split backward takes half of it.
        transfer_s: of a hand-off between ranks.
        seconds_of: time of every action, where chunks differ; then the first two count for nothing.

    Raises:
        InputError: the table deadlocks (an order in which every rank waits for another).
    """
    lasts = {"F": forward_s, "B": backward_s, "I": backward_s / 2, "W": backward_s / 2}
    ended: dict[Action, float] = {}
    position = [0] * table.stages
    free = [0.0] * table.stages
    spans: list[list[tuple[float, float]]] = [[] for _ in range(table.stages)]
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(table.actions):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                inputs = _inputs(table, action)
                if any(i not in ended for i in inputs):
                    break
                ready = [ended[i] + (0.0 if table.rank_of(i.chunk) == rank else transfer_s) for i in inputs]
                start = max([free[rank], *ready])
                end = start + (lasts[action.kind] if seconds_of is None else seconds_of(action))
                ended[_input_gradient(action)], free[rank] = end, end
                spans[rank].append((start, end))
                position[rank] += 1
                progress = True
    stuck = [rank for rank in range(table.stages) if position[rank] < len(table.actions[rank])]
    if stuck:
        waiting = table.actions[stuck[0]][position[stuck[0]]]
        raise InputError(f"schedule {table.name}: {len(stuck)} ranks wait for ever; rank {stuck[0]} waits at {waiting}")
    return Simulation(tuple(tuple(s) for s in spans))


def _input_gradient(action: Action) -> Action:
    """A whole backward counts as an input gradient for those who wait for it."""
    return action._replace(kind="I") if action.kind == "B" else action


def _inputs(table: Table, action: Action) -> list[Action]:
    """What must have ended before: the neighbour's action of the same micro-batch, and the own forward."""
    kind, chunk, microbatch = action
    if kind == "F":
        return [Action("F", chunk - 1, microbatch)] if chunk else []
    if kind == "W":
        return [Action("I", chunk, microbatch)]
    own = [Action("F", chunk, microbatch)]
    return own if chunk == table.chunks - 1 else [*own, Action("I", chunk + 1, microbatch)]
