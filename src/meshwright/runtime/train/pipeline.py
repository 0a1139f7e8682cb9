"""Carries out a pipeline schedule on one rank: the program of ``moves.program`` over the rank's model chunks.

Why not the executor of torch.distributed.pipelining: it fixes shapes at the first step, sends in batches at places of
its own, and splits a backward by walking the graph twice, which would enter the collectives of a block twice. Its
tables and its gradients are what tests hold this executor against.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.moves.pipeline import Action, HandOff, Table
from meshwright.moves.program import program
from meshwright.runtime.mesh import Group
from meshwright.runtime.scope import scope
from meshwright.runtime.train.stage import Stage

#: Kind of hand-off, chunk that takes it, micro-batch.
Key = tuple[str, int, int]


class Watch(Protocol):
    """Is told what the rank runs; ``final``: no later action adds to the gradients of this chunk in this step."""

    def before(self, action: Action, final: bool) -> None:
        """An action begins; its input is there."""

    def after(self, action: Action, final: bool) -> None:
        """An action is over; its output is not yet sent."""


class Span(NamedTuple):
    """When an action ran, by the monotonic clock; ``waited_ns`` is what it waited for its input before."""

    action: Action
    waited_ns: int
    began_ns: int
    ended_ns: int


@dataclass(slots=True)
class Outcome:
    """What a rank's pass over the schedule gave.

    Attributes:
        loss: sum of the losses of the last chunk's micro-batches, fp64; 0 on ranks without it.
        spans: executed actions, in order.
    """

    loss: float = 0.0
    spans: list[Span] = field(default_factory=list)

    @property
    def actions(self) -> tuple[Action, ...]:
        """What was executed."""
        return tuple(span.action for span in self.spans)

    def seconds(self, kinds: str) -> float:
        """Time in the actions of some kinds (``"F"``, ``"BIW"``), waiting left out."""
        return sum(s.ended_ns - s.began_ns for s in self.spans if s.action.kind in kinds) * 1e-9

    @property
    def waited_s(self) -> float:
        """Time in which the rank waited for its neighbours."""
        return sum(s.waited_ns for s in self.spans) * 1e-9


class Pipeline:
    """The chunks of one rank under one schedule.

    Args:
        table: the schedule, for the number of micro-batches of a step.
        stages: the rank's chunks by their place in the model.
        group: the ranks of the pipeline, in the order of their stages.
        device: where hidden states live.
        back: the same ranks again, for what goes to earlier stages. NCCL carries out what two ranks exchange through
            one group in the order in which each issued it, so that two sends that meet would wait for each other.
    """

    def __init__(
        self,
        table: Table,
        stages: Mapping[int, Stage],
        group: Group,
        device: torch.device,
        back: Group | None = None,
    ) -> None:
        own = {place for place in range(table.chunks) if table.rank_of(place) == group.index}
        assert set(stages) == own, f"rank {group.index} runs chunks {sorted(own)}, {sorted(stages)} are given"
        self.table, self.stages, self.group, self.device = table, dict(stages), group, device
        self.back = back or group
        self.program = program(table, group.index)
        actions = table.actions[group.index]
        self._final = {a.chunk: n for n, a in enumerate(actions) if a.kind in "BW"}

    def run(self, batches: Sequence[Any], scale: float, watch: Watch | None = None) -> Outcome:
        """Forward and backward of all micro-batches; gradients accumulate in the parameters.

        Args:
            batches: one a micro-batch, as the chunks take them. scale: gradient of the summed loss.
        """
        assert len(batches) == self.table.microbatches
        return _Run(self, batches, scale, watch).run()


class _Run:
    """One step of one rank."""

    def __init__(self, pipeline: Pipeline, batches: Sequence[Any], scale: float, watch: Watch | None) -> None:
        self.p, self.batches, self.scale, self.watch = pipeline, batches, scale, watch
        self.inbox: dict[Key, tuple[Tensor, dist.Work | None]] = {}
        self.made: dict[Key, Tensor] = {}
        self.sending: deque[tuple[dist.Work, Tensor]] = deque()
        self.losses: list[Tensor] = []
        self.outcome = Outcome()

    def run(self) -> Outcome:
        for instruction in self.p.program:
            if isinstance(instruction, Action):
                self._act(instruction)
            elif instruction.op == "recv":
                self._post(instruction)
            else:
                self._send(instruction)
        for work, _ in self.sending:
            work.wait()
        self.outcome.loss = float(sum(loss.double() for loss in self.losses))
        assert not self.inbox
        assert not any(stage.under_way for stage in self.p.stages.values())
        return self.outcome

    def _post(self, off: HandOff) -> None:
        """Make room for a hidden state or its gradient and ask the neighbour for it."""
        chunk = self.p.stages[off.chunk].chunk
        x = torch.empty(chunk.input_shape(self.batches[off.microbatch]), dtype=chunk.dtype, device=self.p.device)
        with _named(off.kind, off.microbatch):
            work = dist.irecv(x, group=self._way(off.peer, self.p.group.index), group_src=off.peer)
        self.inbox[off.kind, off.chunk, off.microbatch] = x, work

    def _send(self, off: HandOff) -> None:
        """Hand on what the last action made; it is kept until it is gone."""
        while self.sending and self.sending[0][0].is_completed():
            self.sending.popleft()
        x = self.made.pop((off.kind, off.chunk, off.microbatch)).contiguous()
        with _named(off.kind, off.microbatch):
            work = dist.isend(x, group=self._way(self.p.group.index, off.peer), group_dst=off.peer)
        assert work is not None
        self.sending.append((work, x))

    def _way(self, src: int, dst: int) -> dist.ProcessGroup | None:
        """What carries from a stage to another."""
        return (self.p.group if src < dst else self.p.back).pg

    def _act(self, action: Action) -> None:
        """Run one action, once its input is there."""
        asked = time.monotonic_ns()
        given = None if action.kind == "W" else self._take("F" if action.kind == "F" else "B", action)
        began = time.monotonic_ns()
        final = self.p._final.get(action.chunk) == len(self.outcome.spans)
        if self.watch is not None:
            self.watch.before(action, final)
        self._carry_out(action, given)
        if self.watch is not None:
            self.watch.after(action, final)
        self.outcome.spans.append(Span(action, began - asked, began, time.monotonic_ns()))

    def _take(self, kind: str, action: Action) -> Tensor | None:
        """What came for an action; None where nothing comes (first chunk, loss)."""
        x, work = self.inbox.pop((kind, action.chunk, action.microbatch), (None, None))
        if work is not None:
            work.wait()
        return x

    def _carry_out(self, action: Action, given: Tensor | None) -> None:
        kind, place, number = action
        stage = self.p.stages[place]
        if kind == "W":
            stage.weights(number)
        elif kind == "F":
            out = stage.forward(number, given, self.batches[number])
            if place == self.p.table.chunks - 1:
                self.losses.append(out)
                self.inbox["B", place, number] = torch.full_like(out, self.scale), None
            else:
                self._made("F", place, place + 1, number, out)
        else:
            assert given is not None
            before = stage.backward(number, given, split=kind == "I")
            if before is not None:
                self._made("B", place, place - 1, number, before)

    def _made(self, kind: str, place: int, to: int, number: int, x: Tensor) -> None:
        """Hand over to a chunk of this rank, or keep for the send that follows."""
        if to in self.p.stages:
            self.inbox[kind, to, number] = x, None
        else:
            self.made[kind, place, number] = x


def _named(kind: str, number: int) -> scope:
    """Scope of a hand-off."""
    forward = kind == "F"
    name = "activations" if forward else "gradients"
    return scope(phase="forward" if forward else "backward", microbatch=number, name=name, fresh=True)
