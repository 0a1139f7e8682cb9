"""The line between a rank and the coordinator: one JSON object a line over a socket pair, from several threads."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterable
from itertools import count
from typing import Any

from meshwright.ledger.matching import Call

#: What a rank ends with when the coordinator is gone.
ORPHANED = 3


class Link:
    """A rank's end. ``post`` and ``wait`` return when the coordinator lets the caller go on."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = sock.makefile("rb")
        self._numbers = count()
        self._lock = threading.Lock()
        self._turn = threading.Condition()
        self._reading = False
        self._answers: dict[int, dict[str, Any]] = {}
        self._threads = count()
        self._local = threading.local()

    def post(self, call: Call, *, hold: bool, **more: Any) -> tuple[int, dict[str, Any]]:
        """Post an operation; with ``hold`` wait until its peers have posted theirs. Its number, and the answer."""
        number = next(self._numbers)
        self._say(say="post", number=number, hold=hold, thread=self._thread(), call=call, **more)
        return number, self._answer(number) if hold else {}

    def wait(self, numbers: Iterable[int]) -> None:
        """Wait until the operations with these numbers are matched."""
        number = next(self._numbers)
        self._say(say="wait", number=number, thread=self._thread(), tickets=list(numbers))
        self._answer(number)

    def tell(self, **what: Any) -> None:
        """Say something that needs no answer."""
        self._say(**what)

    def _thread(self) -> int:
        """Number of the calling thread; its end is told when its locals go."""
        if not hasattr(self._local, "end"):
            self._local.end = _End(self, next(self._threads))
        number: int = self._local.end.number
        return number

    def _say(self, **message: Any) -> None:
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        try:
            with self._lock:
                self._sock.sendall(line)
        except OSError:
            os._exit(ORPHANED)

    def _answer(self, number: int) -> dict[str, Any]:
        """The answer to one number; whoever waits reads for all, one at a time."""
        while True:
            with self._turn:
                while self._reading and number not in self._answers:
                    self._turn.wait()
                if number in self._answers:
                    return self._answers.pop(number)
                self._reading = True
            line = self._reader.readline()
            if not line:
                os._exit(ORPHANED)
            answer = json.loads(line)
            with self._turn:
                self._answers[answer["go"]] = answer
                self._reading = False
                self._turn.notify_all()


class _End:
    """Lives as long as its thread."""

    def __init__(self, link: Link, number: int) -> None:
        self.number = number
        self._link = link

    def __del__(self) -> None:
        self._link.tell(say="thread_end", thread=self.number)


def as_call(values: list[Any]) -> Call:
    """A call as it comes out of JSON, where tuples are lists."""

    def tuples(value: Any) -> Any:
        return tuple(tuples(v) for v in value) if isinstance(value, list) else value

    return Call(*(tuples(v) for v in values))
