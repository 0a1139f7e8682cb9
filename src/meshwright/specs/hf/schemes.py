"""What one quantized linear layer stores: the weight of the plain model in, its packed weight and scales out.

Shapes are those of the checkpoint formats; D names ``[out, in]``. Sources: the safetensors headers of the
named models and the packers of the formats (AutoGPTQ, AutoAWQ, compressed-tensors, modelopt, bitsandbytes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from meshwright.specs.tensors import Dim, Part, Segment, TensorFamily

Kind = Literal[
    "fp8_block", "fp8_tensor", "fp8_channel", "gptq", "awq", "packed_int", "int_awq", "int8", "mxfp4_blocks",
    "fp4_group", "fp8_group", "bnb4", "bnb8",
]  # fmt: skip


class Scheme(NamedTuple):
    """How a linear layer is stored.

    Attributes:
        kind: storage format.
        bits: bits of one weight.
        group: elements of the input dimension that share a scale; 0: none.
        block: (out, in) block of two-dimensional scales.
        static: an activation scale is stored.
        zeros: zero points are stored.
        scale_dtype: of the weight scales.
        scale: name of the scale behind the module name.
        weight: name of the stored weight behind the module name.
        global_scale: name of a scalar second scale, empty where there is none.
        input_scale: name of the activation scale.
        scalar: shape of scalars: () (modelopt) or (1,) (compressed-tensors).
        g_idx: a group index of the input dimension is stored.
        shape_tensor: the packed weight carries its shape as a tensor.
    """

    kind: Kind
    bits: int
    group: int = 0
    block: tuple[int, int] | None = None
    static: bool = False
    zeros: bool = False
    scale_dtype: str = "f32"
    scale: str = "weight_scale"
    weight: str = "weight"
    global_scale: str = ""
    input_scale: str = "input_scale"
    scalar: tuple[int, ...] = ()
    g_idx: bool = False
    shape_tensor: bool = False


Builder = Callable[["_Linear", Scheme], Iterator[TensorFamily]]


def packed(dim: Dim, by: int, times: int = 1) -> Dim:
    """``ceil(size x times / by)`` elements with the labels of ``dim``, as near to its units as they divide.

    A packed width keeps its units when it divides; otherwise the units are those of the packed elements, so
    that cuts fall between whole packs (or between whole scale blocks) only.
    """
    result: list[Segment] = []
    done = stored = 0
    for s in dim:
        done += s.size * times
        size = -(-done // by) - stored
        stored += size
        exact = s.width * times % by == 0 and s.units * (s.width * times // by) == size
        result.append(Segment(s.label, s.units, s.width * times // by) if exact else Segment(s.label, size, 1))
    return tuple(result)


class _Linear(NamedTuple):
    """One linear layer: module name, leading dimensions (fused experts), out and in dimension.

    ``swapped``: the plain weight lies [in, out].
    """

    family: TensorFamily
    module: str
    lead: tuple[Dim, ...]
    out: Dim
    into: Dim
    swapped: bool = False

    def ordered(self, out: Dim, into: Dim) -> tuple[Dim, Dim]:
        """The two dimensions in the order of the plain weight."""
        return (into, out) if self.swapped else (out, into)

    def tensor(self, name: str, part: Part, dtype: str, *dims: Dim, elements: int = 0, join: str = ".") -> TensorFamily:
        return replace(
            self.family,
            template=self.module + join + name,
            dims=(*self.lead, *dims),
            dtype=dtype,
            part=part,
            elements=elements,
        )

    def scalar(self, name: str, part: Part, shape: tuple[int, ...], dtype: str = "f32") -> TensorFamily:
        return self.tensor(name, part, dtype, *(_fixed(n) for n in shape))


def _fixed(size: int) -> Dim:
    return (Segment("fixed", size),)


def is_fused(family: TensorFamily) -> bool:
    """Whether all experts lie in one tensor."""
    return len(family.dims) == 3 and family.dims[0][0].label == "experts"


def _linear(family: TensorFamily) -> _Linear:
    module = family.template.removesuffix(".weight")
    *lead, out, into = family.dims
    swapped = is_fused(family) and (into[0].label == "expert_mlp") == (family.op != "down")
    if swapped:
        out, into = into, out
    return _Linear(family, module, tuple(lead), out, into, swapped)


def unfused(family: TensorFamily) -> tuple[TensorFamily, ...]:
    """The tensors an expert each that exporters write for a fused expert tensor."""
    plain = _linear(family)
    base, _, _ = plain.module.rpartition(".")
    experts = sum(s.size for s in family.dims[0])
    dims = (plain.out, plain.into)
    names: tuple[str, ...] = (family.op,)
    if family.op == "gate_up":
        names = ("gate", "up")
        first = plain.out[0]
        half = first if len(plain.out) == 2 else replace(first, units=first.units // 2)
        dims = ((half,), plain.into)
    return tuple(
        replace(family, template=f"{base}.{{expert}}.{n}_proj.weight", op=n, dims=dims, experts=experts) for n in names
    )


def apply(family: TensorFamily, scheme: Scheme) -> tuple[TensorFamily, ...]:
    """The stored tensors of a linear layer's weight under ``scheme``.

    Args:
        family: a weight of shape [out, in], or [experts, ...] with all experts in one tensor.
        scheme: storage format.
    """
    return tuple(_BUILDERS[scheme.kind](_linear(family), scheme))


def _scaled(x: _Linear, s: Scheme, weight: TensorFamily, *scale: Dim) -> Iterator[TensorFamily]:
    """A weight, its scale, the second scale and the activation scale."""
    named = x.family.template.endswith(".weight")
    name, join = (s.scale, ".") if named else (s.scale.removeprefix("weight_"), "_")
    yield weight
    yield x.tensor(name, "scale", s.scale_dtype, *scale, join=join)
    if s.zeros and s.kind == "int8":
        yield x.tensor("weight_zero_point", "zero", "i8", *scale)
    if s.global_scale:
        yield x.scalar(s.global_scale, "global_scale", s.scalar)
    if s.static:
        yield x.scalar(s.input_scale, "input_scale", s.scalar)


def _weight(x: _Linear, dtype: str) -> TensorFamily:
    return replace(x.family, dtype=dtype)


def _fp8_block(x: _Linear, s: Scheme) -> Iterator[TensorFamily]:
    rows, columns = s.block or (128, 128)
    return _scaled(x, s, _weight(x, "f8_e4m3"), *x.ordered(packed(x.out, rows), packed(x.into, columns)))


def _fp8_tensor(x: _Linear, s: Scheme) -> Iterator[TensorFamily]:
    return _scaled(x, s, _weight(x, "f8_e4m3"), *(_fixed(n) for n in s.scalar))


def _channel(x: _Linear, s: Scheme) -> Iterator[TensorFamily]:
    dtype = "f8_e4m3" if s.kind == "fp8_channel" else "i8"
    if s.group:
        return _scaled(x, s, _weight(x, dtype), *x.ordered(x.out, packed(x.into, s.group)))
    return _scaled(x, s, _weight(x, dtype), *x.ordered(x.out, _fixed(1)))


def _fp8_group(x: _Linear, s: Scheme) -> Iterator[TensorFamily]:
    """MXFP8: one power of two for ``group`` elements of a row."""
    return _scaled(x, s, _weight(x, "f8_e4m3"), *x.ordered(x.out, packed(x.into, s.group)))


def _fp4_group(x: _Linear, s: Scheme) -> Iterator[TensorFamily]:
    """NVFP4 and MXFP4: two elements a byte along the input, a scale for ``group`` elements of a row."""
    weight = x.tensor(s.weight, "weight", "i8" if s.scale == "scale" else "u8", x.out, packed(x.into, 2), elements=2)
    return _scaled(x, s, weight, x.out, packed(x.into, s.group))


def _mxfp4_blocks(x: _Linear, s: Scheme) -> Iterator[TensorFamily]:
    """GPT-OSS: ``blocks`` u8 [experts, out, in/32, 16] and ``scales`` u8 [experts, out, in/32]."""
    groups = packed(x.into, 32)
    yield x.tensor("blocks", "weight", "u8", x.out, groups, _fixed(16), elements=2, join="_")
    yield x.tensor("scales", "scale", "u8", x.out, groups, join="_")


def _gptq(x: _Linear, s: Scheme) -> Iterator[TensorFamily]:
    """``qweight`` i32 [in x bits / 32, out], ``qzeros`` [groups, out x bits / 32], ``scales`` [groups, out]."""
    groups = packed(x.into, s.group) if s.group else _fixed(1)
    yield x.tensor("qweight", "weight", "i32", packed(x.into, 32, s.bits), x.out, elements=32 // s.bits)
    yield x.tensor("qzeros", "zero", "i32", groups, packed(x.out, 32, s.bits))
    yield x.tensor("scales", "scale", s.scale_dtype, groups, x.out)
    yield x.tensor("g_idx", "index", "i32", x.into)


def _awq(x: _Linear, s: Scheme) -> Iterator[TensorFamily]:
    """``qweight`` i32 [in, out x bits / 32], ``qzeros`` [groups, out x bits / 32], ``scales`` [groups, out]."""
    groups = packed(x.into, s.group) if s.group else _fixed(1)
    columns = packed(x.out, 32, s.bits)
    yield x.tensor("qweight", "weight", "i32", x.into, columns, elements=32 // s.bits)
    yield x.tensor("qzeros", "zero", "i32", groups, columns)
    yield x.tensor("scales", "scale", s.scale_dtype, groups, x.out)


def _packed_int(x: _Linear, s: Scheme) -> Iterator[TensorFamily]:
    """compressed-tensors: ``weight_packed`` i32 [out, in x bits / 32], ``weight_scale`` [out, groups]."""
    groups = packed(x.into, s.group) if s.group else _fixed(1)
    yield x.tensor("weight_packed", "weight", "i32", x.out, packed(x.into, 32, s.bits), elements=32 // s.bits)
    yield x.tensor("weight_scale", "scale", s.scale_dtype, x.out, groups)
    if s.shape_tensor:
        yield x.scalar("weight_shape", "index", (2,), "i32")
    if s.zeros:
        yield x.tensor("weight_zero_point", "zero", "i32", packed(x.out, 32, s.bits), groups)
    if s.g_idx:
        yield x.tensor("weight_g_idx", "index", "i32", x.into)


def _int_awq(x: _Linear, s: Scheme) -> Iterator[TensorFamily]:
    """modelopt INT4: ``weight`` u8 [out / 2, in], ``weight_scale`` [out, groups], ``pre_quant_scale`` [in]."""
    yield x.tensor("weight", "weight", "u8", packed(x.out, 2), x.into, elements=2)
    yield x.tensor("weight_scale", "scale", s.scale_dtype, x.out, packed(x.into, s.group or 128))
    yield x.tensor("pre_quant_scale", "scale", s.scale_dtype, x.into)


def _bnb4(x: _Linear, s: Scheme) -> Iterator[TensorFamily]:
    """bitsandbytes: ``weight`` u8 [out x in / 2, 1] and a doubly quantized absmax for 64 elements."""
    into = sum(seg.size for seg in x.into)
    flat = packed(x.out, 2, into)
    absmax = packed(x.out, 64, into)
    yield x.tensor("weight", "weight", "u8", flat, _fixed(1), elements=2)
    if s.zeros:
        yield x.tensor("weight.absmax", "scale", "u8", absmax)
        yield x.tensor("weight.nested_absmax", "scale", "f32", packed(x.out, 64 * 256, into))
        yield x.tensor("weight.nested_quant_map", "index", "f32", _fixed(256))
    else:
        yield x.tensor("weight.absmax", "scale", "f32", absmax)
    yield x.tensor("weight.quant_map", "index", "f32", _fixed(16))


def _bnb8(x: _Linear, s: Scheme) -> Iterator[TensorFamily]:
    """bitsandbytes LLM.int8: ``weight`` i8 [out, in], ``SCB`` f32 [out]."""
    yield _weight(x, "i8")
    yield x.tensor("SCB", "scale", "f32", x.out)
    yield x.scalar("weight_format", "index", (), "u8")


_BUILDERS: dict[Kind, Builder] = {
    "fp8_block": _fp8_block,
    "fp8_tensor": _fp8_tensor,
    "fp8_channel": _channel,
    "fp8_group": _fp8_group,
    "int8": _channel,
    "gptq": _gptq,
    "awq": _awq,
    "packed_int": _packed_int,
    "int_awq": _int_awq,
    "mxfp4_blocks": _mxfp4_blocks,
    "fp4_group": _fp4_group,
    "bnb4": _bnb4,
    "bnb8": _bnb8,
}
