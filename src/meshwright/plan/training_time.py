"""Seconds of an optimizer step, from what a rank does in it (``training_time_work``) and a few fitted constants.

Per micro-batch and stage, one after the other:

    products   FLOPs / (peak e), e = e0 / (1 + G P (1/m + 1/n + 1/k)), P the peak in PFLOP/s: the shape term is the
               bytes of the operands beside the FLOPs (1/m + 1/n + 1/k bytes a FLOP in 16 bit)
    cores      FLOPs / (peak e), the backward of attention 2.5 times the forward (counted so)
    the rest   bytes of norms and losses, inputs and outputs of products passed by what lies between them, at 80 % of
               the memory bandwidth; the host's launches beside all that
    wires      collectives of tp, cp and ep, the share of each that is not hidden

The pipeline stretches the slowest stage by its bubble (``pipeline_time``). Gradients and parameters run beside the
compute of one micro-batch, or of every one where FSDP gathers and ZeRO-2 reduces each time; what takes longer is
exposed, and so is one unit of it. The optimizer comes last. Constants, their priors and the rows that they were fitted
on: ``constants/training_time.json``, ``bench/fit_training_time.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from math import exp
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.plan.pipeline_time import pipeline_seconds
from meshwright.plan.timing.collective import is_calibrated
from meshwright.plan.timing.compute import efficiency, measured_passes, unit_dtype
from meshwright.plan.timing.estimate import Seconds, Word, spread
from meshwright.plan.timing.step_time import DENSE_LAUNCHES
from meshwright.plan.train_engine import TrainEngine
from meshwright.plan.training_time_work import DataWork, RankWork, StepWork, Work, distinct, product_peak, step_work
from meshwright.specs.cluster import Cluster, Device
from meshwright.specs.layout import Layout
from meshwright.specs.placement import Placement
from meshwright.specs.workload import Train

#: Parts of a step, in the order in which they are shown.
PARTS = (
    "products", "experts", "head", "attention", "recurrent", "elementwise", "launch", "recompute",
    "tensor parallel", "context parallel", "expert parallel", "hand-offs", "bubble", "data parallel", "optimizer",
)  # fmt: skip
#: How sentences call them.
WORDS = {
    "products": "products of layers",
    "experts": "products of experts",
    "head": "the head",
    "attention": "attention cores",
    "recurrent": "recurrent cores",
    "elementwise": "memory traffic between products",
    "launch": "launches by the host",
    "recompute": "recompute",
    "tensor parallel": "tensor-parallel collectives",
    "context parallel": "context-parallel collectives",
    "expert parallel": "expert-parallel collectives",
    "hand-offs": "hand-offs between stages",
    "bubble": "pipeline bubble",
    "data parallel": "gradients and parameters that nothing hides",
    "optimizer": "the optimizer",
}
#: Which of them are communication that nothing hides.
EXPOSED = ("tensor parallel", "context parallel", "expert parallel", "hand-offs", "data parallel")
#: Share of the memory bandwidth that streaming kernels reach.
STREAM = 0.8
#: Release (months since April 2026) from which mixtures of experts run from CUDA graphs on Blackwell (NeMo 26.06).
FUSED_MIXTURES = 2.0
#: Sharpness of the corner where the host takes as long as the device.
CORNER = 4.0
Constants = Mapping[str, float]


class Software(NamedTuple):
    """What the time depends on beside layout and workload.

    Attributes:
        compute: element type in which layers multiply (``bf16``, ``f8_e4m3``, ``fp4``).
        blocks: 8-bit scales of 32 values (MXFP8) instead of one a tensor.
        fused: kernels of Transformer Engine (fused attention of the generation); False: plain PyTorch.
        months: release of the training software, in months since April 2026 (NeMo 26.04).
        overlap: gradient and parameter collectives run beside the compute.
        async_tp: products hide part of the tensor-parallel collectives (Megatron ``--tp-comm-overlap``, torchtitan's
            asynchronous TP); False: they stand alone.
        recomputed: share of the counted recompute that really runs (torchtitan keeps every second product).
    """

    compute: str = "bf16"
    blocks: bool = False
    fused: bool = True
    months: float = 0.0
    overlap: bool = True
    async_tp: bool = False
    recomputed: float = 1.0


class TrainingTime(NamedTuple):
    """A step as it is predicted.

    Attributes:
        step: seconds with their 80 % interval and word.
        tokens_per_s: of all devices. tokens_per_s_device: of one.
        flops_s_device: model FLOP/s of one device, recompute not counted. mfu: of its peak in the products' type.
        exposed_s: communication that nothing hides. bubble: idle share of the slowest stage.
        parts: (name, seconds) in the order of ``PARTS``; they add up to the step.
    """

    step: Seconds
    tokens_per_s: float
    tokens_per_s_device: float
    flops_s_device: float
    mfu: float
    exposed_s: float
    bubble: float
    parts: tuple[tuple[str, float], ...]


@cache
def data_file() -> Mapping[str, Any]:
    """``constants/training_time.json``."""
    data: Mapping[str, Any] = json.loads(
        Path(__file__).with_name("constants").joinpath("training_time.json").read_bytes()
    )
    return data


@cache
def constants() -> Constants:
    """Fitted values by name."""
    return {name: entry["value"] for name, entry in data_file()["constants"].items()}


def generation(device: Device) -> str:
    """``ampere``, ``hopper``, ``blackwell`` or ``ultra`` (10.3); other devices count as Hopper."""
    if device.vendor != "nvidia":
        return "hopper"
    major = device.capability.partition(".")[0]
    if device.capability == "10.3":
        return "ultra"
    return {"8": "ampere", "10": "blackwell"}.get(major, "hopper")


def software_of(engine: TrainEngine | None) -> Software:
    """Software of an engine as far as its memory description says it; plain PyTorch without one."""
    if engine is None:
        return Software(fused=False)
    partial = 0.35 if "every_second_product" in engine.recompute_modules else 1.0
    return Software(
        "f8_e4m3" if engine.fp8 else "bf16", fused=engine.kernels == "te", async_tp=engine.async_tp, recomputed=partial
    )


class Rates(NamedTuple):
    """What one device and software make of counted work (see ``constants/training_time.json``).

    Attributes:
        weights: seconds of work for each second at the peaks, field by field of ``Work``; ``kernels`` and
            ``mixtures``: seconds of the host for each.
        step_s: of a step beside everything else. contention: slow-down of compute by collectives that it hides.
        serial: the host is the device (CPU ranks): its launches hide behind nothing.
    """

    weights: Work
    step_s: float
    contention: float
    serial: bool = False


def rates(c: Constants, device: Device, software: Software) -> Rates:
    """Rates of a device: 16-bit efficiency of its generation, times that of the element type."""
    of = generation(device)
    core = "blackwell" if of == "ultra" else of
    unit = unit_dtype(device, software.compute)
    low = {"f8_e4m3": "fp8", "fp4": "fp4"}.get(unit, "")
    drift, mixture = exp(-c["drift"] * software.months), exp(-c["drift.mixture"] * software.months)
    if of in {"blackwell", "ultra"} and software.months >= FUSED_MIXTURES:
        mixture *= c["mixture.graphs"]
    head = drift / c[f"dense.{core}"] / (c["clock.ultra"] if of == "ultra" else 1.0)
    dense = head / (c[f"dense.{low}.{core}"] if low and core != "ampere" else 1.0)
    if device.measured:
        drift, mixture = 1.0, 1.0
        head = dense = 1.0 / efficiency(device, "dense", software.compute).compute
    experts = dense * mixture / c["experts"] / (c["experts.fp4"] if low == "fp4" else 1.0)
    blocks = c["dense.blocks"] if software.blocks and low == "fp8" else 1.0
    attention = drift / c[f"attention.{of}"] / (1.0 if software.fused else c["attention.torch"])
    if device.measured:
        attention = 1.0 / efficiency(device, "attention", software.compute).compute
    moved = drift / STREAM
    passes = moved * c["passes"] * (c["passes.low"] if low else 1.0)
    share, driver = measured_passes(device), device.driver
    if share:
        passes = 1.0 / share
    weights = Work(
        dense=dense / blocks,
        dense_shape=dense / blocks * c["ramp"],
        experts=experts,
        experts_shape=experts * c["ramp"],
        head=head,
        head_shape=head * c["ramp"],
        attention=attention,
        recurrent=drift / c["recurrent"],
        light=moved,
        passes=passes,
        routed=passes * c["routed"] * mixture,
        inner=passes * c["inner"] * mixture,
        groups=c["group"] * mixture,
        kernels=driver.layer_s / DENSE_LAUNCHES if driver is not None else c["kernel"] * mixture,
        mixtures=c["mixture"] * mixture,
        tp=c["exposed.tp"] if software.async_tp else 1.0,
        cp=c["exposed.cp"],
        ep=c["exposed.ep"] * mixture,
        pp=1.0,
        pp_beside=c["exposed.pp"],
    )
    step_s = c["step"] if driver is None else driver.pass_s
    return Rates(weights, step_s, c["contention"], serial=device.kind == "cpu")


#: Fields of ``Work`` by the part of a step that shows them.
SHOWN = {
    "products": ("dense", "dense_shape"),
    "experts": ("experts", "experts_shape", "groups"),
    "head": ("head", "head_shape"),
    "attention": ("attention",),
    "recurrent": ("recurrent",),
    "elementwise": ("light", "passes", "routed", "inner"),
    "tensor parallel": ("tp",),
    "context parallel": ("cp",),
    "expert parallel": ("ep",),
    "hand-offs": ("pp", "pp_beside"),
}
#: Fields that the host spends.
HOST = ("kernels", "mixtures")


def work_seconds(w: Work, r: Rates) -> dict[str, float]:
    """Seconds of one micro-batch on one rank, by part.

    The host launches while the device works: both go on side by side, and where they take about as long neither hides
    the other fully (a p-norm, as at the corner of a roofline); ``launch`` is what the host adds. On CPU ranks it is
    all that the host spends.
    """
    of = {name: a * b for name, a, b in zip(Work._fields, w, r.weights, strict=True)}
    parts = {part: sum(of[name] for name in names) for part, names in SHOWN.items()}
    device, host = sum(parts.values()), sum(of[name] for name in HOST)
    parts["launch"] = host if r.serial else (device**CORNER + host**CORNER) ** (1 / CORNER) - device
    return parts


class StageTime(NamedTuple):
    """One stage: seconds of a micro-batch's forward and backward (recompute included), and by part."""

    forward: float
    backward: float
    parts: Mapping[str, float]
    data: DataWork

    @property
    def both(self) -> float:
        """Forward and backward of one micro-batch."""
        return self.forward + self.backward


def stage_time(rank: RankWork, r: Rates, recomputed: float) -> StageTime:
    """Time one micro-batch of a rank."""
    forward, backward = work_seconds(rank.forward, r), work_seconds(rank.backward, r)
    again = recomputed * sum(work_seconds(rank.recompute, r).values())
    parts = {name: forward[name] + backward[name] for name in forward}
    parts["recompute"] = again
    return StageTime(sum(forward.values()), sum(backward.values()) + again, parts, rank.data)


def data_exposed(stage: StageTime, m: int, overlap: bool, contention: float) -> float:
    """Seconds of gradient and parameter collectives that the compute does not hide, and what they slow down."""
    d = stage.data
    every = m * (d.gather + d.gather_again + d.scatter)
    once = d.gradients + d.parameters
    if not overlap:
        return every + once + d.norm
    backward = stage.backward
    out = m * (max(0.0, d.gather - stage.forward) + max(0.0, d.gather_again + d.scatter - backward))
    out += m * (d.gather + d.scatter) / d.units
    out += max(d.gradients - backward, d.gradients / d.buckets) + max(d.parameters - stage.forward, 0.0)
    hidden = every + once - out
    return max(0.0, out) + contention * max(0.0, hidden) + d.norm


def every_stage(timed: Mapping[int, StageTime], stages: int) -> list[StageTime]:
    """All stages; one that was not timed is taken to be as the nearest timed one that is no end."""
    inner = [s for s in timed if 0 < s < stages - 1] or list(timed)
    return [timed[s] if s in timed else timed[min(inner, key=lambda near: abs(near - s))] for s in range(stages)]


def step_parts(work: StepWork, layout: Layout, r: Rates, software: Software) -> dict[str, float]:
    """Seconds of the step by part; they add up to the whole step. The slowest stage is shown."""
    of_stage = {rank.stage: stage_time(rank, r, software.recomputed) for rank in distinct(work.ranks)}
    stages = list(of_stage.values())
    m = work.microbatches
    slowest = max(stages, key=lambda s: s.both)
    whole = pipeline_seconds(layout, m, [(s.forward, s.backward) for s in every_stage(of_stage, layout.pp)])
    data = max(data_exposed(s, m, software.overlap, r.contention) for s in stages)
    parts = {name: m * seconds for name, seconds in slowest.parts.items()}
    parts["bubble"] = whole - m * slowest.both
    parts["data parallel"] = data
    parts["optimizer"] = max(s.data.optimizer for s in stages) / STREAM + r.step_s
    return {name: parts[name] for name in PARTS}


def fitted(device: Device) -> bool:
    """Whether constants were fitted on devices of this generation (A100, H100, B200 and their kin)."""
    return device.vendor == "nvidia" and device.capability.partition(".")[0] in {"8", "9", "10"}


def word_of(cluster: Cluster, software: Software, placement: Placement) -> Word:
    """``calibrated`` on NVIDIA generations of the fit inside one node or domain, ``modelled`` elsewhere."""
    layout = placement.layout
    inside = layout.world <= cluster.devices_per_node
    if cluster.device.measured:
        known = all(is_calibrated(n, cluster.intra) for n in (layout.tp, layout.cp, layout.dp * layout.cp, layout.ep))
        handed = layout.pp == 1 or is_calibrated(2, cluster.intra, "send")
        return "calibrated" if inside and known and handed else "modelled"
    return "calibrated" if fitted(cluster.device) and inside and software.compute != "fp4" else "modelled"


def width_of(cluster: Cluster, placement: Placement) -> str:
    """Which interval holds: that of left-out dense models, of left-out mixtures of experts, or of other devices."""
    if not fitted(cluster.device) and not cluster.device.measured:
        return "elsewhere"
    return "dense" if placement.spec.moe is None else "mixture"


def training_time(
    placement: Placement, cluster: Cluster, train: Train, engine: TrainEngine | None = None, *,
    software: Software | None = None,
) -> TrainingTime:  # fmt: skip
    """Predict a step.

    Args:
        placement: model, layout, engine; its rank classes are timed.
        cluster: devices and links. train: sequence, batch, recompute.
        engine: kernels and element type (see ``software_of``). software: the same, stated.

    Raises:
        InputError: the batch does not divide.
    """
    software = software or software_of(engine)
    work = step_work(placement, cluster, train, software.compute)
    return timed(work, placement, cluster, software)


def timed(work: StepWork, placement: Placement, cluster: Cluster, software: Software) -> TrainingTime:
    """The step whose work was counted."""
    device = cluster.device
    parts = step_parts(work, placement.layout, rates(constants(), device, software), software)
    seconds = sum(parts.values())
    word = word_of(cluster, software, placement)
    pace = sum(v for k, v in parts.items() if k not in {"bubble", "data parallel", "optimizer"})
    flops = work.useful_flops / seconds / work.devices if seconds else 0.0
    rate = work.tokens / seconds if seconds else 0.0
    return TrainingTime(
        step=spread(seconds, data_file()["width_log"][width_of(cluster, placement)], word),
        tokens_per_s=rate,
        tokens_per_s_device=rate / work.devices,
        flops_s_device=flops,
        mfu=flops / product_peak(device, software.compute),
        exposed_s=sum(parts[name] for name in EXPOSED),
        bubble=parts["bubble"] / (pace + parts["bubble"]) if pace else 0.0,
        parts=tuple(parts.items()),
    )
