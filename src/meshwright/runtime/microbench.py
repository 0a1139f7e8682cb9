"""Measures the machine as it is while the ranks of a layout run on it, and writes what it measured as a ledger.

``ledger.calibrate.fit`` reads that ledger. All ranks measure at once, so that they share cores and memory bandwidth
as they do in earnest: products over a stretch of memory as large as the rank's weights, attention over a paged cache,
memory traffic, every transfer of the layout over the transport that the runtime uses, and what the driver takes for a
layer and a pass (by a model that is too small for anything else to matter).
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from meshwright.ledger.calibrate import COPY, LIGHT, duration_s, sizes_of
from meshwright.ledger.schema import Entry, Ledger, Rank
from meshwright.runtime.stepbench import PROMPT, small_steps, together
from meshwright.specs.placement import AXES, Placement

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from meshwright.runtime.mesh import Group, Mesh
    from meshwright.runtime.serve.cache import Batch

#: Seconds that one repetition lasts at least, and how many there are.
SHORTEST_S, TIMES = 0.003, 3
#: Calls of a transfer in one repetition, and repetitions of small and large ones; fixed, because both sides count them.
#: A rank that the system puts aside for a moment makes a transfer many times slower: their median needs many.
CALLS, MOVE_TIMES, LARGE_TIMES, LARGE_BYTES = 12, 15, 5, 4 << 20
#: Largest stretch of memory that products walk through.
MAX_FOOTPRINT_BYTES = 256 << 20
#: Most layers of a cache that attention cores walk through.
MOST_LAYERS = 16
#: Memory traffic is measured on so much: beyond the caches.
COPY_BYTES = 64 << 20
#: Layers of the two small models whose difference is a layer, tokens they decode, and how often all of it is timed.
FEW, MANY, STEPS, ROUNDS = 2, 8, 40, 5
#: Products of a layer of the small model and how many of each, its head, and the bytes of its weights in f32; they are
#: timed by themselves as its attention is.
SMALL_PRODUCTS = {(1, 256, 256): 2, (1, 256, 128): 2, (1, 256, 1024): 2, (1, 1024, 256): 1}
SMALL_HEAD = 1, 256, 32
SMALL_BYTES = 24 << 20


class Core(NamedTuple):
    """An attention core: ``sequences`` of ``new`` tokens after ``past`` cached ones; heads and widths of a rank."""

    phase: str
    sequences: int
    new: int
    past: int
    heads: int
    kv_heads: int
    width: int
    value_width: int


class Move(NamedTuple):
    """A transfer: op, axis of its group, payload bytes."""

    op: str
    axis: str
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class BenchJob:
    """What every rank is told.

    Attributes:
        placement: whose groups are measured.
        products: ``(m, k, n)``: m rows by a weight of k x n. cores, moves: see there.
        footprint_bytes: of the weights of a rank.
        dtype: of all of it. device: ``cpu`` or ``cuda`` (one device a rank).
        alone: also measure what a rank does by itself; False: only transfers.
    """

    placement: Placement
    products: tuple[tuple[int, int, int], ...]
    cores: tuple[Core, ...] = ()
    moves: tuple[Move, ...] = ()
    footprint_bytes: int = 0
    dtype: str = "f32"
    device: str = "cpu"
    alone: bool = True


def microbench(rank: int, job: BenchJob) -> Ledger:
    """Body of a rank: measure everything, in the same order on all ranks."""
    import torch

    from meshwright.runtime.checkpoint import TORCH_DTYPES
    from meshwright.runtime.job import own_device
    from meshwright.runtime.mesh import build_mesh

    dtype = TORCH_DTYPES[job.dtype]
    device = own_device(job.device, rank)
    mesh = build_mesh(job.placement, rank, device)
    world = job.placement.layout.world
    with torch.inference_mode():  # and no torch.device as a context, which each call of torch would pay for
        entries = [*_moves(mesh, job.moves, dtype, job.dtype), *_messages(mesh)]
        together(mesh)
        if job.alone:
            entries += _copies(dtype, job.dtype, mesh.device)
            entries += _products(job, dtype, mesh.device)
            entries += _cores(job, dtype, mesh.device)
            entries += _driver(job, dtype, mesh.device)
    for entry in entries:
        entry.rank_class, entry.source, entry.state = f"rank{rank}", "record", "completed"
    meta = {"machine": machine(), "ranks": str(world), "torch": str(torch.__version__)}
    meta |= {f"group.{axis}": str(mesh.group(axis).size) for axis in (*AXES, "ep") if mesh.group(axis).size > 1}
    return Ledger(entries, ranks=[Rank(rank, {}, f"rank{rank}")], meta=meta)


def microbenches(rank: int, jobs: Sequence[BenchJob]) -> list[Ledger]:
    """``microbench`` of several jobs, one after the other on the same ranks."""
    return [microbench(rank, job) for job in jobs]


def machine() -> str:
    """The machine in words."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.system()} {platform.machine()}, {usable} CPUs"


def repeat(call: Callable[[], object], calls: int | None = None, times: int = TIMES) -> Iterator[tuple[int, int, int]]:
    """``(calls, began, ended)`` of ``times`` repetitions in ns; ``calls`` None: as many as last ``SHORTEST_S``."""
    call()
    if calls is None:
        call()
        _settle()
        began = time.perf_counter()
        call()
        _settle()
        calls = max(1, round(SHORTEST_S / max(time.perf_counter() - began, 1e-7)))
    else:  # ranks that have just met are not at pace yet
        for _ in range(calls):
            call()
    _settle()
    for _ in range(times):
        began_ns = time.monotonic_ns()
        for _ in range(calls):
            call()
        _settle()
        yield calls, began_ns, time.monotonic_ns()


def _settle() -> None:
    """Wait for the device, where there is one beside the CPU."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _timed(
    call: Callable[[], object], like: Entry, calls: int | None = None, share: int = 1, times: int = TIMES
) -> Iterator[Entry]:
    """Entries as ``like`` with the times of a call; ``share``: how many of the entry a call is."""
    for count, began, ended in repeat(call, calls, times):
        yield replace(like, count=count * share, started_ns=began, ended_ns=ended)


def _copies(dtype: torch.dtype, name: str, device: torch.device) -> Iterator[Entry]:
    """Bytes read and written by a copy, and the smallest op there is."""
    import torch

    source = torch.zeros(COPY_BYTES // dtype.itemsize, dtype=dtype, device=device)
    target = torch.empty_like(source)
    like = Entry("", COPY, stream="compute", shapes=(tuple(source.shape),), dtype=name, payload_bytes=2 * COPY_BYTES)
    yield from _timed(lambda: target.copy_(source), like)
    one = source[:4]
    yield from _timed(lambda: one.add_(1), Entry("", "launch", stream="compute"))


def _products(job: BenchJob, dtype: torch.dtype, device: torch.device) -> Iterator[Entry]:
    """Products with weights that follow one another in memory, as those of a pass do."""
    import torch

    from meshwright.runtime.models.parts import Linear

    size = dtype.itemsize
    largest = max((k * n * size for _, k, n in job.products), default=0)
    elements = max(largest, min(job.footprint_bytes, MAX_FOOTPRINT_BYTES)) // size
    stretch = torch.full((elements,), 0.01, dtype=dtype, device=device)
    for m, k, n in job.products:
        count = max(1, stretch.numel() // (k * n))
        linears = [Linear(stretch[i * k * n : (i + 1) * k * n].view(n, k)) for i in range(min(count, 64))]
        x = torch.full((m, k), 0.5, dtype=dtype, device=device)

        def call(linears: list[Linear] = linears, x: Tensor = x) -> None:
            for linear in linears:
                linear(x)

        moved = (m * k + k * n + m * n) * size
        like = Entry("", "matmul", stream="compute", shapes=((m, k), (k, n)), dtype=job.dtype, payload_bytes=moved)
        like.flops = 2 * m * k * n
        yield from _timed(call, like, share=len(linears))


def _cores(job: BenchJob, dtype: torch.dtype, device: torch.device) -> Iterator[Entry]:
    """Attention over a paged cache of its own for every case, layer by layer, so that it is not in the processor's."""
    import torch

    from meshwright.runtime.models.attention import Scores, attend
    from meshwright.runtime.serve.cache import CacheShape, PagedCache, blocks_for

    for c in job.cores:
        shape = CacheShape(c.kv_heads, c.width, c.value_width)
        blocks = c.sequences * blocks_for(c.past + c.new, 16)
        held = blocks * 16 * c.kv_heads * (c.width + c.value_width) * dtype.itemsize
        layers = max(1, min(MOST_LAYERS, job.footprint_bytes // held))
        cache = PagedCache(dict.fromkeys(range(layers), shape), blocks, 16, dtype, device)
        if c.past:
            cache.batch([(s, [0] * c.past) for s in range(c.sequences)], [False] * c.sequences, "prefill")
        batch = cache.batch([(s, [0] * c.new) for s in range(c.sequences)], [True] * c.sequences, c.phase)
        q = torch.full((c.sequences * c.new, c.heads, c.width), 0.1, dtype=dtype, device=device)
        how = Scores()

        def call(
            q: Tensor = q, batch: Batch = batch, cache: PagedCache = cache, how: Scores = how, layers: int = layers
        ) -> None:
            for layer in range(layers):
                attend(q, layer, batch, cache, how)

        yield from _timed(call, core_entry(c, job.dtype, dtype.itemsize), share=layers)


def core_entry(c: Core, dtype: str, size: int) -> Entry:
    """An attention core as the plan counts it (``plan.cores.attention_core``)."""
    tokens, seen = c.sequences * c.new, c.sequences * (c.past + c.new)
    pairs = c.sequences * (c.new * c.past + c.new * (c.new + 1) // 2)
    wide = c.width + c.value_width
    moved = (seen + tokens) * c.kv_heads * wide * size + tokens * c.heads * wide * size
    entry = Entry("", "attention", phase=c.phase, stream="compute", dtype=dtype, payload_bytes=moved)
    entry.shapes = ((tokens, c.heads, c.width), (seen, c.kv_heads, c.width), (seen, c.kv_heads, c.value_width))
    entry.flops = 2 * pairs * c.heads * wide
    return entry


def _moves(mesh: Mesh, moves: Sequence[Move], dtype: torch.dtype, name: str) -> Iterator[Entry]:
    """Every transfer over its group."""
    for move in moves:
        group = mesh.group(move.axis)
        if group.size < 2:
            continue
        call = _call(move, group, dtype, mesh.device)
        if call is None:
            continue
        together(mesh)
        hand_off = move.op in {"send", "recv"}
        like = Entry("", move.op, stream=move.axis, group=move.axis, dtype=name, payload_bytes=move.payload_bytes)
        # There and back again are two hand-offs.
        times = LARGE_TIMES if move.payload_bytes >= LARGE_BYTES else MOVE_TIMES
        yield from _timed(call, like, CALLS, share=2 if hand_off else 1, times=times)


def _call(move: Move, group: Group, dtype: torch.dtype, device: torch.device) -> Callable[[], object] | None:
    """One transfer through ``runtime.collectives``; None for an op that the runtime does not use."""
    import torch

    from meshwright.runtime import collectives as c

    n = group.size
    count = max(1, move.payload_bytes // dtype.itemsize)
    shape = (1, count) if move.op == "gather" else (n, -(-count // n))
    x = torch.zeros(shape, dtype=dtype, device=device)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: c.all_reduce(x, group),
        "all_gather": lambda: c.all_gather_rows(x, group),
        "reduce_scatter": lambda: c.reduce_scatter_rows(x, group),
        "all_to_all": lambda: c.all_to_all(x, group),
        "gather": lambda: c.gather_logits(x, group, (x.shape[1],) * n),
    }
    if move.op not in {"send", "recv"}:
        return calls.get(move.op)

    def there_and_back() -> None:
        if group.index > 1:
            return
        first, other = group.index == 0, 1 - group.index
        if not first:
            c.recv(tuple(x.shape), dtype, x.device, group, other)
        work = c.send(x, group, other)
        if first:
            c.recv(tuple(x.shape), dtype, x.device, group, other)
        if work is not None:
            work.wait()

    return there_and_back


def _messages(mesh: Mesh) -> Iterator[Entry]:
    """A message through the store from rank 0 to rank 1 and one back."""
    store, layout = mesh.store, mesh.placement.layout
    if store is None or layout.world // layout.dp < 2:
        return
    numbers = iter(range(1 << 30))

    def there_and_back() -> None:
        number = next(numbers)
        if mesh.rank == 0:
            store.set(f"bench/there/{number}", "0")
            store.get(f"bench/back/{number}")
        elif mesh.rank == 1:
            store.get(f"bench/there/{number}")
            store.set(f"bench/back/{number}", "0")

    together(mesh)
    yield from _timed(there_and_back, Entry("", "message"), CALLS, share=2)


def _driver(job: BenchJob, dtype: torch.dtype, device: torch.device) -> Iterator[Entry]:
    """A pass and a layer of the driver: decode steps of two small models, without the products and the attention.

    Their weights are wide enough to drive the interpreter's own data out of the caches between two operations, as those
    of a real model do.
    """
    rounds = ROUNDS if job.footprint_bytes >= SMALL_BYTES else 1  # a quick calibration walks through little
    found = [_driver_once(job, dtype, device) for _ in range(rounds)]
    layer_s, pass_s, token_s = (median(values) for values in zip(*found, strict=True))
    if token_s:
        passed = sum(count * (k + n) for (_, k, n), count in SMALL_PRODUCTS.items()) * dtype.itemsize
        yield Entry(
            "", LIGHT, payload_bytes=PROMPT * passed, dtype=job.dtype, started_ns=0, ended_ns=_ns(PROMPT * token_s)
        )
    for op, seconds in (("layer", layer_s), ("pass", pass_s)):
        yield Entry("", op, dtype=job.dtype, started_ns=0, ended_ns=_ns(seconds))


def _driver_once(job: BenchJob, dtype: torch.dtype, device: torch.device) -> tuple[float, float, float]:
    """Seconds of a layer and of a pass of the driver, and for each token that passes through a layer. What is
    subtracted is measured next to what it is subtracted from, because a machine's speed drifts."""
    steps = [small_steps(layers, STEPS, job.placement.profile, dtype, device) for layers in (FEW, MANY)]
    (few, few_tokens), (many, many_tokens) = steps
    rows = {1: SMALL_PRODUCTS, PROMPT: {(PROMPT, *shape[1:]): count for shape, count in SMALL_PRODUCTS.items()}}
    asked = (*rows[1], *rows[PROMPT], SMALL_HEAD)
    took = _seconds(_products(replace(job, products=asked, footprint_bytes=SMALL_BYTES), dtype, device))

    def beside(layer_s: float, tokens: int, core: Core) -> float:
        """Seconds of a layer beside its products and its attention."""
        cores = _seconds(_cores(replace(job, cores=(core,)), dtype, device))
        return layer_s - sum(count * took[shape] for shape, count in rows[tokens].items()) - sum(cores.values())

    layer_s = max(0.0, (many - few) / (MANY - FEW))
    one_s = beside(layer_s, 1, Core("decode", 1, 1, PROMPT + STEPS // 2, 4, 2, 64, 64))
    all_s = beside((many_tokens - few_tokens) / (MANY - FEW), PROMPT, Core("prefill", 1, PROMPT, 0, 4, 2, 64, 64))
    # On a device the host's launches hide it.
    token_s = max(0.0, all_s - one_s) / (PROMPT - 1) if device.type == "cpu" else 0.0
    return one_s - token_s, few - FEW * layer_s - took[SMALL_HEAD], token_s


def _ns(seconds: float) -> int:
    return max(1, round(seconds * 1e9))


def _seconds(entries: Iterator[Entry]) -> dict[tuple[int, ...], float]:
    """Median seconds by sizes."""
    found: dict[tuple[int, ...], list[float]] = {}
    for entry in entries:
        if (took := duration_s(entry)) is not None:
            found.setdefault(sizes_of(entry), []).append(took)
    return {sizes: median(times) for sizes, times in found.items()}
