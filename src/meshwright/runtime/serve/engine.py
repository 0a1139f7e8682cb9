"""The engine: one scheduler a replica, the ranks that do its passes, and the requests that wait for tokens.

::

    submit ──> least loaded replica's Scheduler ──pass──> control links ──> ranks
    Ticket <──── tokens of the sequence <──────── what the sampling rank of the replica chose

It lives in one event loop and computes nothing itself, so it needs no torch. Replicas that meet at experts get their
passes in turns: each turn is a pass, or an idle one, for every replica. Where a rank dies all ranks are started
anew and every sequence is computed again from its prompt and what was said so far: nobody hears a token twice or never.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from meshwright.errors import InputError, MeshwrightError
from meshwright.moves.expert import replicas_meet
from meshwright.runtime.folder import Model
from meshwright.runtime.job import DEFAULT_BLOCK_SIZE, Sampling
from meshwright.runtime.launch.local import RankError, run_local
from meshwright.runtime.serve.blocks import BlockPool
from meshwright.runtime.serve.job import ServeJob, serve_rank
from meshwright.runtime.serve.link import LinkError, Peer, new_secret, pack
from meshwright.runtime.serve.scheduler import Limits, Line, Pass, Scheduler
from meshwright.specs.placement import Coordinate, Placement

#: Bound on the life of ranks: the longest that poll(2) takes, less a day.
LIFE_S = 20 * 86400.0
#: How long ranks may take to end after they were told to.
STOP_S = 10.0


class Launch(Protocol):
    """How ranks are started: ``run_local``, or the same on other machines. Blocks until they have ended."""

    def __call__(
        self,
        target: Callable[..., Any],
        world: int,
        args: Sequence[Any],
        timeout_s: float,
        *,
        backend: str,
        started: Callable[[list[int]], None] | None,
    ) -> list[Any]:
        """Run ``target(rank, *args)`` on every rank."""
        ...


class EngineError(MeshwrightError):
    """The ranks are gone and were not started again."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What is served and how.

    Attributes:
        model: checkpoint. placement: of its model. dtype, device: of weights and activations.
        blocks, block_size: cache of each replica. limits: of each replica's scheduler.
        prefix: equal beginnings share blocks. host: address at which ranks find the scheduler.
        restarts: how often ranks may be started anew. launch: how they are.
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


class Token(NamedTuple):
    """One token of a text; ``ended``: why it is the last, or None. Token -1: the end came without one."""

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


@dataclass(slots=True)
class _Replica:
    """One data-parallel place: its scheduler and its ranks."""

    scheduler: Scheduler
    ranks: tuple[int, ...]
    tickets: dict[int, Ticket] = field(default_factory=dict)


class Engine:
    """Serves one model under one layout."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        layout = config.placement.layout
        if layout.cp > 1:
            raise InputError(
                f"serving deals no sequence over context parallel {layout.cp}; take cp=1 and more tp, pp or dp"
            )
        ranks: list[list[int]] = [[] for _ in range(layout.dp)]
        for rank in range(layout.world):
            ranks[config.placement.coordinate(rank).dp].append(rank)
        self.replicas = [
            _Replica(
                Scheduler(BlockPool(config.blocks, config.block_size, prefix=config.prefix), config.limits), tuple(r)
            )
            for r in ranks
        ]
        self.in_step = replicas_meet(config.placement)
        self.restarts = 0
        self.pids: list[int] = []
        self.trouble = ""
        self._secret, self._epoch, self._numbers = new_secret(), 0, 0
        self._peers: dict[int, Peer] = {}
        self._turns: deque[set[tuple[int, int]]] = deque()
        self._ready = False
        self._settled = asyncio.Event()
        self._ended: asyncio.Future[None] | None = None
        self._failed: MeshwrightError | None = None
        self._stopping = False
        self._server: asyncio.Server | None = None

    @property
    def healthy(self) -> bool:
        """All ranks are there."""
        return self._ready and self._failed is None

    async def start(self) -> None:
        """Start the ranks and wait until all have loaded.

        Raises:
            MeshwrightError: a rank failed while it loaded.
        """
        self._server = await asyncio.start_server(self._greet, self.config.host, 0)
        self._start_ranks()
        await self._settled.wait()
        if self._failed is not None:
            await self.stop()
            raise self._failed

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
        replica = min(self.replicas, key=lambda r: r.scheduler.load)
        replica.scheduler.add(line)
        self._numbers += 1
        ticket = replica.tickets[line.number] = Ticket(line)
        self._pump()
        return ticket

    def drop(self, ticket: Ticket) -> None:
        """The client left, or has enough: blocks are given back."""
        for replica in self.replicas:
            if replica.tickets.pop(ticket.line.number, None) is not None:
                replica.scheduler.drop(ticket.line)
        self._pump()

    async def stop(self) -> None:
        """End the ranks; requests under way are failed."""
        self._stopping = True
        self._fail(EngineError("the server is stopping"))
        for peer in self._peers.values():
            peer.send(pack({"op": "stop"}))
        if self._ended is not None and not self._ended.done():
            await asyncio.wait({self._ended}, timeout=STOP_S)
            if not self._ended.done():
                self._kill()
                await asyncio.wait({self._ended}, timeout=STOP_S)
        if self._server is not None:
            self._server.close()

    def _kill(self) -> None:
        for pid in self.pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _start_ranks(self) -> None:
        """Start all ranks in a thread of their own, which ends when they do."""
        c = self.config
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        job = ServeJob(
            c.model, c.placement, c.dtype, c.device, c.blocks, c.block_size, c.limits.depth, c.host, port,
            self._secret, self._epoch,
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        ended = self._ended

        def over(error: MeshwrightError | None) -> None:
            if not ended.done():
                self._over(error)
                ended.set_result(None)

        def body() -> None:
            error: MeshwrightError | None = None
            try:
                c.launch(
                    serve_rank, c.placement.layout.world, (job,), LIFE_S,
                    backend="nccl" if c.device == "cuda" else "gloo", started=self._started,
                )  # fmt: skip
            except MeshwrightError as caught:
                error = caught
            if not loop.is_closed():
                loop.call_soon_threadsafe(over, error)

        threading.Thread(target=body, name="ranks", daemon=True).start()

    def _started(self, pids: list[int]) -> None:
        self.pids = pids

    def _over(self, error: MeshwrightError | None) -> None:
        """All ranks have ended: as they were told, or one failed and they are started anew."""
        self._ready = False
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._turns.clear()
        if self._stopping:
            return
        self.trouble = str(error) if error else "the ranks left without being told to"
        loading = self._epoch == 0 and not any(r.scheduler.counts.passes for r in self.replicas)
        if self.restarts >= self.config.restarts or (loading and not isinstance(error, RankError)):
            self._fail(error or EngineError(self.trouble))
            return
        self.restarts += 1
        self._epoch += 1
        for replica in self.replicas:
            replica.scheduler.restart()
        self._start_ranks()

    def _fail(self, error: MeshwrightError) -> None:
        self._failed = self._failed or error
        self._settled.set()
        for replica in self.replicas:
            for ticket in replica.tickets.values():
                ticket.put(error)
            replica.tickets.clear()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A rank has loaded and says so; then its answers until it leaves."""
        peer = Peer(reader, writer)
        try:
            hello = await peer.greet(self._secret)
            rank, epoch = int(hello["rank"]), int(hello["epoch"])
        except (LinkError, KeyError, TypeError, ValueError):
            peer.close()
            return
        if epoch != self._epoch:
            peer.close()
            return
        self._peers[rank] = peer
        if len(self._peers) == self.config.placement.layout.world:
            self._ready = True
            self._settled.set()
            self._pump()
        while (answer := await peer.receive()) is not None and epoch == self._epoch:
            self._answered(self.config.placement.coordinate(rank), answer)

    def _pump(self) -> None:
        """Hand out passes while there is something to do and room for it."""
        if not self.healthy:
            return
        if self.in_step:
            while len(self._turns) < self.config.limits.depth and self._turn():
                pass
            return
        for number in range(len(self.replicas)):
            while (made := self.replicas[number].scheduler.next_pass()) is not None:
                self._tell(number, _said(made))

    def _turn(self) -> bool:
        """One pass for every replica, idle where one has nothing to do; False where none has."""
        made = [replica.scheduler.next_pass() for replica in self.replicas]
        if not any(made):
            return False
        self._turns.append({(number, p.number) for number, p in enumerate(made) if p is not None})
        for number, one in enumerate(made):
            self._tell(number, {"op": "idle", "n": 0} if one is None else _said(one))
        return True

    def _tell(self, replica: int, message: dict[str, Any]) -> None:
        frame = pack(message)
        for rank in self.replicas[replica].ranks:
            self._peers[rank].send(frame)

    def _answered(self, at: Coordinate, answer: dict[str, Any]) -> None:
        """A pass is over."""
        replica, number = self.replicas[at.dp], int(answer["n"])
        wanted = [line.number for line in replica.scheduler.under_way[number].wanted]
        chosen = dict(zip(wanted, answer["chosen"], strict=True))
        for line, token in replica.scheduler.done(number, [c[0] for c in answer["chosen"]]):
            ticket = replica.tickets.get(line.number)
            if ticket is not None and token is not None:
                _, logprob, top = chosen[line.number]
                ticket.put(Token(token, logprob, tuple((int(t), p) for t, p in top), line.ended))
            if line.ended:
                replica.tickets.pop(line.number, None)
        for turn in self._turns:
            turn.discard((at.dp, number))
        while self._turns and not self._turns[0]:
            self._turns.popleft()
        self._pump()


def _said(made: Pass) -> dict[str, Any]:
    """A pass as its ranks are told."""
    rows = [
        (r.line.number, r.start, r.line.slice(r.start, r.start + r.length), r.line.table, r.wanted) for r in made.rows
    ]
    choose = []
    for line in made.wanted:
        s = line.sampling
        choose.append((s.temperature, s.top_k, s.top_p, s.seed, len(line.new), line.logprobs, line.bias))
    return {"op": "pass", "n": made.number, "rows": rows, "choose": choose}
