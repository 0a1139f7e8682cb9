"""Dense decoders with rotary positions and a gated MLP: Llama and those that differ in biases and norms."""

from __future__ import annotations

from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.registry import Parts, architecture
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Attention, Layer, Mlp


def gqa(f: Fields, window: int | None = None) -> Attention:
    """Attention of the usual keys: heads, KV heads (default: heads), head width (default: hidden / heads)."""
    heads = f.integer("num_attention_heads", "n_head", high=1 << 14)
    kv_heads = f.integer("num_key_value_heads", default=heads, high=1 << 14)
    head_dim = f.integer("head_dim", default=max(1, f.integer("hidden_size", "n_embd") // heads))
    return Attention("gqa", heads, kv_heads, head_dim, head_dim, window=window)


def attention_tensors(
    t: Table, hidden: int, a: Attention, layers: tuple[int, ...], *, bias: bool = False, out_bias: bool = False
) -> None:
    """Separate q, k, v and o projections under ``self_attn``."""
    q, kv = seg("heads", a.heads, a.head_dim), seg("kv_heads", a.kv_heads, a.head_dim)
    t.linear("self_attn.q_proj", q, hidden, role="attention", op="q", layers=layers, bias=bias)
    t.linear("self_attn.k_proj", kv, hidden, role="attention", op="k", layers=layers, bias=bias)
    t.linear("self_attn.v_proj", kv, hidden, role="attention", op="v", layers=layers, bias=bias)
    t.linear("self_attn.o_proj", hidden, q, role="attention", op="o", layers=layers, bias=out_bias)


def mlp_tensors(
    t: Table, hidden: int, intermediate: int, layers: tuple[int, ...], *, bias: bool = False, name: str = "mlp"
) -> None:
    """Separate gate, up and down projections."""
    inner = seg("mlp", intermediate)
    t.linear(f"{name}.gate_proj", inner, hidden, role="mlp", op="gate", layers=layers, bias=bias)
    t.linear(f"{name}.up_proj", inner, hidden, role="mlp", op="up", layers=layers, bias=bias)
    t.linear(f"{name}.down_proj", hidden, inner, role="mlp", op="down", layers=layers, bias=bias)


def ends(t: Table, hidden: int, vocab: int, tied: bool, *, norm_bias: bool = False) -> None:
    """Embedding, final norm and head of the usual names."""
    rows = seg("vocab", vocab)
    t.add("model.embed_tokens.weight", rows, hidden, role="embedding")
    t.norm("model.norm", hidden, bias=norm_bias)
    if not tied:
        t.add("lm_head.weight", rows, hidden, role="head", op="head")


@architecture("LlamaForCausalLM", "llama")
def llama(f: Fields, dtype: str) -> Parts:
    """Llama 1 to 3: optional biases on all projections of the attention and of the MLP."""
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    a = gqa(f)
    inter = f.integer("intermediate_size")
    tied = f.flag("tie_word_embeddings")
    every = tuple(range(n))
    attn_bias = f.flag("attention_bias")
    t = Table(dtype)
    ends(t, hidden, vocab, tied)
    attention_tensors(t, hidden, a, every, bias=attn_bias, out_bias=attn_bias)
    mlp_tensors(t, hidden, inter, every, bias=f.flag("mlp_bias"))
    t.norm("input_layernorm", hidden, layers=every)
    t.norm("post_attention_layernorm", hidden, layers=every)
    layer = Layer((a,), (Mlp(inter),))
    return Parts(
        hidden, vocab, (layer,) * n, tuple(t.families), tied, f.integer("max_position_embeddings", default=2048)
    )
