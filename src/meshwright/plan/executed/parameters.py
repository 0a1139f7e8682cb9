"""The trained parameters of a rank's model chunks, and over which ranks the gradient of a copy must be summed.

Copies of a parameter that see different data hold partial gradients (Megatron-LM, ``finalize_model_grads``):

- norms and biases that are added after the sum over tp, where sequence parallelism leaves a rank part of the tokens;
- norms of query and key heads, projections into a latent and their norms, routers and the gates of shared experts:
  they feed heads, columns or experts of one rank only;
- keys and values of a KV head that several ranks hold, each for its own query heads (axis ``kv``);
- biases of experts that are cut over etp and add them once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from meshwright.moves.chunks import Chunk
from meshwright.specs.placement import Coordinate, Placement, Shard
from meshwright.specs.tensors import TensorFamily

#: Products whose bias is added once, behind the sum over tp.
SUMMED = frozenset({"o", "down"})


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of a rank.

    Attributes:
        name: in the checkpoint. shape: held here. layer: of the decoder, None for the ends of the model.
        expert: belongs to the experts, whose replicas are other ranks (``edp``).
        axis: over which copies are summed: ``tp``, ``kv``, ``etp``, or None.
        family: what it is. shared: a later chunk of the rank uses it too (a tied table).
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None
    expert: bool
    axis: str | None
    family: TensorFamily
    shared: bool = False

    @property
    def numel(self) -> int:
        """Elements held here."""
        return prod(self.shape)


def chunk_parameters(placement: Placement, at: Coordinate, chunks: Sequence[Chunk]) -> list[list[Parameter]]:
    """For every chunk of a rank its parameters: the embedding, the layers in order, then final norm and head.

    A tied table is one parameter of the rank, of its first chunk that uses it. The balancing bias of a router is moved
    by rule and is none.
    """
    shards = [s for s in placement.shards(at) if s.family.section == "decoder" and _trained(s.family)]
    ends = [s for s in shards if not s.layers]
    tied, first = placement.spec.tied, any(chunk.first for chunk in chunks)
    out = []
    for chunk in chunks:
        tables = chunk.first or (chunk.last and tied and not first)
        shared = tied and chunk.first and not chunk.last and any(other.last for other in chunks)
        own = [_end(placement, s, shared) for s in ends if s.family.role == "embedding" and tables]
        own += [
            p for layer in chunk.layers for s in shards if layer in s.layers for p in _of_layer(placement, s, layer)
        ]
        out.append(own + [_end(placement, s) for s in ends if s.family.role != "embedding" and chunk.last])
    return out


def _trained(family: TensorFamily) -> bool:
    return family.part != "state" and not (family.role == "router" and not family.op)


def _end(placement: Placement, shard: Shard, shared: bool = False) -> Parameter:
    """A parameter outside the layers."""
    axis = sum_axis(placement, shard)
    return Parameter(shard.family.template, shard.shape, None, False, axis, shard.family, shared)


def _of_layer(placement: Placement, shard: Shard, layer: int) -> Iterator[Parameter]:
    name, axis = shard.family.template.replace("{layer}", str(layer)), sum_axis(placement, shard)
    expert = shard.family.role == "expert"
    for number in shard.experts or (None,):
        full = name if number is None else name.replace("{expert}", str(number))
        yield Parameter(full, shard.shape, layer, expert, axis, shard.family)


def sum_axis(placement: Placement, shard: Shard) -> str | None:
    """Over which ranks the gradient of this rank's copy is summed besides the data ranks, None: it is whole."""
    family, layout = shard.family, placement.layout
    if family.role == "expert":
        added_once = family.part == "bias" and family.op == "down"
        return "etp" if placement.cuts.grid.etp > 1 and added_once else None
    if layout.tp == 1:
        return None
    if shard.shape != family.shape:
        units = {s.label: s.units for dim in family.dims for s in dim}
        return "kv" if units.get("kv_heads", layout.tp) < layout.tp else None
    if (family.role == "norm" and not family.op) or _after_sum(family):
        return "tp" if layout.sp else None
    return "tp"


def _after_sum(family: TensorFamily) -> bool:
    return family.part == "bias" and family.op in SUMMED and family.role in {"attention", "mlp"}
