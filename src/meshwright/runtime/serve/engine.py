"""The engine: requests in, tokens out, by schedulers that decide and ranks that compute.

::

    submit ──> least loaded replica's Scheduler ──pass──> control links ──> ranks
    Ticket <──── tokens of the sequence <──────── what the sampling rank of the replica chose

It lives in one event loop and computes nothing itself, so it needs no torch. Where a rank dies all ranks are started
anew and every sequence is computed again from its prompt and what was said so far: nobody hears a token twice or never.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from meshwright.errors import InputError, MeshwrightError
from meshwright.runtime.folder import Model
from meshwright.runtime.job import DEFAULT_BLOCK_SIZE, Sampling
from meshwright.runtime.launch.local import run_local
from meshwright.runtime.serve.blocks import BlockPool
from meshwright.runtime.serve.job import ServeJob, serve_rank
from meshwright.runtime.serve.pool import Pool
from meshwright.runtime.serve.ranks import Control, EngineError, Launch, Ranks
from meshwright.runtime.serve.scheduler import Limits, Line, Scheduler
from meshwright.specs.placement import Placement


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What is served and how.

    Attributes:
        model: checkpoint. placement: of its model. dtype, device: of weights and activations.
        blocks, block_size: cache of each replica. limits: of each replica's scheduler (depth: stages).
        prefix: equal beginnings share blocks. host: address at which ranks find the scheduler.
        restarts: how often ranks may be started anew. launch: how they are.
        decode: placement of ranks of their own that decode what the others have prefilled; None: all do both.
        decode_block_size: of the caches of these, which hold as many tokens; None: the same.
        record: ranks record what they send.
        kv_transport: what carries keys and values from prefill to decode ranks, ``torch`` or ``nixl``.
    """

    model: Model
    placement: Placement
    dtype: str = "f32"
    device: str = "cpu"
    blocks: int = 1024
    block_size: int = DEFAULT_BLOCK_SIZE
    limits: Limits = field(default_factory=Limits)
    prefix: bool = True
    host: str = "127.0.0.1"
    restarts: int = 3
    launch: Launch = run_local
    decode: Placement | None = None
    decode_block_size: int | None = None
    record: bool = False
    kv_transport: str = "torch"

    @property
    def decode_cache(self) -> tuple[int, int]:
        """Blocks, and tokens of one, of each replica that only decodes."""
        size = self.decode_block_size or self.block_size
        return self.blocks * self.block_size // size, size

    @property
    def backend(self) -> str:
        """Of torch.distributed; keys and values go through the host's memory, because NCCL knows no tags."""
        own = "nccl" if self.device == "cuda" else "gloo"
        return own if own == "gloo" or self.decode is None else f"cpu:gloo,cuda:{own}"

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.placement.layout.world + (self.decode.layout.world if self.decode else 0)


class Token(NamedTuple):
    """One token of a text; ``ended``: why it is the last, or None."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    ended: str | None


class Ticket:
    """A request under way: iterate over its tokens."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self._events: asyncio.Queue[Token | MeshwrightError] = asyncio.Queue()

    def put(self, event: Token | MeshwrightError) -> None:
        """What happened to it."""
        self._events.put_nowait(event)

    async def __aiter__(self) -> AsyncIterator[Token]:
        """Tokens until the last.

        Raises:
            MeshwrightError: the engine failed.
        """
        while True:
            event = await self._events.get()
            if isinstance(event, MeshwrightError):
                raise event
            yield event
            if event.ended:
                return


class Engine:
    """Serves one model under one layout.

    Raises:
        InputError: a layout that cannot serve.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        cache = config.blocks, config.block_size
        self.pool = Pool(config.placement, self.scheduler(Scheduler, config.placement, cache))
        self.tickets: dict[int, Ticket] = {}
        self._numbers = 0
        self._failed: MeshwrightError | None = None
        self.ranks = Ranks(
            config.world,
            config.host,
            config.launch,
            config.backend,
            config.restarts,
            self._job,
            ready=self._pump,
            answered=self._answered,
            lost=self._lost,
            failed=self._fail,
        )

    def scheduler(self, kind: type[Scheduler], placement: Placement, cache: tuple[int, int]) -> Callable[[], Scheduler]:
        """Makes schedulers with a cache (blocks, tokens of one); as many passes under way as there are stages."""
        prefix, limits = self.config.prefix, replace(self.config.limits, depth=placement.layout.pp)
        return lambda: kind(BlockPool(*cache, prefix=prefix), limits)

    @property
    def schedulers(self) -> list[Scheduler]:
        """Of all replicas."""
        return [replica.scheduler for replica in self.pool.replicas]

    @property
    def waiting(self) -> int:
        """Requests that wait to be started."""
        return sum(len(scheduler.waiting) for scheduler in self.schedulers)

    @property
    def capacity(self) -> int:
        """Tokens of the longest request."""
        return min(scheduler.capacity for scheduler in self.schedulers)

    @property
    def healthy(self) -> bool:
        """All ranks are there."""
        return self.ranks.ready and self._failed is None

    async def start(self) -> None:
        """Start the ranks and wait until all have loaded.

        Raises:
            MeshwrightError: a rank failed while it loaded.
        """
        try:
            await self.ranks.start()
        except MeshwrightError:
            await self.stop()
            raise

    def submit(
        self,
        prompt: Sequence[int],
        most: int,
        sampling: Sampling | None = None,
        *,
        eos: Sequence[int] | None = None,
        logprobs: int | None = None,
        bias: Sequence[tuple[int, float]] = (),
    ) -> Ticket:
        """Take a request in, at the replica with the least to do.

        Args:
            prompt: token ids. most: at most so many new tokens. sampling: greedy when None.
            eos: ids that end it; None: those of the model. logprobs: likeliest tokens told with each, None: none.
            bias: added to the logits of some tokens.

        Raises:
            InputError: it can never be served. QueueFull: too many wait. EngineError: the ranks are gone.
        """
        if self._failed is not None:
            raise self._failed
        bad = next((t for t in prompt if not 0 <= t < self.config.placement.spec.vocab), None)
        if bad is not None:
            raise InputError(f"token id {bad} is outside the vocabulary of {self.config.placement.spec.vocab}")
        ends = frozenset(self.config.model.settings.eos if eos is None else eos)
        line = Line(
            self._numbers, tuple(prompt), sampling or Sampling(), most, ends, logprobs=logprobs, bias=tuple(bias)
        )
        self._take(line)
        self._numbers += 1
        ticket = self.tickets[line.number] = Ticket(line)
        self._pump()
        return ticket

    def _take(self, line: Line) -> None:
        """Let a new sequence wait where it will be computed."""
        self.pool.replicas[self.pool.least()].scheduler.add(line)

    def drop(self, ticket: Ticket) -> None:
        """The client left, or has enough: blocks are given back."""
        if self.tickets.pop(ticket.line.number, None) is not None:
            self._leave(ticket.line)
            self._pump()

    def _leave(self, line: Line) -> None:
        for scheduler in self.schedulers:
            if line in scheduler.running or line in scheduler.waiting:
                scheduler.drop(line)

    async def stop(self) -> None:
        """End the ranks; requests under way are failed."""
        self._fail(EngineError("the server is stopping"))
        await self.ranks.stop()

    def _job(self, control: Control) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        c = self.config
        cache = c.blocks, c.block_size
        job = ServeJob(
            c.model, c.placement, c.dtype, c.device, cache, control, c.decode, c.decode_cache, c.record, c.kv_transport
        )
        return serve_rank, (job,)

    def _lost(self) -> None:
        """The ranks are being started anew."""
        self.pool.restart()

    def _fail(self, error: MeshwrightError) -> None:
        self._failed = self._failed or error
        for ticket in self.tickets.values():
            ticket.put(error)
        self.tickets.clear()

    def _pump(self) -> None:
        if self.healthy:
            self.pool.pump(self.ranks.tell)

    def _answered(self, rank: int, answer: dict[str, Any]) -> None:
        """A pass is over."""
        for line, token in self._done(self.pool, rank, answer):
            self._say(line, token)
        self._pump()

    def _done(self, pool: Pool, rank: int, answer: dict[str, Any]) -> list[tuple[Line, Token | None]]:
        """Sequences of a pass that is over, with the tokens that they got; None: its client had left."""
        number, at = int(answer["n"]), pool.replica_of(rank)
        scheduler = pool.replicas[at].scheduler
        wanted = [line.number for line in scheduler.under_way[number].wanted]
        chosen = dict(zip(wanted, answer["chosen"], strict=True))
        out: list[tuple[Line, Token | None]] = []
        for line, token in scheduler.done(number, [c[0] for c in answer["chosen"]]):
            if token is None:
                out.append((line, None))
                continue
            _, logprob, top = chosen[line.number]
            out.append((line, Token(token, logprob, tuple((int(t), p) for t, p in top), line.ended)))
        pool.over(at, number)
        return out

    def _say(self, line: Line, token: Token | None) -> None:
        """Hand a token to who asked for it."""
        ticket = self.tickets.get(line.number)
        if ticket is not None and token is not None:
            ticket.put(token)
        if line.ended:
            self.tickets.pop(line.number, None)
