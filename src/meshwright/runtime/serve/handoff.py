"""Keys and values from prefill to decode ranks, as ``moves.kv`` plans them, over torch.distributed.

A prefill rank copies what a layer has cached of a prompt out of its pages and sends it while it computes the next one;
the copy is its own, so its blocks are free as soon as the pass is over. A decode rank receives into memory that belongs
to no page, in a thread, and writes pages only when the scheduler says so, between two passes: whatever comes late, or
after a request was given up, never reaches a block that serves another.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.moves.context import Piece
from meshwright.moves.kv import Message, held_by, messages
from meshwright.runtime.scope import scope
from meshwright.runtime.serve.cache import PagedCache
from meshwright.specs.placement import Placement

#: Tags run over a range that every backend takes.
TAGS = 1 << 30


class Pending(Protocol):
    """A message that is under way."""

    def wait(self) -> object:
        """Until it is there, or its memory is free again."""
        ...


class Transport(Protocol):
    """Carries tensors between ranks of the world; both calls return at once."""

    def send(self, x: Tensor, to: int, tag: int) -> Pending:
        """Send; ``x`` stays as it is until the result was waited for."""
        ...

    def receive(self, x: Tensor, frm: int, tag: int) -> Pending:
        """Receive into ``x``."""
        ...


class PointToPoint:
    """``torch.distributed`` isend and irecv of host memory over the world; the tag tells messages of one pair apart.

    Messages of several prompts cross, so tags are needed: gloo has them, NCCL ignores them.
    """

    def send(self, x: Tensor, to: int, tag: int) -> Pending:
        """Send."""
        work = dist.isend(x, to, tag=tag)
        assert work is not None
        return work

    def receive(self, x: Tensor, frm: int, tag: int) -> Pending:
        """Receive."""
        work = dist.irecv(x, frm, tag=tag)
        assert work is not None
        return work


class Planner:
    """Messages of a prompt between one replica of each pool; the same on every rank.

    Args:
        prefill, decode: placements; ranks of ``decode`` follow those of ``prefill`` in the world.
    """

    def __init__(self, prefill: Placement, decode: Placement) -> None:
        self._pools = prefill, decode
        self._second = prefill.layout.world
        self.layers = len(prefill.spec.layers)
        self.plan = lru_cache(maxsize=256)(self._plan)

    def _plan(self, length: int, first: int, source: int, target: int) -> tuple[Message, ...]:
        """Messages in the order of layers, ranks counted in the world.

        Args:
            length: tokens that are cached. first: of them those before are there already. source, target: replicas.
        """
        a, b = self._pools
        pieces = [Piece(0, length)]
        return tuple(
            Message(m.source, self._second + m.target, m.layer, m.heads, m.tokens)
            for m in messages(held_by(a, pieces, source), held_by(b, pieces, target), first)
        )

    def tag(self, transfer: int, layer: int) -> int:
        """Of the messages of a layer."""
        return (transfer * self.layers + layer) % TAGS


def _heads(message: Message, side: str) -> list[int]:
    return [at for run in message.heads for at in range(getattr(run, side), getattr(run, side) + run.length)]


def _slots(message: Message, side: str, table: Sequence[int], size: int) -> list[int]:
    places = (p for run in message.tokens for p in range(getattr(run, side), getattr(run, side) + run.length))
    return [table[p // size] * size + p % size for p in places]


class Sender:
    """The end of a prefill rank.

    Args:
        rank: in the world. planner: of both pools. cache: of this rank. transport: that carries.
    """

    def __init__(self, rank: int, planner: Planner, cache: PagedCache, transport: Transport) -> None:
        self.rank, self.planner, self.cache, self.transport = rank, planner, cache, transport
        self._under_way: deque[tuple[Pending, Tensor]] = deque()
        self._waiter = threading.Thread(target=self._wait, name="sent", daemon=True)
        self._sent = threading.Semaphore(0)
        self._waiter.start()

    def after(self, orders: Sequence[tuple[int, int, int, int, int, Sequence[int]]]) -> Callable[[int], None] | None:
        """What to do after each layer of a pass.

        Args:
            orders: of every prompt that the pass completes: transfer, tokens, first needed, replicas, blocks.
        """
        mine: dict[int, list[tuple[int, Message, Sequence[int]]]] = {}
        for transfer, length, first, source, target, table in orders:
            for m in self.planner.plan(length, first, source, target):
                if m.source == self.rank:
                    mine.setdefault(m.layer, []).append((transfer, m, table))

        def send(layer: int) -> None:
            for transfer, m, table in mine.get(layer, ()):
                with scope(layer=layer, name="KV blocks"):
                    self._send(self.planner.tag(transfer, layer), m, table)

        return send if mine else None

    def _send(self, tag: int, m: Message, table: Sequence[int]) -> None:
        slots = self.cache.tensor(_slots(m, "source", table, self.cache.block_size))[:, None]
        heads = self.cache.tensor(_heads(m, "source"))
        k, v = (pool[m.layer].flatten(0, 1) for pool in (self.cache.k, self.cache.v))
        x_TKd = torch.cat((k[slots, heads], v[slots, heads]), dim=2).cpu()
        self._under_way.append((self.transport.send(x_TKd, m.target, tag), x_TKd))
        self._sent.release()

    def _wait(self) -> None:
        """Let go of what has left, in order."""
        while True:
            self._sent.acquire()
            pending, _ = self._under_way[0]
            with suppress(RuntimeError):  # lost, or the other rank is gone: the request is computed again
                pending.wait()
            self._under_way.popleft()


class Receiver:
    """The end of a decode rank.

    Args:
        rank: in the world. planner, cache, transport: as of ``Sender``.
        arrived: is called, in a thread, with the number of a transfer once all of it is here.
    """

    def __init__(
        self, rank: int, planner: Planner, cache: PagedCache, transport: Transport, arrived: Callable[[int], None]
    ) -> None:
        self.rank, self.planner, self.cache, self.transport, self.arrived = rank, planner, cache, transport, arrived
        self._staged: dict[int, list[tuple[Message, Tensor]]] = {}

    def expect(self, transfer: int, length: int, first: int, source: int, target: int) -> None:
        """Post the receives of a transfer."""
        mine = [m for m in self.planner.plan(length, first, source, target) if m.target == self.rank]
        staged, pending = [], []
        for m in mine:
            k, v = self.cache.k[m.layer], self.cache.v[m.layer]
            tokens, heads = (sum(run.length for run in runs) for runs in (m.tokens, m.heads))
            x_TKd = k.new_empty((tokens, heads, k.shape[3] + v.shape[3]), device="cpu")
            with scope(layer=m.layer, phase="prefill", name="KV blocks"):
                pending.append(self.transport.receive(x_TKd, m.source, self.planner.tag(transfer, m.layer)))
            staged.append((m, x_TKd))
        self._staged[transfer] = staged
        threading.Thread(target=self._wait, args=(transfer, pending), daemon=True, name=f"transfer {transfer}").start()

    def _wait(self, transfer: int, pending: Iterable[Pending]) -> None:
        try:
            for one in pending:
                one.wait()
        except RuntimeError:  # the other rank is gone; the launcher ends this one too
            return
        self.arrived(transfer)

    def place(self, transfer: int, table: Sequence[int]) -> None:
        """Write what has arrived into blocks."""
        for m, staged in self._staged.pop(transfer):
            x_TKd = staged.to(self.cache.device)
            slots = self.cache.tensor(_slots(m, "target", table, self.cache.block_size))[:, None]
            heads = self.cache.tensor(_heads(m, "target"))
            k, v = self.cache.k[m.layer], self.cache.v[m.layer]
            k.flatten(0, 1)[slots, heads] = x_TKd[:, :, : k.shape[3]]
            v.flatten(0, 1)[slots, heads] = x_TKd[:, :, k.shape[3] :]

    def forget(self, transfer: int) -> None:
        """It was given up: what of it has come, or will, goes nowhere."""
        self._staged.pop(transfer, None)
