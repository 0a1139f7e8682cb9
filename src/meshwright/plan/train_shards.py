"""Pipeline stages for training, and the parameters that one rank of a stage holds before ZeRO or FSDP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from meshwright.errors import IllegalLayoutError
from meshwright.plan.train_engine import TrainEngine
from meshwright.specs.layout import Layout
from meshwright.specs.model import Layer, ModelSpec
from meshwright.specs.placement import Coordinate, Placement
from meshwright.specs.tensors import Dim, TensorFamily

#: Labels that tensor parallelism cuts. Key heads and state-space groups are replicated below one a rank.
_TP_LABELS = frozenset(
    {
        "vocab",
        "heads",
        "kv_heads",
        "mlp",
        "shared_mlp",
        "ssm_heads",
        "ssm_groups",
        "linear_k_heads",
        "linear_v_heads",
        "index_heads",
    }
)


@dataclass(frozen=True, slots=True)
class TrainStage:
    """One pipeline stage: decoder layers of each of its model chunks, and the ends of the model it holds."""

    index: int
    chunks: tuple[tuple[int, ...], ...]
    embedding: bool
    head: bool

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of all chunks."""
        return tuple(i for chunk in self.chunks for i in chunk)


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that FSDP gathers at once: a decoder layer, a prediction layer, or the rest of the stage.

    Attributes:
        name: ``layer 3``, ``mtp 0``, ``root``.
        dense, expert: elements that one rank computes with (after tensor and expert parallelism).
        plain: those of ``dense`` that are no hidden matrix (embedding, head, norms, biases), which Muon leaves
            to AdamW.
    """

    name: str
    dense: int
    expert: int
    plain: int = 0


def split_layers(layers: int, parts: int) -> tuple[int, ...]:
    """Layers of each part: as equal as possible, the first parts take the remainder."""
    base, extra = divmod(layers, parts)
    return tuple(base + (i < extra) for i in range(parts))


def _positions(layout: Layout) -> list[list[int]]:
    """For every stage, the places of its chunks in the order that the model is run through."""
    pp, v = layout.pp, max(1, layout.virtual)
    if layout.schedule in {"zbv", "dualpipev"}:
        return [[s, 2 * pp - 1 - s] for s in range(pp)]
    if layout.schedule == "interleaved" or v > 1:
        return [[c * pp + s for c in range(v)] for s in range(pp)]
    return [[s] for s in range(pp)]


def train_stages(spec: ModelSpec, layout: Layout) -> tuple[TrainStage, ...]:
    """Stages of a training layout.

    ``zbv`` and ``dualpipev`` fold the model once over the stages (first and last part on stage 0); ``interleaved``
    deals ``virtual`` chunks round robin (Megatron ``get_num_layers_to_build``).

    Raises:
        IllegalLayoutError: more parts than layers, or ``stage_layers`` of the wrong number or sum.
    """
    n = len(spec.layers)
    places = _positions(layout)
    parts = sum(len(p) for p in places)
    if parts > n:
        raise IllegalLayoutError(
            f"{n} layers cannot fill {parts} pipeline parts (pp {layout.pp} x {parts // layout.pp} chunks); "
            f"use pp x virtual <= {n}"
        )
    if layout.stage_layers:
        sizes = list(layout.stage_layers)
        if len(sizes) != layout.pp or sum(sizes) != n:
            raise IllegalLayoutError(
                f"stage_layers {'+'.join(map(str, sizes))} names {len(sizes)} stages and {sum(sizes)} layers; "
                f"pp is {layout.pp} and the model has {n} layers"
            )
        per = [0] * parts
        for stage, where in enumerate(places):
            for place, size in zip(where, split_layers(sizes[stage], len(where)), strict=True):
                per[place] = size
    else:
        per = list(split_layers(n, parts))
    starts = [sum(per[:i]) for i in range(parts)]
    return tuple(
        TrainStage(
            s,
            tuple(tuple(range(starts[p], starts[p] + per[p])) for p in where),
            embedding=0 in where,
            head=parts - 1 in where,
        )
        for s, where in enumerate(places)
    )


def padded_vocab(vocab: int, tp: int, engine: TrainEngine) -> int:
    """Rows of embedding and head after the engine's padding (Megatron ``_vocab_size_with_padding``)."""
    multiple = engine.vocab_multiple * (tp if engine.vocab_times_tp else 1)
    multiple = multiple if multiple % tp == 0 else multiple * tp
    return -(-vocab // multiple) * multiple


def _dim(dim: Dim, layout: Layout, engine: TrainEngine) -> int:
    etp = layout.etp if layout.etp is not None else layout.tp
    size = 0
    for s in dim:
        units = s.units
        if s.label == "vocab":
            units = padded_vocab(units, layout.tp, engine) // layout.tp
        elif s.label in _TP_LABELS:
            units = -(-units // layout.tp)
        elif s.label == "expert_mlp":
            units = -(-units // etp)
        elif s.label == "experts":
            units = -(-units // layout.ep)
        size += units * s.width
    return size


def local_elements(family: TensorFamily, layout: Layout, engine: TrainEngine) -> int:
    """Logical elements of one layer's tensors of a family on one rank (all its local experts together)."""
    numel = prod(_dim(d, layout, engine) for d in family.dims) * family.elements
    return numel * (-(-family.experts // layout.ep)) if family.experts else numel


def _is_expert(family: TensorFamily) -> bool:
    return family.role == "expert"


def _is_matrix(family: TensorFamily) -> bool:
    return len(family.shape) >= 2 and family.role not in {"embedding", "head"}


def _on_stage(family: TensorFamily, stage: TrainStage, layers: frozenset[int]) -> tuple[int, ...] | None:
    """Those of the stage's ``layers`` that hold the family; ``(-1,)`` for a tensor outside layers, None for none."""
    if family.section == "mtp":
        return (family.layers or (-1,)) if stage.head else None
    if family.layers:
        held = tuple(i for i in family.layers if i in layers)
        return held or None
    if family.section == "vision" or family.role == "embedding":
        return (-1,) if stage.embedding else None
    return (-1,) if stage.head else None


def placed_elements(placement: Placement, at: Coordinate) -> dict[str, int]:
    """Logical elements of one layer's tensors of every family on the rank at ``at``, as placed, by name template.

    Taken from the shards of all stages at the same place within the stage, so that chunks of a folded or interleaved
    pipeline find the layers that the placement puts elsewhere.
    """
    held: dict[str, int] = {}
    for stage in range(placement.layout.pp):
        for shard in placement.shards(Coordinate(at.dp, stage, at.cp, at.tp, at.ep)):
            numel = prod(shard.shape) * shard.family.elements
            held[shard.family.template] = numel * max(1, len(shard.experts))
    return held


def stage_units(
    spec: ModelSpec,
    layout: Layout,
    stage: TrainStage,
    engine: TrainEngine,
    placed: Mapping[str, int] | None = None,
) -> tuple[Unit, ...]:
    """Parameters of one rank of a stage, unit by unit, before ZeRO or FSDP.

    ``placed``: elements by template from ``placed_elements``; families that it lacks are cut evenly.

    Scales of quantized checkpoints and other non-parameters do not count. When the stage of the head is not that
    of the embedding, it holds an own copy of tied weights (Megatron ``shared_embedding``), and of the embedding
    for multi-token prediction.
    """
    sums: dict[str, list[int]] = {"root": [0, 0, 0]}
    layers = frozenset(stage.layers)
    for family in spec.families:
        if not family.elements or family.part in {"scale", "zero", "global_scale", "input_scale", "index"}:
            continue
        held = _on_stage(family, stage, layers)
        copies = 1
        if held is None and stage.head and family.role == "embedding" and _vocab_rows(family):
            copies = int(spec.tied) or int(bool(spec.mtp_layers))
            held = (-1,) if copies else None
        if held is None:
            continue
        numel = (placed or {}).get(family.template)
        numel = (local_elements(family, layout, engine) if numel is None else numel) * copies
        prefix = "mtp" if family.section == "mtp" else "layer"
        expert, plain = _is_expert(family), 0 if _is_matrix(family) else numel
        for i in held:
            row = sums.setdefault("root" if i < 0 else f"{prefix} {i}", [0, 0, 0])
            row[expert] += numel
            row[2] += plain
    return tuple(Unit(name, dense, expert, plain) for name, (dense, expert, plain) in sums.items())


def _vocab_rows(family: TensorFamily) -> bool:
    return any(s.label == "vocab" for dim in family.dims for s in dim)


def largest_matrix(layer: Layer, hidden: int, tp: int) -> int:
    """Elements of the largest hidden matrix of a layer on one rank, experts left out.

    Query, key and value are one matrix, and so are gate and up, as Megatron and Transformer Engine store them.
    """
    sizes = [0]
    if (a := layer.attention) is not None:
        sizes.append(hidden * a.heads * a.v_head_dim)
        if a.kind == "gqa":
            sizes.append(hidden * (a.heads * a.head_dim + a.kv_heads * (a.head_dim + a.v_head_dim)))
    if (m := layer.mlp) is not None:
        sizes.append(hidden * m.intermediate * (2 if m.gated else 1))
    if (e := layer.moe) is not None:
        sizes.append(hidden * e.shared_intermediate * (2 if e.gated else 1))
    return max(sizes) // tp


def iter_elements(units: tuple[Unit, ...]) -> Iterator[int]:
    """Elements of every unit, dense and expert together."""
    return (u.dense + u.expert for u in units)
