"""Why this training layout: sentences with their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.plan.explain import over_nodes
from meshwright.plan.plan import Candidate, Reason
from meshwright.plan.timing.collective import Wiring, curve
from meshwright.plan.train_candidates import EXPLAINED, SPARE, TIE, simplicity
from meshwright.plan.train_cost import bubble_parts
from meshwright.plan.training_time import EXPOSED, PARTS, WORDS
from meshwright.specs.cluster import Cluster
from meshwright.specs.dtypes import size_bytes
from meshwright.specs.layout import Layout, product
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


#: What the parts of a step are made of, in the order in which a tie is called.
KINDS = {
    "FLOPs": ("products", "experts", "head", "attention", "recurrent", "recompute"),
    "memory traffic": ("elementwise", "optimizer"),
    "launches": ("launch",),
    "communication": EXPOSED,
    "the pipeline bubble": ("bubble",),
}
#: What cutting along an axis is called.
CUT = {"tp": "TP", "pp": "pipeline stages", "cp": "CP", "ep": "EP"}


@dataclass(frozen=True, slots=True)
class Rival:
    """A layout that was not chosen, with its predicted speed and the seconds of its parts."""

    layout: Layout
    tokens_per_s_device: float
    parts: Mapping[str, float]


def explain_train(
    spec: ModelSpec,
    cluster: Cluster,
    work: Train,
    chosen: Candidate,
    recompute_fixed: bool,
    rivals: Mapping[str, Rival | None],
) -> tuple[Reason, ...]:
    """Reasons of the chosen (or given) layout, most important first.

    Args:
        recompute_fixed: the user named the mode.
        rivals: by axis the fastest layout on its other side, None where none fits (see ``search.train.Found``).
    """
    layout = chosen.layout
    out = [_capacity(spec, cluster, work, chosen), _bound(work, chosen)]
    if layout.tp > 1:
        inside = layout.tp <= cluster.devices_per_node
        way = f"inside the node ({cluster.intra.name})" if inside else f"across nodes ({cluster.inter.name})"
        text = f"TP {layout.tp} {way}: activations are exchanged twice a layer forward and twice backward"
        if layout.sp:
            text += "; sequence parallel norms keep 1/tp of the activations between the blocks"
        out.append(Reason("tp_inside_node" if inside else "tp_across_nodes", text, {"tp": float(layout.tp)}))
        if inside and cluster.nodes > 1:
            out.append(_across_nodes(spec, cluster, work, layout))
    if layout.pp > 1:
        out.append(_pipeline(spec, work, chosen))
    if layout.dp > 1:
        text = f"DP {layout.dp}, ZeRO-{layout.zero}: {STATES[layout.zero]}"
        out.append(Reason("zero", text, {"dp": float(layout.dp), "zero": float(layout.zero)}))
    if layout.cp > 1:
        text = f"CP {layout.cp} splits the {work.seq:,} tokens of a sequence, so each rank keeps 1/{layout.cp} of them"
        out.append(Reason("context_parallel", text, {"cp": float(layout.cp)}))
    if spec.moe is not None and layout.ep > 1:
        out.append(_experts(spec.moe.experts, cluster, layout))
    if work.recompute != "none":
        why = (
            "as asked"
            if recompute_fixed
            else f"without it the activations of the fullest rank do not fit beside the rest with {SPARE:.0%} to spare"
        )
        out.append(Reason("recompute", f"{work.recompute} recompute: {why}", {}))
    return (*out, *(_rival(axis, chosen, rival) for axis, rival in rivals.items()))


def rivals_of(chosen: Candidate, works: Sequence[Candidate]) -> dict[str, Rival | None]:
    """By axis the fastest of some layouts on the other side of it than the chosen one."""
    out: dict[str, Rival | None] = {}
    for axis in EXPLAINED:
        cut = getattr(chosen.layout, axis) > 1
        others = [(c.layout, t) for c in works if (t := c.cost.predicted_step) and (getattr(c.layout, axis) > 1) != cut]
        if others:
            layout, time = max(others, key=lambda pair: pair[1].tokens_per_s)
            out[axis] = Rival(layout, time.tokens_per_s_device, dict(time.parts))
    return out


def lost_to(chosen: Candidate, other: Candidate) -> str:
    """One clause: how the other layout compares with the chosen (or given) one."""
    a, b = chosen.cost.predicted_step, other.cost.predicted_step
    assert a is not None
    assert b is not None
    said = ["TP crosses nodes"] if any(r.code == "tp_crosses_node" for r in other.rules) else []
    ratio = b.tokens_per_s / a.tokens_per_s
    if other.layout.world > chosen.layout.world:
        said.append(f"{other.layout.world} devices instead of {chosen.layout.world}")
    if ratio <= 0.995:
        said.append(f"{1 - ratio:.0%} fewer tokens/s: {_more(dict(a.parts), dict(b.parts))}")
    elif ratio >= 1.005:
        deeper = simplicity(other.layout) > simplicity(chosen.layout)
        said.append(f"{ratio - 1:.1%} more tokens/s" + (" from a deeper split" if deeper else ""))
    else:
        said.append("the same tokens/s")
    return ", ".join(said)


def _more(best: Mapping[str, float], other: Mapping[str, float]) -> str:
    """What takes longer: the largest part, and the next one if it counts for something."""
    more = sorted(((other[name] - best[name], name) for name in PARTS), reverse=True)
    told = [f"{seconds:,.2g} s more {WORDS[name]}" for seconds, name in more[:2] if seconds > 0.2 * more[0][0] > 0]
    return ", ".join(told) or "nothing in particular"


def _rival(axis: str, chosen: Candidate, rival: Rival | None) -> Reason:
    """Why the layout is cut along an axis, or is not."""
    cut = getattr(chosen.layout, axis) > 1
    word = f"{'without' if cut else 'with'} {CUT[axis]}"
    code = f"without_{axis}" if cut else f"with_{axis}"
    own = chosen.cost.predicted_step
    if rival is None or own is None:
        return Reason(code, f"{word}: no layout of the space fits", {})
    ratio = rival.tokens_per_s_device / own.tokens_per_s_device
    if ratio <= 0.995:
        told = f"is {1 - ratio:.0%} slower: {_more(dict(own.parts), rival.parts)}"
    elif ratio < 1.005:
        told = "is as fast, and not as simple"
    else:
        told = f"is {ratio - 1:.1%} faster, which is too little for what it adds (below {TIE:.0%} the simpler one wins)"
    numbers = {"tokens_per_s_device": rival.tokens_per_s_device, "ratio": ratio}
    return Reason(code, f"{word}: the fastest layout, {product(rival.layout)}, {told}", numbers)


def _across_nodes(spec: ModelSpec, cluster: Cluster, work: Train, layout: Layout) -> Reason:
    """What a collective of tensor parallelism would take over two nodes."""
    node = cluster.devices_per_node
    payload = layout.micro_batch * work.seq // layout.cp * spec.hidden * size_bytes(work.param_dtype)
    inside, across = (
        curve("all_reduce", wiring, cluster).seconds(payload) for wiring in (Wiring(node, node), Wiring(2 * node, node))
    )
    text = (
        f"no TP across nodes: summing {binary(payload)} takes {across * 1e3:,.3g} ms over two nodes and "
        f"{inside * 1e3:,.3g} ms inside one, four times a layer and micro-batch"
    )
    return Reason("no_tp_across_nodes", text, {"inside_s": inside, "across_s": across, "payload_bytes": float(payload)})


def _experts(experts: int, cluster: Cluster, layout: Layout) -> Reason:
    where = over_nodes(cluster, layout.ep * (layout.etp or layout.tp))
    text = (
        f"EP {layout.ep}: {-(-experts // layout.ep)} of {experts} experts a rank, tokens travel to their experts and "
        f"back, forward and backward{where}"
    )
    return Reason("experts_parallel", text, {"ep": float(layout.ep)})


def searched_reasons(found: Found | None) -> tuple[Reason, ...]:
    """What a search over arrays looked at; nothing without one."""
    if found is None:
        return ()
    counts = (
        (found.illegal, "the engine refuses"),
        (found.unfit, "do not fit"),
        (found.tight, f"leave less than {SPARE:.0%} of a device free"),
        (found.uneven, "cut unevenly and were left out"),
        (found.costed, "were timed"),
    )
    told = ", ".join(f"{count:,} {what}" for count, what in counts if count)
    text = f"searched: {found.size:,} layouts; {told}; {len(found.pareto)} are not beaten in both speed and free memory"
    names = ("size", "illegal", "uneven", "unfit", "tight", "costed")
    numbers = {("space" if name == "size" else name): float(getattr(found, name)) for name in names}
    left = "; ".join(f"{what} ({why})" for what, why in found.left_out)
    return Reason("space", text, numbers), Reason("left_out", f"not searched: {left}", {})


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


def _bound(work: Train, chosen: Candidate) -> Reason:
    """What the predicted step is made of, the largest kind first, and how far the peaks are."""
    cost, time = chosen.cost, chosen.cost.predicted_step
    assert time is not None
    whole, parts = time.step.value, dict(time.parts)
    kinds = {kind: sum(parts[name] for name in names) / whole for kind, names in KINDS.items()}
    order = sorted(kinds, key=lambda kind: -kinds[kind])
    sent = max(EXPOSED, key=lambda name: parts[name])
    told = [f"{kind} {kinds[kind]:.0%}" for kind in order[1:] if kinds[kind] >= 0.005]
    text = (
        f"bound by {order[0]}: {kinds[order[0]]:.0%} of a predicted step of {whole:,.3g} s for {work.global_batch:,} x "
        f"{work.seq:,} tokens" + (f"; {', '.join(told)}" if told else "")
    )
    if kinds["communication"] >= 0.005:
        text += f" (most of it {WORDS[sent]}, {parts[sent] / whole:.0%})"
    text += f"; at the peaks of device and links it takes at least {cost.step_s:,.3g} s"
    numbers = {"step_s": whole, "step_lower_bound_s": cost.step_s}
    return Reason("bound", text, numbers | {kind.replace(" ", "_"): share for kind, share in kinds.items()})
