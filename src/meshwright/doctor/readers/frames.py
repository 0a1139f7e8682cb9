"""Call stacks in text, and the line of the user's program in them."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from meshwright.doctor.incident import Frame, is_library

_PYTHON = re.compile(r' {0,8}File "(?P<file>[^"\n]{1,400})", line (?P<line>\d{1,9})(?:,)? in (?P<name>[^\n]{1,200})')
_RECORDER = re.compile(r"#\d{1,4} (?P<name>[^\n]{1,200}?) from (?P<file>[^\n]{1,400}):(?P<line>\d{1,9})\s*$")
_PYSPY = re.compile(r"\s{2,8}(?P<name>[^\s(][^(\n]{0,200}?) \((?P<file>[^()\n]{1,400}?)(?::(?P<line>\d{1,9}))?\)\s*$")

#: First parts of paths that py-spy shortens (it cuts what is on sys.path): packages that are nobody's own program.
_PACKAGES = frozenset({"torch", "numpy", "ray", "threading", "torchdata", "triton", "cupy", "uvloop", "zmq", "gloo"})

#: Where a thread waits, by (part of a file name, names of functions or "" for any), the innermost frames first.
_PLACES: tuple[tuple[str, str, re.Pattern[str]], ...] = (
    ("checkpoint", "torch/serialization.py", re.compile("")),
    ("checkpoint", "torch/distributed/checkpoint/", re.compile("")),
    ("checkpoint", "safetensors/", re.compile("")),
    ("data_loading", "torch/utils/data/", re.compile("")),
    ("data_loading", "datasets/", re.compile("")),
    (
        "collective",
        "distributed_c10d.py",
        re.compile("all_|reduce|broadcast|gather|scatter|barrier|send|recv|wait|new_group|init_process_group"),
    ),
    ("collective", "torch/distributed/", re.compile("all_|reduce|broadcast|gather|scatter|barrier|wait")),
    ("rendezvous", "torch/distributed/rendezvous.py", re.compile("")),
    ("device_sync", "torch/cuda/", re.compile("synchronize|wait|query")),
    ("compile", "torch/_inductor/", re.compile("")),
    ("compile", "torch/_dynamo/", re.compile("")),
    ("compile", "triton/", re.compile("")),
)


def python_frame(text: str) -> Frame | None:
    """A line of a traceback (``File "x.py", line 3, in f``) or of faulthandler (without the second comma)."""
    match = _PYTHON.match(text)
    return Frame(match["name"].strip(), match["file"], int(match["line"])) if match else None


def recorder_frame(text: str) -> Frame | None:
    """A line of torch's "Stack trace of the failed collective" (``#0 all_reduce from x.py:3``)."""
    match = _RECORDER.match(text)
    return Frame(match["name"], match["file"], int(match["line"])) if match else None


def pyspy_frame(text: str) -> Frame | None:
    """A line of py-spy (``    f (x.py:3)``); native frames without a line are 0."""
    match = _PYSPY.match(text)
    return Frame(match["name"], match["file"], int(match["line"] or 0)) if match else None


def own_frame(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame of the user's program, None where there is none. Understands py-spy's shortened paths."""
    return next((f for f in frames if not _foreign(f)), None)


def site(frame: Frame) -> str:
    """``file:line``."""
    return f"{frame.file}:{frame.line}"


def place(frames: Sequence[Frame]) -> str | None:
    """What the thread waits in, from its innermost library frames; None where nothing is known of them."""
    for frame in frames:
        path = frame.file.replace("\\", "/")
        for name, part, functions in _PLACES:
            if part in path and functions.search(frame.function):
                return name
        if not _foreign(frame):
            return None
    return None


def describe(frames: Sequence[Frame]) -> dict[str, object]:
    """``data`` of a fact with a stack, innermost frame first: frames, call site, function and what it waits in."""
    data: dict[str, object] = {"frames": [tuple(f) for f in frames]}
    own = own_frame(frames)
    if own is not None:
        data["call_site"], data["function"] = site(own), own.function
    if frames and (where := place(frames)) is not None:
        data["where"] = where
    return data


def _foreign(frame: Frame) -> bool:
    if is_library(frame.file) or frame.line == 0:
        return True
    path = frame.file.replace("\\", "/")
    if path.startswith("/"):
        return False
    first = path.split("/", 1)[0]
    return first.removesuffix(".py") in sys.stdlib_module_names or first in _PACKAGES
