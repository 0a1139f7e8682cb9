"""Reads many Flight Recorder dumps on all cores: the crew's processes send columns back as bytes.

A process that dies or takes too long loses the file that it was reading, no other.
"""

from __future__ import annotations

import marshal
from array import array
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from meshwright.doctor.incident import Table
from meshwright.doctor.readers import crew
from meshwright.doctor.readers.fr_rows import Dump, Tables
from meshwright.errors import InputError

#: One file may take this long, about a thousand times what a dump of 2,000 entries takes.
FILE_TIMEOUT_S = 60.0
#: Files between two collections of garbage.
TIDY_EVERY = 16
COLUMNS = {"group": "i", "signature": "i", "stack": "i", "seq": "q", "record": "q"} | {
    "state": "b",
    "p2p": "b",
    "created_ns": "q",
}

#: Numbers in the incident's tables of the rows of one process's tables.
Numbers = dict[str, list[int]]


def _plain(dump: Dump) -> tuple[Any, ...]:
    columns = {name: column.tobytes() for name, column in dump.columns.items()}
    return dump.backend, columns, dump.config, dump.ids, dump.status, dump.place, dump.dropped, dump.meta


class _Parser:
    """Makes every file one message, with the rows that the tables of its process gained."""

    def __init__(self, parse: Callable[[int, Tables], Dump]) -> None:
        self._parse, self._tables, self._sent = parse, Tables(), [0, 0, 0]

    def __call__(self, index: int) -> bytes:
        try:
            dump: Any = _plain(self._parse(index, self._tables))
        except InputError as error:
            dump = str(error)
        except Exception as error:  # whatever a hostile file leads to ends here
            dump = f"a dump could not be read ({type(error).__name__})"
        gained = []
        own: tuple[Table[Any], ...] = (self._tables.groups, self._tables.signatures, self._tables.stacks)
        for place, table in enumerate(own):
            rows: list[Any] = table.rows[self._sent[place] :]
            self._sent[place] = len(table)
            gained.append([[tuple(f) for f in row] for row in rows] if place == 2 else [tuple(row) for row in rows])
        return marshal.dumps((gained, dump))


def read_all(
    count: int,
    parse: Callable[[int, Tables], Dump],
    take: Callable[[int, Any, Numbers], None],
    lost: Callable[[int, str], None],
) -> None:
    """Have ``parse(index, tables)`` done for 0 ... count - 1 in forked processes.

    ``take(index, message, numbers)`` gets what came of each, with the numbers of its process's rows to add to;
    ``lost(index, how)`` the files on which a process died or took longer than ``FILE_TIMEOUT_S``.
    """
    numbers: dict[int, Numbers] = defaultdict(lambda: {"groups": [], "signatures": [], "stacks": []})

    def message(process: int, index: int, data: bytes) -> None:
        take(index, marshal.loads(data), numbers[process])

    crew.run(range(count), _Parser(parse), message, lost, lambda index: FILE_TIMEOUT_S, TIDY_EVERY)


def arrays(columns: dict[str, bytes]) -> dict[str, array[int]]:
    """Columns from the bytes of a message."""
    out = {}
    for name, code in COLUMNS.items():
        out[name] = array(code)
        out[name].frombytes(columns[name])
    return out
