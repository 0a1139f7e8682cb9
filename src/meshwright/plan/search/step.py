"""Cost of an optimizer step over columns: the formulas of ``train_cost`` and ``cost.Links`` on arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.plan.cost import KERNEL_S, LAUNCH_S
from meshwright.plan.search.columns import Columns
from meshwright.plan.search.stages import Part
from meshwright.plan.search.tables import Tables
from meshwright.plan.train_cost import HIDDEN
from meshwright.specs.cluster import Cluster, Link
from meshwright.specs.dtypes import DTYPE_BYTES
from meshwright.specs.layout import Fsdp
from meshwright.specs.workload import Train

if TYPE_CHECKING:
    from meshwright.plan.search.columns import Floats, Ints, Mask

    Numbers = Floats | Ints | float


@dataclass(slots=True)
class Sums:
    """Bytes, FLOPs, wire bytes, messages and seconds of each layout, as ``cost.Tally``."""

    wire_bytes: Floats
    messages: Floats
    wire_s: Floats

    def add(self, wire: Floats | Ints, seconds: Floats, live: Mask, times: Numbers = 1.0) -> None:
        """Add a collective that runs where ``live``."""

        many = live * times
        self.wire_bytes += many * wire
        self.wire_s += many * seconds
        self.messages += many


class Group:
    """A group of ranks of every layout: its link, ring bandwidth and latencies (see ``cost.Links``)."""

    def __init__(self, cluster: Cluster, members: Ints, near: Ints) -> None:
        import numpy as np

        self.members, self.across = members, near < members
        inside, between = cluster.intra, cluster.inter
        ports = [_port(link, cluster) for link in (inside, between)]
        shared = np.where(near > 1, np.minimum(ports[1] * near, inside.bandwidth_bytes_s), ports[1])
        self.ring = np.where(self.across, shared, ports[0])
        self.port = np.where(self.across, ports[1], ports[0])
        self.hop = np.where(self.across, between.latency_s, inside.latency_s)
        nodes = -(-members // near)
        self.round = (near - 1) * inside.latency_s + np.ceil(np.log2(nodes)) * self.hop

    def all_reduce(self, out: Sums, ranks: Ints, payload: Ints, times: Numbers = 1.0) -> None:
        """2 (n-1)/n of the payload a rank, two rounds."""
        wire = -(-2 * (ranks - 1) * payload // ranks)
        out.add(wire, wire / self.ring + LAUNCH_S + 2 * self.round, (ranks > 1) & (payload > 0), times)

    def reduce_scatter(self, out: Sums, ranks: Ints, payload: Ints, times: Numbers = 1.0) -> None:
        """(n-1)/n of the payload a rank."""
        wire = -(-(ranks - 1) * payload // ranks)
        out.add(wire, wire / self.ring + LAUNCH_S + self.round, (ranks > 1) & (payload > 0), times)

    def all_gather(self, out: Sums, ranks: Ints, piece: Ints, times: Numbers = 1.0) -> None:
        """(n-1) pieces a rank."""
        wire = (ranks - 1) * piece
        out.add(wire, wire / self.ring + LAUNCH_S + self.round, (ranks > 1) & (piece > 0), times)


def _port(link: Link, cluster: Cluster) -> float:
    return link.device_bandwidth_bytes_s(cluster.devices_per_node)


@dataclass(slots=True)
class Numel:
    """Elements of dense parameters and of experts that are gathered or reduced at once."""

    dense: Ints
    expert: Ints


class Step:
    """Costs a block of layouts that share pipeline depth, schedule, model chunks and ZeRO stage.

    Args:
        tables: of all cuts. cuts: [N]: cut of every row. experts: [N]: ranks that share an expert (``grid_etp``).
        mode: [N]: place in ``columns.MODES``. micro: [N]: micro-batches. idle: [N]: bubble.
    """

    def __init__(
        self,
        x: Columns,
        tables: Tables,
        cluster: Cluster,
        work: Train,
        *,
        tied: bool,
        cuts: Ints,
        experts: Ints,
        mode: Ints,
        micro: Ints,
        idle: Floats,
    ) -> None:
        import numpy as np

        self.x, self.tables, self.cluster, self.work, self.tied = x, tables, cluster, work, tied
        self.cuts, self.mode, self.micro, self.idle = cuts, mode, micro, idle
        self.pp, self.zero = int(x.pp[0]), int(x.zero[0])
        node, stage = cluster.devices_per_node, x.stage
        ranks = x.dp * x.cp
        span = x.ep * experts
        copies = stage // span
        self.dense = Group(cluster, ranks, np.minimum(ranks, -(-node // x.tp)))
        self.expert = Group(cluster, copies, np.minimum(copies, -(-node // span)))
        self.pipe = Group(cluster, x.pp, np.minimum(x.pp, np.maximum(1, node // stage)))
        world = stage * x.pp
        self.tensor = Group(cluster, x.tp, np.minimum(x.tp, node))
        self.world = Group(cluster, world, np.minimum(world, node))
        self.layers = [Numel(tables.parameters[cuts, p, 0], tables.parameters[cuts, p, 1]) for p in self._patterns]
        self.plain = (x.ep == 1) & (copies == ranks)
        self.sharded = np.maximum(1, ranks // x.replicas) if self.zero == 3 else ranks

    @property
    def _patterns(self) -> range:
        return range(self.tables.parameters.shape[1])

    def cost(self, stages: list[tuple[Part, ...]]) -> dict[str, Floats]:
        """Of the slowest stage: seconds of a step, share on links, and sums as in ``plan.Cost``."""
        import numpy as np

        best: dict[str, Floats] = {}
        for parts in stages:
            found = self._stage(parts)
            if not best:
                best = found
                continue
            slower = found["step_s"] >= best["step_s"]
            best = {name: np.where(slower, found[name], best[name]) for name in found}
        return best

    def _stage(self, parts: tuple[Part, ...]) -> dict[str, Floats]:
        import numpy as np

        t, k = self.tables, self.cuts
        total = np.array(parts[0].layers) * 0
        for part in parts:
            total = total + np.array(part.layers)
        each = np.einsum("p,kpms->smk", total.astype(float), t.layer)
        first, last = any(p.first for p in parts), any(p.last for p in parts)
        each += t.first.T[:, None] if first else 0.0
        each += t.last.T[:, None] if last else 0.0
        of_row = np.take(each.reshape(len(each), -1), self.mode * len(t.first) + k, axis=1)
        of_row *= self.micro
        moved, flops, wire, messages, compute_s, wire_s = of_row
        step = Sums(wire, messages, wire_s)
        self._hand_offs(step, sum(p.neighbours for p in parts))
        units = self._units(parts)
        whole = Numel(sum(u.dense for u, _ in units), sum(u.expert for u, _ in units))  # type: ignore[arg-type]
        self._once(step, total, first, last)
        update = self._update_bytes(whole)
        moved += update
        compute_s += np.maximum(KERNEL_S, update / self.cluster.device.bandwidth_bytes_s)
        zeros = np.zeros(len(k))
        data = Sums(zeros.copy(), zeros.copy(), zeros.copy())
        self._data(data, whole, units, len(parts))
        exposed = np.maximum(0.0, data.wire_s - HIDDEN * compute_s)
        seconds = (compute_s + step.wire_s) / (1.0 - self.idle) + exposed
        return {
            "step_s": seconds,
            "wire_share": (step.wire_s + exposed) / seconds,
            "bytes_read": moved,
            "flops": flops,
            "wire_bytes": step.wire_bytes + data.wire_bytes,
            "messages": step.messages + data.messages,
            "compute_s": compute_s,
            "exposed_s": exposed,
            "link_s": step.wire_s,
        }

    def _hand_offs(self, out: Sums, neighbours: int) -> None:
        """Activations and gradients over each boundary: one sent and one received for every neighbour."""
        if not neighbours:
            return
        import numpy as np

        payload = self.tables.hidden_bytes[self.cuts]
        always = np.ones(len(payload), dtype=bool)
        out.add(payload, payload / self.pipe.port + self.pipe.hop, always, self.micro * neighbours)
        out.add(payload * 0, self.pipe.hop, always, self.micro * neighbours)

    def _units(self, parts: tuple[Part, ...]) -> list[tuple[Numel, Part | int]]:
        """Roots of the chunks, then layers by pattern (``Part`` or number of the pattern beside each)."""
        t, k = self.tables, self.cuts
        begins = any(p.first for p in parts)
        nothing = self.x.tp * 0
        out: list[tuple[Numel, Part | int]] = []
        for part in parts:
            root = nothing
            if part.first:
                root = root + t.embedding[k]
            elif part.last and self.tied and not begins:
                root = root + t.vocabulary[k]
            if part.last:
                root = root + t.tail[k] + (t.other[k] if begins else 0)
            out.append((Numel(root, nothing), part))
        for p in self._patterns:
            many = sum(part.layers[p] for part in parts)
            if many:
                out.append((Numel(many * self.layers[p].dense, many * self.layers[p].expert), p))
        return out

    def _once(self, out: Sums, total: Ints, first: bool, last: bool) -> None:
        """Gradient norm, sums of tied embeddings and of norms under sequence parallelism."""
        import numpy as np

        t, k, grad = self.tables, self.cuts, DTYPE_BYTES[self.work.grad_dtype]
        self.world.all_reduce(out, self.world.members, np.full(len(k), DTYPE_BYTES["f32"]))
        if self.tied and first != last:
            self.pipe.all_reduce(out, np.full(len(k), 2), t.tied[k] * grad)
        numel = t.norms @ total + (t.end_norms if last else 0)
        self.tensor.all_reduce(out, self.x.tp, numel[k] * self.x.sp * grad)

    def _update_bytes(self, whole: Numel) -> Floats:
        """What the optimizer reads and writes; see ``data_parallel.optimizer_op``."""
        import numpy as np

        w = self.work
        numel = whole.dense + whole.expert
        if self.zero:
            shared = np.where(self.plain, self.sharded, np.maximum(1, self.expert.members))
            numel = -(-whole.dense // self.sharded) + -(-whole.expert // shared)
        moments = {"adamw": 2, "sgd": 1, "muon": 1}[w.optimizer] * DTYPE_BYTES[w.state_dtype]
        master = 4 if w.master_weights and w.param_dtype != "f32" else 0
        width = DTYPE_BYTES[w.param_dtype]
        each = DTYPE_BYTES[w.grad_dtype] + 2 * moments + (2 * master + width if master else 2 * width)
        return numel.astype(float) * each

    def _data(self, out: Sums, whole: Numel, units: list[tuple[Numel, Part | int]], chunks: int) -> None:
        """Gradients and parameters over the data-parallel ranks, as ``training_step`` emits them by ZeRO stage."""
        w = self.work
        grad, width = DTYPE_BYTES[w.grad_dtype], DTYPE_BYTES[w.param_dtype]
        if self.zero == 0:
            for n, group, _ in self._pairs(whole):
                group.all_reduce(out, group.members, n * grad)
        elif self.zero == 1:
            self._scatter(out, whole, grad)
            self._gather(out, whole, width)
        elif self.zero == 2:
            for each in self._merged(units, chunks):
                self._scatter(out, each, grad, self.micro)
            self._gather(out, whole, width)
        else:
            self._sharded(out, whole, units)

    def _merged(self, units: list[tuple[Numel, Part | int]], chunks: int) -> list[Numel]:
        """Root and layers of each chunk as one."""
        out = []
        for root, part in units[:chunks]:
            assert isinstance(part, Part)
            dense, expert = root.dense, root.expert
            for p, many in enumerate(part.layers):
                dense = dense + many * self.layers[p].dense
                expert = expert + many * self.layers[p].expert
            out.append(Numel(dense, expert))
        return out

    def _sharded(self, out: Sums, whole: Numel, units: list[tuple[Numel, Part | int]]) -> None:
        """ZeRO-3: unit by unit for every micro-batch; under a pipeline gathered and reduced once a step."""
        knobs = Fsdp()
        width, reduce = DTYPE_BYTES[knobs.param_dtype], DTYPE_BYTES[knobs.reduce_dtype]
        once = self.pp > 1
        for unit, part in units:
            if isinstance(part, Part):
                self._gather(out, unit, width, 1.0 if once else self.micro)
                if not once:
                    self._scatter(out, unit, reduce, self.micro)
                continue
            many = int(self._count(part, units))
            layer = self.layers[part]
            if once:
                self._gather(out, layer, width, float(many))
            else:
                self._gather(out, layer, width, self.micro * many * (1 + self.x.reshard))
                self._scatter(out, layer, reduce, self.micro * many)
        if once:
            self._scatter(out, whole, reduce)

    def _count(self, pattern: int, units: list[tuple[Numel, Part | int]]) -> int:
        """Layers of a pattern over all chunks."""
        return sum(part.layers[pattern] for _, part in units if isinstance(part, Part))

    def _pairs(self, unit: Numel) -> list[tuple[Ints, Group, Ints | None]]:
        """Elements, group and the degree that shards them: experts apart where their replicas are other ranks."""
        import numpy as np

        dense = np.where(self.plain, unit.dense + unit.expert, unit.dense)
        pairs: list[tuple[Ints, Group, Ints | None]] = [(dense, self.dense, self.sharded)]
        apart = np.where(self.plain, 0, unit.expert)
        if apart.any():
            pairs.append((apart, self.expert, None))
        return pairs

    def _gather(self, out: Sums, unit: Numel, width: int, times: Numbers = 1.0) -> None:
        for n, group, sharded in self._pairs(unit):
            ranks = group.members if sharded is None else sharded
            group.all_gather(out, ranks, -(-n // ranks) * width, times)

    def _scatter(self, out: Sums, unit: Numel, width: int, times: Numbers = 1.0) -> None:
        for n, group, sharded in self._pairs(unit):
            ranks = group.members if sharded is None else sharded
            group.reduce_scatter(out, ranks, n * width, times)
            if sharded is not None and self.zero == 3 and int(self.x.replicas.max()) > 1:
                group.all_reduce(out, self.x.replicas, -(-n // ranks) * width, times)
