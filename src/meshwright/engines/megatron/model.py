"""The model that Megatron arguments describe.

Defaults are those of ``megatron/training/arguments.py`` (megatron-core 0.19.2): learned positions, GELU, biases,
LayerNorm, tied embeddings, FFN of 4 x hidden (SwiGLU: 8/3 x hidden in multiples of 64, ``validate_args``).
"""

from __future__ import annotations

from meshwright.engines.megatron.arguments import Args, frequency
from meshwright.errors import InputError
from meshwright.specs.atlas import models as atlas
from meshwright.specs.build import Mamba, decoder
from meshwright.specs.model import ModelSpec

#: Rows of a tokenizer that the arguments name by type alone.
TOKENIZERS = {
    "GPT2BPETokenizer": 50257,
    "Llama2Tokenizer": 32000,
    "BertWordPieceLowerCase": 30522,
    "BertWordPieceCase": 28996,
}

#: Dimensions without which arguments describe no model (``validate_args``, ``required_args``).
NEEDED = ("hidden-size", "num-attention-heads")


def vocabulary(a: Args) -> tuple[int, str]:
    """Rows of the embedding before padding, and where they are from (empty: stated).

    ``NullTokenizer`` of 0.19 has ``--vocab-size`` rows, its end-of-document token included (earlier versions had one
    more; ``megatron/core/tokenizers/text/libraries/null_tokenizer.py``).
    """
    kind = a.text("tokenizer-type")
    if a.has("padded-vocab-size"):
        return a.count("padded-vocab-size"), ""
    if a.has("vocab-size"):
        return a.count("vocab-size"), ""
    extra = a.size("vocab-extra-ids")
    if kind in TOKENIZERS:
        return TOKENIZERS[kind] + extra, f"vocabulary of {TOKENIZERS[kind]:,} rows from --tokenizer-type {kind}"
    entry = atlas.find(a.text("tokenizer-model")[:200]) if a.has("tokenizer-model") else None
    if entry is not None:
        rows = atlas.load(entry)[1].get("vocab_size")
        if isinstance(rows, int):
            return rows + extra, f"vocabulary of {rows:,} rows from the atlas entry {entry}"
    return 50257, "the vocabulary is not stated (--vocab-size); GPT-2's 50,257 rows are assumed"


def pattern_of(a: Args) -> str:
    """Main part of the hybrid layer pattern, with its ``|`` separators; empty without one."""
    return (a.text("hybrid-layer-pattern") or a.text("hybrid-override-pattern")).partition("/")[0]


def layers_of(a: Args) -> int | None:
    """Decoder layers, None when the arguments do not say."""
    pattern = pattern_of(a).replace("|", "")
    if pattern:
        return len(pattern)
    return a.whole("num-layers", 1) or a.whole("encoder-num-layers", 1)


def ffn_of(a: Args) -> int:
    """Width of the dense MLP."""
    hidden = a.count("hidden-size")
    if a.has("ffn-hidden-size"):
        return a.count("ffn-hidden-size")
    return int((4 * hidden * 2 / 3) / 64) * 64 if a.flag("swiglu") else 4 * hidden


def _mtp(a: Args) -> int:
    """Prediction layers: as stated, or the parts of the hybrid pattern behind ``/``."""
    whole = a.text("hybrid-layer-pattern") or a.text("hybrid-override-pattern")
    return a.size("mtp-num-layers", whole.count("/"))


def model_from(a: Args, name: str = "megatron arguments", *, causal: bool = True) -> ModelSpec | None:
    """The decoder that the arguments describe; None when its dimensions are not given.

    Args:
        a: the arguments.
        name: what the model is called.
        causal: whether positions see only those before them (not in BERT).

    Raises:
        InputError: a dimension that is no number or beyond any model.
    """
    layers = layers_of(a)
    if layers is None or not all(a.has(n) for n in NEEDED):
        return None
    if layers > 10_000:
        raise InputError(f"--num-layers {layers} is beyond any model; at most 10000 are read")
    hidden, heads = a.count("hidden-size"), a.count("num-attention-heads")
    mla, pattern = a.flag("multi-latent-attention"), pattern_of(a).replace("|", "")
    nope, rope = a.size("qk-head-dim", 128), a.size("qk-pos-emb-head-dim", 64)
    grouped = a.has("num-query-groups") and a.flag("group-query-attention")
    position = "rope" if a.flag("use-rotary-position-embeddings") else a.text("position-embedding-type")
    learned = position in {"", "learned_absolute"} and not pattern
    experts = a.size("num-experts")
    bias = not a.flag("disable-bias-linear")
    mamba = None
    if "M" in pattern:
        dim = a.count("mamba-head-dim", 64)
        mamba = Mamba(
            a.count("mamba-num-heads", max(1, 2 * hidden // dim)),
            dim,
            a.count("mamba-state-dim", 128),
            a.count("mamba-num-groups", 8),
        )
    return decoder(
        name=name,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=a.count("num-query-groups") if grouped else None,
        head_dim=nope + rope if mla else a.whole("kv-channels", 1),
        v_head_dim=a.count("v-head-dim", 128) if mla else None,
        q_lora_rank=a.size("q-lora-rank") if mla else 0,
        kv_lora_rank=a.count("kv-lora-rank", 32) if mla else 0,
        rope_head_dim=rope if mla else 0,
        ffn=ffn_of(a),
        gated=a.flag("swiglu") or a.flag("quick-geglu"),
        vocab=vocabulary(a)[0],
        tied=not a.flag("untie-embeddings-and-output-weights"),
        bias=bias,
        qkv_bias=a.flag("add-qkv-bias"),
        norm_bias=a.text("normalization") != "RMSNorm",
        qk_norm=a.flag("qk-layernorm"),
        learned_positions=a.size("max-position-embeddings") if learned else 0,
        max_positions=a.size("max-position-embeddings"),
        causal=causal,
        experts=experts,
        topk=a.count("moe-router-topk", 2),
        moe_ffn=a.whole("moe-ffn-hidden-size", 1),
        shared_ffn=a.size("moe-shared-expert-intermediate-size"),
        moe_latent=a.size("moe-latent-size"),
        moe_layers=frequency(a.text("moe-layer-freq"), layers) if experts and not pattern else None,
        router_bias=a.flag("moe-router-enable-expert-bias"),
        mtp=_mtp(a),
        mamba=mamba,
        pattern=pattern,
    )
