"""Prefill and decode on ranks of their own: a prompt is computed by one pool, its keys and values move to the other.

::

    arrivals ──blocks reserved in the decode pool──> prefill pool ──first token──> client
                                                          │ keys and values, layer by layer
                                     forget <── given up  ▼
                                     decode pool: all of it is here ──place──> decode ──tokens──> client

Blocks of the decode pool belong to a request from before its prefill until it ends, is given up, or its client leaves;
blocks of the prefill pool only while it is computed. What a rank receives goes to memory outside all pages and is
written into blocks between two passes, once the scheduler knows that it is complete and still wanted. Where a transfer
does not come to its end in time, or blocks of the decode pool run out, the request is computed again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.runtime.serve.engine import Engine, EngineConfig, Token
from meshwright.runtime.serve.pool import Pool
from meshwright.runtime.serve.scheduler import Line, Pass, Scheduler

#: How long keys and values may take to arrive once the prompt is computed.
TRANSFER_S = 60.0


class DecodeScheduler(Scheduler):
    """Passes of a replica that only decodes: sequences enter with blocks that were filled elsewhere."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.returned: list[Line] = []
        self.reserved = 0

    @property
    def load(self) -> int:
        """Sequences that decode here, or will."""
        return len(self.running) + self.reserved

    def reserve(self, tokens: Sequence[int]) -> tuple[list[int], int] | None:
        """Blocks for a prompt and one token more, and how many tokens of it are in them already; None: no room now."""
        if self.load >= self.limits.sequences:
            return None
        shared = self.pool.match(tokens)
        more = self.pool.take(-(-(len(tokens) + 1) // self.pool.block_size) - len(shared))
        if more is None:
            self.pool.release(shared)
            return None
        self.reserved += 1
        return [*shared, *more], len(shared) * self.pool.block_size

    def give_back(self, table: Sequence[int]) -> None:
        """Blocks that were reserved and are not needed."""
        self.pool.release(table)
        self.reserved -= 1

    def adopt(self, line: Line, table: list[int]) -> None:
        """A sequence all of whose tokens but the last are in its blocks."""
        self.reserved -= 1
        line.table, line.cached, line.names = table, line.length - 1, []
        self._name_blocks(line)
        self.running.append(line)

    def _send_back(self, line: Line) -> None:
        """Out of blocks: it has to be prefilled again."""
        self._release(line)
        self.running.remove(line)
        self.returned.append(line)
        self.counts.preemptions += 1


@dataclass(slots=True)
class _Journey:
    """A request between its arrival in the prefill pool and its first pass in the decode pool.

    Attributes:
        line: the request. filling: its prompt in the prefill pool. source, target: replicas.
        table: blocks reserved. first: tokens that are in them already. transfer: number of the transfer, once ordered.
        missing: ranks that have not all of it. filled: the prompt is computed.
    """

    line: Line
    filling: Line
    source: int
    target: int
    table: list[int]
    first: int
    transfer: int | None = None
    missing: set[int] = field(default_factory=set)
    filled: bool = False


class SplitEngine(Engine):
    """Serves one model with prefill and decode on ranks of their own.

    Raises:
        InputError: a layout that cannot serve.
    """

    def __init__(self, config: EngineConfig, transfer_s: float = TRANSFER_S) -> None:
        super().__init__(config)
        assert config.decode is not None
        made = self.scheduler(DecodeScheduler, config.decode, config.decode_cache)
        self.decode = Pool(config.decode, made, config.placement.layout.world)
        self.transfer_s = transfer_s
        self.given_up = 0
        self._arrivals: deque[Line] = deque()
        self._journeys: dict[int, _Journey] = {}
        self._transfers: dict[int, int] = {}
        self._count = 0

    @property
    def schedulers(self) -> list[Scheduler]:
        """Of all replicas of both pools."""
        return [replica.scheduler for pool in (self.pool, self.decode) for replica in pool.replicas]

    @property
    def waiting(self) -> int:
        """Requests that wait for blocks of the decode pool, or to be prefilled."""
        return len(self._arrivals) + super().waiting

    def _take(self, line: Line) -> None:
        for scheduler in self.schedulers:
            scheduler.check(line, len(self._arrivals))
        self._arrivals.append(line)

    def _pump(self) -> None:
        if not self.healthy:
            return
        while True:
            self._admit()
            self.pool.pump(self.ranks.tell, self._order)
            self.decode.pump(self.ranks.tell)
            returned = [line for scheduler in self._decoders() for line in scheduler.returned]
            if not returned:
                return
            for scheduler in self._decoders():
                scheduler.returned.clear()
            self._again(returned)

    def _decoders(self) -> list[DecodeScheduler]:
        return [r.scheduler for r in self.decode.replicas if isinstance(r.scheduler, DecodeScheduler)]

    def _again(self, lines: Iterable[Line]) -> None:
        """Requests that are computed again come before those that wait, in the order of their arrival."""
        live = [line for line in lines if not line.gone]
        self._arrivals = deque(sorted((*live, *self._arrivals), key=lambda line: line.number))

    def _admit(self) -> None:
        """Requests for which the decode pool has blocks go to the prefill pool."""
        decoders = self._decoders()
        while self._arrivals:
            line = self._arrivals[0]
            target = min(range(len(decoders)), key=lambda i: decoders[i].load)
            tokens = line.slice(0, line.length)
            found = decoders[target].reserve(tokens)
            if found is None:
                return
            self._arrivals.popleft()
            filling = Line(
                line.number, tuple(tokens), line.sampling, 1, logprobs=line.logprobs, bias=line.bias,
                said=line.said + len(line.new),
            )  # fmt: skip
            source = self.pool.least()
            self._journeys[line.number] = _Journey(line, filling, source, target, *found)
            self.pool.replicas[source].scheduler.waiting.append(filling)

    def _order(self, replica: int, made: Pass) -> dict[str, Any]:
        """What the ranks of a prefill pass are told to send, after the decode ranks were told to expect it."""
        kv = []
        for row in made.rows:
            journey = self._journeys[row.line.number]
            if not row.wanted or journey.line.most - len(journey.line.new) == 1:
                continue
            self._count += 1
            journey.transfer = self._count
            self._transfers[self._count] = row.line.number
            ranks = self.decode.replicas[journey.target].ranks
            journey.missing = set(ranks)
            transfer = (self._count, row.line.length, journey.first, replica, journey.target)
            self.ranks.tell(ranks, {"op": "expect", "transfer": transfer})
            kv.append((*transfer, row.line.table))
        return {"kv": kv}

    def _answered(self, rank: int, answer: dict[str, Any]) -> None:
        """A pass is over, or a transfer is here on a rank."""
        if "arrived" in answer:
            journey = self._journeys.get(self._transfers.get(int(answer["arrived"]), -1))
            if journey is not None:
                journey.missing.discard(rank)
                self._settle(journey)
        elif rank < self.decode.first:
            for filling, token in self._done(self.pool, rank, answer):
                self._filled(self._journeys[filling.number], token)
        else:
            for line, token in self._done(self.decode, rank, answer):
                self._say(line, token)
        self._pump()

    def _filled(self, journey: _Journey, token: Token | None) -> None:
        """The prompt is computed and its first token chosen."""
        line = journey.line
        if token is None:
            self._give_up(journey)
            line.ended = "abort"
            return
        line.new.append(token.token)
        if token.token in line.eos:
            line.ended = "stop"
        elif len(line.new) >= line.most:
            line.ended = "length"
        self._say(line, token._replace(ended=line.ended))
        if line.ended:
            self._give_up(journey)
            return
        journey.filled = True
        asyncio.get_running_loop().call_later(self.transfer_s, self._late, journey)
        self._settle(journey)

    def _settle(self, journey: _Journey) -> None:
        """Begin to decode once everything is there."""
        if journey.missing or not journey.filled:
            return
        assert journey.transfer is not None
        del self._journeys[journey.line.number], self._transfers[journey.transfer]
        replica = self.decode.replicas[journey.target]
        place = {"op": "place", "transfer": journey.transfer, "table": journey.table}
        self.ranks.tell(replica.ranks, place)
        self._decoders()[journey.target].adopt(journey.line, journey.table)

    def _late(self, journey: _Journey) -> None:
        """A transfer took too long: the request is computed again."""
        if self._journeys.get(journey.line.number) is journey and self.healthy:
            self.given_up += 1
            self._give_up(journey)
            self._again([journey.line])
            self._pump()

    def _give_up(self, journey: _Journey) -> None:
        """Blocks back; what is under way will go nowhere."""
        del self._journeys[journey.line.number]
        self._decoders()[journey.target].give_back(journey.table)
        if journey.transfer is not None:
            del self._transfers[journey.transfer]
            ranks = self.decode.replicas[journey.target].ranks
            self.ranks.tell(ranks, {"op": "forget", "transfer": journey.transfer})

    def _leave(self, line: Line) -> None:
        line.gone = True
        if line in self._arrivals:
            self._arrivals.remove(line)
            line.ended = "abort"
        journey = self._journeys.get(line.number)
        if journey is None:
            super()._leave(line)
        elif journey.filled:
            self._give_up(journey)
            line.ended = "abort"
        else:
            self.pool.replicas[journey.source].scheduler.drop(journey.filling)
            if journey.filling.ended:
                self._give_up(journey)
                line.ended = "abort"

    def _lost(self) -> None:
        """The ranks are being started anew: every request is computed again."""
        lines = [journey.line for journey in self._journeys.values()]
        self._journeys.clear()
        self._transfers.clear()
        self.pool.restart()
        self.decode.restart()
        for scheduler in self.schedulers:
            if isinstance(scheduler, DecodeScheduler):
                scheduler.reserved = 0
                lines += scheduler.waiting
            scheduler.waiting.clear()
        self._again(lines)

    def _fail(self, error: MeshwrightError) -> None:
        super()._fail(error)
        self._arrivals.clear()
