"""The matrix products of one rank: read from its shards, layer kind by layer kind.

Layers that are built alike and cut alike are one *kind*; a model of 126 equal layers is looked at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from meshwright.specs.dtypes import DTYPE_BYTES
from meshwright.specs.model import Layer
from meshwright.specs.placement import Coordinate, Placement, Shard
from meshwright.specs.tensors import TensorFamily

#: Products whose result is as wide as the model: their input dimension is the one that tensor parallelism cuts.
OUT_OPS = frozenset({"o", "out", "down", "latent_out"})


class Product(NamedTuple):
    """One matrix product ``x_TK @ W_KN`` as a rank multiplies it (for experts: one of ``experts`` equal ones).

    Attributes:
        role, op: of the tensor family.
        k, n: input and output width held by the rank, in logical elements.
        experts: local experts multiplied by one grouped product; 0 for a plain product.
        weight_bytes: bytes of the weights with scales, zeros and biases (all local experts).
        dtype: element type of the multiplication.
        cut: the input width is cut, so that the result is a partial sum.
    """

    role: str
    op: str
    k: int
    n: int
    experts: int
    weight_bytes: int
    dtype: str
    cut: bool

    @property
    def name(self) -> str:
        """For people: ``attention.q``; the op alone where the role says the same."""
        return self.op if self.role in {self.op, "head"} else f"{self.role}.{self.op}"


@dataclass(frozen=True, slots=True)
class Kind:
    """Layers that a rank runs in the same way.

    Attributes:
        layer: structure.
        products: in checkpoint order.
        norms: widths of the norms of the layer, in checkpoint order.
        units: units of every dimension label held (``heads``, ``kv_heads``, ``ssm_heads``, ...).
        parameters: logical elements held by one layer of the kind: not experts, experts.
    """

    layer: Layer
    products: tuple[Product, ...]
    norms: tuple[int, ...]
    units: dict[str, int]
    parameters: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Held:
    """Everything that one rank multiplies: the kind of every layer it has, and the ends of the model."""

    kinds: dict[int, Kind]
    ends: tuple[Shard, ...]


def held(placement: Placement, coordinate: Coordinate, cache: dict[object, Kind]) -> Held:
    """What the rank at ``coordinate`` multiplies; ``cache`` keeps kinds from rank to rank.

    Layers are looked at pattern by pattern (``ModelSpec.patterns``): all layers of one have the same families, and a
    family is cut alike in all its layers.
    """
    spec = placement.spec
    by_family: dict[int, Shard] = {}
    ends = []
    for shard in placement.shards(coordinate):
        if shard.family.section == "decoder":
            if shard.layers:
                by_family[id(shard.family)] = shard
            else:
                ends.append(shard)
    kinds: dict[int, Kind] = {}
    of_pattern: dict[int, Kind] = {}
    for layer in placement.stages[coordinate.pp].layers:
        pattern = spec.patterns[layer]
        if pattern not in of_pattern:
            families = (spec.families[number] for number in spec.pattern_families[pattern])
            shards = [by_family[id(family)] for family in families if id(family) in by_family]
            full = (pattern, *((s.shape, len(s.experts)) for s in shards))
            if full not in cache:
                cache[full] = kind_of(spec.layers[layer], shards, placement)
            of_pattern[pattern] = cache[full]
        kinds[layer] = of_pattern[pattern]
    return Held(kinds, tuple(ends))


def kind_of(layer: Layer, shards: Sequence[Shard], placement: Placement) -> Kind:
    """Read one layer's shards."""
    units: dict[str, int] = {}
    parameters = [0, 0]
    for shard in shards:
        for label, count in _units(shard).items():
            units[label] = max(units.get(label, 0), count)
        numel = prod(shard.shape) * shard.family.elements * max(1, len(shard.experts))
        parameters[shard.family.role == "expert"] += numel
    norms = tuple(prod(s.shape) for s in shards if s.family.role == "norm" and s.family.part == "weight")
    dense, expert = parameters
    return Kind(layer, products_of(shards, placement), norms, units, (dense, expert))


def products_of(shards: Sequence[Shard], placement: Placement) -> tuple[Product, ...]:
    """The products of some shards; scales, zeros and biases count as bytes of the weight of their module."""
    spec = placement.spec
    method = spec.quantization.method if spec.quantization is not None else ""
    extra: dict[tuple[str, str, str], int] = {}
    float_scales: set[tuple[str, str, str]] = set()
    weights: list[tuple[tuple[str, str, str], Shard]] = []
    for shard in shards:
        family = shard.family
        if not family.op:
            continue
        key = (str(family.role), family.op, family.template.rpartition(".")[0])
        if family.part == "weight":
            weights.append((key, shard))
        else:
            extra[key] = extra.get(key, 0) + _bytes(shard)
            if family.part == "scale" and family.dtype.startswith("f8"):
                float_scales.add(key)
    out = []
    for key, shard in weights:
        family = shard.family
        experts, k, n = _widths(shard.shape, shard, spec.hidden)
        full = _widths(family.shape, shard, spec.hidden)
        dtype = _dtype(family, "fp4" in method.lower() or key in float_scales, spec.dtype)
        size = _bytes(shard) + extra.pop(key, 0)
        out.append(Product(family.role, family.op, k, n, experts, size, dtype, k < full[1]))
    return tuple(out)


def _bytes(shard: Shard) -> int:
    """Bytes of one layer's tensors of a shard."""
    return prod(shard.shape) * DTYPE_BYTES[shard.family.dtype] * max(1, len(shard.experts))


def _dtype(family: TensorFamily, fp4: bool, compute: str) -> str:
    """Element type that is multiplied: packed pairs with eight-bit scales are four-bit floats, other packed integers
    are unpacked to the compute type first."""
    if family.elements > 1:
        return "fp4" if fp4 and family.dtype in {"u8", "i8"} else compute
    return compute if family.dtype in {"u8", "i32"} else family.dtype


def _widths(shape: tuple[int, ...], shard: Shard, hidden: int) -> tuple[int, int, int]:
    """``(experts, k, n)`` of a weight, whichever way round it lies and however it is packed.

    Products into the model width (``OUT_OPS``) have it as their output, all others as their input; without a
    dimension of the model width, or with a packed input of two dimensions, the weight lies [out, in].
    """
    family, dims = shard.family, shard.family.dims
    lead = 1 if len(dims) > 2 and any(s.label == "experts" for s in dims[0]) else 0
    experts = shape[0] if lead else len(shard.experts)
    total = prod(shape[lead:]) * max(1, family.elements)
    model = next((i for i in range(lead, len(dims)) if all(s.label == "model" for s in dims[i])), None)
    if model is None or family.op == "kv_b" or total % hidden or len(dims) - lead > 2:
        n = shape[lead]
        return experts, total // max(1, n), n
    width = shape[model]
    if width * family.elements == hidden:
        width = hidden
    other = total // width
    return (experts, other, width) if family.op in OUT_OPS else (experts, width, other)


def _units(shard: Shard) -> dict[str, int]:
    """Units of every label that the shard holds (the first segment of a label counts)."""
    out: dict[str, int] = {}
    for dim, intervals in zip(shard.family.dims, shard.intervals, strict=True):
        base = 0
        for segment in dim:
            low, high = base, base + segment.size
            size = sum(max(0, min(high, stop) - max(low, start)) for start, stop in intervals)
            out.setdefault(segment.label, size // max(1, segment.width))
            base = high
    return out
