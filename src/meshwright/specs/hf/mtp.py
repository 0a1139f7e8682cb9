"""Multi-token-prediction layers: one more decoder layer each, with a projection of (embedding, hidden) and norms.

The classes of transformers ignore these tensors; ``MtpModel`` of transformers 5.24 loads some of them. Sources of
the names: the published indexes (DeepSeek-V3 ``model.layers.61.*``, GLM-4.5 ``model.layers.92.*``, Step-3.5
``model.layers.45.*``, LongCat ``model.mtp.layers.0.*``, ERNIE ``model.mtp_block.0.*``) and, for MiniMax-M3, the
NeMo AutoModel documentation of ``model.mtp.layers.0``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from meshwright.specs.hf.fields import MAX_LAYERS, Fields
from meshwright.specs.hf.registry import Parts
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Layer

#: Adds the tensors of attention and feed-forward of the given layers to a table.
Block = Callable[[Table, tuple[int, ...]], None]

MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")


@dataclass(frozen=True, slots=True)
class MtpNames:
    """How a checkpoint names a prediction layer; an empty name: not stored.

    Attributes:
        prefix: of a layer's own tensors.
        follows: layers are numbered on from the decoder's (DeepSeek), not from 0.
        block: module of the decoder layer inside, with its dot.
        enorm, hnorm, proj, last: norms of embedding and hidden state, projection, norm before the head.
        embed, head: copies of embedding and head.
    """

    prefix: str = "model.layers.{layer}."
    follows: bool = True
    block: str = ""
    enorm: str = "enorm"
    hnorm: str = "hnorm"
    proj: str = "eh_proj"
    last: str = "shared_head.norm"
    embed: str = "embed_tokens"
    head: str = "shared_head.head"


#: DeepSeek-V3 and GLM-4.5 store embedding and head again; GLM-5 does not (its 754 B count neither).
COPIES = MtpNames()
NO_COPIES = MtpNames(embed="", head="")


def count_of(f: Fields) -> int:
    """How many prediction layers the configuration states."""
    return f.integer(*MTP_KEYS, default=0, low=0, high=MAX_LAYERS)


def nextn(
    f: Fields, t: Table, parts: Parts, block: Block, layer: Layer, names: MtpNames = COPIES, *, bias: bool = False
) -> Parts:
    """Parts with the prediction layers added, as many as ``num_nextn_predict_layers`` says.

    Args:
        t: the decoder's table.
        parts: the decoder's parts.
        block: adds attention and feed-forward tensors; the two norms of the layer are added here.
        layer: structure of one such layer.
        names: names of its tensors.
        bias: of the projection.
    """
    count = count_of(f)
    if not count:
        return replace(parts, families=tuple(t.families))
    h, rows = parts.hidden, seg("vocab", parts.vocab)
    first = len(parts.layers) if names.follows else 0
    at = tuple(range(first, first + count))
    own = Table(t.dtype, names.prefix, section="mtp")
    if names.embed:
        own.add(f"{own.prefix}{names.embed}.weight", rows, h, role="embedding", layers=at)
    if names.head:
        own.linear(names.head, rows, h, role="head", op="head", layers=at)
    own.linear(names.proj, h, seg("model", 2 * h), role="other", op="in", layers=at, bias=bias)
    for name in (names.enorm, names.hnorm, names.last):
        if name:
            own.norm(name, h, layers=at)
    inner = Table(t.dtype, names.prefix + names.block, section="mtp")
    for name in ("input_layernorm", "post_attention_layernorm"):
        inner.norm(name, h, layers=at)
    block(inner, at)
    families = (*t.families, *own.families, *inner.families)
    return replace(parts, families=families, mtp_layers=(layer,) * count)
