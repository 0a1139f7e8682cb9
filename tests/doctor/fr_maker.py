"""Makes the Flight Recorder dumps of a job that stands still: a small simulator of ranks, hosts and NCCL.

A job is a program a rank: a list of ``Op``. Hosts run ahead of their device until a synchronisation; a device works
one call after the other; a collective ends when it is at the head on all members and is the same on all; another one
at the head jams the group for ever, as in NCCL. Mistakes are planted by changing the program of some rank.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

START_NS = 1_758_610_505_000_000_000


@dataclass(frozen=True)
class Op:
    """One step of a rank. ``what``: call, send, recv, sync, host_hang, device_hang, exit."""

    what: str
    group: str = ""
    name: str = "all_reduce"
    ins: tuple[tuple[int, ...], ...] = ((64,),)
    outs: tuple[tuple[int, ...], ...] = ((64,),)
    dtype: str = "Float"
    peer: int = -1
    site: tuple[tuple[str, str, int], ...] = ()


@dataclass
class Job:
    """Groups (name -> description and members) and the program of every rank."""

    groups: dict[str, tuple[str, tuple[int, ...]]]
    programs: list[list[Op]]
    ahead: int = 12
    blind: dict[int, int] = field(default_factory=dict)
    overlap: bool = False

    @property
    def world(self) -> int:
        return len(self.programs)


def site(function: str, line: int, file: str = "/job/train.py", loop: int = 40) -> tuple[tuple[str, str, int], ...]:
    """A stack: torch's wrapper, the caller, the loop in main."""
    return (
        ("all_reduce", "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 2501),
        (function, file, line),
        ("main", "/job/main.py", loop),
    )


def call(group: str, name: str, size: int, where: tuple[tuple[str, str, int], ...], ranks: int = 1) -> Op:
    """A collective of ``size`` elements a rank."""
    ins = outs = ((size,),)
    if name == "_all_gather_base":
        outs = ((size * ranks,),)
    if name == "_reduce_scatter_base":
        ins = ((size * ranks,),)
    return Op("call", group, name, ins, outs, "BFloat16", -1, where)


def layout(tp: int, dp: int, pp: int = 1, ep: bool = False, steps: int = 6, layers: int = 3, sync: bool = True) -> Job:
    """A training job: tensor parallel calls in every layer, pipeline hand-offs, expert exchange, gradients, a loss."""
    world = tp * dp * pp
    groups: dict[str, tuple[str, tuple[int, ...]]] = {"0": ("default_pg", tuple(range(world)))}

    def place(t: int, d: int, p: int) -> int:
        return p * tp * dp + d * tp + t

    of: dict[tuple[int, str], str] = {}

    def add(desc: str, members: tuple[int, ...]) -> None:
        name = str(len(groups))
        groups[name] = (desc, members)
        for m in members:
            of[m, desc] = name

    for p in range(pp):
        for d in range(dp):
            add("TENSOR", tuple(place(t, d, p) for t in range(tp)))
    for p in range(pp):
        for t in range(tp):
            add("DATA", tuple(place(t, d, p) for d in range(dp)))
    for d in range(dp):
        for t in range(tp):
            add("PIPELINE", tuple(place(t, d, p) for p in range(pp)))
    for p in range(pp):
        add("EXPERT", tuple(place(t, d, p) for d in range(dp) for t in range(tp)))
    programs = []
    for rank in range(world):
        p = rank // (tp * dp)
        ops: list[Op] = []
        for step in range(steps):
            if pp > 1 and p > 0:
                ops.append(Op("recv", of[rank, "PIPELINE"], peer=p - 1, site=site("recv_forward", 20)))
            for layer in range(layers):
                if tp > 1:
                    ops.append(call(of[rank, "TENSOR"], "_all_gather_base", 64, site("attention", 100 + layer), tp))
                if ep:
                    exchange = call(of[rank, "EXPERT"], "all_to_all", 32, site("experts", 200 + layer))
                    size = 32 + (rank * 7 + step + layer) % 5
                    ops.append(replace(exchange, ins=((size,),), outs=((size,),)))
                if tp > 1:
                    ops.append(call(of[rank, "TENSOR"], "_reduce_scatter_base", 64, site("mlp", 300 + layer), tp))
            if pp > 1 and p < pp - 1:
                ops.append(Op("send", of[rank, "PIPELINE"], peer=p + 1, site=site("send_forward", 25)))
            if dp > 1:
                for bucket in range(2):
                    ops.append(call(of[rank, "DATA"], "all_reduce", 128, site("reduce_gradients", 30 + bucket)))
            ops.append(call("0", "all_reduce", 1, site("log_loss", 50)))
            if sync:
                ops.append(Op("sync"))
        ops.append(call("0", "barrier", 1, site("finish", 90, loop=60)))
        ops.append(Op("sync"))
        programs.append(ops)
    return Job(groups, programs)


@dataclass
class _Row:
    op: Op
    record: int
    seq: int
    p2p: bool
    created_ns: int
    state: str = "scheduled"


class Simulator:
    """Runs a job until nothing moves."""

    def __init__(self, job: Job, seed: int = 0) -> None:
        self.job, self.random = job, random.Random(seed)
        world = job.world
        self.at = [0] * world
        self.queue: list[list[_Row]] = [[] for _ in range(world)]
        self.rows: list[list[_Row]] = [[] for _ in range(world)]
        self.counts: list[dict[tuple[str, bool], int]] = [{} for _ in range(world)]
        self.now = START_NS
        self.device_dead: set[int] = set()
        self.ended: set[int] = set()

    def run(self) -> Simulator:
        """To the end or to the hang."""
        moved = True
        while moved:
            order = list(range(self.job.world))
            self.random.shuffle(order)
            hosts, devices = [self._host(r) for r in order], [self._device(r) for r in order]
            moved = any(hosts) or any(devices)
        return self

    def _host(self, r: int) -> bool:
        if self.at[r] >= len(self.job.programs[r]):
            return False
        op = self.job.programs[r][self.at[r]]
        if op.what in {"host_hang", "exit"}:
            return False
        if op.what == "sync" and (self.queue[r] or r in self.device_dead):
            return False
        if op.what == "device_hang":
            self.device_dead.add(r)
        elif op.what != "sync":
            if len(self.queue[r]) >= self.job.ahead:
                return False
            p2p = op.what in {"send", "recv"}
            seq = self.counts[r][op.group, p2p] = self.counts[r].get((op.group, p2p), 0) + 1
            self.now += self.random.randint(1000, 200_000)
            row = _Row(op, len(self.rows[r]), seq, p2p, self.now)
            self.rows[r].append(row)
            self.queue[r].append(row)
        self.at[r] += 1
        return True

    def _heads(self, row: _Row, r: int) -> list[tuple[int, _Row]] | None:
        """What stands at the head of all who take part, when all of them are at this call."""
        members = self.job.groups[row.op.group][1]
        ranks = [members[row.op.peer]] if row.p2p else [m for m in members if m != r]
        out = [(r, row)]
        for m in ranks:
            if m in self.device_dead or not self.queue[m]:
                return None
            head = self._head(m, row.p2p)
            if head is None:
                return None
            if head.op.group != row.op.group or head.p2p != row.p2p:
                return None
            if row.p2p and ({head.op.what, row.op.what} != {"send", "recv"} or members[head.op.peer] != r):
                return None
            if not row.p2p and head.seq != row.seq:
                return None
            out.append((m, head))
        return out

    def _device(self, r: int) -> bool:
        if not self.queue[r] or r in self.device_dead:
            return False
        if self.job.overlap:
            done = [self._try(r, row) for flag in (False, True) if (row := self._head(r, flag)) is not None]
            return any(done)
        return self._try(r, self.queue[r][0])

    def _head(self, r: int, p2p: bool) -> _Row | None:
        """What the device works on: hand-offs have a stream of their own where they overlap."""
        if not self.job.overlap:
            return self.queue[r][0]
        return next((row for row in self.queue[r] if row.p2p == p2p), None)

    def _try(self, r: int, row: _Row) -> bool:
        row.state = "started"
        heads = self._heads(row, r)
        if heads is None:
            return False
        sort = {(h.op.name, h.op.dtype, h.op.outs if h.op.name != "all_to_all" else ()) for _, h in heads}
        if not row.p2p and len(sort) > 1:
            return False
        if row.op.name == "all_to_all" and sum(h.op.ins[0][0] - h.op.outs[0][0] for _, h in heads):
            return False
        for m, head in heads:
            head.state = "completed"
            self.queue[m].remove(head)
        return True


def dump(
    sim: Simulator,
    rank: int,
    frames: bool = True,
    active_only: bool = False,
    ring: int = 2000,
    status: bool = True,
    timing: bool = False,
) -> dict[str, Any]:
    """The dump of one rank as plain data."""
    job = sim.job
    own = [(n, d, m) for n, (d, m) in job.groups.items() if rank in m]
    pg_id = {n: i for i, (n, _, _) in enumerate(own)}
    blind = job.blind.get(rank)
    entries, last = [], {n: [-1, -1] for n in pg_id}
    for row in sim.rows[rank]:
        state = row.state
        if blind is not None and row.record >= blind:
            state = "scheduled"
        if state == "started" and not timing:
            state = "scheduled"
        members = job.groups[row.op.group][1]
        last[row.op.group][0] = row.seq
        if state == "completed":
            last[row.op.group][1] = row.seq
        me = members.index(rank)
        arrow = {"send": f"send {me}->{row.op.peer}", "recv": f"recv {me}<-{row.op.peer}"}
        entry = {
            "record_id": row.record,
            "pg_id": pg_id[row.op.group],
            "process_group": (row.op.group, job.groups[row.op.group][0]),
            "collective_seq_id": row.seq if not row.p2p else 0,
            "p2p_seq_id": row.seq if row.p2p else 0,
            "op_id": row.seq,
            "profiling_name": f"nccl:{arrow.get(row.op.what, row.op.name)}",
            "time_created_ns": row.created_ns,
            "input_sizes": [list(s) for s in row.op.ins],
            "output_sizes": [list(s) for s in row.op.outs],
            "input_dtypes": [row.op.dtype],
            "output_dtypes": [row.op.dtype],
            "state": state,
            "retired": state == "completed",
            "timeout_ms": 600_000,
            "is_p2p": row.p2p,
        }
        if frames:
            entry["frames"] = [{"name": n, "filename": f, "line": line} for n, f, line in row.op.site]
        entries.append(entry)
    if active_only:
        entries = [e for e in entries if e["state"] != "completed"]
    return {
        "version": "2.10",
        "comm_lib_version": "2.27.3",
        "pg_config": {n: {"name": n, "desc": d, "ranks": str(list(m))} for n, d, m in own},
        "pg_status": {
            str(pg_id[n]): {
                "last_enqueued_collective": e,
                "last_started_collective": -1,
                "last_completed_collective": c,
            }
            for n, (e, c) in last.items()
        }
        if status
        else {},
        "entries": entries[-ring:],
    }


def write(sim: Simulator, folder: Path, leave_out: tuple[int, ...] = (), seed: int = 0, **options: Any) -> None:
    """Dumps of all ranks but some, under random names that end in the rank."""
    folder.mkdir(parents=True, exist_ok=True)
    names = random.Random(seed)
    for rank in range(sim.job.world):
        if rank not in leave_out:
            stem = "".join(names.choice("abcdefgh") for _ in range(8))
            (folder / f"{stem}_{rank}").write_bytes(pickle.dumps(dump(sim, rank, **options), protocol=2))


def index(job: Job, rank: int, group: str, nth: int, name: str | None = None) -> int:
    """Place in a rank's program of the nth call of a kind of group."""
    found = [
        i
        for i, op in enumerate(job.programs[rank])
        if op.what in {"call", "send", "recv"} and job.groups[op.group][0] == group and name in {None, op.name}
    ]
    return found[nth]


def edit(job: Job, rank: int, change: Callable[[list[Op]], list[Op]]) -> Job:
    """The job with another program on one rank."""
    programs = list(job.programs)
    programs[rank] = change(list(programs[rank]))
    return replace(job, programs=programs)
