"""Multi-token-prediction layers in the form that DeepSeek-V3 introduced and GLM kept.

One more decoder layer behind the last one, numbered onwards, with the projection of (embedding, hidden) and its
norms; the embedding and the head are stored again. Source: the published index of DeepSeek-V3
(``model.layers.61.*``) and of GLM-4.5 (``model.layers.92.*``); the classes of transformers ignore these tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshwright.specs.hf.fields import MAX_LAYERS, Fields
from meshwright.specs.hf.registry import Parts
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Layer

#: Adds the tensors of attention and feed-forward of the given layers to a table.
Block = Callable[[Table, tuple[int, ...]], None]

MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")


def nextn(
    f: Fields,
    t: Table,
    parts: Parts,
    block: Block,
    layer: Layer,
    *,
    copies: bool = True,
) -> Parts:
    """Parts with the multi-token-prediction layers added, as many as ``num_nextn_predict_layers`` says.

    Args:
        t: the decoder's table.
        parts: the decoder's parts.
        block: adds attention and feed-forward tensors.
        layer: structure of one such layer.
        copies: whether embedding and head are stored again.
    """
    count = f.integer(*MTP_KEYS, default=0, low=0, high=MAX_LAYERS)
    if not count:
        return replace(parts, families=tuple(t.families))
    n, h = len(parts.layers), parts.hidden
    at = tuple(range(n, n + count))
    extra = Table(t.dtype, t.prefix, section="mtp")
    rows = seg("vocab", parts.vocab)
    if copies:
        extra.add(extra.prefix + "embed_tokens.weight", rows, h, role="embedding", layers=at)
        extra.linear("shared_head.head", rows, h, role="head", op="head", layers=at)
    extra.linear("eh_proj", h, seg("model", 2 * h), role="other", op="in", layers=at)
    for name in ("enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm"):
        extra.norm(name, h, layers=at)
    block(extra, at)
    return replace(parts, families=(*t.families, *extra.families), mtp_layers=(layer,) * count)
