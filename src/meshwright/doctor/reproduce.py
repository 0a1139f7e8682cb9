"""``doctor --reproduce``: the mistake as a program of two ranks and a few numbers a tensor, which fails the same way.

``build`` picks one guilty rank and one that waits and keeps the calls around the divergence; sizes shrink to the
smallest that are equal where they were equal. ``render`` writes the program. Nothing of a dump enters it but operations
from a fixed list, integers and element types: no name, no path, no text. ``doctor.rerun`` runs it once, bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pprint import pformat
from typing import NamedTuple

from meshwright.doctor.findings import Finding
from meshwright.doctor.incident import Incident, Signature, Trace
from meshwright.errors import InputError

#: Operations that a program may contain.
OPS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "reduce",
    "gather",
    "scatter",
    "barrier",
)
HAND_OFFS = ("send", "recv")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
#: What a rank may do instead of a call.
DEEDS = ("sleep", "die")
#: Element types by what recorders call them.
DTYPES = {
    "float": "float32",
    "float32": "float32",
    "f32": "float32",
    "double": "float64",
    "float64": "float64",
    "f64": "float64",
    "half": "float16",
    "float16": "float16",
    "f16": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "int": "int32",
    "int32": "int32",
    "i32": "int32",
    "long": "int64",
    "int64": "int64",
    "i64": "int64",
    "byte": "uint8",
    "uint8": "uint8",
    "u8": "uint8",
    "char": "int8",
    "int8": "int8",
    "i8": "int8",
    "bool": "bool",
}
#: Calls that both ranks make before the divergence.
BEFORE = 2


class Act(NamedTuple):
    """One line of a rank's program: operation (or ``sleep``, ``die``), group 0 or 1, elements, type, splits, root."""

    op: str
    group: int = 0
    size: int = 2
    dtype: str = "float32"
    splits: tuple[int, int] | None = None
    root: int = 0


@dataclass(frozen=True, slots=True)
class Program:
    """What both ranks do: rank 0 stands for the guilty rank, rank 1 for one that waits.

    Attributes:
        kind: of the finding.
        acts: of both ranks. shared: so many acts at the beginning are alike and must end on both.
    """

    kind: str
    acts: tuple[tuple[Act, ...], tuple[Act, ...]]
    shared: int


def build(finding: Finding, incident: Incident) -> Program:
    """The program of a finding.

    Raises:
        InputError: the finding is not about the order of calls.
    """
    if finding.kind not in SHOWN:
        raise InputError(f"--reproduce: {finding.kind} is no order of calls, so no program of two ranks can show it")
    pair = _Pair(finding, incident)
    before = pair.before()
    guilty, waiting = _MAKERS[finding.kind](pair)
    return Program(finding.kind, ((*before, *guilty), (*before, *waiting)), len(before))


class _Pair:
    """One guilty rank and one that waits, with their rows around the divergence."""

    def __init__(self, finding: Finding, incident: Incident) -> None:
        self.finding, self.incident = finding, incident
        traced = incident.traces
        self.guilty = next((traced[r] for r in finding.guilty_ranks if r in traced), None)
        self.waiting = next((traced[r] for r in finding.waiting_ranks if r in traced), None)
        self.sizes: dict[tuple[tuple[int, ...], ...], int] = {}
        self.groups = {i for i, g in enumerate(incident.groups.rows) if finding.group in {g.label, g.name, g.key}}

    def rows(self, trace: Trace | None, first: int, count: int) -> list[Signature]:
        """Collectives of the guilty group from call number ``first`` on."""
        if trace is None:
            return []
        found = {
            trace.seq[row]: self.incident.signatures[trace.signature[row]]
            for row in range(len(trace))
            if trace.group[row] in self.groups and not trace.p2p[row]
        }
        return [found[n] for n in range(first, first + count) if n in found]

    def act(self, kind: Signature | None) -> Act:
        """A call with the smallest sizes that keep which of them are equal; an unknown operation is an all_reduce."""
        if kind is None:
            op = self.finding.op or ""
            return Act("recv" if op in HAND_OFFS else _op(op))
        shapes = kind.shapes_in or kind.shapes_out
        size = self.sizes.setdefault(shapes, 2 * (len(self.sizes) + 1))
        return Act(_op(kind.op), 0, size, DTYPES.get((kind.dtype or "").lower(), "float32"))

    def before(self) -> list[Act]:
        """Calls that both ranks made alike."""
        seq = self.finding.seq
        if seq is None or self.guilty is None or self.waiting is None:
            return []
        mine = self.rows(self.guilty, seq - BEFORE, BEFORE)
        return [self.act(kind) for kind in mine] if mine == self.rows(self.waiting, seq - BEFORE, BEFORE) else []

    def at(self, trace: Trace | None, further: int = 0) -> Act | None:
        """The call at the divergence, or some calls further."""
        seq = self.finding.seq
        rows = self.rows(trace, seq + further, 1) if seq is not None else []
        return self.act(rows[0]) if rows else None


def _op(name: str) -> str:
    return name if name in OPS else "all_reduce"


Acts = tuple[list[Act], list[Act]]


def _differs(pair: _Pair) -> Acts:
    """Both call, but not the same."""
    found = pair.at(pair.guilty) or Act("all_reduce", 0, 4)
    wanted = pair.at(pair.waiting) or pair.act(None)
    kind = pair.finding.kind
    if kind == "wrong_splits":
        return [Act("all_to_all", 0, 4, wanted.dtype, (1, 3))], [Act("all_to_all", 0, 4, wanted.dtype, (2, 2))]
    if kind == "wrong_shape" and found.size == wanted.size:
        found = found._replace(size=wanted.size + 2)
    if kind == "wrong_op" and found.op == wanted.op and wanted.op in ROOTED:
        found = found._replace(root=1)
    elif kind == "wrong_op" and found.op == wanted.op:
        found = found._replace(op="broadcast" if wanted.op != "broadcast" else "all_reduce")
    if kind == "wrong_dtype" and found.dtype == wanted.dtype:
        found = found._replace(dtype="float64" if wanted.dtype != "float64" else "float32")
    return [found], [wanted]


def _skips(pair: _Pair) -> Acts:
    """The waiting rank makes a call that the guilty one passes by."""
    missed = pair.at(pair.waiting) or pair.act(None)
    following = pair.at(pair.waiting, 1)
    return ([following] if following else []) + [Act("sleep")], [missed, *([following] if following else [])]


def _extra(pair: _Pair) -> Acts:
    """The guilty rank makes one call more; the other ends and never joins it."""
    extra = pair.at(pair.guilty) or pair.act(None)
    following = pair.at(pair.waiting)
    return [extra, *([following] if following else [])], [*([following] if following else []), Act("sleep")]


def _order(_: _Pair) -> Acts:
    """Two groups of the same ranks in opposite order."""
    one, two = Act("all_reduce", 0), Act("all_reduce", 1, 4)
    return [two, one], [one, two]


def _hand_offs(_: _Pair) -> Acts:
    """Both receive before they send."""
    return [Act("recv"), Act("send")], [Act("recv"), Act("send")]


def _dies(pair: _Pair) -> Acts:
    return [Act("die")], [pair.at(pair.waiting) or pair.act(None)]


def _stays_away(pair: _Pair) -> Acts:
    return [Act("sleep")], [pair.at(pair.waiting) or pair.act(None)]


#: What makes the acts of both ranks, by kind.
_MAKERS: dict[str, Callable[[_Pair], Acts]] = {
    "wrong_op": _differs,
    "wrong_shape": _differs,
    "wrong_dtype": _differs,
    "wrong_splits": _differs,
    "skipped_call": _skips,
    "extra_call": _extra,
    "group_order": _order,
    "p2p_order": _hand_offs,
    "dead_rank": _dies,
    "uneven_inputs": _stays_away,
    "host_stuck": _stays_away,
}
#: Kinds that are about the order of calls, and so can be shown by a program.
SHOWN = frozenset(_MAKERS)

_HEAD = '''"""Two ranks that fail as {kind}: written by meshwright doctor --reproduce. Run: python THIS_FILE

Rank 0 stands for the guilty rank. Exit 1: at least one rank did not come to its end (the mistake shows); 0: both did.
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WAIT_S = {wait_s}
#: What each rank does: operation, group, elements, element type, splits of an all_to_all, root.
ACTS = {acts}
'''

_BODY = """
def call(op, group, size, dtype, splits, root, rank):
    x = torch.ones(size, dtype=getattr(torch, dtype))
    if op == "all_reduce":
        dist.all_reduce(x, group=group)
    elif op == "all_gather":
        dist.all_gather([torch.empty_like(x), torch.empty_like(x)], x, group=group)
    elif op == "reduce_scatter":
        dist.reduce_scatter(torch.empty_like(x), [x, x.clone()], group=group)
    elif op == "broadcast":
        dist.broadcast(x, root, group=group)
    elif op == "all_to_all":
        mine = list(splits) if splits else [size // 2, size - size // 2]
        dist.all_to_all_single(torch.empty_like(x), x, mine, mine, group=group)
    elif op == "reduce":
        dist.reduce(x, root, group=group)
    elif op == "gather":
        dist.gather(x, [torch.empty_like(x), torch.empty_like(x)] if rank == root else None, root, group=group)
    elif op == "scatter":
        dist.scatter(x, [x, x.clone()] if rank == root else None, root, group=group)
    elif op == "barrier":
        dist.barrier(group=group)
    elif op == "send":
        dist.send(x, 1 - rank, group=group)
    elif op == "recv":
        dist.recv(x, 1 - rank, group=group)
    elif op == "sleep":
        time.sleep(2 * WAIT_S)
    elif op == "die":
        os._exit(9)


def run(rank, port):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    wait = timedelta(seconds=WAIT_S)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, wait)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=wait)
    groups = [dist.group.WORLD, dist.new_group([0, 1], timeout=wait)]
    for number, (op, group, size, dtype, splits, root) in enumerate(ACTS[rank]):
        print(f"rank {rank} before {number} {op}", flush=True)
        call(op, groups[group], size, dtype, splits, root, rank)
        print(f"rank {rank} after {number} {op}", flush=True)
    print(f"rank {rank} end", flush=True)
    os._exit(0)


def free_port():
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


if __name__ == "__main__":
    port = free_port()
    ranks = [mp.get_context("spawn").Process(target=run, args=(rank, port)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    until = time.monotonic() + START_S + 3 * WAIT_S
    for rank in ranks:
        rank.join(max(0.0, until - time.monotonic()))
    hung = [rank.is_alive() for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.join()
    sys.exit(int(any(hung) or any(rank.exitcode for rank in ranks)))
"""


def render(program: Program, wait_s: int = 5) -> str:
    """The program as text.

    Raises:
        InputError: an act that is not of the fixed lists (a finding made by hand).
    """
    for acts in program.acts:
        for act in acts:
            known = act.op in (*OPS, *HAND_OFFS, *DEEDS) and act.dtype in DTYPES.values() and act.group in (0, 1)
            sized = 0 <= act.size <= 1 << 20 and act.root in (0, 1) and (act.splits is None or len(act.splits) == 2)
            if not known or not sized:
                raise InputError("--reproduce: the finding holds an operation that is not of the known ones")
    kind = program.kind if program.kind in SHOWN else "unknown"
    plain = pformat([[tuple(act) for act in acts] for acts in program.acts], width=100)
    return (
        _HEAD.format(kind=kind, wait_s=int(wait_s), acts=plain)
        + "#: Seconds that starting may take.\nSTART_S = 60\n\n"
        + _BODY
    )
