"""GPT-OSS: fused experts with biases, attention sinks, every other layer with a sliding window."""

from __future__ import annotations

from dataclasses import replace

from meshwright.specs.hf.dense import attention_tensors, ends, gqa
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.moe import routed, stack, windows
from meshwright.specs.hf.registry import Parts, architecture
from meshwright.specs.hf.table import Table, seg


@architecture("GptOssForCausalLM", "gpt_oss")
def gpt_oss(f: Fields, dtype: str) -> Parts:
    """gpt-oss-20b and 120b before quantization; gate and up columns of one expert alternate.

    Experts are stored input first, (experts, in, out), as transformers 5.24 keeps them; the published MXFP4
    blocks are (experts, out, in / 32, 16).
    """
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    a = replace(gqa(f), sinks=True)
    mixers = windows(f, n, a, full_every="sliding_window_pattern", default=2)
    moe = routed(f, width=("intermediate_size",), experts=128, topk=4)
    every, bias = tuple(range(n)), f.flag("attention_bias", default=True)
    tied = f.flag("tie_word_embeddings")
    t = Table(dtype)
    ends(t, hidden, vocab, tied)
    attention_tensors(t, hidden, a, every, bias=bias, out_bias=bias)
    t.add(t.prefix + "self_attn.sinks", seg("heads", a.heads), role="attention", layers=every)
    router = seg("fixed", moe.experts)
    t.linear("mlp.router", router, hidden, role="router", op="router", layers=every, bias=True)
    rows, pair, inner = seg("experts", moe.experts), seg("expert_mlp", moe.intermediate, 2), moe.intermediate
    name = t.prefix + "mlp.experts."
    t.add(name + "gate_up_proj", rows, hidden, pair, role="expert", op="gate_up", layers=every)
    t.add(name + "gate_up_proj_bias", rows, pair, role="expert", op="gate_up", part="bias", layers=every)
    t.add(name + "down_proj", rows, seg("expert_mlp", inner), hidden, role="expert", op="down", layers=every)
    t.add(name + "down_proj_bias", rows, hidden, role="expert", op="down", part="bias", layers=every)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        t.norm(norm, hidden, layers=every)
    longest = f.integer("max_position_embeddings", default=131072, high=1 << 30)
    return Parts(hidden, vocab, stack(mixers, every, moe, 0), tuple(t.families), tied, longest)
