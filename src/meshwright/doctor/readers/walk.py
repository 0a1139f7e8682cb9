"""Walks what a user hands over, a file or a folder of anything, and lets the readers fill one ``Incident``.

Symbolic links are not followed out of the folder, pipes and devices not opened. Members of archives are held in memory
or, beyond ``SPOOL_BYTES``, in one anonymous temporary file; logs in archives are read as they come out. What nobody can
read is said in the lacks.
"""

from __future__ import annotations

import io
import os
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from meshwright.doctor.incident import Incident
from meshwright.doctor.readers import HEAD_BYTES, Reader, Source, many_of, reader_for, text
from meshwright.doctor.readers.archives import (
    Bounded,
    Budget,
    Limits,
    archive,
    compression,
    decompressor,
    tar_members,
    zip_members,
)
from meshwright.doctor.readers.resolve import resolve
from meshwright.errors import InputError

#: A member of an archive up to this size is held in memory.
SPOOL_BYTES = 1 << 20
#: All members in memory together; beyond it they go to the temporary file.
HELD_BYTES = 256 << 20

#: Said of a file whose reader failed in a way that nobody foresaw; the walk goes on.
BUG = "its reader failed inside meshwright"

#: Told what is going on: bytes read so far, files read so far, the file at hand.
Progress = Callable[[int, int, str], None]


def read_incident(path: str | Path, progress: Progress | None = None, limits: Limits | None = None) -> Incident:
    """Read a file, a folder or an archive of anything.

    Raises:
        InputError: there is nothing at ``path``.
    """
    root = Path(path)
    if not root.exists():
        raise InputError(f"{path}: no such file or folder")
    incident = Incident()
    walk = Walk(incident, limits or Limits(), progress)
    walk.run(root)
    return incident


class Walk:
    """One walk over one root."""

    def __init__(self, incident: Incident, limits: Limits, progress: Progress | None) -> None:
        self._incident = incident
        self._budget = Budget(limits)
        self._progress = progress
        self._logs = text.Logs(incident, self._count)
        self._later: dict[str, tuple[Reader, list[Source]]] = {}
        self._unknown: Counter[str] = Counter()
        self._example: dict[str, str] = {}
        self._held = 0
        self._spool: BinaryIO | None = None
        self._bytes = 0
        self._files = 0
        self._at = ""

    def run(self, root: Path) -> None:
        """Read everything under ``root``, then what is read together, then what needs all of it."""
        try:
            for path, name in _files(root, self._incident):
                self._budget.member(name)
                self._file(path, name)
        except InputError as error:
            self._incident.lack(str(error))
        self.finish()

    def finish(self) -> None:
        """Read what is read together, then do what needs everything."""
        self._together()
        if self._spool is not None:
            self._spool.close()
        self._logs.finish()
        self._incident.settle()
        resolve(self._incident, self._logs.files)
        self._say_unknown()

    def _together(self) -> None:
        """Read what is read faster together."""
        for reader, sources in self._later.values():
            self._at = sources[0].name
            try:
                many_of(reader)(sources, self._incident)
            except InputError as error:
                self._incident.lack(str(error))
            except Exception as error:
                self._incident.lack(f"{sources[0].name} and its like: {BUG} ({type(error).__name__}: {error})")

    def _say_unknown(self) -> None:
        if self._unknown:
            kinds = ", ".join(f"{n} {ending or 'without ending'}" for ending, n in sorted(self._unknown.most_common(6)))
            example = self._example[max(self._unknown, key=lambda k: self._unknown[k])]
            self._incident.lack(f"{sum(self._unknown.values())} files of no known format ({kinds}), such as {example}")

    def _file(self, path: Path, name: str) -> None:
        try:
            info = path.stat()
            with path.open("rb") as stream:
                head = stream.read(HEAD_BYTES)
        except OSError as error:
            self._incident.lack(f"{name}: cannot be read ({error.strerror})")
            return
        source = Source(name, head, lambda: cast(BinaryIO, path.open("rb")), info.st_size, path)
        self.take(source, info.st_mtime)

    def take(self, source: Source, modified: float | None = None) -> None:
        """Read one source, or keep it until ``finish`` where its like are read together."""
        self._budget.in_bytes += source.size or 0
        self._guarded(source, 0, modified)

    def _guarded(self, source: Source, depth: int, modified: float | None) -> None:
        """Read one source; whatever is wrong with it is said and the walk goes on."""
        try:
            self._source(source, depth, modified)
        except InputError as error:
            self._incident.lack(str(error) if source.name in str(error) else f"{source.name}: {error}")
        except (OSError, EOFError) as error:
            self._incident.lack(f"{source.name}: cannot be read to its end ({error or type(error).__name__})")
        except Exception as error:
            self._incident.lack(f"{source.name}: {BUG} ({type(error).__name__}: {error})")

    def _source(self, source: Source, depth: int, modified: float | None) -> None:
        if not source.head:
            return
        packed, box = compression(source.head), archive(source.head)
        if (packed or box) and depth >= self._budget.limits.depth:
            raise InputError(f"{source.name}: archives nested deeper than {self._budget.limits.depth} are not opened")
        if packed:
            self._compressed(source, packed, depth, modified)
        elif box == "tar":
            with source.open() as stream:
                self._members(source.name, tar_members(stream, self._budget, source.name), depth, modified)
        elif box == "zip":
            with source.open() as stream:
                self._members(source.name, zip_members(stream, self._budget, source.name), depth, modified)
        else:
            self._read(source, modified)

    def _compressed(self, source: Source, packed: str, depth: int, modified: float | None) -> None:
        """A compressed file: a tar is read in one pass, anything else is opened anew by each reader that wants it."""
        opener = decompressor(packed)
        budget, size, name = self._budget, source.size, source.name

        def open_inner() -> BinaryIO:
            bounded = Bounded(opener(source.open()), name, size, budget)
            return cast(BinaryIO, io.BufferedReader(bounded, 1 << 16))

        with open_inner() as stream:
            head = _head(stream)
        inner = Source(_bare(name), head, open_inner)
        if archive(head) == "tar":
            with open_inner() as stream:
                self._members(inner.name, tar_members(stream, budget, inner.name), depth + 1, modified)
        elif compression(head) or archive(head):
            with open_inner() as stream:
                self._guarded(self._spooled(inner.name, stream), depth + 1, modified)
        else:
            self._read(inner, modified)

    def _members(self, name: str, members: Iterator[tuple[str, BinaryIO]], depth: int, modified: float | None) -> None:
        for member, content in members:
            full = f"{name}!/{member[-300:]}"
            self._budget.member(full)
            try:
                inner = self._spooled(full, content)
            except InputError as error:
                self._incident.lack(str(error))
                continue
            self._guarded(inner, depth + 1, modified)

    def _spooled(self, name: str, content: BinaryIO) -> Source:
        """A member of an archive as a source that can be opened again."""
        head = _head(content)
        reader = None if compression(head) or archive(head) else reader_for(head, name)
        if reader is None and not compression(head) and not archive(head):
            return Source(name, head, lambda: cast(BinaryIO, io.BytesIO(head)))
        if reader is not None and reader.NAME == text.NAME:
            return Source(name, head, lambda: cast(BinaryIO, io.BufferedReader(_Rest(head, content), 1 << 16)))
        small = head + _up_to(content, SPOOL_BYTES - len(head))
        if len(small) < SPOOL_BYTES and self._held + len(small) <= HELD_BYTES:
            self._held += len(small)
            return Source(name, head, lambda: cast(BinaryIO, io.BytesIO(small)), len(small))
        if self._spool is None:
            self._spool = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115  closed at the end of the walk
        spool = self._spool
        start = spool.seek(0, io.SEEK_END)
        size = spool.write(small)
        while data := content.read(1 << 20):
            size += spool.write(data)
        spool.flush()
        return Source(name, head, lambda: cast(BinaryIO, io.BufferedReader(_View(spool, start, size))), size)

    def _read(self, source: Source, modified: float | None) -> None:
        """Let the reader that recognises a source read it, at once or together with its like."""
        self._at = source.name
        reader = reader_for(source.head, source.name)
        if reader is None:
            ending = os.path.splitext(source.name.rsplit("/", 1)[-1])[1][:12].lower()
            self._unknown[ending] += 1
            self._example.setdefault(ending, source.name)
            return
        self._files += 1
        if reader.NAME == text.NAME:
            self._logs.read(source, modified)
        elif hasattr(reader, "read_many"):
            self._later.setdefault(reader.NAME, (reader, []))[1].append(source)
        else:
            reader.read(source, self._incident)
        self._count(0)

    def _count(self, read: int) -> None:
        self._bytes += read
        if self._progress:
            self._progress(self._bytes, self._files, self._at)


class _View(io.RawIOBase):
    """A stretch of a file that several views and processes share; closing it leaves the file open."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._file = file
        self._start = start
        self._size = size
        self._pos = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move the view."""
        base = (0, self._pos, self._size)[whence]
        self._pos = max(0, base + offset)
        return self._pos

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill a buffer."""
        size = max(0, min(len(buffer), self._size - self._pos))
        data = os.pread(self._file.fileno(), size, self._start + self._pos)
        buffer[: len(data)] = data
        self._pos += len(data)
        return len(data)


class _Rest(io.RawIOBase):
    """A stream whose first bytes have been read already; it can be read once."""

    def __init__(self, head: bytes, stream: BinaryIO) -> None:
        self._head = head
        self._stream = stream

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill a buffer, from the head first."""
        data = self._head[: len(buffer)]
        self._head = self._head[len(data) :]
        data = data or self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _files(root: Path, incident: Incident) -> Iterator[tuple[Path, str]]:
    """Plain files under ``root`` with their names relative to it, by name."""
    if not root.is_dir():
        if stat.S_ISREG(root.stat().st_mode):
            yield root, root.name
        else:
            incident.lack(f"{root.name}: neither a plain file nor a folder")
        return
    for folder, folders, names in os.walk(root, onerror=lambda e: incident.lack(f"{e.filename}: {e.strerror}")):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            try:
                mode = path.lstat().st_mode
                if stat.S_ISLNK(mode) and not path.resolve().is_relative_to(root.resolve()):
                    incident.lack(f"{path.relative_to(root)}: a link that leads out of the folder is not followed")
                    continue
                if not stat.S_ISREG(path.stat().st_mode):
                    continue
            except (OSError, RuntimeError):
                incident.lack(f"{path.relative_to(root)}: cannot be read")
                continue
            yield path, str(path.relative_to(root))


def _head(stream: BinaryIO) -> bytes:
    return _up_to(stream, HEAD_BYTES)


def _up_to(stream: BinaryIO, size: int) -> bytes:
    """Read ``size`` bytes, or all there are."""
    parts = []
    while size > 0 and (data := stream.read(size)):
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


def _bare(name: str) -> str:
    """A name without the ending of its compression."""
    base, ending = os.path.splitext(name)
    if ending.lower() == ".tgz":
        return f"{base}.tar"
    return base if ending.lower() in (".gz", ".bz2", ".xz", ".zst", ".lzma") else name
