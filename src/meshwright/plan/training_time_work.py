"""What a rank does in an optimizer step, summed up for timing: seconds at peak rates by kind of work. No constants.

Everything is counted from the ops of the ledger (``training_step.steps``): products by element type and
shape, attention cores, bytes of everything else, collectives by axis on the wired topology. ``training_time`` puts the
fitted constants on it, which are all linear in these sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from meshwright.plan.forward import Emitter
from meshwright.plan.products import OUT_OPS
from meshwright.plan.timing.collective import Curve, Wiring, curve
from meshwright.plan.timing.compute import peak_flops
from meshwright.plan.timing.step import Groups
from meshwright.plan.training_step import microbatches, steps
from meshwright.plan.wire import Op
from meshwright.specs.cluster import Cluster, Device
from meshwright.specs.placement import Placement
from meshwright.specs.workload import Train


class Work(NamedTuple):
    """Seconds at the peak of the device (or of the links, as ``timing.collective`` has them) of some ops.

    Attributes:
        dense, experts, head: products of layers, of experts, of the head (16-bit). ``*_shape``: the same times the
            PFLOP/s of the peak and 1/m + 1/n + 1/k.
        attention, recurrent: cores, at the 16-bit peak.
        light: bytes of norms, losses and cores that are no attention, over memory bandwidth.
        passes: inputs and outputs of plain products, over memory bandwidth. routed, inner: those of experts, of the
            model's width (permuted tokens) and of the experts' own (around their activation).
        groups: products of single experts (a grouped product of E local experts is E of them).
        kernels: ops on the compute stream. mixtures: mixtures of experts that tokens pass.
        tp, cp, ep: collectives of each axis.
        pp: hand-offs that block the stage (one chunk a rank). pp_beside: those of interleaved chunks.
    """

    dense: float = 0.0
    dense_shape: float = 0.0
    experts: float = 0.0
    experts_shape: float = 0.0
    head: float = 0.0
    head_shape: float = 0.0
    attention: float = 0.0
    recurrent: float = 0.0
    light: float = 0.0
    passes: float = 0.0
    routed: float = 0.0
    inner: float = 0.0
    groups: float = 0.0
    kernels: float = 0.0
    mixtures: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    pp: float = 0.0
    pp_beside: float = 0.0

    def plus(self, other: Work, times: float = 1.0) -> Work:
        """Sum of this and ``times`` the other."""
        return Work(*(a + b * times for a, b in zip(self, other, strict=True)))


class DataWork(NamedTuple):
    """Seconds of gradient and parameter collectives, and of the optimizer.

    Attributes:
        gather, gather_again, scatter: of one micro-batch (FSDP, ZeRO-2 gradients): before the forward, before the
            backward, behind it. units: how many of them one micro-batch has.
        parameters, gradients: once a step. buckets: into how many pieces they are cut (the rank's layers).
        optimizer: bytes of the update over memory bandwidth. norm: the sum of the gradient norm over all ranks.
    """

    gather: float = 0.0
    gather_again: float = 0.0
    scatter: float = 0.0
    units: float = 1.0
    parameters: float = 0.0
    gradients: float = 0.0
    buckets: float = 1.0
    optimizer: float = 0.0
    norm: float = 0.0


class RankWork(NamedTuple):
    """One rank class: work of one micro-batch (all chunks of the rank), and of the data-parallel side."""

    stage: int
    forward: Work
    recompute: Work
    backward: Work
    data: DataWork


class StepWork(NamedTuple):
    """A step: rank classes in order, micro-batches, useful FLOPs of all ranks (three times the
    forward, the usual convention), tokens, devices."""

    ranks: tuple[RankWork, ...]
    microbatches: int
    useful_flops: float
    tokens: int
    devices: int


class Part(NamedTuple):
    """Equal lists of ops of one rank: in which phase, of a layer or of the ends of the model, how often in a step."""

    phase: str
    of_layer: bool
    ops: Sequence[Op]
    times: int


@dataclass(slots=True)
class _Phased(Emitter):
    """Counts lists of ops by phase instead of writing entries; equal layers hand in one list again and again."""

    parts: dict[tuple[str, bool, int], tuple[Sequence[Op], int]] = field(default_factory=dict)

    def emit(
        self,
        ops: Sequence[Op],
        layer: int | None = None,
        *,
        phase: str | None = None,
        microbatch: int | None = None,
        times: int = 1,
    ) -> None:
        """Remember the list (so that its id stays its own) and count it."""
        if ops:
            key = (phase or self.phase, layer is not None, id(ops))
            self.parts[key] = (ops, self.parts.get(key, (ops, 0))[1] + times)


#: Times that 16-bit scores of an unfused attention core pass memory, forward and backward: product, scale with mask and
#: softmax, dropout, product (Korthikanti et al. 2022, arXiv 2205.05198, section 4.1).
SCORE_PASSES = (6, 8)

#: Collectives that carry gradients or parameters.
_DATA = ("dp", "dp+cp", "edp")


def is_data_parallel(group: str | None) -> bool:
    """Whether a collective is of gradients or parameters rather than of activations."""
    return group is not None and group.split("_")[0] in _DATA


def product_peak(device: Device, dtype: str) -> float:
    """Peak of products in training, FLOP/s: NVFP4 counts as twice FP8, also where the device has more for inference
    (B300, GB300: measured steps gain as much over FP8 as on B200 and GB200)."""
    peak, eight = peak_flops(device, dtype), device.peak("f8_e4m3")
    return min(peak, 2 * eight) if dtype == "fp4" and eight else peak


def part_of(wiring: Wiring, group: str, replicas: int) -> Wiring:
    """Wiring of the sharded part of a data-parallel group (``dp_shard``: neighbours) or of the ranks that hold the same
    shard (``dp_replicate``: one in each part); of any other group itself."""
    sharded = max(1, wiring.members // replicas)
    if group.endswith("_shard"):
        return Wiring(sharded, min(sharded, wiring.near))
    if group.endswith("_replicate"):
        return Wiring(replicas, max(1, wiring.near // sharded))
    return wiring


def step_work(placement: Placement, cluster: Cluster, train: Train, compute: str = "bf16") -> StepWork:
    """Count a step of a layout.

    Args:
        placement: model, layout, engine; its rank classes are those that are timed.
        cluster: device and links. train: sequence, batch, recompute.
        compute: element type in which layers multiply (``bf16``, ``f8_e4m3``, ``fp4``); heads and routers stay 16-bit.

    Raises:
        InputError: the batch does not divide.
    """
    layout, moe = placement.layout, placement.spec.moe
    m = microbatches(layout, train)
    fsdp = layout.fsdp if layout.zero == 3 else None
    ranks, useful = [], 0.0
    for step in steps(placement, train, each=False):
        rank_class = step.rank_class
        phased = _Phased(rank_class.name, "forward", [])
        step.run(phased)
        counter = OpCounter(
            Groups(placement, cluster.devices_per_node, rank_class.coordinate),
            cluster,
            train,
            compute,
            topk=moe.topk if moe is not None else 1,
            m=m,
            zero=layout.zero,
            pipelined=layout.pp > 1,
            interleaved=layout.virtual > 1,
            replicas=fsdp.replicas if fsdp is not None else 1,
        )
        parts = [Part(phase, of_layer, ops, n) for (phase, of_layer, _), (ops, n) in phased.parts.items()]
        stage = rank_class.coordinate.pp
        work, flops = _by_phase(counter, parts)
        layers = max(1, len(placement.stages[stage].layers))
        data = DataWork(units=layers, buckets=layers)._replace(**counter.data)
        ranks.append(RankWork(stage, work["forward"], work["recompute"], work["backward"], data))
        useful += flops * rank_class.ranks
    share = layout.world / max(1, sum(c.ranks for c in placement.classes))
    return StepWork(tuple(ranks), m, useful * share, train.global_batch * train.seq, layout.world)


def _by_phase(counter: OpCounter, parts: Iterable[Part]) -> tuple[dict[str, Work], float]:
    """Work of one micro-batch by phase, and useful FLOPs of the step (three times the forward)."""
    work, useful = {"forward": Work(), "recompute": Work(), "backward": Work()}, 0.0
    for part in parts:
        again = part.phase == "backward" and part.ops[0].name.startswith("recompute ")
        name = "recompute" if again else "forward" if part.phase == "forward" else "backward"
        found, flops = counter.count(part)
        work[name] = work[name].plus(found, part.times)
        if name == "forward":
            useful += 3 * flops * part.times
    return {name: Work().plus(total, 1 / counter.m) for name, total in work.items()}, useful


class Wires(Protocol):
    """What knows how the groups of a rank are wired."""

    def of(self, group: str) -> Wiring:
        """Wiring of the group of an axis."""


@dataclass(slots=True)
class OpCounter:
    """Adds up lists of ops: work on activations is returned, ``data`` collects what data parallelism and the optimizer
    take (see ``DataWork``).

    Attributes:
        groups, cluster, train, compute: see ``step_work``. topk: experts of a token. m: micro-batches.
        zero, pipelined, interleaved, replicas: of the layout; they tell where a collective is counted.
    """

    groups: Wires
    cluster: Cluster
    train: Train
    compute: str
    topk: int = 1
    m: int = 1
    zero: int = 0
    pipelined: bool = False
    interleaved: bool = False
    replicas: int = 1
    data: dict[str, float] = field(default_factory=dict)
    _peaks: tuple[float, float] = field(init=False)
    _curves: dict[tuple[str, str], tuple[Wiring, Curve | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        device = self.cluster.device
        self._peaks = product_peak(device, "bf16"), product_peak(device, self.compute)

    def count(self, part: Part) -> tuple[Work, float]:
        """Work of one run of a list, and its FLOPs."""
        sums = dict.fromkeys(Work._fields, 0.0)
        flops, experts = 0.0, 1
        for op in part.ops:
            if op.op == "mark":
                continue
            if op.group is not None:
                self._collective(op, part, sums)
                continue
            flops += op.flops * op.repeats
            if op.op == "matmul":
                if "weight gradient" not in op.name:  # the weight gradient lacks the count: it follows its twin
                    experts = op.shapes[1][0] if len(op.shapes[1]) > 2 else 1
                self._product(op, part.of_layer, experts, sums)
            elif part.phase == "optimizer":
                self._data("optimizer", op.payload / self.cluster.device.bandwidth_bytes_s)
                continue
            else:
                self._other(op, sums)
            sums["kernels"] += op.repeats
        return Work(**sums), flops

    def _product(self, op: Op, of_layer: bool, experts: int, sums: dict[str, float]) -> None:
        of_experts = "expert." in op.name and "shared_expert" not in op.name
        low = of_layer and "router" not in op.name
        peak = self._peaks[low]
        rows, inner = op.shapes[0]
        n = op.shapes[1][-1]
        m, k = float(rows), float(inner)
        sums["groups"] += experts * op.repeats if of_experts else 0
        if of_experts and experts > 1:  # the side that counts tokens is divided over the experts
            m, k = (m, k / experts) if "weight gradient" in op.name else (m / experts, k)
        seconds = op.flops * op.repeats / peak
        name = "experts" if of_experts else "dense" if of_layer else "head"
        sums[name] += seconds
        sums[f"{name}_shape"] += seconds * peak / 1e15 * (1 / m + 1 / k + 1 / n)
        if "weight gradient" not in op.name:
            self._passes(op, of_experts, sums)
        if "router" in op.name and "weight gradient" not in op.name:
            sums["mixtures"] += 1

    def _passes(self, op: Op, of_experts: bool, sums: dict[str, float]) -> None:
        """Bytes of a product's input and output: of experts apart for the width of the model and for their own."""
        (rows, entering), leaving = op.shapes[0], op.shapes[1][-1]
        width = 4 if self.train.param_dtype == "f32" else 2  # layers that multiply in fewer bits read and write 16
        each = rows * width * op.repeats / self.cluster.device.bandwidth_bytes_s
        if not of_experts:
            sums["passes"] += each * (entering + leaving)
            return
        last = op.name.removeprefix("recompute ").split()[0].rpartition(".")[2] in OUT_OPS
        narrow = entering if last != ("gradient" in op.name) else leaving
        sums["inner"] += each * narrow
        sums["routed"] += each * (entering + leaving - narrow)

    def _other(self, op: Op, sums: dict[str, float]) -> None:
        device = self.cluster.device
        if op.op in {"attention", "recurrent"}:
            sums[op.op] += op.flops * op.repeats / peak_flops(device, "bf16")
        moved = 0.0 if op.op == "attention" else float(op.payload)
        if op.op == "attention" and self.train.attention == "unfused":
            tokens, heads = op.shapes[0][:2]
            moved = tokens * heads * self.train.seq * 2 * SCORE_PASSES["gradient" in op.name]
        sums["light"] += moved * op.repeats / device.bandwidth_bytes_s

    def _collective(self, op: Op, part: Part, sums: dict[str, float]) -> None:
        assert op.group is not None
        wiring, found = self._curve(op.op, op.group)
        if found is None:
            return
        payload = op.payload * (self._once_a_node(wiring) if op.op == "all_to_all" and op.group == "ep" else 1.0)
        seconds = found.seconds(payload) * op.repeats
        if is_data_parallel(op.group):
            self._parameters(op, part, seconds)
        elif op.group == "world":
            self._data("norm", seconds * part.times)
        else:
            if op.op == "recv":  # the peer's send is the same transfer
                return
            axis = "pp_beside" if op.group == "pp" and self.interleaved else op.group
            sums[axis if axis in {"cp", "ep", "pp", "pp_beside"} else "tp"] += seconds

    def _curve(self, op: str, group: str) -> tuple[Wiring, Curve | None]:
        """Wiring of a group, and the curve of a collective in it; None for one rank."""
        if (op, group) not in self._curves:
            wiring = part_of(self.groups.of(group), group, self.replicas)
            self._curves[op, group] = wiring, curve(op, wiring, self.cluster) if wiring.members > 1 else None
        return self._curves[op, group]

    def _once_a_node(self, wiring: Wiring) -> float:
        """Share of the routed copies that cross nodes when a token goes to each node once and is copied there
        (DeepSeek-V3, arXiv 2412.19437, section 3.2.2; DeepEP and HybridEP)."""
        nodes = wiring.nodes
        return nodes * (1 - (1 - 1 / nodes) ** self.topk) / self.topk if nodes > 1 else 1.0

    def _parameters(self, op: Op, part: Part, seconds: float) -> None:
        """Gradients and parameters: of every micro-batch, or once a step."""
        gather = op.op == "all_gather"
        every = (self.zero == 3 and not self.pipelined) or (self.zero == 2 and not gather)
        if every and part.phase != "optimizer":
            name = "scatter" if not gather else "gather" if part.phase == "forward" else "gather_again"
            self._data(name, seconds * part.times / self.m)
        else:
            self._data("parameters" if gather else "gradients", seconds * part.times)

    def _data(self, name: str, seconds: float) -> None:
        self.data[name] = self.data.get(name, 0.0) + seconds


def distinct(ranks: Sequence[RankWork]) -> list[RankWork]:
    """One rank class a stage: the one that works longest at the peaks."""
    best: dict[int, RankWork] = {}
    for rank in ranks:
        known = best.get(rank.stage)
        if known is None or sum(rank.backward) > sum(known.backward):
            best[rank.stage] = rank
    return [best[stage] for stage in sorted(best)]
