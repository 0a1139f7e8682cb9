"""Facts of one file while it is read: bounded by kind and process, without repeats, and given their ranks at its end.

The rank of a line is often known only from other lines of the same process: the launcher's tag ``[default3]:`` stands
before all of them, torch's ``[rank11]:`` only before some. So ranks are settled when the whole file has been seen.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field

from meshwright.doctor.incident import MAX_RANK, Incident
from meshwright.doctor.readers.prefix import Prefix

#: Facts kept of a kind and process: this many from the start of the file and from its end.
FIRST_KEPT, LAST_KEPT = 24, 8
#: Kinds of which a healthy process writes many.
_KEPT = {"comm_init": (256, 8), "exception": (8, 4), "stack": (64, 8), "nccl_info": (32, 4)}
#: Facts held of one file; beyond them no further process is taken up, and each keeps only its last ones.
MAX_DRAFTS = 400_000
#: Distinct launcher tags followed per file.
MAX_STREAMS = 100_000

_TRAILING = re.compile(r"(\d{1,7})(?:\.(?:log|txt|out|err|json|prom|dump|stack|stacks|std(?:out|err)))*$", re.ASCII)
_RANK_WORD = re.compile(r"(?:rank|worker|trainer|proc|gpu|stack|dump|std(?:out|err)|log|env)s?[._-]?$", re.IGNORECASE)

#: Ways to a rank that need more than one file: ``resolve`` confirms or drops them.
ONLY_RANK, FILE_NAME = "only rank in file", "file name"
#: The place in a group that old releases print, where the group may be a part of the job.
PLACE = "place in group"

#: Kinds that a launcher or a kernel reports of another process, and what names that process.
_OF_OTHERS = frozenset({"killed", "exited", "oom", "xid"})
_NAMES = frozenset({"pid", "local_rank", "tasks", "launcher"})


@dataclass(slots=True)
class Draft:
    """A fact whose rank is not settled yet."""

    kind: str
    prefix: Prefix
    text: str
    line: int
    data: dict[str, object]
    at: float | None
    times: int = 1
    rank: int | None = None


@dataclass(slots=True)
class _Bucket:
    first: list[Draft] = field(default_factory=list)
    last: deque[Draft] = field(default_factory=deque)
    seen: dict[object, Draft] = field(default_factory=dict)
    dropped: int = 0


class FileFacts:
    """Collects what one file says.

    ``alone`` is set to False by a reader that sees more than one process: lines without a rank are then nobody's.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.ranks: set[int] = set()
        self.alone = True
        self._buckets: dict[tuple[str, object], _Bucket] = {}
        self._streams: dict[str, int | None] = {}
        self._offsets: set[int] = set()
        self._tasks: set[bool] = set()
        self._kept = 0
        self._overflow = 0
        self._distinct: bool | None = None

    def learn(self, prefix: Prefix) -> None:
        """Remember which launcher tag goes with which rank."""
        rank = prefix.rank
        if rank is None:
            return
        if len(self.ranks) < MAX_STREAMS:
            self.ranks.add(rank)
        if prefix.stream and len(self._streams) < MAX_STREAMS:
            held = self._streams.setdefault(prefix.stream, rank)
            if held != rank:
                self._streams[prefix.stream] = None
        if prefix.local_rank is not None and len(self._offsets) < 2:
            self._offsets.add(rank - prefix.local_rank)
        if prefix.task is not None:
            self._tasks.add(prefix.task == rank)

    def add(
        self,
        kind: str,
        prefix: Prefix,
        line: int,
        data: dict[str, object] | None = None,
        text: str | None = None,
        same: object = None,
    ) -> Draft | None:
        """Note a fact. Facts of one kind and process with the same ``same`` are one, counted in ``data["times"]``."""
        if data is None or "rank_from" not in data:
            self.learn(prefix)
        key = (kind, prefix.rank if prefix.rank is not None else prefix.stream)
        bucket = self._buckets.get(key)
        if bucket is None:
            if self._kept >= MAX_DRAFTS:
                self._overflow += 1
                return None
            bucket = self._buckets[key] = _Bucket()
        if same is not None and (held := bucket.seen.get(same)) is not None:
            held.times += 1
            return held
        draft = Draft(kind, prefix, prefix.rest if text is None else text, line, data or {}, prefix.at)
        first, last = _KEPT.get(kind, (FIRST_KEPT, LAST_KEPT))
        self._kept += 1
        if len(bucket.first) < first and self._kept <= MAX_DRAFTS:
            bucket.first.append(draft)
        else:
            bucket.last.append(draft)
            if len(bucket.last) > last:
                bucket.last.popleft()
                bucket.dropped += 1
                self._kept -= 1
        if same is not None and len(bucket.seen) < first + last:
            bucket.seen[same] = draft
        return draft

    def flush(self, incident: Incident) -> None:
        """Settle the ranks and hand the facts over, each process's first ones before any process's second."""
        drafts = [(i, d) for b in self._buckets.values() for i, d in enumerate((*b.first, *b.last))]
        for _, draft in drafts:
            draft.rank = self._rank_of(draft)
        drafts = _without_echoes(drafts)
        _join_groups([d for _, d in drafts])
        _mark_first([d for _, d in drafts])
        drafts.sort(key=lambda pair: (pair[0], pair[1].line))
        for _, draft in drafts:
            if draft.times > 1:
                draft.data["times"] = draft.times
            _identify(draft)
            incident.add_fact(
                draft.kind, draft.text.strip(), f"{self.name}:{draft.line}", draft.rank, draft.at, draft.data
            )
        dropped = sum(b.dropped for b in self._buckets.values()) + self._overflow
        if dropped:
            incident.lack(f"{self.name}: {dropped} facts beyond the first and last of their kind and rank are left out")

    def _one_rank_a_stream(self) -> bool:
        if self._distinct is None:
            ranks = list(self._streams.values())
            self._distinct = len(ranks) > 1 and None not in ranks and len(set(ranks)) == len(ranks)
        return self._distinct

    def _rank_of(self, draft: Draft) -> int | None:
        prefix = draft.prefix
        if "rank_from" in draft.data:
            return prefix.rank
        if draft.kind in _OF_OTHERS and prefix.rank is None and not _NAMES.isdisjoint(draft.data):
            return None
        rank, how = self._guess(prefix, draft.data.get("group_rank"))
        if rank is not None and not 0 <= rank < MAX_RANK:
            return None
        if how and rank is not None:
            draft.data["rank_from"] = how
        return rank

    def _guess(self, prefix: Prefix, place: object) -> tuple[int | None, str]:
        """``(rank, how)``; ``how`` is empty where the line itself says its global rank.

        A tag is one process where it has a pid, a local rank or MPI's rank; others (a pod, a node's task) may hold
        many, so they count only where each tag of the file goes with one rank of its own.
        """
        if prefix.rank is not None:
            return prefix.rank, ""
        mpi = prefix.task is not None and prefix.stream.startswith("[")
        one_process = prefix.pid is not None or prefix.local_rank is not None or mpi or self._one_rank_a_stream()
        if prefix.local_rank is not None and len(self._offsets) > 1:
            return None, ""
        if prefix.stream in self._streams and one_process:
            return self._streams[prefix.stream], "same process"
        if prefix.local_rank is not None:
            if len(self._offsets) == 1:
                return prefix.local_rank + next(iter(self._offsets)), "local rank"
            return None, ""
        if prefix.task is not None:
            sure = mpi or True in self._tasks or place == prefix.task
            return (prefix.task, "task") if sure and False not in self._tasks else (None, "")
        if prefix.stream or len(self.ranks) > 1 or not self.alone:
            return None, ""
        if self.ranks:
            return next(iter(self.ranks)), ONLY_RANK
        return rank_in_name(self.name), FILE_NAME


def rank_in_name(name: str) -> int | None:
    """The number at the end of a file name that speaks of ranks or the like; weak, for content that names no rank."""
    base = name.rsplit("/", 1)[-1]
    match = _TRAILING.search(base)
    if match is None or not _RANK_WORD.search(base[: match.start()]):
        return None
    return int(match[1])


def _identify(draft: Draft) -> None:
    """Keep what may tell the process later, when other files are known."""
    prefix = draft.prefix
    if prefix.zoned and draft.at is not None:
        draft.data["zoned"] = True
    if draft.rank is None:
        for name in ("pid", "host", "local_rank", "task"):
            if name not in draft.data and (value := getattr(prefix, name)) is not None:
                draft.data[name] = value
        if prefix.stream:
            draft.data["stream"] = prefix.stream[:120]
    elif prefix.pid is not None:
        draft.data.setdefault("pid", prefix.pid)


def _without_echoes(drafts: list[tuple[int, Draft]]) -> list[tuple[int, Draft]]:
    """Leave out timeouts that C++ repeats in ``what():`` without the rank, and places in groups where torch says ranks.

    Where a file has lines with the global rank in front, or two processes claim one, a lone ``[Rank 3]`` is a place in
    some group.
    """
    weak = [d for _, d in drafts if d.kind == "watchdog_timeout" and d.data.get("rank_from") == PLACE]
    shared = any(d.times > 1 for d in weak)
    sound = {_work(d) for _, d in drafts if d.kind == "watchdog_timeout" and _is_sound(d)}
    kept = []
    for place, draft in drafts:
        if draft.kind == "watchdog_timeout" and not _is_sound(draft) and _work(draft) in sound:
            continue
        if (sound or shared) and draft.data.get("rank_from") == PLACE:
            draft.rank, draft.data["maybe_rank"] = None, draft.rank
            draft.data.pop("rank_from")
        kept.append((place, draft))
    return kept


def _is_sound(draft: Draft) -> bool:
    return draft.rank is not None and draft.data.get("rank_from") != PLACE


def _work(draft: Draft) -> tuple[object, ...]:
    return tuple(draft.data.get(name) for name in ("seq", "op_name", "numel_in", "group_rank"))


def _join_groups(drafts: list[Draft]) -> None:
    """The line of a timeout names no group, the status line after it does: same rank, same number."""
    groups: dict[tuple[int, object], tuple[object, object]] = {}
    for draft in drafts:
        if draft.kind == "pg_status" and draft.rank is not None and "seq" in draft.data:
            groups[draft.rank, draft.data["seq"]] = (draft.data.get("group"), draft.data.get("group_name"))
    for draft in drafts:
        if draft.kind == "watchdog_timeout" and draft.rank is not None and "group" not in draft.data:
            found = groups.get((draft.rank, draft.data.get("seq")))
            if found:
                draft.data["group"], draft.data["group_name"] = found


def _mark_first(drafts: list[Draft]) -> None:
    """Each rank's first exception in the file: what comes after it usually follows from it."""
    first: dict[object, Draft] = {}
    for draft in drafts:
        if draft.kind == "exception":
            key = draft.rank if draft.rank is not None else draft.prefix.key
            if key not in first or draft.line < first[key].line:
                first[key] = draft
    for draft in first.values():
        draft.data["first"] = True
