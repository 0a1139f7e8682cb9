"""Parameters, gradients and optimizer state of one rank, by ZeRO stage and FSDP.

Sources: ZeRO (arXiv 1910.02054, section 5: 2 + 2 + 12 bytes a parameter with fp16 gradients); Megatron-LM's
distributed optimizer (``docs/source/api-guide/dist_optimizer.md``: 2 + 4 + 12 / d bytes with fp32 gradients in one
buffer); torch FSDP2 (``fully_shard``: fp32 shards are the master weights, so 16 / d in all).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.plan.train_engine import TrainEngine
from meshwright.plan.train_shards import Unit, iter_elements
from meshwright.specs.dtypes import size_bytes
from meshwright.specs.layout import Fsdp, Layout
from meshwright.specs.workload import Train


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of one rank.

    Attributes:
        weights, gradients, optimizer: what stays over the whole step.
        gathered_weights, gathered_gradients: ZeRO-3 and ZeRO-2 working set: what is whole for a while.
        step_gradients: fp32 copies of the gradients that live from the optimizer step to the next iteration.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered_weights: int = 0
    gathered_gradients: int = 0
    step_gradients: int = 0


def shard_degrees(layout: Layout, engine: TrainEngine) -> tuple[int, int]:
    """Ranks over which ZeRO spreads the states of dense parameters and of experts.

    Dense: dp x cp. Experts have dp x cp x tp / (ep x etp) replicas, since ep is laid over dp, cp and, where etp is
    smaller, tp (Megatron ``parallel_state``). Both are divided by the replicas of the sharded optimizer.
    """
    etp = layout.etp if layout.etp is not None else layout.tp
    replicas = layout.fsdp.replicas if layout.fsdp is not None and layout.zero == 3 else engine.optimizer_instances
    dense = layout.dp * layout.cp
    expert = max(1, dense * layout.tp // (layout.ep * etp))
    return max(1, dense // replicas), max(1, expert // replicas)


def moment_bytes(work: Train, matrix: bool = True) -> int:
    """Bytes a parameter of the optimizer's moments: AdamW two, SGD with momentum one, Muon one for matrices."""
    count = {"adamw": 2, "sgd": 1, "muon": 1 if matrix else 2}[work.optimizer]
    return count * size_bytes(work.state_dtype)


def _optimizer_bytes(work: Train, *, master: bool) -> int:
    return moment_bytes(work) + (4 if master else 0)


def _plain_moments(units: tuple[Unit, ...], work: Train, degrees: tuple[int, int]) -> int:
    """The second moment that Muon keeps for what is no hidden matrix."""
    extra = moment_bytes(work, matrix=False) - moment_bytes(work)
    return _spread(sum(u.plain for u in units), 0, extra, degrees)


def _spread(dense: int, expert: int, each: int, degrees: tuple[int, int]) -> int:
    return -(-dense * each // degrees[0]) + -(-expert * each // degrees[1])


def _sums(units: tuple[Unit, ...]) -> tuple[int, int]:
    return sum(u.dense for u in units), sum(u.expert for u in units)


def states(units: tuple[Unit, ...], layout: Layout, work: Train, engine: TrainEngine) -> States:
    """States of one rank that computes with ``units``: those on the device (``TrainEngine.on_host`` taken off)."""
    held = fsdp_states(units, layout, work, engine) if layout.zero == 3 else zero_states(units, layout, work, engine)
    if "parameters" in engine.on_host and layout.zero == 3:
        held = replace(held, weights=0)
    if "gradients" in engine.on_host:
        held = replace(held, gradients=0, step_gradients=0)
    return replace(held, optimizer=0) if "optimizer" in engine.on_host else held


def zero_states(units: tuple[Unit, ...], layout: Layout, work: Train, engine: TrainEngine) -> States:
    """States without sharded parameters.

    ZeRO-0 keeps everything whole, 1 shards the optimizer, 2 also the gradients; one unit's gradient is then whole
    while it is reduced.
    """
    dense, expert = _sums(units)
    whole, degrees = (1, 1), shard_degrees(layout, engine)
    width, grad = size_bytes(work.param_dtype), size_bytes(work.grad_dtype)
    master = work.master_weights and work.param_dtype != "f32"
    spread = degrees if layout.zero else whole
    optimizer = _spread(dense, expert, _optimizer_bytes(work, master=master), spread)
    optimizer += _plain_moments(units, work, spread)
    optimizer -= int(optimizer * engine.offload_fraction) if work.offload == "optimizer" else 0
    gradients = _spread(dense, expert, grad, degrees if layout.zero >= 2 else whole)
    largest = max(iter_elements(units), default=0)
    copies = 2 * (dense + expert - sum(u.plain for u in units)) if engine.fp8_weight_copies else 0
    return States(
        weights=width * (dense + expert) + copies,
        gradients=gradients,
        optimizer=optimizer,
        gathered_gradients=grad * largest if layout.zero >= 2 and degrees != whole else 0,
        step_gradients=_spread(dense, expert, 4, spread) if engine.separate_main_grads and grad < 4 else 0,
    )


def fsdp_states(units: tuple[Unit, ...], layout: Layout, work: Train, engine: TrainEngine) -> States:
    """Fully sharded states: fp32 shards of parameters (the master weights), gradients and moments, and what is whole.

    Without a pipeline: the root unit (embedding, final norm, head) stays whole from its gather to its reduction, and
    with it ``prefetch`` + 1 layers (all layers without ``reshard_after_forward``, or wrapped as one model); one
    layer's gradient is whole in both dtypes while it is reduced, and the root's waits for the end of the backward.
    With a pipeline (``fsdp_unsharded``) parameters and unreduced fp32 gradients of the whole stage stay whole from
    micro-batch to micro-batch. ``half_shards``: DeepSpeed stage 3 (``runtime/zero/stage3.py``): 2 bytes a parameter
    of working shards, 4 of master weights with the moments, and 4 of gradients in the step: 18 / d and what is whole
    (``estimate_zero3_model_states_mem_needs``).
    """
    knobs = layout.fsdp or Fsdp()
    dense, expert = _sums(units)
    degrees = shard_degrees(layout, engine)
    stored = 4 if work.master_weights else size_bytes(work.param_dtype)
    width, reduce = size_bytes(knobs.param_dtype), size_bytes(knobs.reduce_dtype)
    halves = engine.half_shards and stored > width
    optimizer = _spread(dense, expert, _optimizer_bytes(work, master=halves), degrees)
    optimizer += _plain_moments(units, work, degrees)
    optimizer -= int(optimizer * engine.offload_fraction) if work.offload == "optimizer" else 0
    everything = dense + expert
    if degrees == (1, 1):
        gathered = width * everything if stored != width else 0
        gradients = 0
    elif layout.pp > 1 and engine.fsdp_unsharded:
        gathered, gradients = width * everything, reduce * everything
    else:
        root = sum(u.dense + u.expert for u in units if u.name == "root")
        inner = sorted((u.dense + u.expert for u in units if u.name != "root"), reverse=True)
        if knobs.wrap == "model" or not knobs.reshard_after_forward:
            gathered = width * everything
        else:
            gathered = width * (root + sum(inner[: knobs.prefetch + 1]))
        largest = everything if knobs.wrap == "model" else max(inner, default=0)
        waiting = 0 if knobs.wrap == "model" else root
        gradients = (width + reduce) * largest + (width + (reduce if engine.grad_buffer else 0)) * waiting
    return States(
        weights=_spread(dense, expert, width if halves else stored, degrees),
        gradients=_spread(dense, expert, reduce, degrees),
        optimizer=optimizer,
        gathered_weights=0 if halves and degrees == (1, 1) else gathered,
        gathered_gradients=gradients,
        step_gradients=_spread(dense, expert, 4, degrees) if halves and reduce < 4 else 0,
    )
