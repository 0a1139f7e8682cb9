"""Tencent Hy4: sparse latent attention with sinks and an output gate, fused experts, hyper-connections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwright.errors import InputError
from meshwright.specs.hf.dense import ends
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.mla import indexer, indexer_tensors, mla, mla_tensors
from meshwright.specs.hf.moe import after_dense, outside, routed, shared_width, stack
from meshwright.specs.hf.registry import Parts, architecture
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Attention, Indexer, Moe
from meshwright.specs.tensors import Label, Role


@architecture("HYV4ForCausalLM", "hy_v4")
def hy_v4(f: Fields, dtype: str) -> Parts:
    """Hy4 as transformers 5.24 writes it; layers named ``shared`` reuse the token selection of one before.

    Head, hyper-connections, sinks and the small tensors of the selector are kept in fp32.
    """
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    x, own = indexer(f), _own(f, n)
    a = replace(mla(f), sinks=True, gated=True)
    if not a.q_lora_rank:
        raise InputError(f"{f.where}: q_lora_rank is missing; the token selector takes its queries from it")
    mixers = tuple(replace(a, indexer=x if i in own else Indexer(0, 0, x.topk)) for i in range(n))
    sparse = after_dense(f, n, default=1)
    rest, every = outside(sparse, n), tuple(range(n))
    width = f.integer("moe_intermediate_size")
    moe = routed(f, shared=shared_width(f, width, default=1), grouped=True)
    dense, tied = f.integer("intermediate_size") if rest else 0, f.flag("tie_word_embeddings")
    t = Table(dtype)
    ends(t, hidden, vocab, True)
    if not tied:
        t.add("lm_head.weight", seg("vocab", vocab), hidden, role="head", op="head", dtype="f32")
    _attention(t, hidden, a, every, f.flag("attention_bias"))
    indexer_tensors(t, hidden, x, a.q_lora_rank, own, small_dtype="f32")
    if rest:
        _gated(t, "mlp", hidden, dense, rest, "mlp", "mlp")
    if sparse:
        _experts(t, hidden, moe, sparse)
    for name in ("input_layernorm", "post_attention_layernorm"):
        t.norm(name, hidden, layers=every)
    mult = f.integer("hc_mult", default=4, high=64)
    for part in ("attn", "mlp"):
        _mixing(t, f"{t.prefix}hc_pre.hc_{part}_layer.hc_", hidden, mult, 2 * mult, every)
    _mixing(t, "model.hc_pre.hc_head.hc_head_", hidden, mult, mult, ())
    longest = f.integer("max_position_embeddings", default=262144, high=1 << 30)
    return Parts(hidden, vocab, stack(mixers, sparse, moe, dense), tuple(t.families), tied, longest)


def _own(f: Fields, n: int) -> tuple[int, ...]:
    """Layers with a selector of their own: the first two and every fourth from there, unless listed."""
    if f.has("indexer_types"):
        types = f.texts("indexer_types", length=n)
        return tuple(i for i, word in enumerate(types) if word == "full")
    return tuple(i for i in range(n) if i == 0 or (i - 1) % 4 == 0)


def _attention(t: Table, hidden: int, a: Attention, at: Sequence[int], bias: bool) -> None:
    mla_tensors(t, hidden, a, at, bias=bias)
    gate = seg("heads", a.heads, a.v_head_dim)
    t.linear("self_attn.linear_gate", gate, hidden, role="attention", op="gate", layers=at)
    sinks = t.prefix + "self_attn.learnable_sink_param"
    t.add(sinks, seg("heads", a.heads), role="attention", layers=at, dtype="f32")


def _gated(t: Table, name: str, hidden: int, width: int, at: Sequence[int], label: Label, role: Role) -> None:
    inner = seg(label, width)
    t.linear(f"{name}.linear_gate", inner, hidden, role=role, op="gate", layers=at)
    t.linear(f"{name}.up_proj", inner, hidden, role=role, op="up", layers=at)
    t.linear(f"{name}.down_proj", hidden, inner, role=role, op="down", layers=at)


def _experts(t: Table, hidden: int, moe: Moe, at: Sequence[int]) -> None:
    router = seg("fixed", moe.experts)
    t.linear("mlp.gate", router, hidden, role="router", op="router", layers=at)
    name = t.prefix + "mlp."
    t.add(name + "gate.e_score_correction_bias", router, role="router", part="bias", layers=at, dtype="f32")
    rows, inner = seg("experts", moe.experts), seg("expert_mlp", moe.intermediate)
    t.add(name + "experts.gate_up_proj", rows, (inner, inner), hidden, role="expert", op="gate_up", layers=at)
    t.add(name + "experts.down_proj", rows, hidden, inner, role="expert", op="down", layers=at)
    if moe.shared_intermediate:
        _gated(t, "mlp.shared_experts", hidden, moe.shared_intermediate, at, "shared_mlp", "shared_expert")


def _mixing(t: Table, name: str, hidden: int, mult: int, out: int, at: Sequence[int]) -> None:
    """Hyper-connection of ``mult`` residual streams: ``out`` weights, with a scale for each use of them."""
    rows = seg("fixed", out)
    t.add(f"{name}fn", rows, seg("model", mult * hidden), role="other", layers=at, dtype="f32")
    t.add(f"{name}base", rows, role="other", part="bias", layers=at, dtype="f32")
    t.add(f"{name}scale", seg("fixed", out // mult), role="other", layers=at, dtype="f32")
