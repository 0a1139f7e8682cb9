"""A Chrome trace as a stream: events in batches, however large the file, then what stands before and after them.

The file is cut into stretches of a few MiB at places that look like the end of one event and the begin of the next; a
stretch counts as cut rightly when it parses. One that does not (a flipped byte, a trace cut off) is halved until the
event that is broken is alone, and left out. ``orjson`` parses where it is installed, else the standard library, which
also takes what ``orjson`` refuses: NaN and broken UTF-8.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

#: A stretch that is parsed at once; what one event, and what stands before or after the events, may take.
STRETCH_BYTES = 2 << 20
MAX_EVENT_BYTES = 32 << 20
MAX_HEAD_BYTES = 32 << 20

_OPEN = re.compile(rb'"traceEvents"\s*:\s*\[')
_KEYS = rb'"(?:ph|cat|name|pid|tid|ts|dur|args|id|bp|s)"'
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{\s*" + _KEYS + rb"\s*:)")
_CLOSE = re.compile(rb'\}\s*,?\s*\]\s*(?:,\s*"|\}\s*$|$)')

Event = dict[str, Any]


def _decoder() -> Callable[[bytes], Any] | None:
    try:
        import orjson
    except ImportError:
        return None
    return orjson.loads


class Events:
    """Events of one trace, and what is known of the trace once they have all been handed out.

    Attributes:
        meta: keys of the document beside ``traceEvents``.
        broken: stretches that could not be parsed. cut: the file ends before its events do.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self.meta: dict[str, Any] = {}
        self.broken = 0
        self.cut = False
        self._stream = stream
        self._fast = _decoder()
        self._over = False

    def batches(self) -> Iterator[list[Event]]:
        """Lists of events in the order of the file; anything that is no object is left out."""
        rest = self._begin()
        if rest is None:
            return
        while not self._over:
            try:
                data = self._stream.read(STRETCH_BYTES)
            except EOFError:
                data = b""
            rest += data
            if not data:
                break
            if len(rest) < STRETCH_BYTES:
                continue
            cut = self._last_cut(rest)
            if cut is None:
                if len(rest) > MAX_EVENT_BYTES:
                    self.broken += 1
                    rest = b""
                continue
            stretch, rest = rest[:cut], rest[cut:].lstrip()[1:]
            yield self._parsed(stretch)
        if not self._over:
            yield self._last(rest)
        self._drain()

    def _begin(self) -> bytes | None:
        """Read up to the first event; None when there is none."""
        head = b""
        while len(head) < MAX_HEAD_BYTES:
            try:
                data = self._stream.read(1 << 16)
            except EOFError:
                data = b""
            head += data
            bare = head.lstrip()
            if bare[:1] == b"[":
                return bare[1:]
            found = _OPEN.search(head)
            if found is not None:
                self._note(head[: found.start()].rstrip().rstrip(b",") + b"}")
                return head[found.end() :]
            if not data:
                break
        self.cut = True
        return None

    def _last_cut(self, data: bytes) -> int | None:
        """Place after the last event that is whole, as far as it looks."""
        for back in (1 << 16, len(data)):
            start = max(0, len(data) - back)
            places = [m.start() + 1 for m in _BETWEEN.finditer(data, start)]
            if places:
                return places[-1]
        return None

    def _loads(self, data: bytes) -> Any:
        if self._fast is not None:
            try:
                return self._fast(data)
            except ValueError:
                pass
        return json.loads(data.decode("utf-8", "replace"), strict=False)

    def _parsed(self, stretch: bytes) -> list[Event]:
        """Events of a stretch; one that does not parse is halved, unless the events end in it."""
        if not stretch.strip():
            return []
        try:
            return _objects(self._loads(b"[%b]" % stretch))
        except (ValueError, RecursionError):
            pass
        ended = self._ended(stretch)
        return ended if ended is not None else self._halves(stretch)

    def _ended(self, stretch: bytes) -> list[Event] | None:
        """Events of a stretch in which their list ends; what follows is kept as facts of the trace."""
        for found in list(_CLOSE.finditer(stretch))[:8]:
            try:
                events = _objects(self._loads(b"[%b}]" % stretch[: found.start()]))
            except (ValueError, RecursionError):
                continue
            self._over = True
            after = stretch[stretch.index(b"]", found.start()) + 1 :].strip().lstrip(b",")
            while len(after) < MAX_HEAD_BYTES:
                try:
                    data = self._stream.read(1 << 20)
                except EOFError:
                    data = b""
                if not data:
                    break
                after += data
            self._note(b"{" + after.strip())
            return events
        return None

    def _halves(self, stretch: bytes) -> list[Event]:
        """What parses of a broken stretch."""
        events: list[Event] = []
        parts = [stretch]
        while parts:
            part = parts.pop()
            try:
                events += _objects(self._loads(b"[%b]" % part))
                continue
            except (ValueError, RecursionError):
                pass
            middle = len(part) // 2
            place = _BETWEEN.search(part, middle) or next(_BETWEEN.finditer(part), None)
            if place is None:
                self.broken += 1
                continue
            parts += [part[place.end() :], part[: place.start() + 1]]
        return events

    def _last(self, rest: bytes) -> list[Event]:
        """Events of the last stretch, with what follows them, or up to where the file was cut off."""
        ended = self._ended(rest) if rest.strip() else None
        if ended is not None:
            return ended
        tail = rest.strip()
        if tail.startswith(b"]"):
            self._over = True
            self._note(b"{" + tail[1:].strip().lstrip(b","))
            return []
        closes = list(_CLOSE.finditer(rest))
        if closes:  # the list ends, but an event in it is broken
            self._over = True
            place = closes[-1].start() + 1
            self._note(b"{" + rest[rest.index(b"]", place) + 1 :].strip().lstrip(b","))
            return self._halves(rest[:place])
        self.cut = True
        whole = rest.rstrip().rstrip(b",")
        return self._parsed(whole) if whole.strip() else []

    def _note(self, text: bytes) -> None:
        if text.strip() in (b"{", b"{}", b"}"):
            return
        try:
            found = self._loads(text)
        except (ValueError, RecursionError):
            try:
                found = self._loads(text + b"}")
            except (ValueError, RecursionError):
                return
        if isinstance(found, dict):
            self.meta |= found

    def _drain(self) -> None:
        """Read what is left, so that a stream that is broken at its end says so."""
        while True:
            try:
                if not self._stream.read(1 << 20):
                    return
            except EOFError:
                self.cut = True
                return


def _objects(found: Any) -> list[Event]:
    return [e for e in found if type(e) is dict]
