"""Things that span lines of a log: tracebacks, stacks of faulthandler, py-spy and of torch's failed collective.

Lines of other processes may stand between, so a block takes only the lines of its own process (``Prefix.key``) and
ends at the first of them that does not belong to it.
"""

from __future__ import annotations

import re

from meshwright.doctor.incident import Frame
from meshwright.doctor.readers.frames import describe, pyspy_frame, python_frame, recorder_frame
from meshwright.doctor.readers.prefix import Prefix
from meshwright.doctor.readers.store import FileFacts
from meshwright.doctor.readers.troubles import troubles
from meshwright.doctor.readers.watchdog import reports, watchdog

MAX_FRAMES = 200
#: A block ends after this many of its own lines.
MAX_LINES = 600
#: Lines of other processes to wait for a chained traceback; every line costs while a block is open.
PATIENCE_FOR_CHAIN = 100

_EXCEPTION = re.compile(r"(?P<type>[A-Za-z_][\w.]{0,120})(?:: ?(?P<message>.*))?$")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_THREAD = re.compile(
    r"(?:(?P<current>Current thread|Thread) (?P<id>0x[0-9a-f]{1,16})(?: \[(?P<name>[^\]]{0,60})\])?|Stack) "
    r"\(most recent call first\)"
)
PYSPY_THREAD = re.compile(
    r'Thread (?P<id>0x[0-9A-Fa-f]{1,16}|\d{1,20})(?: \((?P<state>[\w+ ]{1,40})\))?(?:: "(?P<name>[^"\n]{0,120})")?'
)

#: Exceptions that end a process because of something else: another rank, the launcher, a person.
CONSEQUENCES = (
    "KeyboardInterrupt",
    "SystemExit",
    "SignalException",
    "ChildFailedError",
    "BrokenPipeError",
    "ConnectionResetError",
    "EOFError",
    "ActorDiedError",
    "EngineDeadError",
    "BrokenProcessPool",
    "ProcessExitedException",
    "ProcessRaisedException",
)


class Block:
    """Lines of one process that belong together.

    ``patience``: lines of other processes after which a block that waits for its next line is closed.
    """

    patience = 3000
    #: What every line of it begins with.
    indent = ""

    def __init__(self, prefix: Prefix, line: int, facts: FileFacts) -> None:
        self.prefix = prefix
        self.key = prefix.key
        self.line = line
        self.facts = facts
        self.lines = 0
        self.frames: list[Frame] = []

    def take(self, prefix: Prefix, line: int) -> bool:
        """Take a line of the same process; False when the block ended before it."""
        self.lines += 1
        return self.lines <= MAX_LINES and self._take(prefix, line)

    def _take(self, prefix: Prefix, line: int) -> bool:
        raise NotImplementedError

    def close(self) -> None:
        """Hand over what has been gathered."""
        raise NotImplementedError

    def _add(self, frame: Frame) -> bool:
        if len(self.frames) < MAX_FRAMES:
            self.frames.append(frame)
        return True


class Traceback(Block):
    """``Traceback (most recent call last):`` up to the line of the exception, and what is chained to it."""

    def __init__(self, prefix: Prefix, line: int, facts: FileFacts) -> None:
        super().__init__(prefix, line, facts)
        self._follows = False
        self._over = False

    def _take(self, prefix: Prefix, line: int) -> bool:
        text = prefix.rest.removeprefix(self.indent)
        if self._over:
            return self._after(prefix, line)
        if (frame := python_frame(text)) is not None:
            return self._add(frame)
        if text.startswith(" ") or not text.strip():
            return bool(text.strip()) or not self.frames
        match = _EXCEPTION.match(text)
        if match is None:
            return False
        self._note(match["type"], match["message"] or "", prefix, line)
        return True

    def _after(self, prefix: Prefix, line: int) -> bool:
        text = prefix.rest
        if not text.strip():
            return True
        if text.startswith(_CHAINED):
            self._follows = True
            return True
        if text.startswith("Traceback (most") and self._follows:
            self._over, self.frames, self.line, self.lines = False, [], line, 0
            self.patience = Block.patience
            return True
        return False

    def _note(self, name: str, message: str, prefix: Prefix, line: int) -> None:
        short = name.rsplit(".", 1)[-1]
        data = describe(list(reversed(self.frames)))
        data |= {"type": name, "message": message[:300]}
        if self._follows:
            data["follows"] = True
        reports(prefix, line, self.facts)
        timeout = "Watchdog" in message and watchdog(prefix, line, self.facts)
        cause = troubles(prefix, line, self.facts)
        if timeout or short in CONSEQUENCES or cause in ("gloo_consequence", "nccl_consequence"):
            data["consequence"] = True
        self.prefix.rest = f"{name}: {message}" if message else name
        same = (name, message[:120], data.get("call_site"))
        self.facts.add("exception", self.prefix, self.line, data, text=self.prefix.rest, same=same)
        self._over, self.patience = True, PATIENCE_FOR_CHAIN

    def close(self) -> None:
        """A traceback cut off before its exception is still a place where the rank was."""
        if not self._over and self.frames:
            data = describe(list(reversed(self.frames))) | {"cut": True}
            self.facts.add("exception", self.prefix, self.line, data, text="Traceback, cut off", same=str(data))


class FailedCollective(Block):
    """torch's stack of the collective that timed out."""

    def _take(self, prefix: Prefix, line: int) -> bool:
        frame = recorder_frame(prefix.rest)
        return frame is not None and self._add(frame)

    def close(self) -> None:
        """Note the stack where it has frames."""
        if self.frames:
            data = describe(self.frames)
            same = str(data["frames"])
            self.facts.add("collective_stack", self.prefix, self.line, data, text=self.prefix.rest, same=same)


class FaultHandler(Block):
    """Stacks of all threads, printed by ``faulthandler``: the last one is the main thread's."""

    def __init__(self, prefix: Prefix, line: int, facts: FileFacts) -> None:
        super().__init__(prefix, line, facts)
        self._threads: list[tuple[str, bool, int, list[Frame]]] = []
        self._start(prefix, line)

    def _start(self, prefix: Prefix, line: int) -> bool:
        match = _THREAD.search(prefix.rest)
        if match is None or len(self._threads) >= 256:
            return False
        self.frames = []
        name = match["name"] or match["id"] or "current"
        self._threads.append((name, match["current"] in ("Current thread", None), line, self.frames))
        return True

    def _take(self, prefix: Prefix, line: int) -> bool:
        if (frame := python_frame(prefix.rest)) is not None:
            return self._add(frame)
        text = prefix.rest.strip()
        return not text or text.startswith(("...", "<no Python frame>")) or self._start(prefix, line)

    def close(self) -> None:
        """Note each thread that has frames."""
        for order, (name, current, line, frames) in enumerate(self._threads):
            if frames:
                data = describe(frames) | {"thread": name, "current": current, "tool": "faulthandler"}
                data["main"] = order == len(self._threads) - 1
                self.facts.add("stack", self.prefix, line, data, text=_headline(frames), same=str(data["frames"]))


class PySpy(Block):
    """One thread of ``py-spy dump``."""

    def __init__(self, prefix: Prefix, line: int, facts: FileFacts, pid: int | None = None) -> None:
        super().__init__(prefix, line, facts)
        match = PYSPY_THREAD.search(prefix.rest)
        self._state = (match["state"] or "") if match else ""
        self._name = (match["name"] or match["id"]) if match else ""
        self._main = self._name == "MainThread" or bool(match and pid is not None and match["id"] == str(pid))
        self._pid = pid

    def _take(self, prefix: Prefix, line: int) -> bool:
        frame = pyspy_frame(prefix.rest)
        if frame is not None:
            return self._add(frame)
        return prefix.rest.startswith("        ")

    def close(self) -> None:
        """Note the thread where it has frames."""
        if not self.frames:
            return
        data = describe(self.frames) | {"thread": self._name, "main": self._main, "tool": "py-spy"}
        data |= {"active": "active" in self._state, "gil": "gil" in self._state}
        if self._pid is not None:
            data["pid"] = self._pid
        self.facts.add("stack", self.prefix, self.line, data, text=_headline(self.frames))


def opened(prefix: Prefix, line: int, facts: FileFacts) -> Block | None:
    """The block that a line begins, None where it begins none."""
    text = prefix.rest
    if "Traceback (most recent call last)" in text:
        return Traceback(prefix, line, facts)
    if "(most recent call first)" in text and _THREAD.search(text):
        return FaultHandler(prefix, line, facts)
    if "Stack trace of the failed collective" in text and "not found" not in text:
        return FailedCollective(prefix, line, facts)
    if '"MainThread"' in text and PYSPY_THREAD.match(text):
        return PySpy(prefix, line, facts)
    return None


def _headline(frames: list[Frame]) -> str:
    return " < ".join(f"{f.function} ({f.file.rsplit('/', 1)[-1]}:{f.line})" for f in frames[:6])
