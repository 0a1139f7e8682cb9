"""Linear attention and gated recurrences: MiniMax-Text-01 (lightning), RecurrentGemma (RG-LRU), RWKV-4."""

from __future__ import annotations

from meshwright.specs.hf.blocks import expert_tensors, layer_types, mlp3_tensors, of, qkvo_tensors, text_ends
from meshwright.specs.hf.dense import gqa
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.mamba import taps
from meshwright.specs.hf.registry import Parts, architecture
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Attention, Layer, Mlp, Moe, Recurrent

KINDS = {"full_attention": "attention", "attention": "attention", "linear_attention": "linear"}


def _minimax_types(f: Fields, n: int) -> tuple[str, ...]:
    listed = layer_types(f, n, "layer_types", known=KINDS)
    if not listed and f.has("attn_type_list"):
        flags = f.integers("attn_type_list", length=n, high=1)
        return tuple("attention" if flag else "linear" for flag in flags)
    return listed or tuple("linear" if i % 2 else "attention" for i in range(n))


def _lightning_tensors(t: Table, hidden: int, a: Attention, layers: tuple[int, ...]) -> None:
    """Fused q, k, v head by head, an output gate, a norm over all heads."""
    q = seg("heads", a.heads, a.head_dim)
    t.linear(
        "self_attn.qkv_proj", seg("heads", a.heads, 3 * a.head_dim), hidden, role="recurrent", op="qkv", layers=layers
    )
    t.linear("self_attn.output_gate", q, hidden, role="recurrent", op="gate", layers=layers)
    t.linear("self_attn.out_proj", hidden, q, role="recurrent", op="out", layers=layers)
    t.norm("self_attn.norm", q, layers=layers, role="recurrent")


def _lightning_buffers(t: Table, a: Attention, block: int, layers: tuple[int, ...]) -> None:
    """Decay tables that the transformers class saves although they follow from the layer number."""
    heads, one, rows = seg("heads", a.heads), seg("fixed", 1), seg("fixed", block)
    shapes = {
        "slope_rate": (heads, one, one),
        "query_decay": (heads, rows, one),
        "key_decay": (heads, rows, one),
        "diagonal_decay": (one, heads, rows, rows),
    }
    for leaf, dims in shapes.items():
        name = f"{t.prefix}self_attn.{leaf}"
        t.add(name, *dims, role="recurrent", part="state", layers=layers, elements=0)


@architecture("MiniMaxForCausalLM", "minimax", "MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM", "minimax_text_01")
def minimax(f: Fields, dtype: str) -> Parts:
    """MiniMax-Text-01 and M1: lightning attention, softmax attention in some layers, experts in all."""
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    a, types = gqa(f), _minimax_types(f, n)
    experts = f.integer("num_local_experts", default=8, high=1 << 14)
    moe = Moe(experts, f.integer("num_experts_per_tok", default=2), f.integer("intermediate_size"))
    tied, every, linear = f.flag("tie_word_embeddings"), tuple(range(n)), of(types, "linear")
    t = Table(dtype)
    text_ends(t, hidden, vocab, tied)
    qkvo_tensors(t, hidden, a, of(types, "attention"))
    if linear:
        _lightning_tensors(t, hidden, a, linear)
        if f.text("model_type") == "minimax":
            _lightning_buffers(t, a, f.integer("block_size", default=256), linear)
    rows = seg("fixed", experts)
    t.linear("block_sparse_moe.gate", rows, hidden, role="router", op="router", layers=every)
    name, leaves = "block_sparse_moe.experts", ("w1", "w3", "w2")
    expert_tensors(t, hidden, moe.intermediate, experts, every, name=name, leaves=leaves)
    for leaf in ("input_layernorm", "post_attention_layernorm"):
        t.norm(leaf, hidden, layers=every)
    # vLLM keeps the state in the model's dtype and refuses float32 (linear_attention_state_dtype).
    r = Recurrent("lightning", a.heads, a.head_dim, a.head_dim, a.heads, state_dtype=dtype)
    layers = tuple(Layer((a if kind == "attention" else r,), (moe,)) for kind in types)
    return Parts(hidden, vocab, layers, tuple(t.families), tied, f.integer("max_position_embeddings", default=4096))


def _rglru_tensors(t: Table, hidden: int, width: int, heads: int, kernel: int, layers: tuple[int, ...]) -> None:
    """Two input branches, a short convolution, gates that are block-diagonal over heads, the output projection."""
    x, one, block = seg("ssm_heads", width), seg("ssm_heads", heads), seg("fixed", max(1, width // heads))
    for leaf in ("linear_x", "linear_y"):
        t.linear(f"temporal_block.{leaf}", x, hidden, role="recurrent", op=leaf[-1], layers=layers, bias=True)
    t.linear("temporal_block.linear_out", hidden, x, role="recurrent", op="out", layers=layers, bias=True)
    base = f"{t.prefix}temporal_block."
    t.add(base + "conv_1d.weight", x, *taps(kernel), role="recurrent", layers=layers)
    t.add(base + "conv_1d.bias", x, role="recurrent", part="bias", layers=layers)
    for leaf in ("input_gate", "recurrent_gate"):
        t.add(f"{base}rg_lru.{leaf}_weight", one, block, block, role="recurrent", op=leaf, layers=layers)
        t.add(f"{base}rg_lru.{leaf}_bias", one, block, role="recurrent", part="bias", layers=layers)
    t.add(base + "rg_lru.recurrent_param", x, role="recurrent", layers=layers)


@architecture("RecurrentGemmaForCausalLM", "recurrent_gemma")
def recurrent_gemma(f: Fields, dtype: str) -> Parts:
    """RecurrentGemma (Griffin): two recurrent layers, one of local attention; half the stated MLP width each way."""
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    window = f.integer("attention_window_size", default=2048)
    a = gqa(f, window)
    cycle = f.texts("block_types", "_block_types") or ("recurrent", "recurrent", "attention")
    types = tuple(cycle[i % len(cycle)] for i in range(n))
    width, kernel = f.integer("lru_width", default=hidden), f.integer("conv1d_width", default=4)
    inter, tied = max(1, f.integer("intermediate_size") // 2), f.flag("tie_word_embeddings", default=True)
    every, recurrent = tuple(range(n)), of(types, "recurrent")
    t = Table(dtype)
    text_ends(t, hidden, vocab, tied, norm="model.final_norm")
    if recurrent:
        _rglru_tensors(t, hidden, width, a.heads, kernel, recurrent)
    attention = of(types, "attention")
    bias = f.flag("attention_bias")
    qkvo_tensors(t, hidden, a, attention, name="temporal_block", bias=bias, out_bias=True)
    mlp3_tensors(t, hidden, inter, every, name="mlp_block", bias=True)
    for leaf in ("temporal_pre_norm", "channel_pre_norm"):
        t.norm(leaf, hidden, layers=every)
    r = Recurrent("rg_lru", a.heads, max(1, width // a.heads), 1, 1, kernel, width)
    layers = tuple(Layer((r if kind == "recurrent" else a,), (Mlp(inter),)) for kind in types)
    return Parts(hidden, vocab, layers, tuple(t.families), tied, f.integer("max_position_embeddings", default=8192))


@architecture("RwkvForCausalLM", "rwkv")
def rwkv(f: Fields, dtype: str) -> Parts:
    """RWKV-4: time mix and channel mix; the state keeps numerator, denominator and maximum a channel."""
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    width = f.integer("attention_hidden_size", default=hidden)
    inter, tied = f.integer("intermediate_size", default=4 * hidden), f.flag("tie_word_embeddings")
    every, x, one, inner = tuple(range(n)), seg("ssm_heads", width), seg("fixed", 1), seg("mlp", inter)
    t = Table(dtype, prefix="rwkv.blocks.{layer}.")
    t.add("rwkv.embeddings.weight", seg("vocab", vocab), hidden, role="embedding")
    t.norm("rwkv.ln_out", hidden, bias=True)
    if not tied:
        t.add("head.weight", seg("vocab", vocab), hidden, role="head", op="head")
    t.norm("pre_ln", hidden, layers=(0,), bias=True)
    for leaf in ("ln1", "ln2"):
        t.norm(leaf, hidden, layers=every, bias=True)
    for leaf in ("key", "value", "receptance"):
        t.linear(f"attention.{leaf}", x, hidden, role="recurrent", op=leaf, layers=every)
    t.linear("attention.output", hidden, x, role="recurrent", op="out", layers=every)
    for leaf in ("time_decay", "time_first"):
        t.add(f"{t.prefix}attention.{leaf}", x, role="recurrent", layers=every)
    for block, leaves in (("attention", ("key", "value", "receptance")), ("feed_forward", ("key", "receptance"))):
        for leaf in leaves:
            t.add(f"{t.prefix}{block}.time_mix_{leaf}", one, one, hidden, role="recurrent", layers=every)
    t.linear("feed_forward.key", inner, hidden, role="mlp", op="up", layers=every)
    t.linear("feed_forward.value", hidden, inner, role="mlp", op="down", layers=every)
    t.linear("feed_forward.receptance", hidden, hidden, role="mlp", op="receptance", layers=every)
    layer = Layer((Recurrent("rwkv", width, 1, 3, 1, 2, 2 * hidden),), (Mlp(inter, gated=False),))
    return Parts(hidden, vocab, (layer,) * n, tuple(t.families), tied, f.integer("context_length", default=1024))
