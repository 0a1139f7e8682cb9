"""The ranks of an engine from their start to their end: a control port, a thread that launches them, restarts.

Everything happens in one event loop; the thread only waits for the launcher to return.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from meshwright.errors import MeshwrightError
from meshwright.runtime.launch.local import RankError
from meshwright.runtime.serve.link import LinkError, Peer, new_secret, pack

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


@dataclass(frozen=True, slots=True)
class Control:
    """Where ranks find their engine: address, port, secret of the run, and which start of the ranks this is."""

    host: str
    port: int
    secret: str
    epoch: int = 0


class EngineError(MeshwrightError):
    """The ranks are gone and were not started again."""

    exit_code = 1


class Ranks:
    """All ranks of an engine.

    Args:
        world: how many. host: address at which they find the engine. launch, backend: how they are started.
        restarts: how often they may be started anew. job: target and arguments of one start.
        ready: called when all have loaded. answered: when one says something. lost: when they are gone and are
            being started anew. failed: when they are gone for good.
    """

    def __init__(
        self,
        world: int,
        host: str,
        launch: Launch,
        backend: str,
        restarts: int,
        job: Callable[[Control], tuple[Callable[..., Any], tuple[Any, ...]]],
        *,
        ready: Callable[[], None],
        answered: Callable[[int, dict[str, Any]], None],
        lost: Callable[[], None],
        failed: Callable[[MeshwrightError], None],
    ) -> None:
        self.world, self.host, self.most = world, host, restarts
        self._launch, self._backend, self._job = launch, backend, job
        self._on_ready, self._answered, self._lost, self._on_failed = ready, answered, lost, failed
        self.restarts, self.trouble, self.ready = 0, "", False
        self.pids: list[int] = []
        self.results: list[Any] | None = None
        self.error: MeshwrightError | None = None
        self._secret, self._epoch, self._was_ready = new_secret(), 0, False
        self._peers: dict[int, Peer] = {}
        self._settled = asyncio.Event()
        self._ended: asyncio.Future[None] | None = None
        self._stopping = False
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Start them and wait until all have loaded.

        Raises:
            MeshwrightError: one failed while it loaded.
        """
        self._server = await asyncio.start_server(self._greet, self.host, 0)
        self._begin()
        await self._settled.wait()
        if self.error is not None:
            raise self.error

    def tell(self, ranks: Iterable[int], message: Any) -> None:
        """Send some of them a message."""
        frame = pack(message)
        for rank in ranks:
            self._peers[rank].send(frame)

    async def stop(self) -> None:
        """End them: by a word, and by force where that does not help."""
        self._stopping = True
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

    def _begin(self) -> None:
        """Start all ranks in a thread of their own, which ends when they do."""
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        target, args = self._job(Control(self.host, port, self._secret, self._epoch))
        loop = asyncio.get_running_loop()
        ended = self._ended = loop.create_future()

        def over(results: list[Any] | None, error: MeshwrightError | None) -> None:
            self.results = results
            self._over(error)
            if not ended.done():
                ended.set_result(None)

        def body() -> None:
            results, error = None, None
            try:
                results = self._launch(target, self.world, args, LIFE_S, backend=self._backend, started=self._started)
            except MeshwrightError as caught:
                error = caught
            except Exception as caught:  # a launcher that fails in its own way must not leave requests waiting
                error = EngineError(f"the ranks could not be started: {type(caught).__name__}: {caught}"[:300])
            if not loop.is_closed():
                loop.call_soon_threadsafe(over, results, error)

        threading.Thread(target=body, name="ranks", daemon=True).start()

    def _started(self, pids: list[int]) -> None:
        self.pids = pids

    def _over(self, error: MeshwrightError | None) -> None:
        """All have ended: as they were told, or one failed and they are started anew."""
        self.ready = False
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        if self._stopping:
            return
        self.trouble = str(error) if error else "the ranks left without being told to"
        refused = not self._was_ready and not isinstance(error, RankError)
        if self.restarts >= self.most or refused:
            self.error = error or EngineError(self.trouble)
            self._settled.set()
            self._on_failed(self.error)
            return
        self.restarts += 1
        self._epoch += 1
        self._lost()
        self._begin()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One has loaded and says so; then its answers until it leaves."""
        peer = Peer(reader, writer)
        try:
            hello = await peer.greet(self._secret)
            rank, epoch = int(hello["rank"]), int(hello["epoch"])
        except (LinkError, KeyError, TypeError, ValueError):
            peer.close()
            return
        if epoch != self._epoch or not 0 <= rank < self.world:
            peer.close()
            return
        self._peers[rank] = peer
        if len(self._peers) == self.world:
            self.ready = self._was_ready = True
            self._settled.set()
            self._on_ready()
        try:
            while (answer := await peer.receive()) is not None and epoch == self._epoch:
                self._answered(rank, answer)
        finally:  # a rank that is not listened to any more ends, and all are started anew
            peer.close()
