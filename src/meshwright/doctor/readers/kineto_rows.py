"""Events of one profiler trace as columns, batch by batch, so that a trace of several GiB needs little memory.

Only what the doctor asks is kept: device work with stream and correlation, launches, spans of the host that mean
something (``kineto_names``), calls of collectives with their arguments. Anything of a wrong type is left out.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

from meshwright.doctor.readers.events import Event
from meshwright.doctor.readers.kineto_names import COMM, STEP, WORK, host_kind, kernel_op

#: Calls of collectives kept of a trace, and names remembered.
MAX_CALLS = 200_000
MAX_NAMES = 200_000
#: Characters of a name that are looked at, steps kept, numbers in a list of shapes.
MAX_NAME, MAX_STEPS, MAX_NUMBERS = 2000, 100_000, 1024
#: Beyond these microseconds a time is absolute, and no base is added (2001-09-09).
ABSOLUTE_US = 1e15
#: Times beyond this many microseconds are nonsense (64-bit nanoseconds end at 9.2e15).
_LAST_US = 9e15

_DEVICE = {
    "kernel": "kernel",
    "Kernel": "kernel",
    "gpu_memcpy": "copy",
    "Memcpy": "copy",
    "gpu_memset": "copy",
    "Memset": "copy",
    "concurrent_kernel": "kernel",
    "privateuse1_kernel": "kernel",
}
_HOST = {
    "cpu_op": "cpu_op",
    "Operator": "cpu_op",
    "user_annotation": "user_annotation",
    "python_function": "python_function",
    "cuda_runtime": "runtime",
    "Runtime": "runtime",
    "cuda_driver": "runtime",
    "hip_runtime": "runtime",
    "xpu_runtime": "runtime",
    "cuda_sync": "runtime",
    "privateuse1_runtime": "runtime",
}
_CALL_ARGS = (
    "Collective name",
    "In msg nelems",
    "Out msg nelems",
    "Group size",
    "dtype",
    "In split size",
    "Out split size",
    "Process Group Name",
    "Process Group Description",
    "Process Group Ranks",
    "Rank",
    "Src Rank",
    "Dst Rank",
    "Seq",
    "Input Dims",
    "Input type",
)
#: Shared by all calls that carry none; never written to.
_NO_ARGS: dict[str, Any] = {}


@dataclass(slots=True)
class Call:
    """A collective as a trace shows it: a kernel on the device, or a span of the host."""

    start: int
    end: int
    lane: int
    name: str
    args: dict[str, Any]
    correlation: int = -1


@dataclass(slots=True)
class Device:
    """Kernels, or copies: microseconds x 1000, before any base is added."""

    start: array[int] = field(default_factory=lambda: array("q"))
    end: array[int] = field(default_factory=lambda: array("q"))
    stream: array[int] = field(default_factory=lambda: array("q"))
    name: array[int] = field(default_factory=lambda: array("i"))
    correlation: array[int] = field(default_factory=lambda: array("q"))


@dataclass(slots=True)
class Spans:
    """Spans of the host of one kind; the lane is a thread."""

    start: array[int] = field(default_factory=lambda: array("q"))
    end: array[int] = field(default_factory=lambda: array("q"))
    lane: array[int] = field(default_factory=lambda: array("i"))


class Rows:
    """Takes batches of events.

    Attributes:
        kernels, copies: device work that does not communicate. calls: kernels that do. host_calls: spans of the host
            that belong to a collective.
        spans: by kind. steps: (name, start, end, thread). launches: correlation -> columns of time and thread.
        names: of kernels and operators by number. bad: events left out because something in them has a wrong type.
    """

    def __init__(self) -> None:
        self.kernels, self.copies = Device(), Device()
        self.calls: list[Call] = []
        self.host_calls: list[Call] = []
        self.spans: dict[str, Spans] = {}
        self.steps: list[tuple[str, int, int, int]] = []
        self.launch_id, self.launch_at, self.launch_lane = array("q"), array("q"), array("i")
        self.names: list[str] = []
        self.work_name, self.work_ns = array("i"), array("q")
        self.events = self.bad = self.dropped = self.graph_launches = 0
        self._numbers: dict[str, int] = {}
        self._lanes: dict[Any, int] = {}
        self._kinds: dict[str, dict[str, str | None]] = {}
        self._ops: dict[str, bool] = {}
        self._held: dict[tuple[str, int], tuple[int, int]] = {}

    def take(self, batch: list[Event]) -> None:
        """Keep what matters of a batch."""
        self.events += len(batch)
        for event in batch:
            if event.get("ph") != "X":
                continue
            try:
                ts, dur = event["ts"], event.get("dur", 0)
                if not (0 <= ts < _LAST_US and 0 <= dur < _LAST_US):
                    raise ValueError
                start = int(ts * 1000)
                self._event(event, start, start + int(dur * 1000))
            except (TypeError, ValueError, KeyError, OverflowError, AttributeError):
                self.bad += 1

    def _event(self, event: Event, start: int, end: int) -> None:
        category = event.get("cat")
        device = _DEVICE.get(category) if category is not None else self._legacy(event)
        if device is not None:
            self._device(event, device, start, end)
            return
        host = _HOST.get(category, "cpu_op" if category is None else "")  # type: ignore[arg-type]
        if host:
            self._host(event, host, start, end)

    @staticmethod
    def _legacy(event: Event) -> str | None:
        """Traces of the old autograd profiler have no categories, but a process of that name."""
        return "kernel" if event.get("pid") == "CUDA functions" else None

    def _device(self, event: Event, kind: str, start: int, end: int) -> None:
        name = event["name"][:MAX_NAME]
        args = event.get("args") or {}
        known = self._ops.get(name)
        if known is None:
            known = self._ops[name] = kernel_op(name) is not None
            if len(self._ops) > MAX_NAMES:
                self._ops.clear()
        stream, correlation = args.get("stream", event.get("tid")), args.get("correlation", -1)
        if type(correlation) is not int or not -1 <= correlation < 1 << 62:
            correlation = -1
        lane = stream if type(stream) is int and 0 <= stream < 1 << 31 else self._lane(str(stream)) + (1 << 32)
        if known and kind == "kernel":
            self._call(self.calls, Call(start, end, lane, name[:200], _kept(args), correlation))
            return
        rows = self.kernels if kind == "kernel" else self.copies
        rows.start.append(start)
        rows.end.append(end)
        rows.stream.append(lane)
        rows.name.append(self._number(name))
        rows.correlation.append(correlation)

    def _call(self, calls: list[Call], call: Call) -> None:
        if len(calls) < MAX_CALLS:
            calls.append(call)
        else:
            self.dropped += 1

    def _host(self, event: Event, category: str, start: int, end: int) -> None:
        name = event["name"][:MAX_NAME]
        kinds = self._kinds.setdefault(category, {})
        if name in kinds:
            kind = kinds[name]
        else:
            kind = kinds[name] = host_kind(category, name)
            if len(kinds) > MAX_NAMES:
                kinds.clear()
        if category == "runtime":
            self._launch(event, name, start, end)
        if kind is None:
            return
        lane = self._lane(event.get("tid"))
        if kind == STEP:
            if len(self.steps) < MAX_STEPS:
                self.steps.append((name[:120], start, end, lane))
            return
        if kind == COMM:
            self._call(self.host_calls, Call(start, end, lane, name[:120], _kept(event.get("args") or {})))
            return
        if kind == WORK and event.get("pid") == "CPU functions" and start == end:
            return
        self._span(kind, start, end, lane, name)

    def _launch(self, event: Event, name: str, start: int, end: int) -> None:
        if "Launch" not in name and "Mem" not in name:
            return
        if "GraphLaunch" in name:
            self.graph_launches += 1
        args = event.get("args") or {}
        correlation = args.get("correlation")
        lane = self._lane(event.get("tid"))
        if type(correlation) is int and 0 <= correlation < 1 << 62:
            self.launch_id.append(correlation)
            self.launch_at.append(start)
            self.launch_lane.append(lane)
        self._span(WORK, start, end, lane, None)

    def _span(self, kind: str, start: int, end: int, lane: int, name: str | None) -> None:
        """Keep a span unless the last one of its kind and thread holds it."""
        held = self._held.get((kind, lane))
        if held is not None and held[0] <= start and end <= held[1]:
            return
        self._held[kind, lane] = (start, end)
        spans = self.spans.get(kind)
        if spans is None:
            spans = self.spans[kind] = Spans()
        spans.start.append(start)
        spans.end.append(end)
        spans.lane.append(lane)
        if name is not None and kind == WORK:
            self.work_name.append(self._number(name))
            self.work_ns.append(end - start)

    def _number(self, name: str) -> int:
        found = self._numbers.get(name)
        if found is None:
            if len(self.names) >= MAX_NAMES:
                return self._numbers.setdefault("...", 0)
            found = self._numbers[name] = len(self.names)
            self.names.append(name[:200])
        return found

    def _lane(self, tid: Any) -> int:
        tid = tid[:MAX_NAME] if isinstance(tid, str) else tid
        found = self._lanes.get(tid)
        if found is None:
            found = self._lanes[tid] = len(self._lanes) if len(self._lanes) < MAX_NAMES else 0
        return found


def _kept(args: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a collective that are read later, each bounded."""
    found = {key: value for key in _CALL_ARGS if (value := args.get(key)) is not None and _small(value)}
    return found or _NO_ARGS


def _small(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= 1 << 16
    if isinstance(value, list):
        return len(value) <= 64 and sum(len(v) for v in value if isinstance(v, list | str)) <= MAX_NUMBERS
    return isinstance(value, int | float)
