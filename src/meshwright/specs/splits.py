"""What of a model has to be divided: distinct block sizes, read once a model and remembered."""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    name: str
    label: Label
    size: int
    side: str
    heads: int = 1


@dataclass(frozen=True, slots=True)
class Splits:
    """Distinct blocks of a model, in order of appearance.

    Attributes:
        attentions, recurrents, mlps, moes: distinct blocks of the decoder layers.
        quantized: sides of quantized matrices that tensor parallelism cuts.
    """

    attentions: tuple[Attention, ...]
    recurrents: tuple[Recurrent, ...]
    mlps: tuple[Mlp, ...]
    moes: tuple[Moe, ...]
    quantized: tuple[Width, ...]

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
    return Splits(found.attentions, found.recurrents, found.mlps, found.moes, tuple(_quantized(spec, found)))


def is_quantized(family: TensorFamily) -> bool:
    """Whether a family is a weight stored in fewer bits."""
    return family.part == "weight" and family.dtype in QUANTIZED_DTYPES


def _quantized(spec: ModelSpec, found: Splits) -> dict[Width, None]:
    """Sides of the decoder's quantized matrices, by the roles whose weights are stored quantized."""
    ops: dict[Role, set[str]] = {}
    for family in spec.families:
        if family.section == "decoder" and is_quantized(family):
            ops.setdefault(family.role, set()).add(family.op)
    out: dict[Width, None] = {}
    if "attention" in ops:
        for a in found.attentions:
            _attention_widths(a, ops["attention"], out)
    if "mlp" in ops:
        for mlp in found.mlps:
            _ffn_widths("MLP", "mlp", mlp.intermediate, out)
    for moe in found.moes:
        if "expert" in ops:
            _ffn_widths("expert", "expert_mlp", moe.intermediate, out)
        if "shared_expert" in ops and moe.shared_intermediate:
            _ffn_widths("shared expert", "shared_mlp", moe.shared_intermediate, out)
    return out


def _attention_widths(a: Attention, ops: set[str], out: dict[Width, None]) -> None:
    if ops & {"q", "qkv", "q_b"}:
        out[Width("query", "heads", a.heads * a.head_dim, "out", a.heads)] = None
    if a.kind == "gqa" and ops & {"k", "v", "qkv"}:
        out[Width("key and value", "kv_heads", a.kv_heads * a.head_dim, "out", a.kv_heads)] = None
    if "o" in ops:
        out[Width("attention output", "heads", a.heads * (a.v_head_dim or a.head_dim), "in", a.heads)] = None


def _ffn_widths(name: str, label: Label, size: int, out: dict[Width, None]) -> None:
    out[Width(name, label, size, "out")] = None
    out[Width(name, label, size, "in")] = None
