"""Makes small profiler traces of several ranks: what each does is told, when collectives begin and end follows.

On a device every piece of work is a kernel with its launch on the host; on CPU it is an operator, and collectives are
spans of gloo's thread.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BASE_NS = 1_790_000_000_000_000_000
COMPUTE_STREAM, COMM_STREAM = 7, 20
MAIN, AUTOGRAD, GLOO = 100, 101, 102
NAMES = {"forward": "aten::linear", "backward": "autograd::engine::evaluate_function: AddmmBackward0"}
KERNELS = ("gemm_nn", "gemm_tn", "softmax", "layer_norm", "gelu", "add")


class TraceMaker:
    """``now[r]`` is the time of rank r in seconds; every call lets time pass."""

    def __init__(self, ranks: int, *, device: bool = True, clocks: Sequence[float] = (), world: int = 0) -> None:
        self.ranks = range(ranks)
        self.device = device
        self.clocks = list(clocks) or [0.0] * ranks
        self.world = world or ranks
        self.now = [0.01] * ranks
        self.begun = [0.0] * ranks
        self.events: list[list[dict[str, Any]]] = [[] for _ in self.ranks]
        self.number = 0
        self.seq: dict[tuple[int, ...], int] = {}
        self.groups: dict[tuple[int, ...], str] = {tuple(self.ranks): "0"}
        self.name = "NVIDIA H100 80GB HBM3"

    def _add(self, r: int, cat: str, name: str, start: float, took: float, tid: int, **args: Any) -> None:
        us = (start + self.clocks[r]) * 1e6
        event = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": round(us, 3)}
        self.events[r].append(event | {"dur": round(took * 1e6, 3), "args": args})

    def begin(self) -> None:
        """A step begins on every rank."""
        self.begun = list(self.now)

    def end(self) -> None:
        """The step ends on every rank."""
        for r in self.ranks:
            name = f"ProfilerStep#{self.number}"
            self._add(r, "user_annotation", name, self.begun[r], self.now[r] - self.begun[r], MAIN)
        self.number += 1

    def host(self, r: int, name: str, seconds: float, cat: str = "user_annotation") -> None:
        """Something on the host: data loading, garbage collection, a synchronization."""
        self._add(r, cat, name, self.now[r], seconds, MAIN)
        self.now[r] += seconds

    def data(self, r: int, seconds: float) -> None:
        """The loader gives the next batch."""
        self.host(r, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", seconds)

    def nothing(self, r: int, seconds: float) -> None:
        """Nothing is recorded."""
        self.now[r] += seconds

    def work(self, r: int, phase: str, seconds: float, pieces: int = 6, gap: float = 0.0) -> None:
        """Computation: ``pieces`` kernels or operators; before each the device waits ``gap`` for its launch."""
        for n in range(pieces):
            each = seconds / pieces
            at = self.now[r]
            name = "Optimizer.step#AdamW.step" if phase == "optimizer" else NAMES[phase]
            cat = "user_annotation" if phase == "optimizer" else "cpu_op"
            self._add(
                r, cat, name, at, gap or (each if not self.device else 4e-6), AUTOGRAD if phase == "backward" else MAIN
            )
            if not self.device and phase == "optimizer":
                self._add(r, "cpu_op", "aten::add_", at, each, MAIN)
            if self.device:
                kernel = KERNELS[n % len(KERNELS)]
                identity = len(self.events[r])
                tid = AUTOGRAD if phase == "backward" else MAIN
                self._add(r, "cuda_runtime", "cudaLaunchKernel", at + gap, 2e-6, tid, correlation=identity)
                args = {"stream": COMPUTE_STREAM, "correlation": identity, "device": 0}
                self._add(r, "kernel", kernel, at + gap + 2e-6, each - 2e-6, COMPUTE_STREAM, **args)
            self.now[r] = at + gap + each

    def meet(
        self,
        op: str,
        elements: int,
        transfer: float,
        ranks: Sequence[int] | None = None,
        *,
        named: bool = True,
        hidden: bool = False,
    ) -> None:
        """A collective ends ``transfer`` seconds after the last one arrived; with ``hidden`` nobody waits for it."""
        members = tuple(self.ranks if ranks is None else ranks)
        group = self.groups.setdefault(members, str(len(self.groups)))
        seq = self.seq[members] = self.seq.get(members, 0) + 1
        end = max(self.now[r] for r in members) + transfer
        for r in members:
            args: dict[str, Any] = {}
            if named:
                ranks_text = f"[{', '.join(map(str, members))}]"
                args = {"Collective name": op, "In msg nelems": elements, "Out msg nelems": elements, "dtype": "Float"}
                args |= {"Group size": len(members), "Process Group Name": group, "Process Group Ranks": ranks_text}
                args["Seq"] = seq
            self._call(r, op, self.now[r], end, elements, args)
            if not hidden:
                self.now[r] = end

    def _call(self, r: int, op: str, start: float, end: float, elements: int, args: dict[str, Any]) -> None:
        if not self.device:
            dims = {"Input Dims": [[elements]], "Input type": ["float"]}
            self._add(r, "user_annotation", f"gloo:{op}", start, end - start, GLOO, **dims)
            return
        identity = len(self.events[r])
        self._add(r, "cuda_runtime", "cudaLaunchKernelExC", start, 2e-6, MAIN, correlation=identity)
        words = {"all_reduce": "AllReduce", "all_to_all": "SendRecv", "reduce_scatter": "ReduceScatter"}
        name = f"ncclDevKernel_{words.get(op, 'AllGather')}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        extra = {"stream": COMM_STREAM, "correlation": identity, "device": 0}
        self._add(r, "kernel", name, start, end - start, COMM_STREAM, **extra, **args)

    def hand_off(self, source: int, target: int, elements: int, transfer: float) -> None:
        """A send that costs its sender nothing, and the receive that waits for it."""
        sent = self.now[source]
        got = max(self.now[target], sent) + transfer
        self._add(source, "user_annotation", f"gloo:send {source}->{target}", sent, transfer, GLOO, **_dims(elements))
        begin = self.now[target]
        name = f"gloo:recv {target}<-{source}"
        self._add(target, "user_annotation", name, begin, got - begin, GLOO, **_dims(elements))
        self.now[target] = got

    def document(self, r: int) -> dict[str, Any]:
        """The trace of a rank."""
        listed = [{"pg_name": n, "pg_desc": "", "pg_size": len(m), "ranks": list(m)} for m, n in self.groups.items()]
        backend = "nccl" if self.device else "gloo"
        info = {"backend": backend, "rank": r, "world_size": self.world, "pg_config": listed}
        properties = [{"id": 0, "name": self.name}] if self.device else []
        head = {
            "schemaVersion": 1,
            "deviceProperties": properties,
            "distributedInfo": info,
            "host_name": f"node{r // 8}",
        }
        return head | {"baseTimeNanoseconds": BASE_NS, "traceEvents": self.events[r]}

    def write(self, folder: Path, names: str = "trace{}.json", packed: bool = False) -> Path:
        """One file a rank."""
        folder.mkdir(parents=True, exist_ok=True)
        for r in self.ranks:
            text = json.dumps(self.document(r)).encode()
            path = folder / (names.format(r) + (".gz" if packed else ""))
            path.write_bytes(gzip.compress(text, 1) if packed else text)
        return folder


def _dims(elements: int) -> dict[str, Any]:
    return {"Input Dims": [[elements]], "Input type": ["float"]}
