"""Records what a rank does: every collective and hand-off of torch.distributed, and matrix products when asked.

The hook is a kernel for every ``c10d`` op at the dispatch key ``BackendSelect``, which notes the call and passes it
on to the backend. All ways lead through there: Python calls, the C++ reducer of DDP, functional collectives, FSDP2,
pipelining, collectives inside operations of DTensor. Ops of other namespaces cost nothing.

What the times mean: ``enqueued_ns`` is when this rank entered the call, before the backend saw it. ``ended_ns`` is
when the backend reported it complete on this rank (its future; for a hand-off, which has none, when waiting for it
returned). None: it never was, or the tensors are on a device whose stream does not tell. ``started_ns`` is known for
matrix products only. Times are those of the host's monotonic clock; ``Rank.clock_offset_ns`` makes them Unix time.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import DispatchKey, DispatchKeySet
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.ledger.schema import Entry, Holding, Ledger, Rank
from meshwright.moves.ring import COLLECTIVES, wire_bytes
from meshwright.runtime import c10d, transport
from meshwright.runtime.callsite import call_site
from meshwright.runtime.products import CompilingProductMode, ProductMode
from meshwright.runtime.scope import scope, where
from meshwright.specs.placement import AXES, Placement

__all__ = ["Recorder", "scope"]

#: Work of hand-offs that is kept to see when waiting for it ends; the oldest is forgotten beyond.
MAX_PENDING = 1024
#: Entries that are kept; a run that goes on longer says how many it dropped.
MAX_ENTRIES = 2_000_000


class Recorder:
    """Records one rank between ``with Recorder(...) as recorder:`` and its end; one at a time in a process.

    Args:
        placement: of the model, when the program is ours: gives the coordinate and names groups by axis.
        rank: global rank.
        matmuls: also record matrix products (a TorchDispatchMode: slows every op down).
        source: what entries say of where they come from.

    Tensors without data (device ``meta``, of a dry-run) are handed to the backend of the CPU. ``recorder.ledger()`` is
    what was recorded so far. ``call_site`` is the first frame outside the standard library, installed packages and this
    runtime.
    """

    def __init__(
        self, placement: Placement | None = None, rank: int = 0, matmuls: bool = False, source: str = "record"
    ) -> None:
        self.rank, self.source = rank, source
        self.rank_class = f"rank{rank}"
        self.placement = placement
        self.entries: list[Entry] = []
        self.holdings: list[Holding] = []
        self.meta: dict[str, str] = {}
        #: Called after every call of torch.distributed was noted and before the backend sees it.
        self.on_entry: Callable[[], None] | None = None
        self.dropped = 0
        self._axes = _axes_by_ranks(placement, rank)
        self._names: dict[str, str] = {}
        self._seq: dict[str, int] = {}
        self._lock = threading.Lock()
        self._works: OrderedDict[int, tuple[Any, Entry]] = OrderedDict()
        mode = ProductMode if placement is not None else CompilingProductMode
        self._mode: TorchDispatchMode | None = mode(self.add) if matmuls else None
        self._library: torch.library.Library | None = None
        self._shared: torch.library.Library | None = None
        self._wait: Callable[..., Any] | None = None
        self._clock_offset_ns = time.time_ns() - time.monotonic_ns()

    def __enter__(self) -> Recorder:
        self._library = torch.library.Library("c10d", "IMPL")
        for name in c10d.op_names():
            self._library.impl(name, self._kernel(name), "BackendSelect")
        self._shared = torch.library.Library(transport.NAMESPACE, "IMPL")
        for name in transport.OPS:
            self._shared.impl(name, self._shared_kernel(name), "BackendSelect")
        for name in transport.LATER:
            self._shared.impl(name, self._later_kernel(name), "BackendSelect")
        self._hook_wait()
        if self._mode is not None:
            self._mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mode is not None:
            self._mode.__exit__(kind, error, trace)
        if self._wait is not None:
            dist.Work.wait = self._wait  # type: ignore[method-assign]
        if self._library is not None:
            self._library._destroy()
            self._library = None
        if self._shared is not None:
            self._shared._destroy()
            self._shared = None
        self._works.clear()

    def add(self, entry: Entry) -> None:
        """Append an entry: place, order within its stream and source are filled in."""
        at = where()
        entry.layer, entry.phase, entry.step, entry.microbatch = at.layer, at.phase, at.step, at.microbatch
        entry.name = entry.name or at.name
        entry.rank_class, entry.source = self.rank_class, self.source
        stream = entry.stream or "compute"
        with self._lock:
            if len(self.entries) >= MAX_ENTRIES:
                self.dropped += 1
                return
            entry.seq = self._seq.get(stream, 0)
            self._seq[stream] = entry.seq + 1
            self.entries.append(entry)

    def hold(self, term: str, tensor: str | None, size_bytes: int) -> None:
        """Note bytes that this rank holds (counted, so exact)."""
        self.holdings.append(Holding(self.rank_class, term, tensor, size_bytes, "exact"))

    def ledger(self) -> Ledger:
        """What was recorded so far, as a ledger of one rank."""
        head = self.ledger_head()
        with self._lock:
            head.entries, head.holdings = list(self.entries), list(self.holdings)
        return head

    def ledger_head(self) -> Ledger:
        """The ledger without its entries and holdings: the rank and the facts about the whole."""
        coordinate: dict[str, int] = {}
        if self.placement is not None:
            at = self.placement.coordinate(self.rank)
            coordinate = {axis: getattr(at, axis) for axis in (*AXES, "ep")}
        row = Rank(self.rank, coordinate, self.rank_class, 1, socket.gethostname(), self._clock_offset_ns)
        meta = {
            "clock": "monotonic clock of the host; clock_offset_ns makes it Unix time",
            "ended": "the backend reported the operation complete, or waiting for it returned",
            "torch": str(torch.__version__),
            **self.meta,
        }
        if self.dropped:
            meta["dropped"] = f"{self.dropped} entries after the first {MAX_ENTRIES}"
        return Ledger(ranks=[row], meta=meta)

    def _kernel(self, name: str) -> Callable[..., Any]:
        """The kernel of one op: note it, pass it on, watch its end."""
        op = getattr(torch.ops.c10d, name).default
        names = tuple(argument.name for argument in op._schema.arguments)
        by_device: dict[str, DispatchKeySet] = {}

        def kernel(*args: Any, **kwargs: Any) -> Any:
            arguments = {**dict(zip(names, args, strict=False)), **kwargs}
            entry, device = self._enter(name, arguments)
            if device not in by_device:
                key = "CPU" if device == "meta" else device.upper()
                by_device[device] = DispatchKeySet(getattr(DispatchKey, key, DispatchKey.CPU))
            if device == "meta" and name == "alltoall_base_" and not args[1].numel():
                # The fake backend refuses to receive where nothing is sent: it receives nothing.
                args = (args[0][:0], *args[1:3], [0] * len(args[3]), *args[4:])
            out = op.redispatch(by_device[device], *args, **kwargs)
            self._watch(entry, out[-1] if isinstance(out, tuple) else out, device)
            return out

        return kernel

    def _shared_kernel(self, name: str) -> Callable[..., Any]:
        """The kernel of an op of the own transport, which is over when it returns."""
        op = getattr(torch.ops.meshwright, name).default
        names = tuple(argument.name for argument in op._schema.arguments)
        kind, other = transport.OPS[name]
        cpu = DispatchKeySet(DispatchKey.CPU)

        def kernel(*args: Any) -> None:
            arguments = dict(zip(names, args, strict=True))
            channel = transport.channel(arguments["channel"])
            call = c10d.Call(kind, (arguments["x"],), peer=arguments[other] if other else None)
            entry = self._entry(call, channel.name, channel.size, channel.index)
            op.redispatch(cpu, *args)
            _end(entry)

        return kernel

    def _later_kernel(self, name: str) -> Callable[..., Any]:
        """The kernel of an op that is over once what it posted has come or left."""
        op = getattr(torch.ops.meshwright, name).default
        kind, _ = transport.LATER[name]
        cpu = DispatchKeySet(DispatchKey.CPU)

        def kernel(x: torch.Tensor, number: int, peer: int, tag: int) -> None:
            by = transport.poster(number)
            entry = self._entry(c10d.Call(kind, (x,), peer=peer), by.name, by.size, by.index)
            op.redispatch(cpu, x, number, peer, tag)
            transport.posted(number, name, peer, tag).add_done_callback(
                lambda over: None if over.exception() else _end(entry)
            )

        return kernel

    def _enter(self, name: str, arguments: c10d.Arguments) -> tuple[Entry, str]:
        """The entry of a call, appended before the backend sees it, and the type of its device."""
        call = c10d.describe(name, arguments)
        pg = dist.ProcessGroup.unbox(arguments["process_group"])
        entry = self._entry(call, self._group(pg), pg.size(), pg.rank())
        tensors = call.tensors or (arguments.get("tensor"),)
        return entry, tensors[0].device.type if isinstance(tensors[0], torch.Tensor) else "cpu"

    def _entry(self, call: c10d.Call, group: str, size: int, place: int) -> Entry:
        """The entry of a call that begins now."""
        entry = Entry(self.rank_class, call.op, stream=group, group=group, peer=call.peer, splits=call.splits)
        entry.shapes, entry.dtype, entry.payload_bytes = call.shapes or None, call.dtype, call.payload_bytes
        entry.wire_bytes = _sent_bytes(call, size, place)
        entry.state, entry.call_site = "scheduled", call_site()
        self.add(entry)
        entry.enqueued_ns = time.monotonic_ns()
        if self.on_entry is not None:
            self.on_entry()
        return entry

    def _group(self, pg: dist.ProcessGroup) -> str:
        """Name of a process group."""
        key = f"{pg.group_name} {pg.size()}"
        if key not in self._names:
            name = c10d.group_name(pg)
            if name not in {*AXES, "ep"} and self._axes:
                name = self._axes.get(frozenset(dist.get_process_group_ranks(pg)), name)
            self._names[key] = name if self.placement is not None else name + c10d.twin(pg)
        return self._names[key]

    def _watch(self, entry: Entry, boxed: Any, device: str) -> None:
        """Note the end of the operation when the backend, or whoever waits, tells."""
        if device != "cpu" or not isinstance(boxed, torch.ScriptObject):
            return
        work = dist.Work.unbox(boxed)
        if entry.op in {"send", "recv"}:
            self._works[id(work)] = (work, entry)
            while len(self._works) > MAX_PENDING:
                self._works.popitem(last=False)
            return
        try:
            future = work.get_future()
        except RuntimeError:
            self._works[id(work)] = (work, entry)
            return
        future.add_done_callback(lambda over: _end_of(entry, over))

    def _hook_wait(self) -> None:
        """Let ``Work.wait`` tell when waiting for a hand-off ended."""
        original, works = dist.Work.wait, self._works

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            out = original(work, *args, **kwargs)
            known = works.pop(id(work), None)
            if known is not None:
                _end(known[1])
            return out

        self._wait = original
        dist.Work.wait = wait  # type: ignore[method-assign,assignment]


def _sent_bytes(call: c10d.Call, size: int, place: int) -> int | None:
    """Bytes that this rank sends: by its own splits where they are known, else by ``moves.ring``."""
    if call.splits is not None and call.tensors:
        return (sum(call.splits) - call.splits[place]) * call.tensors[0].element_size()
    if call.op not in COLLECTIVES:
        return None
    return wire_bytes(call.op, size, call.payload_bytes, root=call.peer == place)


def _end_of(entry: Entry, future: torch.futures.Future[Any]) -> None:
    """The end of a call that came through; one that failed never completed."""
    try:
        future.value()
    except Exception:
        return
    _end(entry)


def _end(entry: Entry) -> None:
    if entry.ended_ns is None:
        entry.ended_ns = time.monotonic_ns()
        entry.state = "completed"


def _axes_by_ranks(placement: Placement | None, rank: int) -> dict[frozenset[int], str]:
    """Axis of the group with just these ranks, for the axes with more than one; ``world`` for all ranks."""
    if placement is None:
        return {}
    at = placement.coordinate(rank)
    everyone = {frozenset(range(placement.layout.world)): "world"}
    return everyone | {
        frozenset(placement.group(axis, at)): axis for axis in AXES if getattr(placement.layout, axis) > 1
    }


def write(recorder: Recorder, path: str | Path) -> None:
    """Write the ledger of one rank as it stands."""
    from meshwright.ledger import store

    store.write(recorder.ledger(), path)
