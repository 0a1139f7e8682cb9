"""Readers, one file a format: each recognises its files by their first bytes and fills an ``Incident``.

A reader is a module with ``NAME``, ``sniff(head, name)`` and ``read(source, incident)``, and, where many files are
read faster together, ``read_many(sources, incident)``. All are listed in ``READERS`` in the order in which they are
asked; the first that recognises a file reads it. Whatever is unreadable becomes a line in ``Incident.lacks``; no
reader raises anything but ``InputError``, and none executes, imports or unpickles what a file names.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from meshwright.doctor.incident import Incident

#: Bytes of a file that readers are shown to recognise it.
HEAD_BYTES = 4096


@dataclass(slots=True)
class Source:
    """One stream of bytes: a file, or a member of an archive after decompression.

    Attributes:
        name: path as the user knows it (``logs.tar.gz!/rank0.log`` within an archive).
        head: its first ``HEAD_BYTES``.
        open: opens it anew for reading bytes; the caller closes it.
        size: bytes, None when unknown before reading.
        path: of a plain file on disk that needs no unpacking, else None.
    """

    name: str
    head: bytes
    open: Callable[[], BinaryIO]
    size: int | None = None
    path: Path | None = None


class Reader(Protocol):
    """What the module of a reader offers; ``read_many`` is optional (``many_of``)."""

    NAME: str

    @staticmethod
    def sniff(head: bytes, name: str) -> bool:
        """Whether the first bytes are of this format; the name is a hint at most."""

    @staticmethod
    def read(source: Source, incident: Incident) -> None:
        """Fill the incident from one source.

        Raises:
            InputError: unreadable; one line that says what and where.
        """


#: Modules in the order in which they are asked, free text last. Traces come first, because their lists of groups look
#: like those of the Flight Recorder. RAS comes before the Flight Recorder: the JSON of both
#: has ``nccl_version``, and RAS asks for more.
READERS = (
    "meshwright.doctor.readers.kineto",
    "meshwright.doctor.readers.straggler",
    "meshwright.doctor.readers.ras",
    "meshwright.doctor.readers.flight_recorder",
    "meshwright.doctor.readers.ledger",
    "meshwright.doctor.readers.inspector",
    "meshwright.doctor.readers.serving_metrics",
    "meshwright.doctor.readers.xpu_timer",
    "meshwright.doctor.readers.stacks",
    "meshwright.doctor.readers.text",
)


def load(module: str) -> Reader:
    """Import one of ``READERS``."""
    return cast(Reader, importlib.import_module(module))


def reader_for(head: bytes, name: str) -> Reader | None:
    """The first reader that recognises a file, None when none does."""
    return next((r for r in map(load, READERS) if r.sniff(head, name)), None)


def many_of(reader: Reader) -> Callable[[Sequence[Source], Incident], None]:
    """The reader's way to read many sources: its own ``read_many``, else one after the other.

    One by one, an ``InputError`` becomes a lack of the incident and the next source is read.
    """
    from meshwright.errors import InputError

    own = getattr(reader, "read_many", None)
    if own is not None:
        return cast("Callable[[Sequence[Source], Incident], None]", own)

    def read_each(sources: Sequence[Source], incident: Incident) -> None:
        for source in sources:
            try:
                reader.read(source, incident)
            except InputError as error:
                incident.lack(str(error))

    return read_each
