"""Why this training layout: sentences with their numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.plan.explain import over_nodes
from meshwright.plan.plan import Candidate, Reason
from meshwright.plan.train_cost import bubble_parts
from meshwright.specs.cluster import Cluster
from meshwright.specs.dtypes import size_bytes
from meshwright.specs.model import ModelSpec
from meshwright.specs.units import GIB, binary, gib
from meshwright.specs.workload import Train

if TYPE_CHECKING:
    from meshwright.plan.search.train import Found

STATES = {
    0: "every data-parallel rank holds parameters, gradients and optimizer state whole",
    1: "optimizer state is spread over the data-parallel ranks, parameters and gradients are whole",
    2: "gradients and optimizer state are spread over the data-parallel ranks, parameters are whole",
    3: "parameters, gradients and optimizer state are spread; each layer is gathered just before it runs",
}


def explain_train(
    spec: ModelSpec, cluster: Cluster, work: Train, chosen: Candidate, recompute_fixed: bool = False
) -> tuple[Reason, ...]:
    """Reasons of the chosen (or given) layout, most important first; ``recompute_fixed``: the user named the mode."""
    layout = chosen.layout
    out = [_capacity(spec, cluster, work, chosen)]
    if layout.tp > 1:
        inside = layout.tp <= cluster.devices_per_node
        way = f"inside the node ({cluster.intra.name})" if inside else f"across nodes ({cluster.inter.name})"
        text = f"TP {layout.tp} {way}: activations are exchanged twice a layer forward and twice backward"
        if layout.sp:
            text += "; sequence parallel norms keep 1/tp of the activations between the blocks"
        out.append(Reason("tp_inside_node" if inside else "tp_across_nodes", text, {"tp": float(layout.tp)}))
    if layout.pp > 1:
        out.append(_pipeline(spec, work, chosen))
    if layout.dp > 1:
        text = f"DP {layout.dp}, ZeRO-{layout.zero}: {STATES[layout.zero]}"
        out.append(Reason("zero", text, {"dp": float(layout.dp), "zero": float(layout.zero)}))
    if layout.cp > 1:
        text = f"CP {layout.cp} splits the {work.seq:,} tokens of a sequence, so each rank keeps 1/{layout.cp} of them"
        out.append(Reason("context_parallel", text, {"cp": float(layout.cp)}))
    if spec.moe is not None and layout.ep > 1:
        where = over_nodes(cluster, layout.ep * (layout.etp or layout.tp))
        text = (
            f"EP {layout.ep}: {-(-spec.moe.experts // layout.ep)} of {spec.moe.experts} experts a rank, tokens travel "
            f"to their experts and back, forward and backward{where}"
        )
        out.append(Reason("experts_parallel", text, {"ep": float(layout.ep)}))
    if work.recompute != "none":
        why = (
            "as asked"
            if recompute_fixed
            else "without it the activations of the fullest rank do not fit beside the rest"
        )
        out.append(Reason("recompute", f"{work.recompute} recompute: {why}", {}))
    out.append(_bound(cluster, work, chosen))
    return tuple(out)


def searched_reasons(found: Found | None) -> tuple[Reason, ...]:
    """What a search over arrays looked at; nothing without one."""
    if found is None:
        return ()
    text = (
        f"searched: {found.size:,} layouts; {found.illegal:,} the engine refuses, {found.unfit:,} do not fit, "
        + (f"{found.uneven:,} cut unevenly and were left out, " if found.uneven else "")
        + f"{found.costed:,} were costed; {len(found.pareto)} are not beaten in both speed and free memory"
    )
    numbers = {
        "space": found.size,
        "illegal": found.illegal,
        "uneven": found.uneven,
        "unfit": found.unfit,
        "costed": found.costed,
    }
    return (Reason("space", text, {name: float(n) for name, n in numbers.items()}),)


def _capacity(spec: ModelSpec, cluster: Cluster, work: Train, chosen: Candidate) -> Reason:
    parameters = spec.parameters("decoder")
    states = parameters * state_bytes(work)
    device = cluster.device.memory_bytes
    text = (
        f"{parameters / 1e9:,.2f} B parameters need {gib(states, 0)} of weights, gradients and optimizer state "
        f"({state_bytes(work)} bytes each), a device has {gib(device)}"
    )
    numbers = {"parameters": float(parameters), "states_gib": states / GIB, "device_gib": device / GIB}
    if states > device:
        return Reason("capacity", f"capacity: {text}: they must be split or spread", numbers)
    return Reason("throughput", f"throughput: {text}: it fits one device, more devices make it faster", numbers)


def state_bytes(work: Train) -> int:
    """Bytes of one parameter with its gradient and optimizer state, unsharded."""
    moments = {"adamw": 2, "sgd": 1, "muon": 1}[work.optimizer]
    master = 4 if work.master_weights and work.param_dtype != "f32" else 0
    return size_bytes(work.param_dtype) + size_bytes(work.grad_dtype) + master + moments * size_bytes(work.state_dtype)


def _pipeline(spec: ModelSpec, work: Train, chosen: Candidate) -> Reason:
    layout = chosen.layout
    m = work.global_batch // (layout.dp * layout.micro_batch)
    sizes = sorted({len(s.layers) for s in chosen.placement.stages})
    layers = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    handed = layout.micro_batch * work.seq * spec.hidden * 2
    named = f" (schedule {layout.schedule})" if layout.schedule != "1f1b" else ""
    simulated = layout.schedule == "zbv" and m < 2 * layout.pp
    form = "by its table" if simulated else f"= (p-1)/({bubble_parts(layout, m)[1]}+p-1)"
    text = (
        f"PP {layout.pp}{named} hands {binary(handed)} a micro-batch over each boundary; {m:,} micro-batches leave a "
        f"bubble of {chosen.cost.bubble:.1%} {form}; {layers} layers a stage"
    )
    return Reason("pipeline", text, {"bubble": chosen.cost.bubble, "micro_batches": float(m)})


def _bound(cluster: Cluster, work: Train, chosen: Candidate) -> Reason:
    cost = chosen.cost
    text = (
        f"a step of {work.global_batch:,} x {work.seq:,} tokens takes at least {cost.step_s:,.3g} s at the peaks of "
        f"device and links ({cost.wire_share:.0%} on links, {cost.bubble:.1%} bubble); layouts are ranked by these "
        "counts, not by a time prediction"
    )
    return Reason("bound", text, {"step_lower_bound_s": cost.step_s})
