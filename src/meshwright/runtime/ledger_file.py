"""Keeps a rank's ledger file up to date while the program runs, so that it outlives any death of the program.

Every call is appended before the backend sees it, because gloo ends the process from within where sizes disagree. A
thread writes every half second what became of them: what is complete is written once; operations that still run are
written behind it each time anew. So a file left by a killed or hanging rank ends in what the rank was waiting for.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import threading
from pathlib import Path

from meshwright.errors import InputError
from meshwright.ledger import store
from meshwright.ledger.schema import Entry
from meshwright.runtime.record import Recorder

PERIOD_S = 0.5
#: Entries behind which an operation that never ended is no longer waited for.
MAX_OPEN = 1000
_COLUMNS = tuple(store.TABLES["entries"][1])
_VALUES = operator.attrgetter(*_COLUMNS)
_encode = json.JSONEncoder(separators=(",", ":")).encode


def _row(entry: Entry) -> str:
    """What ``store.row_lines`` makes of an entry, in a tenth of the time: this is on the way of every call."""
    pairs = zip(_COLUMNS, _VALUES(entry), strict=True)
    return _encode({"table": "entries", **{name: value for name, value in pairs if value is not None}}) + "\n"


class LedgerFile:
    """Writes ``recorder`` into ``path`` (JSON lines) until ``close``: calls as they begin, ends every half second.

    Raises:
        InputError: the folder cannot be made or the file cannot be written.
    """

    def __init__(self, recorder: Recorder, path: Path) -> None:
        self.recorder, self.path = recorder, path
        self._pid = os.getpid()
        #: Entries of which all is written, and entries of which there is a row.
        self._done = self._written = 0
        #: Bytes of what is complete, and of the whole file.
        self._offset = self._end = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._out = open(path, "wb", buffering=0)  # noqa: SIM115 - open for as long as the recorder runs
        except OSError as error:
            raise InputError(f"ledger {path}: cannot be written ({error.strerror})") from None
        facts = recorder.ledger_head()
        self._put(0, store.head_line(facts) + "".join(store.row_lines("ranks", facts.ranks)))
        self._offset = self._end
        self._thread = threading.Thread(target=self._run, name="meshwright-ledger", daemon=True)
        self._thread.start()
        recorder.on_entry = self._entered

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            self._write()

    def _entered(self) -> None:
        """Append the call that begins now, behind what was recorded before it."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            entries = self.recorder.entries
            if not self._stop.is_set() and self._written < len(entries):
                new = entries[self._written :]
                self._put(self._end, "".join(map(_row, new)))
                self._written += len(new)

    def _write(self) -> None:
        """Append what is new and complete, then what is open."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            entries = self.recorder.entries
            count = len(entries)
            done = self._done
            while done < count and (entries[done].state == "completed" or count - done > MAX_OPEN):
                done += 1
            text = "".join(store.row_lines("entries", entries[self._done : done]))
            tail = "".join(store.row_lines("entries", entries[done:count]))
            self._put(self._offset, text + tail)
            self._offset += len(text.encode())
            self._done, self._written = done, count

    def _put(self, at: int, text: str) -> None:
        """Let the file end in ``text`` from byte ``at`` on. A disk that is full costs rows, never the program."""
        with contextlib.suppress(OSError):
            if at < self._end:
                os.ftruncate(self._out.fileno(), at)
            data = text.encode()
            os.pwrite(self._out.fileno(), data, at)
            self._end = at + len(data)

    def close(self) -> None:
        """Stop the thread and write the whole ledger, holdings and ranks included."""
        if os.getpid() != self._pid or self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(timeout=10)
        with self._lock:
            self._out.close()
        whole = self.path.with_name(self.path.name + ".new")
        store.write_jsonl(self.recorder.ledger(), whole)
        os.replace(whole, self.path)
