"""Seconds of a step of a serving engine, part by part, from its counted work."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from meshwright.plan.timing.collective import curve, small_all_reduce_seconds
from meshwright.plan.timing.compute import (
    Efficiency,
    constants,
    efficiency,
    generation,
    measured_passes,
    peak_flops,
    roofline,
)
from meshwright.plan.timing.step import Kernel, Message, Work
from meshwright.specs.cluster import Cluster, Driver

#: Parts of a step, in the order in which they are shown.
PARTS = ("weights", "experts", "attention", "other", "communication", "launch", "host")
#: Engines whose host constants were fitted; another one takes those of the first.
FITTED = ("vllm", "sglang", "trtllm")
#: The engine whose driver ``calibrate`` measures.
OWN = "meshwright"


class EngineTime(NamedTuple):
    """Host side of one engine (``constants/timing.json``).

    Attributes:
        launch_s: of one kernel in a CUDA graph. eager_s: of one kernel in a step with prompts.
        eager_decode_s: of one kernel of a decode step without graphs.
        request_s: of a request outside the steps. sequence_s: of a step for each request in it. step_s: of a step.
        transfer_s: of a hand-over between pools beside the bytes.
        alone: prompts run without decoding requests (SGLang's default scheduler).
        fitted: the constants are this engine's own.
    """

    launch_s: float
    eager_s: float
    eager_decode_s: float
    request_s: float
    sequence_s: float
    step_s: float
    transfer_s: float
    alone: bool
    fitted: bool


#: Kernels of a dense layer as ``timing.step.launches_of`` counts them: two norms, five of attention, three of the MLP.
DENSE_LAUNCHES = 10


@cache
def engine_time(engine: str, driver: Driver | None = None) -> EngineTime:
    """Constants of an engine by name; one that was not fitted takes vLLM's.

    Args:
        engine: name. driver: of the own engine where ``calibrate`` measured it: it launches every kernel itself, so
            that its layer is shared out over the kernels of one.
    """
    if engine == OWN and driver is not None:
        each = driver.layer_s / DENSE_LAUNCHES
        step_s, sequence_s = driver.pass_s + driver.serve_s, driver.sequence_s
        return EngineTime(each, each, each, driver.message_s, sequence_s, step_s, 0.0, alone=False, fitted=True)
    name, c = engine if engine in FITTED else FITTED[0], constants()
    return EngineTime(
        launch_s=c[f"launch.{name}"],
        eager_s=c[f"eager.{name}"],
        eager_decode_s=c[f"eager_decode.{name}"],
        request_s=c[f"request.{name}"],
        sequence_s=c[f"sequence.{name}"],
        step_s=c["step"],
        transfer_s=c[f"transfer.{name}"],
        alone=engine == "sglang",
        fitted=engine == name,
    )


class StepTime(NamedTuple):
    """Seconds of a step: by part, and ``launches``: kernels that the host launches for it."""

    parts: tuple[float, ...]
    launches: float

    @property
    def seconds(self) -> float:
        """All parts one after the other."""
        return sum(self.parts)

    def of(self, part: str) -> float:
        """Seconds of one of ``PARTS``."""
        return self.parts[PARTS.index(part)]


def touched(experts: Any, held: Any, skew: float) -> Any:
    """Experts that skewed routing reads where a uniform choice would read ``experts`` of ``held``."""
    return held * (1.0 - (1.0 - (experts / held) * 0.9999) ** skew)


def batched(requests: Any, half: float) -> Any:
    """Requests that cost the host as much as single ones do: of large batches it handles many at once."""
    return requests / (1.0 + requests / half)


def kernel_seconds(k: Kernel, e: Efficiency, rate: float, peak: float) -> float:
    """Seconds of one run of counted work at the device's ``rate`` (bytes a second) and ``peak`` (FLOP/s)."""
    c = constants()
    moved = k.moved_bytes
    if k.experts:
        read = touched(k.experts, k.held, c["skew"])
        if k.spread:
            read = min(read + c["imbalance"] * read**0.5, k.held)
        moved = moved * read / k.experts
    if e.points:
        return e.seconds(moved, k.flops, rate, peak, k.outputs)
    top = peak * e.compute
    if k.rows:
        top /= 1.0 + c["tile"] / k.rows
    if k.width:
        top /= 1.0 + e.ramp / k.width
    found: float = roofline(moved, k.flops, rate * e.memory, top, c["sharpness"])
    return found


def message_seconds(m: Message, cluster: Cluster) -> float:
    """Seconds of one collective or hand-off of a step; small all_reduces run by the engine's own kernels."""
    if m.wiring.members <= 1:
        return 0.0
    if m.op == "all_reduce":
        share = constants()[f"small.{generation(cluster.device)}"]
        return small_all_reduce_seconds(m.wiring, m.payload_bytes, share, cluster)
    return curve(m.op, m.wiring, cluster).seconds(m.payload_bytes)


def step_seconds(work: Work, cluster: Cluster, engine: EngineTime) -> StepTime:
    """Time the counted work of one rank on a device of ``cluster``, CUDA graphs assumed.

    A step with prompts takes at least ``launches x eager_s``: that floor is left to the caller, who knows how many
    prompts share the step.
    """
    device, c = cluster.device, constants()
    of = dict.fromkeys(PARTS, 0.0)
    known: dict[tuple[str, str], tuple[Efficiency, float]] = {}
    for k in work.kernels:
        key = (k.kind, k.dtype)
        if key not in known:
            known[key] = efficiency(device, k.kind, k.dtype), peak_flops(device, k.dtype)
        e, peak = known[key]
        of[k.part] += kernel_seconds(k, e, device.bandwidth_bytes_s, peak) * k.repeats
    of["communication"] = sum(message_seconds(m, cluster) * m.repeats for m in work.messages)
    launches = work.launches + work.expert_launches * c[f"expert_launches.{generation(device)}"]
    launches += work.quantizing * c["quantizing"]
    share = measured_passes(device)
    often = 1.0 / share if share else c["passes"]
    of["other"] += often * work.passes_bytes / device.bandwidth_bytes_s
    of["launch"] = launches * engine.launch_s
    of["host"] = engine.step_s + engine.sequence_s * batched(work.requests, c["sequences"])
    return StepTime(tuple(of.values()), launches)
