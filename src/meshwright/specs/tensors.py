"""The tensor table: every parameter of a checkpoint, compressed into families.

A family is one row of the table: the same tensor in many layers and, for experts, many times a layer. Each
dimension is a run of *segments*, and each segment says by which unit it may be cut: a fused ``qkv`` has three
segments (query heads, key heads, value heads), an output projection's input dimension has one (query heads).
Placement reads only these labels, never a substring of a name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from meshwright.specs.dtypes import DTYPE_BYTES

#: What a dimension can be cut by.
#: ``model`` and ``fixed`` are never cut by tensor parallelism; ``vocab`` may be padded first; ``experts`` is
#: the leading dimension of checkpoints that fuse all experts into one tensor.
Label = Literal[
    "model",
    "fixed",
    "vocab",
    "heads",
    "kv_heads",
    "mlp",
    "expert_mlp",
    "shared_mlp",
    "experts",
    "ssm_heads",
    "ssm_groups",
    "linear_k_heads",
    "linear_v_heads",
    "index_heads",
    "vision",
]

#: The part of the model that a tensor serves; also the grouping used when memory is shown by component.
Role = Literal[
    "embedding",
    "head",
    "norm",
    "attention",
    "indexer",
    "recurrent",
    "mlp",
    "router",
    "expert",
    "shared_expert",
    "other",
]

#: What kind of number a tensor holds. A quantized linear layer has a ``weight`` and its ``scale`` (``zero``,
#: ``global_scale``, ``input_scale``, ...), all of the same role.
Part = Literal["weight", "bias", "scale", "zero", "global_scale", "input_scale", "index", "state"]

#: ``mtp``: multi-token-prediction layers that serving loads only for speculative decoding.
#: ``vision``: the encoder of a multimodal wrapper (images, audio), counted but not modelled.
Section = Literal["decoder", "mtp", "vision"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of one dimension: ``units`` pieces of ``width`` elements; cuts fall between units only."""

    label: Label
    units: int
    width: int = 1

    @property
    def size(self) -> int:
        """Elements of the segment."""
        return self.units * self.width


Dim = tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class TensorFamily:
    """One row of the compressed tensor table.

    Attributes:
        template: checkpoint name with ``{layer}`` and ``{expert}`` where it repeats.
        dims: one tuple of segments per dimension; the shape follows from it. A scalar has no dimension.
        dtype: stored element type, a key of ``DTYPE_BYTES``.
        role: part of the model.
        op: short name of the matrix product it belongs to (``q``, ``k``, ``v``, ``qkv``, ``o``, ``q_a``,
            ``q_b``, ``kv_a``, ``kv_b``, ``gate``, ``up``, ``gate_up``, ``down``, ``router``, ``in``, ``out``,
            ``head``, ...); empty for tensors that multiply nothing (norms, convolutions, position tables).
        part: weight, bias, scale, ...
        layers: layer indices within ``section`` (checkpoint numbering); empty for tensors outside layers.
        experts: how many tensors a layer holds, numbered from 0; 0 for a tensor that is not one of many experts.
        section: decoder, mtp or vision.
        elements: logical parameters per stored element (a packed int4 pair in one ``u8`` counts 2); 0 for
            scales and the like, which are bytes but not parameters.
    """

    template: str
    dims: tuple[Dim, ...]
    dtype: str
    role: Role
    op: str = ""
    part: Part = "weight"
    layers: tuple[int, ...] = ()
    experts: int = 0
    section: Section = "decoder"
    elements: int = 1
    shape: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(sum(s.size for s in dim) for dim in self.dims))

    @property
    def numel(self) -> int:
        """Stored elements of one tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one tensor."""
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def count(self) -> int:
        """How many tensors the family stands for."""
        return max(1, len(self.layers)) * max(1, self.experts)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors of the family."""
        return self.nbytes * self.count

    @property
    def parameters(self) -> int:
        """Logical parameters of all tensors of the family (a packed four-bit weight counts each element)."""
        return self.numel * self.elements * self.count

    def names(self) -> Iterator[tuple[str, int | None, int | None]]:
        """Yield ``(name, layer, expert)`` for every tensor of the family."""
        for layer in self.layers or (None,):
            for expert in range(self.experts) if self.experts else (None,):
                name = self.template
                if layer is not None:
                    name = name.replace("{layer}", str(layer))
                if expert is not None:
                    name = name.replace("{expert}", str(expert))
                yield name, layer, expert


def expand(families: tuple[TensorFamily, ...]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return ``name -> (shape, dtype)`` for every tensor, as a safetensors index would list them."""
    return {name: (f.shape, f.dtype) for f in families for name, _, _ in f.names()}
