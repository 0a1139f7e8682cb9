"""Which training layouts a search row by row looks at, and the bound that spares most of them a full count."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.plan.train_engine import TrainEngine
from meshwright.plan.train_states import moment_bytes
from meshwright.specs.cluster import Cluster
from meshwright.specs.dtypes import size_bytes
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.workload import Train

#: Throughputs closer than this are a tie, which the simpler layout wins: half the median error of a predicted step on
#: the largest source of measured ones (bench/score_training_time.py, Megatron-Bridge).
TIE = 0.03
#: Share of a device that a chosen layout leaves free where one can: one in ten of 663 measured ranks needs 2.6 % more
#: than predicted (bench/score_training_memory.py).
SPARE = 0.03
#: Axes of which a plan says why it cuts along them, or why it does not.
EXPLAINED = ("tp", "pp", "cp", "ep")
#: Sequences from which context parallelism is tried even if the model fits without.
LONG_SEQUENCE = 32_768


def _powers(limit: int) -> Iterator[int]:
    value = 1
    while value <= limit:
        yield value
        value *= 2


def training_layouts(spec: ModelSpec, cluster: Cluster, work: Train) -> Iterator[Layout]:
    """Layouts of the whole cluster: TP inside a node, PP a divisor, CP for long sequences, EP where experts are."""
    world, node = cluster.devices, cluster.devices_per_node
    for tp in (t for t in _powers(node) if node % t == 0):
        for pp in (p for p in range(1, min(len(spec.layers), world // tp, 64) + 1) if world % (tp * p) == 0):
            rest = world // (tp * pp)
            for cp in (c for c in _powers(16 if work.seq >= LONG_SEQUENCE else 1) if rest % c == 0):
                dp = rest // cp
                if work.global_batch % dp:
                    continue
                for ep in _expert_degrees(spec, dp * cp):
                    for zero in (1, 3) if dp * cp > 1 else (0,):
                        yield Layout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, zero=zero, sp=tp > 1)


def _expert_degrees(spec: ModelSpec, ranks: int) -> list[int]:
    moe = spec.moe
    if moe is None:
        return [1]
    return [e for e in (1, 4, 8, 16, 32, 64) if ranks % e == 0 and e <= moe.experts]


def parameter_counts(spec: ModelSpec) -> tuple[int, int]:
    """Parameters of the decoder: outside experts, in experts."""
    expert = sum(f.parameters for f in spec.select("decoder") if f.role == "expert")
    return spec.parameters("decoder") - expert, expert


def state_bound(work: Train, engine: TrainEngine, layout: Layout, counts: tuple[int, int]) -> float:
    """Least bytes of parameters, gradients and optimizer state on the fullest rank, shares at best equal.

    ZeRO-3 keeps the fp32 shard as the only copy of a parameter (torch FSDP2), so working weights do not count there;
    what is offloaded does not count at all.
    """
    experts_cut = layout.ep * (layout.etp if layout.etp is not None else layout.tp)
    parameters = (counts[0] / layout.tp + counts[1] / experts_cut) / layout.pp
    width, gradient = size_bytes(work.param_dtype), size_bytes(work.grad_dtype)
    master = 4 if work.master_weights and work.param_dtype != "f32" else 0
    states = 0 if work.offload == "optimizer" or engine.on_host else moment_bytes(work) + master
    kept = 0 if engine.on_host else gradient
    sharded = layout.dp * layout.cp
    if layout.zero == 3:
        return 0.0 if engine.on_host else parameters * (kept + states) / sharded
    over = sharded if layout.zero else 1
    return parameters * (width + kept / (over if layout.zero == 2 else 1) + states / over)


def promise(layout: Layout) -> tuple[float, ...]:
    """Order in which layouts are counted: few cuts of the model, since each costs traffic or a bubble."""
    return (layout.tp * layout.pp * layout.cp, layout.zero == 3, layout.pp, layout.tp, layout.ep)


def simplicity(layout: Layout) -> tuple[float, ...]:
    """Order of layouts that are about equally fast: few cuts of the model, no sharded parameters, nothing that must be
    stated by hand, a plain schedule, few stages, small groups, small micro-batches."""
    stated = layout.fsdp is not None or bool(layout.stage_layers)
    cuts, plain = layout.pp * layout.tp * layout.cp, layout.schedule != "1f1b"
    degrees = (layout.pp, layout.tp, layout.ep, layout.micro_batch, layout.etp or 0)
    return (cuts, layout.zero == 3, stated, plain, *degrees, layout.zero != 1)
