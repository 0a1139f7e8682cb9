"""Where every tensor and every layer boundary lives: ``place(spec, layout, profile)``.

The one table that planner, loader, runtime, checkpointer and tests read. It knows dimension labels and axes,
no names and no engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from meshwright.errors import IllegalLayoutError
from meshwright.specs.cuts import Cuts, Place
from meshwright.specs.dtypes import DTYPE_BYTES
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import Axis, EngineProfile
from meshwright.specs.shares import part
from meshwright.specs.tensors import Section, TensorFamily

AXES: tuple[Axis, ...] = ("dp", "pp", "cp", "tp")
#: Places of one placement whose shards are remembered.
MAX_KNOWN = 64


@dataclass(frozen=True, slots=True, order=True)
class Coordinate:
    """A rank's place on every axis; ``ep`` follows from the others (see ``Placement.coordinate``)."""

    dp: int = 0
    pp: int = 0
    cp: int = 0
    tp: int = 0
    ep: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage: its decoder layers (``layers``, checkpoint numbers, in order) and its ends.

    ``chunks``: the layers by model chunk; one chunk unless the schedule interleaves or folds the model.
    """

    index: int
    layers: tuple[int, ...]
    embedding: bool
    head: bool
    chunks: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds of one family.

    Attributes:
        family: the row of the tensor table.
        intervals: for every dimension the half-open element ranges held, in order (several where a fused
            dimension is cut segment by segment).
        layers: layers held; () for a family outside layers.
        experts: expert numbers held; () for a family that is not one of many experts.
        padding: elements by which the engine pads the dimension 0 interval (vocabulary), stored but empty.
        stage: pipeline stage that holds it.
        shape: of one held tensor, padding included.
    """

    family: TensorFamily
    intervals: tuple[tuple[tuple[int, int], ...], ...]
    layers: tuple[int, ...]
    experts: tuple[int, ...]
    padding: int = 0
    stage: int = 0
    shape: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        sizes = [d[0][1] - d[0][0] if len(d) == 1 else sum(stop - start for start, stop in d) for d in self.intervals]
        if sizes and self.padding:
            sizes[0] += self.padding
        object.__setattr__(self, "shape", tuple(sizes))

    @property
    def count(self) -> int:
        """How many tensors are held: layers times experts."""
        return max(1, len(self.layers)) * max(1, len(self.experts))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors held, padding included."""
        size = DTYPE_BYTES[self.family.dtype] * self.count
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True, slots=True)
class RankClass:
    """Ranks that hold and do the same: a name, one member's coordinate, how many there are, the first rank."""

    name: str
    coordinate: Coordinate
    first_rank: int
    ranks: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of one model under one layout by one engine."""

    spec: ModelSpec
    layout: Layout
    profile: EngineProfile
    stages: tuple[Stage, ...]
    classes: tuple[RankClass, ...]
    sections: tuple[Section, ...] = ("decoder", "vision")
    cuts: Cuts = field(repr=False, compare=False, kw_only=True)
    class_index: dict[tuple[int, tuple[int, ...]], RankClass] = field(repr=False, compare=False, kw_only=True)
    known: dict[tuple[int, Place], tuple[Shard, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def coordinate(self, rank: int) -> Coordinate:
        """Coordinate of a rank, by the profile's rank order.

        Raises:
            IndexError: the rank is outside the layout's world.
        """
        if not 0 <= rank < self.layout.world:
            raise IndexError(f"rank {rank} is outside the world of {self.layout.world}")
        places: dict[str, int] = {}
        for axis in reversed(self.profile.rank_order):
            rank, places[axis] = divmod(rank, getattr(self.layout, axis))
        flat = self._flat(places)
        return Coordinate(**places, ep=self.cuts.grid.place(flat)[1])

    def _flat(self, places: dict[str, int]) -> int:
        flat = 0
        for axis in self.profile.rank_order:
            if axis != "pp":
                flat = flat * getattr(self.layout, axis) + places[axis]
        return flat

    def flat(self, coordinate: Coordinate) -> int:
        """Index of a rank within its stage: its axes in the profile's order, without pp."""
        return self._flat({axis: getattr(coordinate, axis) for axis in AXES})

    def place(self, coordinate: Coordinate) -> Place:
        """Place within the stage that decides what is held."""
        etp, ep, _ = self.cuts.grid.place(self.flat(coordinate))
        return Place(coordinate.tp, etp, ep)

    def rank(self, coordinate: Coordinate) -> int:
        """Rank at a coordinate (``ep`` is ignored)."""
        rank = 0
        for axis in self.profile.rank_order:
            rank = rank * getattr(self.layout, axis) + getattr(coordinate, axis)
        return rank

    def group(self, axis: str, coordinate: Coordinate) -> tuple[int, ...]:
        """Ranks of the group of ``axis`` that holds ``coordinate``, in ascending order.

        ``axis``: tp, pp, dp, cp, joined with ``+`` (``dp+cp``), ``ep`` (ranks that share out one set of experts),
        ``etp`` (ranks that share one expert), ``edp`` (ranks that hold the same experts), ``dcp`` (inside tp).

        Raises:
            KeyError: an unknown axis.
        """
        if axis in {"ep", "etp", "edp"}:
            return tuple(self._expert_group(axis, coordinate))
        names = axis.split("+")
        ranges: dict[str, range] = {}
        for name in names:
            if name == "dcp":
                first = coordinate.tp // self.layout.dcp * self.layout.dcp
                ranges["tp"] = range(first, first + self.layout.dcp)
            elif name in AXES:
                ranges[name] = range(getattr(self.layout, name))
            else:
                raise KeyError(f"unknown axis {name!r}; known: {', '.join(AXES)}, dcp, ep, etp, edp")
        members = [0]
        for axis in self.profile.rank_order:
            at = getattr(coordinate, axis)
            size = getattr(self.layout, axis)
            members = [rank * size + place for rank in members for place in ranges.get(axis, (at,))]
        return tuple(members)

    def _expert_group(self, axis: str, coordinate: Coordinate) -> Iterator[int]:
        grid = self.cuts.grid
        etp, ep, replica = grid.place(self.flat(coordinate))
        degree, step, base = {
            "etp": (grid.etp, 1, (replica * grid.ep + ep) * grid.etp),
            "ep": (grid.ep, grid.etp, replica * grid.ep * grid.etp + etp),
            "edp": (grid.replicas, grid.ep * grid.etp, ep * grid.etp + etp),
        }[axis]
        for index in range(degree):
            yield self.rank(self.at(coordinate.pp, base + index * step))

    def at(self, stage: int, flat: int) -> Coordinate:
        """Coordinate of rank ``flat`` of a stage."""
        ep = self.cuts.grid.place(flat)[1]
        places = {"pp": stage}
        for axis in reversed(self.profile.rank_order):
            if axis != "pp":
                flat, places[axis] = divmod(flat, getattr(self.layout, axis))
        return Coordinate(**places, ep=ep)

    def shards(self, coordinate: Coordinate) -> tuple[Shard, ...]:
        """Everything that the rank at ``coordinate`` holds of the weights (before ZeRO or FSDP)."""
        key = (coordinate.pp, self.place(coordinate))
        if key not in self.known:
            if len(self.known) >= MAX_KNOWN:
                self.known.clear()
            self.known[key] = tuple(self._shards(*key))
        return self.known[key]

    def _shards(self, stage_index: int, at: Place) -> Iterator[Shard]:
        stage = self.stages[stage_index]
        on_stage = frozenset(stage.layers)
        for family in self.spec.families:
            if family.section not in self.sections or not self._on(family, stage):
                continue
            layers = family.layers
            if family.section == "decoder" and len(on_stage) < len(self.spec.layers):
                layers = tuple(n for n in layers if n in on_stage)
            if family.layers and not layers:
                continue
            experts: tuple[int, ...] = ()
            if family.experts:
                experts = tuple(range(*part(family.experts, self.cuts.grid.ep, at.ep)))
                if not experts:
                    continue
            intervals, padding = self.cuts.intervals(family, at)
            shard = Shard(family, intervals, layers, experts, padding, stage_index)
            if all(shard.shape):
                yield shard

    def _on(self, family: TensorFamily, stage: Stage) -> bool:
        """Whether a stage holds (part of) a family."""
        first = stage.index == 0
        if family.section == "vision":
            return first or self.profile.vision_on == "all"
        if family.section == "mtp":
            return stage.head and not (self.profile.draft_shares_ends and family.role in {"embedding", "head"})
        if family.layers:
            return True
        if family.role in {"head", "norm"}:
            return stage.head
        if family.role == "embedding" and any(s.label == "vocab" for d in family.dims for s in d):
            return stage.embedding
        return first

    def weight_bytes(self, coordinate: Coordinate) -> int:
        """Bytes of ``shards(coordinate)``."""
        return sum(shard.nbytes for shard in self.shards(coordinate))

    def weight_bytes_by_role(self, coordinate: Coordinate) -> dict[str, int]:
        """Bytes of ``shards(coordinate)`` by role of the tensor (vision and mtp sections under their own names)."""
        out: dict[str, int] = {}
        for shard in self.shards(coordinate):
            key = shard.family.role if shard.family.section == "decoder" else shard.family.section
            out[key] = out.get(key, 0) + shard.nbytes
        return out

    def class_of(self, rank: int) -> RankClass:
        """The rank class of a rank."""
        coordinate = self.coordinate(rank)
        return self.class_index[(coordinate.pp, self.cuts.signature(self.place(coordinate)))]


def place(
    spec: ModelSpec,
    layout: Layout,
    profile: EngineProfile,
    *,
    sections: tuple[Section, ...] = ("decoder", "vision"),
) -> Placement:
    """Place ``spec`` under ``layout`` as ``profile`` does.

    Args:
        spec: the model.
        layout: degrees of every axis.
        profile: engine.
        sections: parts of the checkpoint that are loaded: ``mtp`` only for speculative decoding, ``vision`` unless
            the engine runs text only.

    Raises:
        IllegalLayoutError: the profile refuses the layout (its first illegal rule, both numbers, the way out).
    """
    for rule in profile.check(spec, layout, None, None):
        if rule.severity == "illegal":
            raise IllegalLayoutError(f"{rule.message}; {rule.way_out}")
    cuts = Cuts(spec, layout, profile)
    stages = _stages(spec, layout, profile, sections)
    period = cuts.signatures()
    placement = Placement(spec, layout, profile, stages, (), sections, cuts=cuts, class_index={})
    index = _classes(placement, period)
    classes = tuple(sorted(index.values(), key=lambda c: c.first_rank))
    return Placement(spec, layout, profile, stages, classes, sections, cuts=cuts, class_index=index)


def _stages(
    spec: ModelSpec, layout: Layout, profile: EngineProfile, sections: tuple[Section, ...]
) -> tuple[Stage, ...]:
    """Layer boundaries, and which stages hold the ends.

    The embedding lies on the first stage; a tied head and the draft layers (mtp) need it on the last one too
    (vLLM v1/spec_decode: the draft shares the embedding only without pipeline stages).
    """
    places = chunk_places(layout)
    sizes = _chunk_sizes(len(spec.layers), layout, profile, places)
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    again = spec.tied or ("mtp" in sections and bool(spec.mtp_layers))
    stages = []
    for index, held in enumerate(places):
        chunks = tuple(tuple(range(starts[p], starts[p] + sizes[p])) for p in held)
        last = len(sizes) - 1 in held
        layers = tuple(layer for chunk in chunks for layer in chunk)
        stages.append(Stage(index, layers, embedding=0 in held or (last and again), head=last, chunks=chunks))
    return tuple(stages)


def chunk_places(layout: Layout) -> list[tuple[int, ...]]:
    """For every stage the places of its chunks in the model.

    ``interleaved`` deals chunks round robin (Narayanan et al., arXiv:2104.04473, section 2.2); ``zbv`` and
    ``dualpipev`` fold the model once, so that stage 0 holds both ends (Qi et al., arXiv:2405.15362, section 4).
    """
    pp = layout.pp
    if pp > 1 and layout.schedule in {"zbv", "dualpipev"}:
        return [(stage, 2 * pp - 1 - stage) for stage in range(pp)]
    return [tuple(chunk * pp + stage for chunk in range(layout.virtual)) for stage in range(pp)]


def _chunk_sizes(layers: int, layout: Layout, profile: EngineProfile, places: list[tuple[int, ...]]) -> list[int]:
    """Layers of every chunk in model order; ``stage_layers`` are dealt evenly over the chunks of their stage."""
    count = sum(map(len, places))
    if not layout.stage_layers:
        return list(profile.split_layers(layers, count))
    sizes = [0] * count
    for total, held in zip(layout.stage_layers, places, strict=True):
        for number, place in enumerate(held):
            low, high = part(total, len(held), number)
            sizes[place] = high - low
    return sizes


def _classes(placement: Placement, period: list[tuple[int, ...]]) -> dict[tuple[int, tuple[int, ...]], RankClass]:
    """Rank classes from stages x distinct signatures, without a list of all ranks."""
    layout = placement.layout
    repeats = layout.dp * layout.cp * layout.tp // len(period)
    firsts: dict[tuple[int, ...], int] = {}
    counts: dict[tuple[int, ...], int] = {}
    for flat, signature in enumerate(period):
        firsts.setdefault(signature, flat)
        counts[signature] = counts.get(signature, 0) + 1
    out: dict[tuple[int, tuple[int, ...]], RankClass] = {}
    for stage in placement.stages:
        for number, (signature, flat) in enumerate(firsts.items()):
            coordinate = placement.at(stage.index, flat)
            name = f"pp{stage.index}" + (f".{number}" if len(firsts) > 1 else "")
            out[(stage.index, signature)] = RankClass(
                name, coordinate, placement.rank(coordinate), counts[signature] * repeats
            )
    return out
