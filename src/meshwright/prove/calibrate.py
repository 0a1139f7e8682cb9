"""``calibrate``: what this machine's products, attention, memory, transfers and driver really take.

::

    sizes below ──> runtime.microbench on as many ranks as there are devices ──> ledger ──> ledger.calibrate.fit ─┐
    nccl-tests, ledgers, traces (doctor.measured) ────────────────────────────> ledger ──> its transfers ─────────┴─>
        plan.machine_file: the cluster that `plan --on FILE` reads

All ranks measure at once, as they share cores, memory and links in earnest. On CPU the transfers are those that the
own engine makes: through shared memory below its limits, through gloo above (``runtime.collectives``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from meshwright import engines
from meshwright.errors import InputError, MeshwrightError
from meshwright.ledger.calibrate import Calibration, fit
from meshwright.ledger.schema import Ledger
from meshwright.plan.machine_file import measured_cluster
from meshwright.prove.calibrate_serving import can_serve, serving_entries
from meshwright.runtime.launch.local import MAX_LOCAL_RANKS, run_local
from meshwright.runtime.microbench import BenchJob, Core, Move, microbenches
from meshwright.runtime.stepbench import SMALL
from meshwright.specs.cluster import Cluster
from meshwright.specs.detect import detect
from meshwright.specs.hf.read import model_from_config
from meshwright.specs.layout import Layout
from meshwright.specs.placement import Placement, place

if TYPE_CHECKING:
    from meshwright.specs.profile import EngineProfile

#: Payloads of every collective; 1 MiB and 256 KiB are the limits of shared memory, so both sides of each are measured.
PAYLOADS: tuple[int, ...] = (256, 4096, 1 << 15, 1 << 18, (1 << 18) + 4096, 1 << 20, (1 << 20) + 4096, 1 << 22, 1 << 24)
#: Payloads on a device with links of its own.
DEVICE_PAYLOADS = tuple(1 << e for e in range(9, 29, 2))
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "send")
#: Rows and weights of the measured products; ``DEVICE_*``: of an accelerator.
ROWS: tuple[int, ...] = (1, 2, 4, 8, 16, 64, 256)
WEIGHTS: tuple[tuple[int, int], ...] = (
    (256, 256), (256, 1024), (1024, 256), (576, 1536), (1024, 1024), (1536, 576), (2048, 2048), (576, 49152)
)  # fmt: skip
DEVICE_ROWS = (1, 16, 64, 256, 1024, 4096)
DEVICE_WEIGHTS = ((1024, 1024), (4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192))
#: Attention cores: decode by sequences and cached tokens, prefill by tokens; heads, KV heads and width.
HEADS: tuple[tuple[int, int, int], ...] = ((9, 3, 64), (8, 2, 128))
DEVICE_HEADS = ((32, 8, 128),)
DECODES: tuple[tuple[int, int], ...] = ((1, 128), (4, 128), (16, 128), (1, 1024), (8, 512))
PREFILLS: tuple[int, ...] = (64, 256)
DEVICE_DECODES, DEVICE_PREFILLS = ((1, 1024), (16, 1024), (64, 4096)), (512, 2048, 8192)
#: Weights that products walk through: beyond the caches.
FOOTPRINT_BYTES = 128 << 20

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured, and the cluster that it makes.

    Attributes:
        cluster: this machine with measured figures. calibration: the fit. ledger: everything with its times.
        remarks: for the head of the file.
    """

    cluster: Cluster
    calibration: Calibration
    ledger: Ledger
    remarks: tuple[str, ...] = ()


def calibrate_here(
    *,
    ranks: int | None = None,
    dtypes: Sequence[str] | None = None,
    device: str = "auto",
    quick: bool = False,
    timeout_s: float = 600.0,
    say: Say = lambda _: None,
) -> Measured:
    """Measure this machine.

    Args:
        ranks: processes; None: one a device, or a core up to eight. dtypes: None: f32 on CPU with bf16 where the
            hardware has it, bf16 and f16 on CUDA. device: ``cpu``, ``cuda``, or ``auto``: what is here.
        quick: fewest shapes and payloads, to see that it works. timeout_s: bound on all of it.

    Raises:
        InputError: no such device, more ranks than devices. RankError: a rank failed or was too late.
    """
    cluster = detect()
    kind = _kind(cluster, device)
    count = ranks or cluster.devices_per_node
    most = cluster.devices_per_node if kind == "cuda" else MAX_LOCAL_RANKS
    if not 1 <= count <= most:
        raise InputError(f"--ranks {count}; 1 to {most} can be measured here")
    names = tuple(dtypes or _dtypes(cluster, kind))
    jobs = bench_jobs(count, names, kind, quick)
    many = "s" * (count > 1)
    say(f"{count} rank{many}, {kind}: transfers, memory, products, attention, the driver ({', '.join(names)})")
    backend = "nccl" if kind == "cuda" else "gloo"
    ledger = merged(run_local(microbenches, count, (jobs,), timeout_s, backend=backend)[0], count)
    if can_serve() and not quick:
        say("1 rank behind a server: what it adds to a step")
        try:
            ledger.entries += serving_entries(kind, timeout_s)
        except MeshwrightError as error:  # all else is known without it
            say(f"left out: {error}")
    c = fit(ledger)
    if count != cluster.devices_per_node:
        cluster = replace(cluster, devices_per_node=count)
    remark = (
        f"measured by `meshwright calibrate` on {c.machine}, {count} ranks at once, torch {ledger.meta.get('torch')}"
    )
    return Measured(measured_cluster(cluster, c), c, ledger, (remark,))


def _kind(cluster: Cluster, device: str) -> str:
    here = "cuda" if cluster.device.kind == "gpu" else "cpu"
    if device == "cuda" and here != "cuda":
        raise InputError("--device cuda: no CUDA device is usable here; --device cpu measures the CPU")
    return here if device == "auto" else device


def _dtypes(cluster: Cluster, kind: str) -> tuple[str, ...]:
    if kind == "cuda":
        return "bf16", "f16", "f32"
    return ("f32", "bf16") if cluster.device.peak("bf16") else ("f32",)


def bench_jobs(count: int, dtypes: Sequence[str], device: str, quick: bool = False) -> tuple[BenchJob, ...]:
    """The jobs of every rank: one a dtype, the first with the transfers; then transfers between halves of the ranks."""
    profile = engines.profile("meshwright")
    whole = _placement(Layout(tp=count), profile)
    cuda = device == "cuda"
    payloads = DEVICE_PAYLOADS if cuda else PAYLOADS
    rows, weights = (DEVICE_ROWS, DEVICE_WEIGHTS) if cuda else (ROWS, WEIGHTS)
    if quick:
        payloads, rows, weights = payloads[:3], rows[:2], weights[:2]
    products = tuple((m, k, n) for m in rows for k, n in weights if m * k * n <= 1 << 33 or cuda)
    moves = tuple(Move(op, "tp", size) for op in OPS for size in payloads) if count > 1 else ()
    footprint = 1 << 20 if quick else FOOTPRINT_BYTES
    jobs = [
        BenchJob(whole, products, _cores(cuda, quick), moves if dtype == dtypes[0] else (), footprint, dtype, device)
        for dtype in dtypes
    ]
    for size in (n for n in (2, 4) if n < count and count % n == 0):
        part = _placement(Layout(tp=size, dp=count // size), profile)
        some = tuple(m for m in moves if m.op != "send")
        jobs.append(BenchJob(part, (), (), some, 0, dtypes[0], device, alone=False))
    return tuple(jobs)


def _placement(layout: Layout, profile: EngineProfile) -> Placement:
    """A model whose heads divide, so that any number of ranks has a place."""
    n = layout.tp
    config = {**SMALL, "hidden_size": 8 * n, "intermediate_size": 8 * n, "num_attention_heads": n, "vocab_size": 8 * n}
    model = model_from_config({**config, "num_key_value_heads": n, "num_hidden_layers": 1}, "small", "small")
    return place(model, layout, profile)


def _cores(cuda: bool, quick: bool) -> tuple[Core, ...]:
    heads, decodes, prefills = (DEVICE_HEADS, DEVICE_DECODES, DEVICE_PREFILLS) if cuda else (HEADS, DECODES, PREFILLS)
    if quick:
        heads, decodes, prefills = heads[:1], decodes[:1], prefills[:1]
    out = []
    for h, k, width in heads:
        out += [Core("decode", sequences, 1, past, h, k, width, width) for sequences, past in decodes]
        out += [Core("prefill", 1, tokens, 0, h, k, width, width) for tokens in prefills]
    return tuple(out)


def merged(ledgers: Sequence[Ledger], ranks: int) -> Ledger:
    """One ledger of several: groups of other sizes under names of their own (``tp2``)."""
    entries, meta = [], {**ledgers[0].meta, "ranks": str(ranks)}
    for ledger in ledgers:
        for e in ledger.entries:
            if e.group is not None:
                size = ledger.meta.get(f"group.{e.group}", "2")
                e.group = f"{e.group}{size}"
                meta[f"group.{e.group}"] = size
            entries.append(e)
    return Ledger(entries, ranks=list(ledgers[0].ranks), meta=meta)
