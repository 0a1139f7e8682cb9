"""What of a model has to be divided: distinct block sizes, read once a model and remembered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.specs.model import Attention, Mlp, ModelSpec, Moe, Recurrent
from meshwright.specs.tensors import Label, Role, TensorFamily

#: Stored element types of a weight that mean it is quantized.
QUANTIZED_DTYPES = frozenset({"f8_e4m3", "f8_e5m2", "i8", "u8", "i32"})


@dataclass(frozen=True, slots=True)
class Width:
    """One side of quantized matrices that tensor parallelism cuts.

    Attributes:
        name: for people (``MLP``, ``expert``, ``shared expert``, ``query``, ``key and value``).
        label: what the side is cut by.
        size: elements of the whole side (logical, not packed).
        side: ``out``: columns of the result (column parallel); ``in``: reduction side (row parallel).
        heads: how many heads the side consists of, 1 where it has none.
        block: elements of the side that share a two-dimensional scale of an fp8 weight; 0: none.
        packed: four-bit and integer weights, whose groups run along the reduction side.
    """

    name: str
    label: Label
    size: int
    side: str
    heads: int = 1
    block: int = 0
    packed: bool = False


@dataclass(frozen=True, slots=True)
class Splits:
    """Distinct blocks of a model, in order of appearance.

    Attributes:
        attentions, recurrents, mlps, moes: distinct blocks of the decoder layers.
        quantized: sides of quantized matrices that tensor parallelism cuts.
        head_units: fewest pieces that any weight of the decoder's attention lets query heads be cut into: the heads,
            or groups of them where an output projection is grouped (DeepSeek-V4); 0 without attention.
    """

    attentions: tuple[Attention, ...]
    recurrents: tuple[Recurrent, ...]
    mlps: tuple[Mlp, ...]
    moes: tuple[Moe, ...]
    quantized: tuple[Width, ...]
    head_units: int = 0

    @property
    def softmax_mla(self) -> bool:
        """Whether any attention caches one latent vector instead of heads."""
        return any(a.kind == "mla" for a in self.attentions)


_MEMO: dict[int, tuple[ModelSpec, Splits]] = {}


def splits(spec: ModelSpec) -> Splits:
    """The distinct blocks of a model. Remembered for the last few models, because a search asks thousands of times."""
    known = _MEMO.get(id(spec))
    if known is not None and known[0] is spec:
        return known[1]
    found = _read(spec)
    while len(_MEMO) >= 8:
        _MEMO.pop(next(iter(_MEMO)))
    _MEMO[id(spec)] = (spec, found)
    return found


def _read(spec: ModelSpec) -> Splits:
    attentions: dict[Attention, None] = {}
    recurrents: dict[Recurrent, None] = {}
    mlps: dict[Mlp, None] = {}
    moes: dict[Moe, None] = {}
    for layer in {id(layer): layer for layer in spec.layers}.values():
        for mixer in layer.mixers:
            if isinstance(mixer, Attention):
                attentions[mixer] = None
            else:
                recurrents[mixer] = None
        for ffn in layer.ffns:
            if isinstance(ffn, Mlp):
                mlps[ffn] = None
            else:
                moes[ffn] = None
    found = Splits(tuple(attentions), tuple(recurrents), tuple(mlps), tuple(moes), ())
    return replace(found, quantized=tuple(_quantized(spec, found)), head_units=_head_units(spec))


def _head_units(spec: ModelSpec) -> int:
    weights = (f for f in spec.families if f.section == "decoder" and f.role == "attention" and f.part == "weight")
    return min((s.units for f in weights for dim in f.dims for s in dim if s.label == "heads"), default=0)


def is_quantized(family: TensorFamily) -> bool:
    """Whether a family is a weight stored in fewer bits."""
    return family.part == "weight" and family.dtype in QUANTIZED_DTYPES


def _quantized(spec: ModelSpec, found: Splits) -> Iterator[Width]:
    """Sides of the decoder's quantized matrices, by the roles whose weights are stored quantized."""
    stored: dict[Role, list[TensorFamily]] = {}
    for family in spec.families:
        if family.section == "decoder" and is_quantized(family):
            stored.setdefault(family.role, []).append(family)
    widths: dict[Width, Role] = {}
    for a in found.attentions if "attention" in stored else ():
        widths |= dict.fromkeys(_attention_widths(a, {f.op for f in stored["attention"]}), "attention")
    for mlp in found.mlps if "mlp" in stored else ():
        widths |= dict.fromkeys(_ffn_widths("MLP", "mlp", mlp.intermediate), "mlp")
    for moe in found.moes:
        if "expert" in stored:
            widths |= dict.fromkeys(_ffn_widths("expert", "expert_mlp", moe.intermediate), "expert")
        if "shared_expert" in stored and moe.shared_intermediate:
            shared = _ffn_widths("shared expert", "shared_mlp", moe.shared_intermediate)
            widths |= dict.fromkeys(shared, "shared_expert")
    scales = {f.template.rpartition(".")[0]: f for f in spec.families if f.part == "scale"}
    for width, role in widths.items():
        packed = any(not f.dtype.startswith("f8") for f in stored[role])
        yield replace(width, packed=packed, block=_block(spec, stored[role], scales, width))


def _block(spec: ModelSpec, weights: list[TensorFamily], scales: dict[str, TensorFamily], width: Width) -> int:
    """Elements along a side that one scale covers, from the shapes of fp8 weights and their scales."""
    for weight in weights:
        scale = scales.get(weight.template.rpartition(".")[0])
        if scale is None or not weight.dtype.startswith("f8") or not 1 < len(scale.shape) == len(weight.shape):
            continue
        number = -2 if width.side == "out" else -1
        rows, blocks = weight.shape[number], scale.shape[number]
        if any(s.label == width.label for s in weight.dims[number]) and 1 < blocks < rows:
            stated = spec.quantization.block if spec.quantization else None
            return stated[number] if stated else -(-rows // blocks)
    return 0


def _attention_widths(a: Attention, ops: set[str]) -> list[Width]:
    out = []
    if ops & {"q", "qkv", "q_b"}:
        out.append(Width("query", "heads", a.heads * a.head_dim, "out", a.heads))
    if a.kind == "gqa" and ops & {"k", "v", "qkv"}:
        out.append(Width("key and value", "kv_heads", a.kv_heads * a.head_dim, "out", a.kv_heads))
    if "o" in ops:
        out.append(Width("attention output", "heads", a.heads * (a.v_head_dim or a.head_dim), "in", a.heads))
    return out


def _ffn_widths(name: str, label: Label, size: int) -> list[Width]:
    return [Width(name, label, size, "out"), Width(name, label, size, "in")]
