"""What a rank does in an optimizer step, summed up for timing: seconds at peak rates by kind of work. No constants.

Everything is counted from the ops of the ledger (``training_step.steps``): products by element type and
shape, attention cores, bytes of everything else, collectives by axis on the wired topology. ``training_time`` puts the
fitted constants on it, which are all linear in these sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from meshwright.plan.forward import Emitter
from meshwright.plan.products import OUT_OPS
from meshwright.plan.timing.collective import Wiring, curve
from meshwright.plan.timing.compute import peak_flops
from meshwright.plan.timing.step import Groups
from meshwright.plan.training_step import microbatches, steps
from meshwright.plan.wire import Op
from meshwright.specs.cluster import Cluster, Device
from meshwright.specs.placement import Placement, RankClass
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


def step_work(placement: Placement, cluster: Cluster, train: Train, compute: str = "bf16") -> StepWork:
    """Count a step of a layout.

    Args:
        placement: model, layout, engine; its rank classes are those that are timed.
        cluster: device and links. train: sequence, batch, recompute.
        compute: element type in which layers multiply (``bf16``, ``f8_e4m3``, ``fp4``); heads and routers stay 16-bit.

    Raises:
        InputError: the batch does not divide.
    """
    m = microbatches(placement.layout, train)
    ranks, useful = [], 0.0
    for step in steps(placement, train, each=False):
        phased = _Phased(step.rank_class.name, "forward", [])
        step.run(phased)
        rank_class = step.rank_class
        counter = _Counter(placement, cluster, rank_class, compute, m, train)
        counter.add(Part(phase, of_layer, ops, n) for (phase, of_layer, _), (ops, n) in phased.parts.items())
        ranks.append(counter.result())
        useful += counter.useful_flops * rank_class.ranks
    share = placement.layout.world / max(1, sum(c.ranks for c in placement.classes))
    return StepWork(tuple(ranks), m, useful * share, train.global_batch * train.seq, placement.layout.world)


class _Counter:
    """Adds up the lists of one rank class."""

    def __init__(
        self, placement: Placement, cluster: Cluster, rank_class: RankClass, compute: str, m: int, train: Train
    ) -> None:
        self.unfused, self.seq = train.attention == "unfused", train.seq
        self.cluster, self.m, self.compute = cluster, m, compute
        self.groups = Groups(placement, cluster.devices_per_node, rank_class.coordinate)
        self.stage = rank_class.coordinate.pp
        self.zero, self.pipelined = placement.layout.zero, placement.layout.pp > 1
        self.interleaved = placement.layout.virtual > 1
        moe = placement.spec.moe
        self.topk = moe.topk if moe is not None else 1
        self.layers = max(1, len(placement.stages[self.stage].layers))
        self.work = {"forward": Work(), "recompute": Work(), "backward": Work()}
        self.data: dict[str, float] = {}
        self.useful_flops = 0.0

    def result(self) -> RankWork:
        """The sums; work is of one micro-batch."""
        one = {name: Work().plus(work, 1 / self.m) for name, work in self.work.items()}
        of = self.data.get
        data = DataWork(
            gather=of("gather", 0.0),
            gather_again=of("gather_again", 0.0),
            scatter=of("scatter", 0.0),
            units=self.layers,
            parameters=of("parameters", 0.0),
            gradients=of("gradients", 0.0),
            buckets=self.layers,
            optimizer=of("optimizer", 0.0),
            norm=of("norm", 0.0),
        )
        return RankWork(self.stage, one["forward"], one["recompute"], one["backward"], data)

    def add(self, parts: Iterable[Part]) -> None:
        """Add lists of ops of all phases."""
        for part in parts:
            again = part.phase == "backward" and part.ops[0].name.startswith("recompute ")
            name = "recompute" if again else "forward" if part.phase == "forward" else "backward"
            found, flops = self._work(part)
            self.work[name] = self.work[name].plus(found, part.times)
            if name == "forward":
                self.useful_flops += 3 * flops * part.times

    def _work(self, part: Part) -> tuple[Work, float]:
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
        device = self.cluster.device
        of_experts = "expert." in op.name and "shared_expert" not in op.name
        low = of_layer and "router" not in op.name
        peak = product_peak(device, self.compute if low else "bf16")
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
        each = rows * 2 * op.repeats / self.cluster.device.bandwidth_bytes_s
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
        if op.op == "attention" and self.unfused:
            tokens, heads = op.shapes[0][:2]
            moved = tokens * heads * self.seq * 2 * SCORE_PASSES["gradient" in op.name]
        sums["light"] += moved * op.repeats / device.bandwidth_bytes_s

    def _collective(self, op: Op, part: Part, sums: dict[str, float]) -> None:
        assert op.group is not None
        wiring = self.groups.of(op.group)
        if wiring.members <= 1:
            return
        payload = op.payload * (self._once_a_node(wiring) if op.op == "all_to_all" and op.group == "ep" else 1.0)
        seconds = curve(op.op, wiring, self.cluster).seconds(payload) * op.repeats
        if is_data_parallel(op.group):
            self._parameters(op, part, seconds)
        elif op.group == "world":
            self._data("norm", seconds * part.times)
        else:
            if op.op == "recv":  # the peer's send is the same transfer
                return
            axis = "pp_beside" if op.group == "pp" and self.interleaved else op.group
            sums[axis if axis in {"cp", "ep", "pp", "pp_beside"} else "tp"] += seconds

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
