"""What a folder of dumps, logs and stacks says about one job, brought together by the readers.

Rows of recorded calls are columns of integers (``Trace``): what is called, on which group and from where are numbers
into tables that all ranks share (``Incident.signatures``, ``groups``, ``stacks``), so that thousands of ranks with
thousands of rows fit and compare fast. What logs, stacks and metrics say are ``Fact`` rows.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from meshwright.doctor.job import Job
    from meshwright.doctor.peak import Peaks
    from meshwright.doctor.slow_view import SlowView
    from meshwright.ledger.schema import Entry
    from meshwright.ledger.tracks import Track

#: States of a recorded call. UNKNOWN: the recorder does not tell, or it is over without anybody knowing how.
SCHEDULED, STARTED, COMPLETED, UNKNOWN = 0, 1, 2, 3
STATES = ("scheduled", "started", "completed", "unknown")

MAX_TEXT = 400
MAX_FACTS = 200_000
MAX_LACKS = 500
MAX_RANK = 1 << 20

T = TypeVar("T")


@dataclass(slots=True)
class Fact:
    """Something that a log line, a stack or a metric says.

    Attributes:
        kind: ``watchdog_timeout``, ``dump_signal``, ``pg_status``, ``heartbeat``, ``exception``, ``oom``, ``killed``,
            ``gloo_error``, ``stack``, ``nccl_warn``, ``nccl_info``, ``comm_init``, ``shm``, ``env``, ``metric``, ...
        rank: global rank, None when the text does not tell.
        at: Unix seconds, None when unknown.
        text: the line, clipped to ``MAX_TEXT`` characters.
        source: ``file:line``.
        data: what was parsed out of it: ``seq``, ``op``, ``numel_in``, ``numel_out``, ``timeout_ms``,
            ``last_enqueued``, ``last_completed``, ``group``, ``frames`` as a list of (function, file, line) innermost
            first, ``signal``, ...
    """

    kind: str
    rank: int | None
    at: float | None
    text: str
    source: str
    data: dict[str, object] = field(default_factory=dict)


class Group(NamedTuple):
    """A process group: name and description as the program gave them, global ranks in order of place.

    ``members`` is empty while unknown (gloo writes no table); ``key`` tells groups of equal names apart.
    """

    name: str
    desc: str
    members: tuple[int, ...]

    @property
    def key(self) -> str:
        """The same text on every member."""
        return f"{self.name}|{','.join(map(str, self.members))}" if self.members else f"{self.name}|{self.desc}"

    @property
    def label(self) -> str:
        """For people."""
        return self.desc if self.desc and self.desc != "undefined" else self.name or "group"


class Signature(NamedTuple):
    """What a call is, apart from its group and place in the order. None or empty: the recorder does not tell.

    ``op`` is one of ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``, ``all_to_all``, ``reduce``,
    ``gather``, ``scatter``, ``barrier``, ``send``, ``recv``, ``coalesced`` or a recorder's own word. ``peer`` is a
    place within the group: the other side of a hand-off, or a root. ``raw`` is the recorder's name of the op.
    """

    op: str
    shapes_in: tuple[tuple[int, ...], ...] = ()
    shapes_out: tuple[tuple[int, ...], ...] = ()
    dtype: str | None = None
    peer: int | None = None
    splits: tuple[int, ...] | None = None
    raw: str = ""


class Frame(NamedTuple):
    """One level of a call stack."""

    function: str
    file: str
    line: int


class Status(NamedTuple):
    """Counters that a rank keeps for a group (``pg_status``); None when unknown, -1 never."""

    enqueued: int | None
    started: int | None
    completed: int | None


@dataclass(slots=True)
class Trace:
    """One rank's recorded calls in the order in which it issued them, as columns of equal length.

    Attributes:
        rank: global rank.
        source: file it comes from.
        recorder: ``flight_recorder`` or ``ledger``.
        backend: ``nccl``, ``gloo``, ... as far as the names tell; "" when nothing was recorded.
        group, signature, stack: places in ``Incident.groups``, ``signatures``, ``stacks``; -1 unknown.
        seq: order of the call among the collectives of its group, or among its hand-offs (``p2p``).
        record: order among all calls of the rank, as the recorder counts; gaps mean that rows are missing.
        state: ``SCHEDULED``, ``STARTED``, ``COMPLETED`` or ``UNKNOWN``.
        p2p: 1 for a hand-off.
        created_ns: Unix time at which it was issued, 0 unknown.
        status: counters by place in ``Incident.groups``.
        member_of: places in ``Incident.groups`` of all groups of this rank that the dump lists.
        rank_from: ``content`` or ``file name``: where the rank's number comes from.
        active_only: only calls that had not completed were dumped.
        wrapped: rows before the first one were dropped by the ring.
        settled: states tell whether a call completed (gloo's do not).
        meta: version and the like, for people.
    """

    rank: int
    source: str
    recorder: str = "flight_recorder"
    backend: str = ""
    group: array[int] = field(default_factory=lambda: array("i"))
    signature: array[int] = field(default_factory=lambda: array("i"))
    stack: array[int] = field(default_factory=lambda: array("i"))
    seq: array[int] = field(default_factory=lambda: array("q"))
    record: array[int] = field(default_factory=lambda: array("q"))
    state: array[int] = field(default_factory=lambda: array("b"))
    p2p: array[int] = field(default_factory=lambda: array("b"))
    created_ns: array[int] = field(default_factory=lambda: array("q"))
    status: dict[int, Status] = field(default_factory=dict)
    member_of: tuple[int, ...] = ()
    rank_from: str = "content"
    active_only: bool = False
    wrapped: bool = False
    settled: bool = True
    meta: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.seq)


class Table(Generic[T]):
    """Values that occur again and again, each kept once and known by its number."""

    __slots__ = ("_numbers", "rows")

    def __init__(self) -> None:
        self.rows: list[T] = []
        self._numbers: dict[T, int] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> T:
        return self.rows[number]

    def number(self, value: T) -> int:
        """The number of ``value``, a new one at its first time."""
        found = self._numbers.get(value)
        if found is None:
            found = self._numbers[value] = len(self.rows)
            self.rows.append(value)
        return found


class Incident:
    """Everything that is known about a job.

    Attributes:
        traces: by global rank.
        facts: from logs, stacks and metrics, in the order of reading (which means nothing).
        groups, signatures, stacks: tables that the columns of the traces point into.
        lacks: what the folder does not hold or could not be read, one line each, for people.
        world: number of ranks of the job, None while unknown.
        earlier: last issue (Unix ns) in another dump of a rank, which ends before the one that counts.
        spare: rows of a second recorder by global rank, until ``settle``.
        tracks: what profiler traces show of the time of each rank, ascending.
        jobs: operations of pipelined training jobs.
        timings: of NCCL's Inspector: (communicator, operation, number) -> place -> (microseconds, bytes, host).
        times: what follows from the tracks, made when it is first asked for (``slow_view.view_of``).
        peaks: what the links carry, where a plan told it.
        cache_calls: hand-offs of KV blocks in our ledgers, by rank; peers are global ranks, times Unix nanoseconds.
    """

    def __init__(self) -> None:
        self.traces: dict[int, Trace] = {}
        self.spare: dict[int, Trace] = {}
        self.facts: list[Fact] = []
        self.groups: Table[Group] = Table()
        self.signatures: Table[Signature] = Table()
        self.stacks: Table[tuple[Frame, ...]] = Table()
        self.lacks: list[str] = []
        self.world: int | None = None
        self.earlier: dict[int, int] = {}
        self.dropped_facts = 0
        self.tracks: list[Track] = []
        self.jobs: list[Job] = []
        self.timings: dict[tuple[str, str, int], dict[int, tuple[int, int, str]]] = {}
        self.times: SlowView | None = None
        self.peaks: Peaks | None = None
        self.cache_calls: dict[int, list[Entry]] = {}

    def add_fact(
        self,
        kind: str,
        text: str,
        source: str,
        rank: int | None = None,
        at: float | None = None,
        data: dict[str, object] | None = None,
    ) -> None:
        """Note a fact; text is clipped, and beyond ``MAX_FACTS`` facts are only counted."""
        if len(self.facts) >= MAX_FACTS:
            self.dropped_facts += 1
            return
        if rank is not None and not 0 <= rank < MAX_RANK:
            rank = None
        self.facts.append(Fact(kind, rank, at, text[:MAX_TEXT], source[-MAX_TEXT:], data or {}))

    def add_trace(self, trace: Trace) -> None:
        """Note a rank's calls. Of several dumps of one rank the one that reaches furthest counts; the lacks say so."""
        held = self.traces.get(trace.rank)
        if held is None:
            self.traces[trace.rank] = trace
            return
        if held.recorder != trace.recorder:
            self.spare.setdefault(trace.rank, trace)
            return
        later, earlier = (trace, held) if _reach(trace) > _reach(held) else (held, trace)
        self.traces[trace.rank] = later
        before = max(earlier.created_ns, default=0)
        self.earlier[trace.rank] = max(before, self.earlier.get(trace.rank, 0))
        self.lack(f"rank {trace.rank} has two dumps; {later.source} counts, {earlier.source} ends earlier")

    def settle(self) -> None:
        """Keep the rows of one recorder: two number calls and groups differently, and cannot be held together.

        The one with more ranks counts; of equals our own, which knows hand-offs on every back end.
        """
        by: dict[str, dict[int, Trace]] = {}
        for trace in (*self.traces.values(), *self.spare.values()):
            by.setdefault(trace.recorder, {})[trace.rank] = trace
        self.spare = {}
        if len(by) < 2:
            return
        chosen = max(by, key=lambda name: (len(by[name]), name == "ledger"))
        self.traces = by.pop(chosen)
        for name, others in by.items():
            words = {"ledger": "ledgers", "flight_recorder": "Flight Recorder dumps"}
            self.lack(
                f"{words.get(name, name)} of {len(others)} ranks are left out beside {words.get(chosen, chosen)} of "
                f"{len(self.traces)}: the two count calls differently"
            )

    def lack(self, text: str) -> None:
        """Note what is missing or unreadable, once."""
        if len(self.lacks) < MAX_LACKS and (line := text[:MAX_TEXT]) not in self.lacks:
            self.lacks.append(line)


def _reach(trace: Trace) -> tuple[int, int, int, str]:
    """How far a dump reaches: last issue, last record, number of rows; the name decides between equal ones."""
    return max(trace.created_ns, default=0), max(trace.record, default=-1), len(trace), trace.source


def user_frame(stack: Sequence[Frame]) -> Frame | None:
    """The innermost frame outside torch, installed packages and the standard library; the innermost one if none is."""
    for frame in stack:
        if not is_library(frame.file):
            return frame
    return stack[0] if stack else None


_LIBRARY_PARTS = ("/site-packages/", "/dist-packages/", "torch/distributed/", "torch/nn/", "torch/autograd/", "/torch/")
#: Our own recorder, which stands in every stack below what it records.
_RECORDER = ("meshwright/record.py", "meshwright/runtime/record.py", "meshwright/runtime/ledger_file.py")
#: Packages of the standard library in the short paths that py-spy prints.
_PACKAGES = frozenset({"asyncio", "concurrent", "ctypes", "http", "importlib", "json", "multiprocessing", "urllib"})


def is_library(file: str) -> bool:
    """Whether a file belongs to torch, an installed package, the standard library or the interpreter."""
    if not file or file.startswith("<") or file == "??":
        return True
    path = file.replace("\\", "/")
    if path.endswith(_RECORDER) or path.startswith("torch/") or any(part in path for part in _LIBRARY_PARTS):
        return True
    head, _, rest = path.partition("/")
    if head in _PACKAGES if rest else head.removesuffix(".py") in sys.stdlib_module_names:
        return True
    return "/lib/python3" in path or path.endswith((".cpp", ".cc", ".so", ".c", ".h"))
