"""Keeps a rank's ledger file up to date while the program runs, so that it outlives any death of the program.

A thread writes every half second. What is complete is written once; operations that still run are written behind it
each time anew, so that a file left by a killed or hanging rank ends in what the rank was waiting for.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from meshwright.errors import InputError
from meshwright.ledger import store
from meshwright.runtime.record import Recorder

PERIOD_S = 0.5
#: Entries behind which an operation that never ended is no longer waited for.
MAX_OPEN = 1000


class LedgerFile:
    """Writes ``recorder`` into ``path`` (JSON lines) every half second until ``close``.

    Raises:
        InputError: the folder cannot be made or the file cannot be written.
    """

    def __init__(self, recorder: Recorder, path: Path) -> None:
        self.recorder, self.path = recorder, path
        self._pid = os.getpid()
        self._done = 0
        self._offset = 0
        self._stop = threading.Event()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._out = open(path, "wb")  # noqa: SIM115 - open for as long as the recorder runs
        except OSError as error:
            raise InputError(f"ledger {path}: cannot be written ({error.strerror})") from None
        self._thread = threading.Thread(target=self._run, name="meshwright-ledger", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            self._write()

    def _write(self) -> None:
        """Append what is new and complete, then what is open."""
        if os.getpid() != self._pid:
            return
        entries = self.recorder.entries
        count = len(entries)
        end = self._done
        while end < count and (entries[end].state == "completed" or count - end > MAX_OPEN):
            end += 1
        head = ""
        if not self._offset:
            facts = self.recorder.ledger_head()
            head = store.head_line(facts) + "".join(store.row_lines("ranks", facts.ranks))
        text = head + "".join(store.row_lines("entries", entries[self._done : end]))
        tail = "".join(store.row_lines("entries", entries[end:count]))
        self._out.seek(self._offset)
        self._out.truncate()
        self._offset += self._out.write(text.encode())
        self._out.write(tail.encode())
        self._out.flush()
        self._done = end

    def close(self) -> None:
        """Stop the thread and write the whole ledger, holdings and ranks included."""
        if os.getpid() != self._pid or self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(timeout=10)
        self._out.close()
        whole = self.path.with_name(self.path.name + ".new")
        store.write_jsonl(self.recorder.ledger(), whole)
        os.replace(whole, self.path)
