"""Continuous batching: which tokens of which sequences the next pass computes. One decision for all ranks; no torch.

A pass takes one token of every sequence that decodes, then prompt tokens up to a budget: of prompts that are under way,
then of those that wait, in the order of arrival. Where blocks run out, the sequence admitted last gives all of its own
back and is computed again later, from its prompt and what it has said so far. Up to ``depth`` passes are under way (the
stages of a pipeline); a sequence is in one of them at most.

Everything here is bookkeeping: the same calls give the same passes, whatever the clock says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from meshwright.errors import InputError
from meshwright.runtime.job import Sampling
from meshwright.runtime.serve.blocks import ROOT, BlockPool

Reason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a scheduler.

    Attributes:
        sequences: at most so many under way. tokens: of a pass. length: tokens of a sequence, prompt and new.
        queue: sequences that may wait. depth: passes under way.
    """

    sequences: int = 64
    tokens: int = 512
    length: int = 4096
    queue: int = 1024
    depth: int = 1


class QueueFull(InputError):
    """No room to wait in."""


@dataclass(slots=True, eq=False)
class Line:
    """One sequence from its arrival to its end.

    Attributes:
        number: of the sequence. prompt: token ids. new: those generated.
        sampling: how tokens are chosen. most: at most so many new ones. eos: ids that end it. logprobs: how many
            likeliest tokens are told with each, None: not even its own. bias: added to logits, by token.
        said: tokens of the prompt that were generated before.
        table: its blocks. cached: tokens whose keys and values they hold. names: digests of its full blocks.
        busy: it is in a pass under way. gone: its client left meanwhile. ended: why, once it has.
    """

    number: int
    prompt: tuple[int, ...]
    sampling: Sampling
    most: int
    eos: frozenset[int] = frozenset()
    logprobs: int | None = None
    bias: tuple[tuple[int, float], ...] = ()
    said: int = 0
    new: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    cached: int = 0
    names: list[bytes] = field(default_factory=list)
    busy: bool = False
    gone: bool = False
    ended: Reason | None = None

    @property
    def length(self) -> int:
        """Tokens so far."""
        return len(self.prompt) + len(self.new)

    @property
    def rest(self) -> int:
        """Tokens that are not in the cache yet; 1 while it decodes."""
        return self.length - self.cached

    def slice(self, low: int, high: int) -> list[int]:
        """Tokens ``low`` to ``high``."""
        p = len(self.prompt)
        return [*self.prompt[low:high], *self.new[max(0, low - p) : max(0, high - p)]]


class Row(NamedTuple):
    """Tokens of one sequence in a pass; ``wanted``: the next token is to be chosen."""

    line: Line
    start: int
    length: int
    wanted: bool


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass computes: rows of one token first."""

    number: int
    rows: tuple[Row, ...]

    @property
    def tokens(self) -> int:
        """Of all rows."""
        return sum(row.length for row in self.rows)

    @property
    def wanted(self) -> list[Line]:
        """Sequences whose next token is chosen, in the order of rows."""
        return [row.line for row in self.rows if row.wanted]


@dataclass(slots=True)
class Counts:
    """What happened so far, for metrics."""

    prompt_tokens: int = 0
    prefix_tokens: int = 0
    new_tokens: int = 0
    preemptions: int = 0
    passes: int = 0


class Scheduler:
    """Passes of one replica.

    Args:
        pool: its blocks. limits: of passes and sequences.
    """

    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self.pool, self.limits = pool, limits
        self.waiting: deque[Line] = deque()
        self.running: list[Line] = []
        self.under_way: dict[int, Pass] = {}
        self.counts = Counts()

    @property
    def load(self) -> int:
        """Tokens that wait to be computed, and one for every sequence that decodes."""
        return sum(line.rest for line in (*self.waiting, *self.running))

    @property
    def capacity(self) -> int:
        """Longest sequence that can ever be held."""
        return min(self.limits.length, self.pool.blocks * self.pool.block_size)

    def add(self, line: Line) -> None:
        """Take a sequence in.

        Raises:
            QueueFull: too many wait already.
            InputError: it can never fit.
        """
        self.check(line, len(self.waiting))
        self.waiting.append(line)

    def check(self, line: Line, waiting: int) -> None:
        """Refuse a sequence as ``add`` does, where ``waiting`` sequences wait already."""
        if not line.prompt or line.most < 1:
            raise InputError("an empty prompt, or no new token asked for; at least one of each is needed")
        if len(line.prompt) + line.most > self.capacity:
            raise InputError(
                f"{len(line.prompt)} prompt tokens and {line.most} new ones exceed the {self.capacity} tokens that a "
                "sequence may have here; ask for fewer"
            )
        if waiting >= self.limits.queue:
            raise QueueFull(f"{waiting} requests wait already; try again later")

    def drop(self, line: Line) -> None:
        """The client left: blocks are given back now, or when the pass that reads them is over."""
        if line.ended:
            return
        line.gone = True
        if not line.busy:
            self._end(line, "abort")

    def next_pass(self) -> Pass | None:
        """The next pass, or None where nothing can go on before another one is over."""
        if len(self.under_way) >= self.limits.depth:
            return None
        rows: list[Row] = []
        self._decodes(rows)
        self._prompts(rows)
        if not rows:
            return None
        for row in rows:
            row.line.busy = True
        made = Pass(self.counts.passes, tuple(sorted(rows, key=lambda row: row.length > 1)))
        self.counts.passes += 1
        self.under_way[made.number] = made
        return made

    def _decodes(self, rows: list[Row]) -> None:
        """One token of every idle sequence that decodes; with a pipeline, of its share of them."""
        decoding = sum(line.rest == 1 for line in self.running)
        most = min(self.limits.tokens, -(-decoding // self.limits.depth))
        for line in list(self.running):
            if len(rows) >= most:
                return
            if line.busy or line.rest != 1 or line not in self.running:
                continue
            if self._room(line, 1, [row.line for row in rows]):
                rows.append(Row(line, line.cached, 1, True))

    def _room(self, line: Line, tokens: int, kept: Sequence[Line]) -> bool:
        """Blocks for more tokens of a sequence, taken from the one admitted last if need be.

        ``kept``: sequences of this pass, whose blocks stay. False: it must wait, or was sent back itself.
        """
        while True:
            missing = -(-(line.cached + tokens) // self.pool.block_size) - len(line.table)
            taken = self.pool.take(max(0, missing))
            if taken is not None:
                line.table += taken
                return True
            victim = next((o for o in reversed(self.running) if not o.busy and o not in kept and o.table), None)
            if victim is None:
                return False
            self._send_back(victim)
            if victim is line:
                return False

    def _send_back(self, line: Line) -> None:
        """All blocks back; it is computed again before those that wait."""
        self._release(line)
        self.running.remove(line)
        self.waiting.appendleft(line)
        self.counts.preemptions += 1

    def _prompts(self, rows: list[Row]) -> None:
        """Prompt tokens up to the budget."""
        left = self.limits.tokens - len(rows)
        for line in [o for o in self.running if not o.busy and o.rest > 1]:
            if left <= 0:
                return
            count = min(line.rest, left)
            if line in self.running and self._room(line, count, [*(row.line for row in rows), *self._before(line)]):
                rows.append(Row(line, line.cached, count, count == line.rest))
                left -= count
        while left > 0 and self.waiting and len(self.running) < self.limits.sequences:
            row = self._admit(self.waiting[0], left)
            if row is None:
                return
            rows.append(row)
            left -= row.length

    def _before(self, line: Line) -> list[Line]:
        """Sequences admitted before one: they do not make room for it."""
        return self.running[: self.running.index(line)]

    def _admit(self, line: Line, left: int) -> Row | None:
        """Start a sequence that waits, once there is room for all its tokens and one more block."""
        tokens = line.slice(0, line.length)
        shared = self.pool.match(tokens)
        line.table, line.cached = shared, len(shared) * self.pool.block_size
        needed = -(-(line.length + 1) // self.pool.block_size) - len(shared)
        count = min(line.rest, left)
        if needed > self.pool.available:
            self._release(line)
            return None
        before = ROOT
        for i in range(len(shared)):
            before = self.pool.name(
                shared[i], before, tokens[i * self.pool.block_size : (i + 1) * self.pool.block_size]
            )
            line.names.append(before)
        self.waiting.popleft()
        self.running.append(line)
        self.counts.prefix_tokens += line.cached
        self.counts.prompt_tokens += len(line.prompt) if not line.new else 0
        taken = self._room(line, count, self.running)
        assert taken, "room was counted before"
        return Row(line, line.cached, count, count == line.rest)

    def done(self, number: int, tokens: Sequence[int]) -> Iterator[tuple[Line, int | None]]:
        """A pass is over: ``tokens`` are the chosen ones in the order of ``Pass.wanted``.

        Yields every sequence that got a token (None: it ended because its client left) ; ``Line.ended`` says whether
        it was the last.
        """
        chosen = iter(tokens)
        for line, start, length, wanted in self.under_way.pop(number).rows:
            line.busy = False
            token = next(chosen) if wanted else None
            line.cached = start + length
            if line.gone:
                self._end(line, "abort")
                yield line, None
                continue
            self._name_blocks(line)
            if token is None:
                continue
            line.new.append(token)
            self.counts.new_tokens += 1
            if token in line.eos:
                self._end(line, "stop")
            elif len(line.new) >= line.most:
                self._end(line, "length")
            yield line, token

    def restart(self) -> None:
        """The ranks and all they cached are gone: every sequence is computed again, in the order of arrival."""
        lines = sorted((*self.running, *self.waiting), key=lambda line: line.number)
        self.pool = BlockPool(self.pool.blocks, self.pool.block_size, prefix=self.pool.prefix)
        self.under_way.clear()
        self.running.clear()
        self.waiting.clear()
        for line in lines:
            line.table, line.names, line.cached, line.busy = [], [], 0, False
            if line.gone:
                line.ended = "abort"
            else:
                self.waiting.append(line)

    def _name_blocks(self, line: Line) -> None:
        size = self.pool.block_size
        for i in range(len(line.names), line.cached // size):
            before = line.names[-1] if line.names else ROOT
            line.names.append(self.pool.name(line.table[i], before, line.slice(i * size, (i + 1) * size)))

    def _release(self, line: Line) -> None:
        self.pool.release(line.table)
        line.table, line.names, line.cached = [], [], 0

    def _end(self, line: Line, why: Reason) -> None:
        self._release(line)
        line.ended = why
        if line in self.running:
            self.running.remove(line)
        elif line in self.waiting:
            self.waiting.remove(line)
