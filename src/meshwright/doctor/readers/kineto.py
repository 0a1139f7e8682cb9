"""Profiler traces (Kineto, Chrome trace format) of PyTorch 1.8 to 2.14, of any accelerator or none.

Files are read on all cores, each as a stream. What is read is one ``Track`` a rank.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, BinaryIO

from meshwright.doctor.incident import Incident
from meshwright.doctor.readers import Source
from meshwright.doctor.readers.crew import run
from meshwright.doctor.readers.events import Events
from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.ledger.tracks import Track

NAME = "kineto"

#: A trace may take this long, and so much more for every byte of it (a hundredth of the usual speed).
LIMIT_S, LIMIT_S_PER_BYTE = 60.0, 2e-6
_HEAD = re.compile(rb'"traceEvents"|"ph"\s*:\s*"[A-Za-z]"')
_RANK = re.compile(r"(?:rank|worker|gpu|trainer|node)[_.\-]?(\d{1,7})", re.IGNORECASE)
_NUMBER = re.compile(r"(\d{1,7})")


def sniff(head: bytes, name: str) -> bool:
    """The begin of a Chrome trace; in those of torch ``deviceProperties`` may take all of it."""
    if head.lstrip()[:1] not in (b"{", b"["):
        return False
    return _HEAD.search(head) is not None or (b'"schemaVersion"' in head and b'"deviceProperties"' in head)


def read_track(stream: BinaryIO, name: str) -> Track:
    """Read one trace to its end."""
    from meshwright.doctor.readers.kineto_rows import Rows
    from meshwright.doctor.readers.kineto_track import track_of

    events, rows = Events(stream), Rows()
    for batch in events.batches():
        rows.take(batch)
        batch.clear()  # before the next one is parsed
    track = track_of(rows, events.meta, name)
    if events.cut:
        track.lacks.append(f"the file is cut off after {rows.events:,} events; what follows is not known")
    if events.broken:
        track.lacks.append(f"{events.broken} stretches of the file could not be parsed and are left out")
    if rows.dropped:
        track.lacks.append(f"{rows.dropped} collectives beyond the first {len(track.calls)} are left out")
    return track


def read(source: Source, incident: Incident) -> None:
    """Read one trace.

    Raises:
        InputError: unreadable.
    """
    try:
        with source.open() as stream:
            incident.tracks.append(read_track(stream, source.name))
    except (OSError, EOFError) as error:
        raise InputError(f"{source.name}: cannot be read ({str(error)[:80]})") from None


def read_many(sources: Sequence[Source], incident: Incident) -> None:
    """Read all traces on all cores, then settle which rank each is of."""
    found: dict[int, Track] = {}

    def work(index: int) -> bytes:
        source = sources[index]
        try:
            with source.open() as stream:
                return pickle.dumps(read_track(stream, source.name), pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # whatever a hostile file leads to ends here
            return pickle.dumps(f"{source.name}: cannot be read ({type(error).__name__}: {str(error)[:80]})")

    def take(_: int, index: int, message: bytes) -> None:
        track = pickle.loads(message)  # written by our own process a moment ago
        if isinstance(track, str):
            incident.lack(track)
        else:
            found[index] = track

    def lost(index: int, how: str) -> None:
        incident.lack(f"{sources[index].name}: is left out, reading it failed: {how}")

    sizes = [s.size if s.size is not None else 1 << 40 for s in sources]
    order = sorted(range(len(sources)), key=lambda i: -sizes[i])
    run(order, work, take, lost, lambda i: LIMIT_S + LIMIT_S_PER_BYTE * min(sizes[i], 1 << 38))
    incident.tracks += settle([found[i] for i in sorted(found)])


def settle(tracks: list[Track]) -> list[Track]:
    """One track a rank, ascending: ranks that a trace does not tell come from its name, or from the order of names.

    Traces of one rank that follow each other in time become one. Traces of one rank that do not are of several ranks
    that name themselves wrongly (copies); they are numbered by their names.
    """
    told: dict[int, list[Track]] = {}
    for track in tracks:
        told.setdefault(track.rank, []).append(track)
    ranks: dict[int, Track] = {}
    loose = told.pop(-1, [])
    for rank, own in sorted(told.items()):
        joined = _joined(own)
        if joined is None:
            loose += own
        else:
            ranks[rank] = joined
    copies = sorted({t.rank for t in loose} - {-1})
    for track in sorted(loose, key=lambda t: (_named(t.source) is None, _named(t.source) or 0, t.source)):
        named = _named(track.source)
        free = named if named is not None and named not in ranks else next(n for n in range(1 << 20) if n not in ranks)
        how = f"number {free} by its name" if free == named else f"number {free} by the order of names"
        if track.rank in copies:
            how += f": several traces say they are of rank {track.rank}"
        ranks[free] = replace(track, rank=free, lacks=[*track.lacks, f"rank: {how}"])
    for rank, track in ranks.items():
        for call in track.calls:
            call.rank_class = f"rank{rank}"
    return [ranks[rank] for rank in sorted(ranks)]


def _named(source: str) -> int | None:
    """The rank in a file's name, else the only number in it."""
    name = PurePosixPath(source).name
    found = _RANK.search(name)
    if found:
        return int(found[1])
    numbers = _NUMBER.findall(name)
    return int(numbers[0]) if len(numbers) == 1 else None


def _joined(own: list[Track]) -> Track | None:
    """One track of those of one rank, None where they overlap in time."""
    import numpy as np

    from meshwright.ledger.intervals import Segments

    own = sorted(own, key=lambda t: t.span_ns)
    if len(own) == 1:
        return own[0]
    if any(b.span_ns[0] < a.span_ns[1] for a, b in pairwise(own)):
        return None
    first = own[0]
    parts = [t.segments for t in own]
    columns = [np.concatenate([getattr(p, name) for p in parts]) for name in ("start", "end", "label")]
    work: dict[str, tuple[int, int]] = {}
    for track in own:
        for name, (often, spent) in track.work.items():
            held = work.get(name, (0, 0))
            work[name] = (held[0] + often, held[1] + spent)
    return replace(
        first,
        steps=[s for t in own for s in t.steps],
        segments=Segments(*columns),
        calls=[c for t in own for c in t.calls],
        counts={key: sum(t.counts.get(key, 0) for t in own) for key in first.counts},
        work=work,
        lacks=list(dict.fromkeys(line for t in own for line in t.lacks)),
    )
