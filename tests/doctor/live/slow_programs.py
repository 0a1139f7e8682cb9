"""Small training loops on gloo with a planted slowness, recorded by torch.profiler: what the doctor must find.

Work is an operator that sleeps, so that a busy machine hardly changes what was put in. Every rank writes its trace and
what it measured itself (``seconds.json``).
"""

from __future__ import annotations

import gc
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: Recorded steps, and those before them.
STEPS, BEFORE = 4, 2
#: Seconds of a step that every case has: forward, backward, optimizer.
FORWARD_S, BACKWARD_S, OPTIMIZER_S = 0.08, 0.12, 0.02
#: Kind and guilty ranks by case.
EXPECTED: dict[str, tuple[str, frozenset[int]]] = {
    "data_stall": ("input_bound", frozenset({1})),
    "straggler": ("compute_straggler", frozenset({0})),
    "communication": ("bandwidth_bound_comm", frozenset()),
    "tiny_buckets": ("tiny_buckets", frozenset()),
    "gc_pause": ("gc_pauses", frozenset({1})),
    "host_sync": ("sync_bound", frozenset({0, 1})),
    "stages": ("stage_imbalance", frozenset({1})),
    "experts": ("expert_imbalance", frozenset({1})),
    "healthy": ("healthy", frozenset()),
}
#: Seconds that are put in, a step.
STALL_S, MORE_S, PAUSE_S, SYNC_S, STAGE_S, EXPERT_S = 0.4, 0.3, 0.5, 0.3, 0.15, 0.3
#: Micro-batches of the pipeline. Small and large all_reduces: how many, of how many elements.
MICRO_BATCHES, TINY, TINY_ELEMENTS, LARGE, LARGE_ELEMENTS = 4, 200, 1024, 4, 12 << 20

_library = torch.library.Library("slowcase", "DEF")
_library.define("work(Tensor x, float seconds) -> Tensor")


def _work(x: Tensor, seconds: float) -> Tensor:
    time.sleep(seconds)
    return x.clone()


_library.impl("work", _work, "CompositeExplicitAutograd")


class Layer(torch.autograd.Function):
    """Forward and backward of a layer that sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        return torch.ops.slowcase.work(x, forward_s)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return torch.ops.slowcase.work(grad, ctx.backward_s), None, None


def compute(x: Tensor, factor: float = 1.0) -> None:
    """Forward and backward."""
    Layer.apply(x, FORWARD_S * factor, BACKWARD_S * factor).sum().backward()


def optimize(x: Tensor) -> None:
    with torch.profiler.record_function("Optimizer.step#SGD.step"):
        torch.ops.slowcase.work(x, OPTIMIZER_S)


def synchronize() -> None:
    """Stands for what a host waits for its device in."""
    time.sleep(SYNC_S)


def _pause(phase: str, _: dict[str, int]) -> None:
    if phase == "start":
        time.sleep(PAUSE_S)


class Loop:
    """One rank of a case; ``spent`` is what it measured itself: in collectives that all entered
    together, or in the collection."""

    def __init__(self, rank: int, name: str) -> None:
        self.rank, self.name, self.spent = rank, name, 0.0
        self.x = torch.ones(8, requires_grad=True)
        self.gradient = torch.ones(LARGE_ELEMENTS if name == "communication" else TINY_ELEMENTS)

    def begin(self) -> None:
        """The recording has begun: from here on it counts. A pause comes before what a collection does itself."""
        self.spent = 0.0
        if self.name == "gc_pause":
            gc.callbacks.append(_pause)

    def end(self) -> None:
        if self.name == "gc_pause":
            gc.callbacks.remove(_pause)

    def step(self) -> None:
        getattr(self, f"_{self.name}", self._plain)()

    def _plain(self) -> None:
        compute(self.x)
        dist.all_reduce(self.gradient)
        optimize(self.x)

    _healthy = _plain

    def _data_stall(self) -> None:
        with torch.profiler.record_function("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"):
            time.sleep(STALL_S if self.rank == 1 else 0.001)
        self._plain()

    def _straggler(self) -> None:
        compute(self.x, 1 + MORE_S / (FORWARD_S + BACKWARD_S) * (self.rank == 0))
        dist.all_reduce(self.gradient)
        optimize(self.x)

    def _timed(self, times: int) -> None:
        """So many all_reduces after the backward, all launched at once as DDP does."""
        compute(self.x)
        dist.barrier()
        began = time.perf_counter()
        for work in [dist.all_reduce(self.gradient, async_op=True) for _ in range(times)]:
            work.wait()
        self.spent += time.perf_counter() - began
        optimize(self.x)

    def _communication(self) -> None:
        self._timed(LARGE)

    def _tiny_buckets(self) -> None:
        self._timed(TINY)

    def _gc_pause(self) -> None:
        if self.rank == 1:
            began = time.perf_counter()
            gc.collect()
            self.spent += time.perf_counter() - began
        self._plain()

    def _host_sync(self) -> None:
        compute(self.x)
        synchronize()
        dist.all_reduce(self.gradient)
        optimize(self.x)

    def _stages(self) -> None:
        """All forwards, then all backwards; the second stage takes longer by ``STAGE_S`` a micro-batch in each."""
        more = STAGE_S * (self.rank == 1)
        held = torch.ones(1024)
        for _ in range(MICRO_BATCHES):
            if self.rank == 1:
                dist.recv(held, 0)
            Layer.apply(self.x, FORWARD_S / 4 + more, 0.0)
            if self.rank == 0:
                dist.send(held, 1)
        for _ in range(MICRO_BATCHES):
            if self.rank == 0:
                dist.recv(held, 1)
            Layer.apply(self.x, 0.0, BACKWARD_S / 4 + more).sum().backward()
            if self.rank == 1:
                dist.send(held, 0)
        optimize(self.x)

    def _experts(self) -> None:
        tokens, out = torch.ones(4096), torch.ones(4096)
        dist.all_to_all_single(out, tokens)
        compute(self.x, 1 + EXPERT_S / (FORWARD_S + BACKWARD_S) * (self.rank == 1))
        dist.all_to_all_single(out, tokens)
        optimize(self.x)


def run_cases(rank: int, folder: str, names: tuple[str, ...]) -> None:
    """Body of a rank: every case, recorded."""
    gc.collect()
    gc.freeze()
    gc.disable()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        dist.barrier()
    for name in names:
        target = Path(folder) / name
        target.mkdir(exist_ok=True)
        loop = Loop(rank, name)
        dist.barrier()
        _record(loop, target / f"{rank}.pt.trace.json")
        (target / f"seconds_{rank}.json").write_text(json.dumps(loop.spent / STEPS))


def _record(loop: Loop, path: Path) -> None:
    """``STEPS`` steps under the profiler."""
    from torch._C._profiler import _ExperimentalConfig

    stacks = loop.name in {"gc_pause", "host_sync"}
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=0, warmup=BEFORE, active=STEPS, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
        record_shapes=True,
        with_stack=stacks,
        experimental_config=_ExperimentalConfig(record_python_gc_info=True) if stacks else None,
    ) as profiler:
        for number in range(BEFORE + STEPS):
            if number == BEFORE:
                loop.begin()
            loop.step()
            profiler.step()
    loop.end()
