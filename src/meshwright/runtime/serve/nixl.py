"""Keys and values over NIXL (UCX): the receiver names memory, the sender writes there, a notice tells the receiver.

::

    receive(x): registered buffer ── "R tag address bytes [what its memory is]" ──> sender
    send(x):    its own buffer    ── write ──> the receiver's buffer, then "D tag" ──> copied into x

Buffers are registered once, by powers of two, and taken again, so no address ever means other memory than before. One
thread of a rank calls the agent; notices are bytes of a fixed form, nothing on them is unpickled. Agents find each
other through the store of the run. API: nixl_agent of NIXL 1.5.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import queue
import struct
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from meshwright.errors import InputError
from meshwright.runtime import transport
from meshwright.runtime.transport import Posted

#: Packages that hold the API, by what they were built for.
PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
#: Between two looks at what is under way, and the smallest buffer.
POLL_S, LEAST_BYTES = 2e-4, 1 << 16
READY, DONE = b"R", b"D"
_NOTICE = struct.Struct("<cQQQ")


def installed() -> str | None:
    """The package of NIXL that is installed, or None."""
    return next((name for name in PACKAGES if importlib.util.find_spec(name) is not None), None)


def need_nixl() -> str:
    """The package of NIXL.

    Raises:
        InputError: none is installed.
    """
    found = installed()
    if found is None:
        raise InputError(
            f"--kv-transport nixl needs NIXL, and none of {', '.join(PACKAGES)} is installed: pip install nixl"
        )
    return found


@dataclass(slots=True, eq=False)
class _Buffer:
    """Registered memory; ``known``: ranks that have been told what it is."""

    memory: Tensor
    registered: Any
    known: set[int] = field(default_factory=set)

    def view(self, x: Tensor) -> Tensor:
        """Its beginning as a tensor like ``x``."""
        return self.memory[: _bytes(x)].view(x.dtype).view(x.shape)


@dataclass(frozen=True, slots=True, eq=False)
class _Moving:
    handle: Any
    buffer: _Buffer
    posted: Posted


class Nixl:
    """The transport of one rank.

    Args:
        rank, world: of torch.distributed. store: of the run.

    Raises:
        InputError: NIXL is not installed, or does not start here.
    """

    name = "world"

    def __init__(self, rank: int, world: int, store: Store) -> None:
        self.index, self.size, self._store = rank, world, store
        api = importlib.import_module(f"{_quiet()}._api")
        try:
            self._agent = api.nixl_agent(
                _agent(rank), api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            )
            store.set(_key(rank), self._agent.get_agent_metadata())
        except Exception as error:  # NIXL raises classes of its own, by backend
            raise InputError(
                f"--kv-transport nixl does not start here: {type(error).__name__}: {error}"[:300]
            ) from None
        self._met: set[int] = set()
        self._free: dict[int, list[_Buffer]] = {}
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ready: dict[tuple[int, int], tuple[int, int]] = {}
        self._sends: dict[tuple[int, int], tuple[_Buffer, int, Posted]] = {}
        self._receives: dict[tuple[int, int], tuple[Tensor, _Buffer, Posted]] = {}
        self._moving: list[_Moving] = []
        self.number = transport.join(self)
        threading.Thread(target=self._live, name="nixl", daemon=True).start()

    def send(self, x: Tensor, to: int, tag: int) -> Posted:
        """Send."""
        torch.ops.meshwright.post_send(x, self.number, to, tag)
        return transport.take(self.number, "post_send", to, tag)

    def receive(self, x: Tensor, frm: int, tag: int) -> Posted:
        """Receive."""
        torch.ops.meshwright.post_recv_(x, self.number, frm, tag)
        return transport.take(self.number, "post_recv_", frm, tag)

    def post(self, op: str, x: Tensor, peer: int, tag: int) -> Posted:
        """Body of both ops."""
        posted = Posted()
        begin = self._begin_send if op == "post_send" else self._begin_receive
        self._orders.put(lambda: begin(x, (peer, tag), posted))
        return posted

    def _live(self) -> None:
        """The thread. A fault of it ends this rank: all are started anew, where messages would be lost for ever."""
        try:
            with torch.inference_mode():
                self._work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _work(self) -> None:
        """Orders as they come, and while something is under way a look at it every now and then."""
        while True:
            busy = self._sends or self._receives or self._moving
            with suppress(queue.Empty):
                self._orders.get(timeout=POLL_S if busy else None)()
            while not self._orders.empty():
                self._orders.get()()
            self._look()

    def _look(self) -> None:
        for name, notices in self._agent.get_new_notifs().items():
            for notice in notices:
                self._noticed(int(name.removeprefix(_agent(""))), notice)
        for key in [key for key in self._sends if key in self._ready]:
            self._write(key)
        for one in list(self._moving):
            state = self._agent.check_xfer_state(one.handle)
            if state != "PROC":
                self._moving.remove(one)
                self._over(one, state)

    def _noticed(self, peer: int, notice: bytes) -> None:
        kind, tag, address, size = _NOTICE.unpack_from(notice)
        if kind == READY:
            if more := notice[_NOTICE.size :]:
                self._agent.add_remote_agent(more)
            self._ready[peer, tag] = address, size
        elif kind == DONE and (found := self._receives.pop((peer, tag), None)):
            x, buffer, posted = found
            x.copy_(buffer.view(x))
            self._give(buffer)
            posted.set_result(None)

    def _begin_receive(self, x: Tensor, key: tuple[int, int], posted: Posted) -> None:
        """Tell the sender where to write."""
        peer, tag = key
        try:
            buffer = self._take(_bytes(x))
            what = b"" if peer in buffer.known else self._agent.get_partial_agent_metadata(buffer.registered, True)
            buffer.known.add(peer)
            self._receives[key] = x, buffer, posted
            self._meet(peer)
            head = _NOTICE.pack(READY, tag, buffer.memory.data_ptr(), _bytes(x))
            self._agent.send_notif(_agent(peer), head + what)
        except Exception as error:
            self._receives.pop(key, None)
            posted.set_exception(RuntimeError(f"NIXL: {error}"))

    def _begin_send(self, x: Tensor, key: tuple[int, int], posted: Posted) -> None:
        try:
            buffer = self._take(_bytes(x))
            buffer.view(x).copy_(x)
            self._meet(key[0])
            self._sends[key] = buffer, _bytes(x), posted
        except Exception as error:
            posted.set_exception(RuntimeError(f"NIXL: {error}"))

    def _write(self, key: tuple[int, int]) -> None:
        """The receiver is ready: write."""
        (peer, tag), (buffer, size, posted) = key, self._sends.pop(key)
        address, room = self._ready.pop(key)
        try:
            if room != size:
                raise ValueError(f"rank {peer} expects {room} bytes of message {tag}, {size} are sent")
            own, theirs = (
                self._agent.get_xfer_descs([(at, size, 0)], "DRAM") for at in (buffer.memory.data_ptr(), address)
            )
            done = _NOTICE.pack(DONE, tag, 0, size)
            handle = self._agent.initialize_xfer("WRITE", own, theirs, _agent(peer), done)
            moving = _Moving(handle, buffer, posted)
            state = self._agent.transfer(handle)
        except Exception as error:
            self._give(buffer)
            posted.set_exception(RuntimeError(f"NIXL: {error}"))
            return
        if state == "PROC":
            self._moving.append(moving)
        else:
            self._over(moving, state)

    def _over(self, one: _Moving, state: str) -> None:
        self._agent.release_xfer_handle(one.handle)
        self._give(one.buffer)
        if state == "DONE":
            one.posted.set_result(None)
        else:
            one.posted.set_exception(RuntimeError("NIXL: a write failed"))

    def _meet(self, peer: int) -> None:
        """Know the agent of a rank; waits until it has started."""
        if peer not in self._met:
            self._agent.add_remote_agent(self._store.get(_key(peer)))
            self._met.add(peer)

    def _take(self, size: int) -> _Buffer:
        room = max(LEAST_BYTES, 1 << (size - 1).bit_length())
        free = self._free.setdefault(room, [])
        if free:
            return free.pop()
        memory = torch.empty(room, dtype=torch.uint8)
        return _Buffer(memory, self._agent.register_memory([(memory.data_ptr(), room, 0, "")], "DRAM"))

    def _give(self, buffer: _Buffer) -> None:
        self._free[buffer.memory.numel()].append(buffer)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _agent(rank: int | str) -> str:
    return f"meshwright-{rank}"


def _key(rank: int) -> str:
    return f"nixl/{rank}"


def _quiet() -> str:
    """The package of NIXL, told to print errors only, and to stay on loopback where gloo does.

    UCX takes every interface unless ``UCX_NET_DEVICES`` names some; shared memory of a host is none of them.
    """
    found = need_nixl()
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    if os.environ.get("GLOO_SOCKET_IFNAME") == "lo":
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    return found
