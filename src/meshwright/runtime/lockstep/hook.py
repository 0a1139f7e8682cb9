"""Posts every operation of torch.distributed to the coordinator, and holds it until its peers have posted theirs.

Collectives are held where they are issued, also asynchronous ones: their later wait may happen where Python does not
see it (the reducer of DDP, functional collectives). Hand-offs go on at once and are held in ``Work.wait``. Once held
operations are let go, gloo really runs them, so the script computes with real data.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

from meshwright.ledger.matching import Call, Shapes
from meshwright.runtime import c10d
from meshwright.runtime.callsite import call_site
from meshwright.runtime.lockstep.emulate import EMULATED, FLATTENED, as_bytes, flattened, reduction
from meshwright.runtime.lockstep.link import Link

#: (argument with what enters, argument with what is filled) of the ops whose names do not say it.
_TENSORS = {
    "allreduce_": ("tensors", None),
    "allreduce_coalesced_": ("tensors", None),
    "broadcast_": ("tensors", None),
    "reduce_": ("tensors", None),
    "allgather_": ("input_tensors", "output_tensors"),
    "_allgather_base_": ("input_tensor", "output_tensor"),
    "allgather_coalesced_": ("input_list", "output_lists"),
    "allgather_into_tensor_coalesced_": ("inputs", "outputs"),
    "reduce_scatter_": ("input_tensors", "output_tensors"),
    "_reduce_scatter_base_": ("input_tensor", "output_tensor"),
    "reduce_scatter_tensor_coalesced_": ("inputs", "outputs"),
    "gather_": ("input_tensors", "output_tensors"),
    "scatter_": ("input_tensors", "output_tensors"),
    "alltoall_base_": ("input", "output"),
    "alltoall_": ("input_tensors", "output_tensors"),
    "send": ("tensors", None),
    "recv_": (None, "tensors"),
    "recv_any_source_": (None, "tensors"),
}
_PEERS = {"broadcast_": "root_rank", "reduce_": "root_rank", "gather_": "root_rank", "scatter_": "root_rank",
          "send": "dst", "recv_": "src"}  # fmt: skip
#: Work of hand-offs that is kept until someone waits for it.
MAX_WORKS = 65_536


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in _flat(v)] if isinstance(value, list | tuple) else []


def _shapes(value: Any) -> Shapes:
    return tuple(tuple(t.shape) for t in _flat(value))


def in_background() -> bool:
    """Whether the script runs this in a thread that it started (a checkpoint that is written meanwhile)."""
    thread = threading.current_thread()
    return thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)


class _Inside(threading.local):
    """Whether this thread is inside an emulation."""

    active = False


class Hook:
    """The hook of one rank; ``install`` once.

    Args:
        link: to the coordinator.
        rank: global rank.
        shown: turns a file name into what the user calls it.
    """

    def __init__(self, link: Link, rank: int, shown: Callable[[str], str]) -> None:
        self.link = link
        self.rank = rank
        self.keys: dict[str, tuple[str, tuple[int, ...], bool]] = {}
        self._shown = shown
        self._made: dict[tuple[int, ...], int] = {}
        self._works: OrderedDict[int, tuple[Any, int]] = OrderedDict()
        self._library = torch.library.Library("c10d", "IMPL")
        self._wait = dist.Work.wait
        self._inside = _Inside()
        self._background: dict[str, Any] = {}
        self.make_group: Callable[[Any], Any] = lambda pg: pg

    def install(self) -> None:
        """Put a kernel before every c10d op, and watch waits."""
        for name in c10d.op_names():
            self._library.impl(name, self._kernel(name), "BackendSelect")
        original, works, link = self._wait, self._works, self.link

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            known = works.pop(id(work), None)
            if known is not None:
                link.wait([known[1]])
            return original(work, *args, **kwargs)

        dist.Work.wait = wait  # type: ignore[method-assign,assignment]

    def group_made(self, name: str, ranks: Sequence[int], *, tags: bool = False) -> None:
        """Remember a new group under a key that is the same on all of its members: its ranks, and which one of them.

        ``tags``: its hand-offs are paired by tag, which NCCL does not.
        """
        members = tuple(ranks)
        ordinal = self._made.get(members, 0)
        self._made[members] = ordinal + 1
        text = "world" if not self.keys else c10d.ranks_text(members)
        self.keys[name] = (text + (f" #{ordinal + 1}" if ordinal else ""), members, tags)

    def held(self, op: str, group: str, members: tuple[int, ...], **more: Any) -> dict[str, Any]:
        """Post something that is no op of torch (``new_group``) and wait until all members have."""
        creates = more.pop("creates", None)
        call = Call(self.rank, group, members, op, call_site=self.site(), creates=creates)
        return self.link.post(call, hold=True, **more)[1]

    def site(self) -> str | None:
        """The user's line that runs now."""
        found = call_site()
        if found is None:
            return None
        name, _, line = found.rpartition(":")
        return f"{self._shown(name)}:{line}"

    def _kernel(self, name: str) -> Callable[..., Any]:
        op = getattr(torch.ops.c10d, name).default
        names = tuple(argument.name for argument in op._schema.arguments)
        defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
        cpu = DispatchKeySet(DispatchKey.CPU)
        emulated = EMULATED.get(name)
        two = len(op._schema.returns) == 2
        returned = next((n for n in _TENSORS.get(name, ())[::-1] if n), None) if two else None

        def kernel(*args: Any, **kwargs: Any) -> Any:
            if self._inside.active:
                return op.redispatch(cpu, *args, **kwargs)
            arguments = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
            call = self._call(name, arguments)
            free = call.op in {"send", "recv"}
            number, answer = self.link.post(call, hold=not free)
            if free and call.tag is None:
                args = (*args[:-1], 0) if len(args) == len(names) else args
            boxed = self._emulate(emulated, arguments) if emulated is not None else None
            if boxed is not None:
                return (arguments[returned], boxed) if returned else boxed
            given = as_bytes(list(self._own_group(args, names)))
            out = op.redispatch(cpu, *(flattened(given) if name in FLATTENED else given), **kwargs)
            if free or answer.get("unmatched"):
                self._keep(number, out[-1] if isinstance(out, tuple) else out)
            return out

        return kernel

    def _own_group(self, args: tuple[Any, ...], names: tuple[str, ...]) -> tuple[Any, ...]:
        """Arguments for a thread of the script's own: gloo pairs by order, so that it needs a group of its own."""
        if not in_background():
            return args
        at = names.index("process_group")
        pg = dist.ProcessGroup.unbox(args[at])
        if pg.group_name not in self._background:
            self._background[pg.group_name] = self.make_group(pg)
        return (*args[:at], self._background[pg.group_name].boxed(), *args[at + 1 :])

    def _emulate(self, emulated: Callable[[c10d.Arguments], Any], arguments: c10d.Arguments) -> Any:
        """Do with gloo's own ops what it lacks; those are no operations of the script and not posted."""
        self._inside.active = True
        try:
            return emulated({name: as_bytes(value) for name, value in arguments.items()})
        finally:
            self._inside.active = False

    def _keep(self, number: int, boxed: Any) -> None:
        """Remember work that is not matched yet, so that waiting for it is seen."""
        if not isinstance(boxed, torch.ScriptObject):
            return
        work = dist.Work.unbox(boxed)
        self._works[id(work)] = (work, number)
        while len(self._works) > MAX_WORKS:
            self._works.popitem(last=False)

    def _call(self, name: str, arguments: c10d.Arguments) -> Call:
        """What the coordinator is told of an op."""
        pg = dist.ProcessGroup.unbox(arguments["process_group"])
        known = self.keys.get(pg.group_name)
        if known is None:
            self.group_made(pg.group_name, dist.get_process_group_ranks(pg))
            known = self.keys[pg.group_name]
        key, members, tags = known
        if in_background():
            key += " in a thread"
        into, out_of = _TENSORS.get(name, (None, None))
        entering = arguments.get(into) if into else None
        filled = arguments.get(out_of) if out_of else None
        tensors = _flat(entering) or _flat(filled)
        peer = arguments[_PEERS[name]] if name in _PEERS else None
        splits = self._splits(name, arguments, entering, filled)
        return Call(
            self.rank,
            key,
            members,
            c10d.describe(name, arguments).op,
            _shapes(entering),
            _shapes(filled),
            c10d.dtype_name(tensors[0].dtype) if tensors else None,
            None if peer is None else members[peer],
            *splits,
            reduce_op=reduction(arguments.get("reduce_op")),
            tag=arguments.get("tag") if tags else None,
            call_site=self.site(),
            is_async=bool(arguments.get("async_op")),
        )

    @staticmethod
    def _splits(name: str, a: c10d.Arguments, entering: Any, filled: Any) -> tuple[Any, Any]:
        """Elements to and from every place, of an all_to_all."""
        if name == "alltoall_":
            return tuple(t.numel() for t in _flat(entering)), tuple(t.numel() for t in _flat(filled))
        if name != "alltoall_base_":
            return None, None
        found: list[tuple[int, ...] | None] = []
        for tensor, sizes in ((entering, a["input_split_sizes"]), (filled, a["output_split_sizes"])):
            row = tensor.numel() // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 1
            found.append(tuple(int(n) * row for n in sizes) or None)
        return found[0], found[1]
