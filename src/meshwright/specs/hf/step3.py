"""Step-3.5-Flash and Step-3.7-Flash, text part: head-wise gated attention, windows, fused experts."""

from __future__ import annotations

from dataclasses import replace

from meshwright.specs.hf.dense import attention_tensors, ends, gqa, mlp_tensors
from meshwright.specs.hf.fields import MAX_EXPERTS, Fields
from meshwright.specs.hf.moe import MoeNames, after_dense, outside, qk_norms, shared_tensors, stack
from meshwright.specs.hf.mtp import MtpNames, count_of, nextn
from meshwright.specs.hf.registry import Parts, architecture
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Attention, Layer, Mlp, Moe

MAX_HEADS = 1 << 14


@architecture("Step3p5ForCausalLM", "Step3p7FlashForCausalLM", "step3p5", "step3p7_text")
def step3p5(f: Fields, dtype: str) -> Parts:
    """The text part of Step-3.5/3.7-Flash; sliding layers may have more query heads than the others.

    With its three prediction layers Step-3.5-Flash has the published 199 B parameters.
    """
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    *mixers, ahead = _attentions(f, n)
    sparse = _sparse(f, n)
    rest = outside(sparse, n)
    moe = Moe(
        f.integer("n_routed_experts", "moe_num_experts", "num_experts", default=288, high=MAX_EXPERTS),
        f.integer("num_experts_per_tok", "moe_top_k", default=8, high=MAX_EXPERTS),
        f.integer("moe_intermediate_size"),
        f.integer("share_expert_dim", "share_expert_dims", default=1280, low=0),
    )
    dense = f.integer("intermediate_size") if rest else 0
    tied, bias = f.flag("tie_word_embeddings"), f.flag("attention_bias")
    t = Table(dtype)
    ends(t, hidden, vocab, tied)
    for a in dict.fromkeys(mixers):
        at = tuple(i for i in range(n) if mixers[i] == a)
        _attention(t, hidden, a, at, bias)
    if rest:
        mlp_tensors(t, hidden, dense, rest)
    if sparse:
        _experts(t, hidden, moe, sparse)
    for name in ("input_layernorm", "post_attention_layernorm"):
        t.norm(name, hidden, layers=range(n))
    longest = f.integer("max_position_embeddings", default=128000, high=1 << 30)
    parts = Parts(hidden, vocab, stack(mixers, sparse, moe, dense), tuple(t.families), tied, longest)
    return _prediction(f, t, parts, ahead, bias)


def _prediction(f: Fields, t: Table, parts: Parts, a: Attention, bias: bool) -> Parts:
    """Dense layers, each with an own head."""
    width = f.integer("intermediate_size") if count_of(f) else 0

    def block(to: Table, at: tuple[int, ...]) -> None:
        _attention(to, parts.hidden, a, at, bias)
        mlp_tensors(to, parts.hidden, width, at)

    head = "transformer.shared_head."
    names = MtpNames(last=head + "norm", embed="", head=head + "output")
    return nextn(f, t, parts, block, Layer((a,), (Mlp(width),)), names)


def _attention(t: Table, hidden: int, a: Attention, at: tuple[int, ...], bias: bool) -> None:
    attention_tensors(t, hidden, a, at, bias=bias, out_bias=bias)
    qk_norms(t, a, at)
    t.linear("self_attn.g_proj", seg("heads", a.heads), hidden, role="attention", op="gate", layers=at)


def _experts(t: Table, hidden: int, moe: Moe, at: tuple[int, ...]) -> None:
    t.linear("moe.gate", seg("fixed", moe.experts), hidden, role="router", op="router", layers=at)
    t.add(t.prefix + "moe.router_bias", seg("fixed", moe.experts), role="router", part="bias", layers=at)
    rows, inner = seg("experts", moe.experts), seg("expert_mlp", moe.intermediate)
    name = t.prefix + "moe."
    for op in ("gate", "up"):
        t.add(f"{name}{op}_proj.weight", rows, inner, hidden, role="expert", op=op, layers=at)
    t.add(name + "down_proj.weight", rows, hidden, inner, role="expert", op="down", layers=at)
    shared_tensors(t, hidden, moe, at, MoeNames(shared="share_expert"))


def _attentions(f: Fields, n: int) -> tuple[Attention, ...]:
    """Attention of ``n`` layers and then of one prediction layer; ``layer_types`` may go on with those.

    Prediction layers that it does not list have a sliding window, as the published ones, where there is any.
    """
    heads = f.integer("num_attention_heads", high=MAX_HEADS)
    groups = f.integer("num_key_value_heads", "num_attention_groups", default=8, high=MAX_HEADS)
    whole = replace(gqa(f), kv_heads=groups)
    other = f.sub("attention_other_setting")
    wide = f.integer("num_sliding_attention_heads", default=0, low=0, high=MAX_HEADS)
    wide = wide or other.integer("num_attention_heads", default=heads, high=MAX_HEADS)
    types = f.texts("layer_types")[: n + 1]
    if "sliding_attention" not in types:
        return (whole,) * (n + 1)
    local = replace(whole, heads=wide, window=f.integer("sliding_window", high=1 << 30))
    kinds = types + ("full_attention",) * (n - len(types))
    kinds += ("sliding_attention",) * (n + 1 - len(kinds))
    return tuple(local if kind == "sliding_attention" else whole for kind in kinds)


def _sparse(f: Fields, n: int) -> tuple[int, ...]:
    if f.has("mlp_layer_types") or f.has("first_k_dense_replace"):
        return after_dense(f, n)
    listed = f.get("moe_layers_enum")[1]
    if isinstance(listed, str):
        words = [w.strip() for w in listed.split(",") if w.strip().isdecimal()]
        return tuple(sorted({int(w) for w in words[:4096] if len(w) < 6 and int(w) < n}))
    return tuple(range(3, n))
