"""Which share of which dimension a rank of a stage holds; the part of ``place`` that looks at labels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm

from meshwright.specs import shares
from meshwright.specs.layout import Layout
from meshwright.specs.model import Attention, Layer, ModelSpec, Recurrent
from meshwright.specs.profile import EngineProfile
from meshwright.specs.shares import WHOLE, ExpertGrid, Share
from meshwright.specs.tensors import Dim, Label, Segment, TensorFamily

Intervals = tuple[tuple[int, int], ...]

#: Labels cut over tp, and over the ranks of one expert.
_HEADS: tuple[Label, ...] = ("heads", "kv_heads", "index_heads")
_STATE: tuple[Label, ...] = ("ssm_heads", "ssm_groups", "linear_k_heads", "linear_v_heads")
_WIDTHS: tuple[Label, ...] = ("vocab", "mlp", "shared_mlp", "vision")
TP_LABELS: frozenset[str] = frozenset((*_HEADS, *_STATE, *_WIDTHS))
EXPERT_LABELS = frozenset({"expert_mlp"})

#: Labels of heads that belong to groups, and those of the groups.
_MEMBERS = frozenset({"heads", "ssm_heads", "linear_v_heads"})
_GROUPS = frozenset({"kv_heads", "ssm_groups", "linear_k_heads"})

#: Labels whose share is rounded outward to whole units where an engine cuts into exact parts (scales of blocks), so
#: that ranks may differ even then.
_ROUNDED = frozenset({"mlp", "shared_mlp", "expert_mlp", "index_heads"})


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place within its stage: on tp, inside one expert, in the expert group."""

    tp: int
    etp: int
    ep: int


class Cuts:
    """Shares of every labelled dimension of one model under one layout."""

    def __init__(self, spec: ModelSpec, layout: Layout, profile: EngineProfile) -> None:
        self.spec, self.layout, self.profile = spec, layout, profile
        self.grid: ExpertGrid = shares.expert_grid(layout, profile)
        self.vocab_multiple = profile.vocab_multiple * (layout.tp if profile.vocab_times_tp else 1)
        whole = set(profile.replicated_labels)
        if profile.shared_whole_under_ep and min(layout.ep, layout.tp, layout.dp) > 1:
            whole.add("shared_mlp")
        self._whole = frozenset(whole)
        around_experts = layout.dp > 1 and self.grid.replicas == 1 and spec.moe is not None
        self._wide = profile.wide_labels if around_experts else frozenset()
        if layout.ep > 1:  # tokens, not sums, travel to the experts: the rest stays with its tokens
            self._wide = self._wide - {"shared_mlp"} if layout.tp > 1 else frozenset()
        self._coarsest = self._coarsest_units(spec.families)
        self._grouped = self._coarsest_units(f for f in spec.families if f.part == "weight")

    @staticmethod
    def _coarsest_units(families: Iterable[TensorFamily]) -> dict[tuple[object, ...], int]:
        """Fewest units of any tensor by (label, role, section, layers): blocks of scales where there are some."""
        units: dict[tuple[object, ...], int] = {}
        for family in families:
            for dim in family.dims:
                for segment in dim:
                    key = (segment.label, family.role, family.section, family.layers)
                    units[key] = min(units.get(key, segment.units), segment.units)
        return units

    def _groups(self, family: TensorFamily, label: str) -> tuple[int, int] | None:
        """``(members, groups)`` of the layer that the family belongs to, or None outside layers."""
        if not family.layers or family.section == "vision":
            return None
        layers: tuple[Layer, ...] = self.spec.layers
        index = family.layers[0]
        if family.section == "mtp":
            layers = self.spec.mtp_layers
            index = 0
        if index >= len(layers):
            return None
        layer = layers[index]
        mixer: Attention | Recurrent | None
        if label in {"heads", "kv_heads"}:
            mixer = layer.attention
            if mixer is None or mixer.kind == "mla":
                return None
            return mixer.heads, mixer.kv_heads
        mixer = layer.recurrent
        return (mixer.heads, mixer.groups) if mixer is not None else None

    def share(self, family: TensorFamily, segment: Segment, at: Place) -> Share:
        """Share of one segment at a place; ``WHOLE`` where the engine does not cut it."""
        label = segment.label
        if label in EXPERT_LABELS:
            return self._plain(family, segment, self.grid.etp, at.etp)
        if label == "experts" and family.role == "expert":
            return Share(*shares.part(segment.units, self.grid.ep, at.ep), segment.units)
        if label in self._wide:
            return self._plain(family, segment, self.grid.etp * self.grid.ep, at.ep * self.grid.etp + at.etp)
        degree = self.layout.tp
        if degree == 1 and self.vocab_multiple == 1:
            return WHOLE
        if label not in TP_LABELS or label in self._whole:
            return WHOLE
        if label == "vocab":
            return self._vocab(family, segment, at.tp)
        pair = self._groups(family, label) if label in _MEMBERS | _GROUPS else None
        if pair is None:
            return self._plain(family, segment, degree, at.tp)
        if label in _GROUPS:
            return shares.groups_of(pair[1], degree, at.tp)
        return shares.members_of(self._pieces(family, pair[0], label), pair[1], degree, at.tp)

    def _pieces(self, family: TensorFamily, heads: int, label: str) -> int:
        """Pieces in which heads are dealt: fewer than the heads where a weight groups them (grouped output)."""
        units = self._grouped.get((label, family.role, family.section, family.layers), heads)
        return units if heads % units == 0 else heads

    def _plain(self, family: TensorFamily, segment: Segment, degree: int, index: int) -> Share:
        if segment.label == "vision" and segment.units % degree:
            return WHOLE
        coarsest = self._coarsest[(segment.label, family.role, family.section, family.layers)]
        aligned = segment.units % coarsest == 0 or family.part not in {"weight", "bias"}
        units = coarsest if aligned else segment.units
        return shares.plain(units, degree, index, self.profile.uneven_tp)

    def _vocab(self, family: TensorFamily, segment: Segment, index: int) -> Share:
        if self.profile.uneven_tp or family.part not in {"weight", "bias"}:
            return shares.plain(segment.units, self.layout.tp, index, self.profile.uneven_tp)
        return shares.padded(segment.units, self.layout.tp, index, self.vocab_multiple)

    def intervals(self, family: TensorFamily, at: Place) -> tuple[tuple[Intervals, ...], int]:
        """Element ranges of every dimension at a place, and the padding of dimension 0 in elements.

        One axis cuts at most one dimension of a tensor: the first that carries a label of the axis.
        """
        out: list[Intervals] = []
        padding = 0
        used: set[str] = set()
        for number, dim in enumerate(family.dims):
            axis = axis_of(dim, family)
            if axis is None or axis in used:
                out.append(((0, family.shape[number]),))
                continue
            ranges, pad = self._dim(family, dim, at)
            padding += pad if number == 0 else 0
            out.append(ranges)
            used.add(axis)
        return tuple(out), padding

    def _dim(self, family: TensorFamily, dim: Dim, at: Place) -> tuple[Intervals, int]:
        ranges: list[tuple[int, int]] = []
        base = padding = 0
        for segment in dim:
            share = self.share(family, segment, at)
            first, last = share.interval(segment.units)
            padding += share.padding * segment.width
            for start, stop in self._pieces_of(family, segment, first, last, at):
                start, stop = base + start, base + stop
                if ranges and ranges[-1][1] == start:
                    ranges[-1] = (ranges[-1][0], stop)
                elif stop > start or not ranges:
                    ranges.append((start, stop))
            base += segment.size
        return tuple(ranges), padding

    def _pieces_of(self, family: TensorFamily, segment: Segment, first: int, last: int, at: Place) -> Intervals:
        """Elements of units ``first`` to ``last`` of a segment that are held.

        Experts whose matrices lie one under the other in one dimension (DBRX) are cut over the ranks of an expert
        inside each of them.
        """
        width, etp = segment.width, self.grid.etp
        stacked = segment.label == "experts" and family.role == "expert" and width > 1 and etp > 1
        if not stacked:
            return ((first * width, last * width),)
        low, high = shares.part(width, etp, at.etp)
        return tuple((expert * width + low, expert * width + high) for expert in range(first, last))

    def signature(self, at: Place) -> tuple[int, ...]:
        """Sizes of everything cut, at a place: equal signatures hold equal bytes and do equal work."""
        sizes: dict[tuple[object, ...], int] = {}
        for family in self.spec.families:
            if family.experts:
                low, high = shares.part(family.experts, self.grid.ep, at.ep)
                sizes[("experts", family.experts)] = high - low
            for dim in family.dims:
                for segment in dim:
                    if axis_of((segment,), family):
                        share = self.share(family, segment, at)
                        low, high = share.interval(segment.units)
                        key = (segment.label, segment.units, family.layers, family.section)
                        sizes[key] = high - low + share.padding
        return tuple(sizes.values())

    def signatures(self) -> list[tuple[int, ...]]:
        """Signature of every rank of one period of the stage, in the profile's order without pp."""
        grid, tp = self.grid, self.layout.tp
        ranks = self.layout.dp * self.layout.cp * tp
        period = min(ranks, lcm(tp, grid.etp * grid.ep))
        known: dict[tuple[object, ...], tuple[int, ...]] = {}
        tp_alike, etp_alike, ep_alike = self._alike()
        experts = [() if ep_alike else self._held_experts(ep) for ep in range(1 if ep_alike else grid.ep)]
        out = []
        for flat in range(period):
            etp, ep, _ = grid.place(flat)
            key = (0 if tp_alike else flat % tp, 0 if etp_alike else etp, experts[0 if ep_alike else ep])
            if key not in known:
                known[key] = self.signature(Place(flat % tp, etp, ep))
            out.append(known[key])
            if tp_alike and etp_alike and ep_alike:
                break
        return out

    def _held_experts(self, ep: int) -> tuple[int, ...]:
        """How many experts of every kind a member of the expert group holds."""
        counts = {f.experts for f in self.spec.families if f.experts}
        counts |= {s.units for f in self.spec.families for d in f.dims for s in d if s.label == "experts"}
        bounds = (shares.part(n, self.grid.ep, ep) for n in sorted(counts))
        return tuple(high - low for low, high in bounds)

    def _alike(self) -> tuple[bool, bool, bool]:
        """Whether all places on tp, inside an expert and in the expert group hold the same sizes."""
        even = not self.profile.uneven_tp
        tp_alike = etp_alike = ep_alike = True
        for family in self.spec.families:
            if family.experts % self.grid.ep:
                ep_alike = False
            for dim in family.dims:
                for segment in dim:
                    if segment.label == "experts" and family.role == "expert" and segment.units % self.grid.ep:
                        ep_alike = False
                    if even and segment.label not in _ROUNDED:
                        continue
                    if segment.label in self._wide and segment.units % (self.grid.etp * self.grid.ep):
                        etp_alike = ep_alike = False
                    if segment.label in EXPERT_LABELS and segment.units % self.grid.etp:
                        etp_alike = False
                    if segment.label in TP_LABELS and segment.units % self.layout.tp:
                        tp_alike = False
        return tp_alike, etp_alike, ep_alike


def axis_of(dim: Dim, family: TensorFamily) -> str | None:
    """Axis that cuts a dimension: ``tp``, ``etp``, ``ep`` or None."""
    for segment in dim:
        if segment.label in TP_LABELS:
            return "tp"
        if segment.label in EXPERT_LABELS:
            return "etp"
        if segment.label == "experts" and family.role == "expert":
            return "ep"
    return None
