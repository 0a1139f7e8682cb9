"""Small tensors between ranks of one host through shared memory, as registered torch ops.

gloo needs about 0.3 ms for a sum of a few kilobytes; a decode step has two a layer. Here a rank copies its tensor into
a slot that all ranks of the group map, raises its flag and reads the others' slots. The ops ``all_reduce_``,
``gather_``, ``send`` and ``recv_`` of the namespace ``meshwright`` stand at the dispatcher like those of ``c10d``, so
that a recorder sees them.

Protocol of a channel. Collectives are numbered; a rank enters number n when every flag is at least n - 1, writes slot
n mod 2 and sets its flag to n. A rank whose flag is n - 1 has finished number n - 2, so its slot is free again, and a
reader waits until the flags it needs are at least n. Hand-offs have a mailbox of ``LETTERS`` slots for every ordered
pair with two counters, written and read. Counters are aligned words of eight bytes, written by one rank each, after the
data: x86 keeps that order; on other machines the channel is not made (``usable``) and gloo is used.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

#: Bytes of a slot of a collective, and of a hand-off; larger tensors go through gloo.
SLOT_BYTES, LETTER_BYTES = 1 << 20, 1 << 18
#: Hand-offs that can be under way from one rank to another.
LETTERS = 4
#: Spins before a waiting rank yields its core, and yields before it sleeps.
SPINS, YIELDS, NAP_S = 200, 400, 5e-5
#: Bytes between two counters: a cache line and its neighbour.
LINE = 128

#: How the message of a rank begins that waited too long for another.
WAITED = "shared memory of"
NAMESPACE = "meshwright"
_library = torch.library.Library(NAMESPACE, "DEF")
_library.define("all_reduce_(Tensor(a!) x, int channel) -> ()")
_library.define("gather_(Tensor x, Tensor(a!)[] out, int channel, int root) -> ()")
_library.define("send(Tensor x, int channel, int dst) -> ()")
_library.define("recv_(Tensor(a!) x, int channel, int src) -> ()")
_library.define("post_send(Tensor x, int channel, int dst, int tag) -> ()")
_library.define("post_recv_(Tensor(a!) x, int channel, int src, int tag) -> ()")

#: Channels of this process by the number that the ops carry.
_channels: dict[int, Channel] = {}


class Posted(Future[None]):
    """A message that is under way."""

    def wait(self) -> None:
        """Until it has come, or its memory is free again.

        Raises:
            RuntimeError: it could not be carried.
        """
        self.result()


class Poster(Protocol):
    """Carries tensors that are posted now and there later, told apart by a tag; a number of the ops stands for it."""

    name: str
    index: int
    size: int

    def post(self, op: str, x: Tensor, peer: int, tag: int) -> Posted:
        """Begin; the result is there once ``x`` has come, or has left."""
        ...


#: Posters of this process by number, and what they have under way until it is taken.
_posters: dict[int, Poster] = {}
_posted: dict[tuple[int, str, int, int], Posted] = {}


def usable() -> bool:
    """Whether ranks of this host may exchange tensors through shared memory: x86 Linux, whose stores stay in order."""
    return platform.system() == "Linux" and platform.machine() in {"x86_64", "AMD64"}


class Channel:
    """One group's stretch of shared memory, seen by one of its ranks.

    Args:
        path: file that all ranks of the group map. index, size: place in the group.
        name: axis of the group, for messages. timeout_s: longest wait for another rank.
    """

    def __init__(self, path: Path, index: int, size: int, name: str, timeout_s: float) -> None:
        self.index, self.size, self.name, self.timeout_s = index, size, name, timeout_s
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), channel_bytes(size))
        counters = size + 2 * size * size
        self._words = memoryview(self._map)[: counters * LINE].cast("q")
        self._data = torch.frombuffer(self._map, dtype=torch.uint8, offset=counters * LINE)
        self._turn = 0
        self._views: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}
        self.number = len(_channels)
        _channels[self.number] = self

    def _view(self, start: int, x: Tensor) -> Tensor:
        """The memory from byte ``start`` as a tensor like ``x``."""
        key = start, x.shape, x.dtype
        found = self._views.get(key)
        if found is None:
            piece = self._data.narrow(0, start, x.numel() * x.element_size())
            found = self._views[key] = piece.view(x.dtype).view(x.shape)
        return found

    def _wait(self, word: int, least: int, what: Callable[[], str]) -> None:
        """Until a counter has reached ``least``."""
        words, word = self._words, word * (LINE // 8)
        for _ in range(SPINS):
            if words[word] >= least:
                return
        for _ in range(YIELDS):
            os.sched_yield()
            if words[word] >= least:
                return
        until = time.monotonic() + self.timeout_s
        while words[word] < least:
            time.sleep(NAP_S)
            if time.monotonic() > until:
                raise RuntimeError(f"{WAITED} {self.name}: place {self.index} waited {self.timeout_s:g} s {what()}")

    def _post(self, x: Tensor, op: str) -> None:
        """Enter the next collective: its slot is free once all have entered the one before."""
        self._turn += 1
        for place in range(self.size):
            self._arrived(place, self._turn - 1, f"the collective before {op}")
        self._view(self._slot(self.index), x).copy_(x)
        self._words[self.index * (LINE // 8)] = self._turn

    def _slot(self, place: int) -> int:
        """First byte of a place's slot in this turn."""
        return (self._turn % 2 * self.size + place) * SLOT_BYTES

    def _arrived(self, place: int, turn: int, op: str) -> None:
        if place != self.index:
            self._wait(place, turn, lambda: f"for place {place} to enter {op} (number {turn})")

    def all_reduce(self, x: Tensor) -> None:
        """Sum in place, in the order of places, so that all ranks get the same bits."""
        self._post(x, "all_reduce")
        for place in range(self.size):
            self._arrived(place, self._turn, "all_reduce")
        torch.add(self._view(self._slot(0), x), self._view(self._slot(1), x), out=x)
        for place in range(2, self.size):
            x.add_(self._view(self._slot(place), x))

    def gather(self, x: Tensor, out: list[Tensor], root: int) -> None:
        """Copies of all places' ``x`` on ``root``."""
        self._post(x, "gather")
        if self.index == root:
            for place, piece in enumerate(out):
                self._arrived(place, self._turn, "gather")
                piece.copy_(self._view(self._slot(place), x))

    def _letter(self, src: int, dst: int) -> tuple[int, int, int]:
        """Of a pair: the counter of letters written, that of letters read, and the first byte of its mailbox."""
        pair = src * self.size + dst
        first = 2 * self.size * SLOT_BYTES + pair * LETTERS * LETTER_BYTES
        return self.size + 2 * pair, self.size + 2 * pair + 1, first

    def send(self, x: Tensor, dst: int) -> None:
        """Put ``x`` into the mailbox of a place; waits only while the mailbox is full."""
        written, read, first = self._letter(self.index, dst)
        number = self._words[written * (LINE // 8)]
        self._wait(read, number - LETTERS + 1, lambda: f"for place {dst} to take hand-off {number - LETTERS}")
        self._view(first + number % LETTERS * LETTER_BYTES, x).copy_(x)
        self._words[written * (LINE // 8)] = number + 1

    def recv(self, x: Tensor, src: int) -> None:
        """Take the next letter of a place."""
        written, read, first = self._letter(src, self.index)
        number = self._words[read * (LINE // 8)]
        self._wait(written, number + 1, lambda: f"for hand-off {number} of place {src}")
        x.copy_(self._view(first + number % LETTERS * LETTER_BYTES, x))
        self._words[read * (LINE // 8)] = number + 1


def fits(x: Tensor, most: int = SLOT_BYTES) -> bool:
    """Whether a tensor goes through a slot (``LETTER_BYTES``: a mailbox)."""
    return 0 < x.numel() * x.element_size() <= most


def channel_bytes(size: int) -> int:
    """Bytes of the shared memory of a group; pages that are never touched cost nothing."""
    return (size + 2 * size * size) * LINE + 2 * size * SLOT_BYTES + size * size * LETTERS * LETTER_BYTES


def open_channel(store: Store, key: str, index: int, size: int, name: str, timeout_s: float) -> Channel | None:
    """Make the channel of a group. Collective over its ranks; None when they do not share a host, or it is not usable.

    The file is unlinked as soon as all have mapped it, so that nothing is left behind however a rank ends.

    Args:
        store: that all ranks of the group reach. key: of the group, the same on all its ranks and unique in the store.
    """
    store.set(f"{key}/host/{index}", f"{_host()} {usable()}")
    hosts = {store.get(f"{key}/host/{place}") for place in range(size)}
    if len(hosts) > 1 or not usable():
        return None
    if index == 0:
        store.set(f"{key}/path", str(_file(channel_bytes(size)) or ""))
    said = store.get(f"{key}/path").decode()
    if not said:
        return None
    path = Path(said)
    channel = Channel(path, index, size, name, timeout_s)
    if store.add(f"{key}/mapped", 1) == size:
        store.set(f"{key}/all", "1")
    if index == 0:
        store.wait([f"{key}/all"], timedelta(seconds=timeout_s))
        path.unlink(missing_ok=True)
    return channel


def _host() -> str:
    """The machine, told apart from others of the same name by its boot and from other containers by their mounts."""
    boot, mounts = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/mnt")
    if not (boot.exists() and mounts.exists()):
        return f"{socket.gethostname()} {os.getpid()}"
    return f"{socket.gethostname()} {boot.read_text().strip()} {os.readlink(mounts)}"


def _file(size: int) -> Path | None:
    """An empty file of a size in memory, readable by this user only; None where there is no room for it.

    Writing to a page that the file system cannot give ends a process (SIGBUS), so twice the room must be free.
    """
    folder = Path("/dev/shm")
    try:
        room = os.statvfs(folder)
        if room.f_bavail * room.f_frsize < 2 * size:
            return None
        path = folder / f"meshwright-{secrets.token_hex(8)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return None
    os.ftruncate(descriptor, size)
    os.close(descriptor)
    return path


#: Of every op: what the ledger calls it, and the argument that names the other side.
OPS = {
    "all_reduce_": ("all_reduce", None),
    "gather_": ("gather", "root"),
    "send": ("send", "dst"),
    "recv_": ("recv", "src"),
}


#: The same of ops that return before they are over.
LATER = {"post_send": ("send", "dst"), "post_recv_": ("recv", "src")}


def join(poster: Poster) -> int:
    """Take a poster in; the number that the ops carry."""
    number = len(_posters)
    _posters[number] = poster
    return number


def poster(number: int) -> Poster:
    """The poster that an op names."""
    return _posters[number]


def posted(number: int, op: str, peer: int, tag: int) -> Posted:
    """What an op has begun."""
    return _posted[number, op, peer, tag]


def take(number: int, op: str, peer: int, tag: int) -> Posted:
    """The same, and forget it here."""
    return _posted.pop((number, op, peer, tag))


def _post(op: str) -> Callable[[Tensor, int, int, int], None]:
    def kernel(x: Tensor, number: int, peer: int, tag: int) -> None:
        _posted[number, op, peer, tag] = _posters[number].post(op, x, peer, tag)

    return kernel


def channel(number: int) -> Channel:
    """The channel that an op names."""
    return _channels[number]


_library.impl("all_reduce_", lambda x, number: _channels[number].all_reduce(x), "CPU")
_library.impl("gather_", lambda x, out, number, root: _channels[number].gather(x, out, root), "CPU")
_library.impl("send", lambda x, number, dst: _channels[number].send(x, dst), "CPU")
_library.impl("recv_", lambda x, number, src: _channels[number].recv(x, src), "CPU")
for _name in LATER:
    _library.impl(_name, _post(_name), "CPU")
