"""``torch.cuda`` as a script sees it where there is none: one device a rank, nothing to wait for, memory to spare.

Functions of torch itself are told the truth (there is no device) so that they take their CPU paths; the script and
the libraries it uses are told that there is one.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace, TracebackType
from typing import Any

import torch

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
#: What the device says of itself: an H100 SXM (memory and processors as CUDA 12 reports them).
MEMORY_BYTES = 79 * 2**30
_NAME = "NVIDIA H100 80GB HBM3"
_CAPABILITY = (9, 0)


class Stream:
    """A stream: everything is done when it is issued."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cpu")
        self.device_index = 0
        self.stream_id = 0
        self.cuda_stream = 0
        self.priority = 0

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait_stream(self, other: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Any = None) -> Any:
        """An event, already over."""
        return event or Event()

    def query(self) -> bool:
        """All work is done."""
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, t: TracebackType | None) -> None:
        return None


class Event:
    """An event, over when it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_event = 0

    def record(self, stream: Any = None) -> None:
        """Nothing to record."""

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """It is over."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds; a dry-run has no times."""
        return 1.0


class Device(contextlib.AbstractContextManager[Any]):
    """``with torch.cuda.device(n):``."""

    def __init__(self, device: Any = None) -> None:
        self.idx = 0

    def __exit__(self, *error: Any) -> None:
        return None


@contextlib.contextmanager
def _within(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _says(value: Any) -> Callable[..., Any]:
    """A new function that returns ``value``; one a stub, as Dynamo refuses one object under two names."""
    return lambda *args, **kwargs: value


def outside_torch(depth: int = 2) -> bool:
    """Whether the caller of the function that asks is no file of torch."""
    return not sys._getframe(depth).f_code.co_filename.startswith(_TORCH)


def _properties(*args: Any) -> SimpleNamespace:
    return SimpleNamespace(
        name=_NAME, total_memory=MEMORY_BYTES, major=_CAPABILITY[0], minor=_CAPABILITY[1], multi_processor_count=132,
        is_integrated=False, is_multi_gpu_board=False, warp_size=32, gcnArchName="",
    )  # fmt: skip


#: Functions that return nothing or a figure.
_VALUES: dict[str, Any] = {
    **dict.fromkeys(
        ("_lazy_init", "init", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats",
         "reset_max_memory_allocated", "reset_max_memory_cached", "reset_accumulated_memory_stats",
         "set_per_process_memory_fraction", "set_stream", "manual_seed", "manual_seed_all", "seed", "seed_all",
         "set_sync_debug_mode", "set_rng_state_all", "_sleep")
    ),
    **dict.fromkeys(
        ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_cached",
         "max_memory_cached", "utilization", "temperature", "power_draw", "clock_rate", "initial_seed",
         "get_sync_debug_mode"), 0
    ),
    "memory_stats": {}, "memory_summary": "", "memory_snapshot": [], "list_gpu_processes": "",
    "mem_get_info": (MEMORY_BYTES, MEMORY_BYTES), "get_device_name": _NAME, "get_device_capability": _CAPABILITY,
    "is_bf16_supported": True, "is_initialized": True, "get_arch_list": ["sm_90"], "can_device_access_peer": True,
    "is_current_stream_capturing": False, "_is_in_bad_fork": False,
}  # fmt: skip


def install(local_rank: int, local_world: int) -> None:
    """Put the stubs into ``torch.cuda``."""
    cuda: Any = torch.cuda
    current = [local_rank if local_rank < local_world else 0]

    def index(device: Any) -> int:
        if isinstance(device, int):
            return device
        found = torch.device(device) if isinstance(device, str) else device
        return found.index if isinstance(found, torch.device) and found.index is not None else current[0]

    def set_device(device: Any) -> None:
        number = index(device)
        if number >= local_world:
            raise RuntimeError(
                f"CUDA error: invalid device ordinal (device {number} of {local_world} a node in this dry-run)"
            )
        current[0] = max(0, number)

    for name, value in _VALUES.items():
        if hasattr(cuda, name):
            setattr(cuda, name, _says(value))
    cuda.is_available = lambda: outside_torch()
    cuda.device_count = lambda: local_world
    cuda.current_device = lambda: current[0]
    cuda.set_device = set_device
    cuda.get_device_properties = _properties
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.get_rng_state_all = lambda: [torch.get_rng_state()]
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.current_stream, cuda.default_stream = _streams(), _streams()
    cuda.Stream, cuda.Event, cuda.ExternalStream = Stream, Event, Stream
    cuda.streams.Stream, cuda.streams.Event = Stream, Event
    cuda.device, cuda.device_of = Device, Device
    cuda.stream = _within
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(cuda.nvtx, name, _says(0))
    cuda.nvtx.range = _within
    cuda.nccl.version = _says((2, 27, 7))
    torch.version.cuda = "13.0"
    cuda.memory._record_memory_history = _says(None)
    cuda.memory._dump_snapshot = _says(None)
    for kind in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool"):
        setattr(cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))


def _streams() -> Callable[..., Stream]:
    stream = Stream()
    return lambda device=None: stream
