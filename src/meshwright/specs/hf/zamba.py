"""Zamba2: Mamba-2 layers, some of them led by one of a few shared transformer blocks with low-rank adapters."""

from __future__ import annotations

from meshwright.specs.hf.blocks import layer_types, of, text_ends
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.mamba import Mamba2, mamba2_tensors, ssm_dtype
from meshwright.specs.hf.registry import Parts, architecture
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Attention, Layer, Mlp

KINDS = {"mamba": "mamba", "linear_attention": "mamba", "hybrid": "hybrid"}


def _default_types() -> tuple[str, ...]:
    """Layer types of Zamba2-2.7B, the default of the transformers class."""
    body = (("mamba",) * 5 + ("hybrid",)) * 7
    return ("mamba", *body, *("mamba",) * 4, "hybrid", *("mamba",) * 3, "hybrid", *("mamba",) * 2)


def _adapter(t: Table, name: str, in_size: int, rank: int, out: int, layer: int) -> None:
    """One low-rank pair ``name.0``, ``name.1``; the widths are not cut."""
    t.linear(f"{name}.0", seg("fixed", rank), in_size, role="other", op="adapter_a", layers=(layer,))
    t.linear(f"{name}.1", seg("fixed", out), seg("fixed", rank), role="other", op="adapter_b", layers=(layer,))


def _shared_block(t: Table, hidden: int, a: Attention, inter: int, layer: int, bias: bool) -> None:
    """A shared transformer, stored under the first layer that uses it; it reads hidden state and embedding joined."""
    name, at, inner = "shared_transformer", (layer,), seg("mlp", inter)
    t.norm(f"{name}.input_layernorm", 2 * hidden, layers=at)
    t.norm(f"{name}.pre_ff_layernorm", hidden, layers=at)
    q, kv = seg("heads", a.heads, a.head_dim), seg("kv_heads", a.kv_heads, a.head_dim)
    for leaf, rows in (("q", q), ("k", kv), ("v", kv)):
        t.linear(f"{name}.self_attn.{leaf}_proj", rows, 2 * hidden, role="attention", op=leaf, layers=at)
    t.linear(f"{name}.self_attn.o_proj", hidden, q, role="attention", op="o", layers=at)
    wide = (inner, inner)
    t.linear(f"{name}.feed_forward.gate_up_proj", wide, hidden, role="mlp", op="gate_up", layers=at, bias=bias)
    t.linear(f"{name}.feed_forward.down_proj", hidden, inner, role="mlp", op="down", layers=at, bias=bias)


def _shared_blocks(t: Table, f: Fields, hidden: int, a: Attention, inter: int, hybrid: tuple[int, ...]) -> None:
    """Blocks 0 to ``num_mem_blocks`` - 1 in turn; adapter number i belongs to the i-th hybrid layer."""
    blocks, rank = f.integer("num_mem_blocks", default=1), f.integer("adapter_rank", default=128)
    attention_adapters = f.flag("use_shared_attention_adapter")
    for layer in hybrid[:blocks]:
        _shared_block(t, hidden, a, inter, layer, f.flag("add_bias_linear"))
    for i in range(len(hybrid)):
        home = hybrid[i % blocks]
        name = "shared_transformer.feed_forward.gate_up_proj_adapter_list"
        _adapter(t, f"{name}.{i}", hidden, rank, 2 * inter, home)
        for leaf in "qkv" if attention_adapters else "":
            name = f"shared_transformer.self_attn.linear_{leaf}_adapter_list.{i}"
            _adapter(t, name, 2 * hidden, rank, 2 * hidden, home)


@architecture("Zamba2ForCausalLM", "zamba2")
def zamba2(f: Fields, dtype: str) -> Parts:
    """Zamba2. A shared block is stored once and runs in each of its layers, each with its own cache."""
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    heads = f.integer("num_attention_heads")
    width = max(1, 2 * hidden // heads)
    a = Attention("gqa", heads, f.integer("num_key_value_heads", default=heads), width, width)
    m_heads = f.integer("n_mamba_heads", default=8)
    m = Mamba2(
        m_heads,
        max(1, f.integer("mamba_expand", default=2) * hidden // m_heads),
        f.integer("mamba_ngroups", default=1),
        f.integer("mamba_d_state", default=64),
        f.integer("mamba_d_conv", default=4),
        True,
        f.flag("add_bias_linear"),
    )
    types = layer_types(f, n, "layers_block_type", "layer_types", known=KINDS)
    if not types:
        f.assume("layers_block_type is missing; the pattern of Zamba2-2.7B is assumed")
        types = (_default_types() * (n // 54 + 1))[:n]
    inter = f.integer("intermediate_size", default=4 * hidden)
    tied = f.flag("tie_word_embeddings", default=True)
    plain, hybrid = of(types, "mamba"), of(types, "hybrid")
    t = Table(dtype)
    text_ends(t, hidden, vocab, tied, norm="model.final_layernorm")
    for name, layers in (("", plain), ("mamba_decoder.", hybrid)):
        if layers:
            mamba2_tensors(t, f"{name}mamba", hidden, m, layers)
            t.norm(f"{name}input_layernorm", hidden, layers=layers)
    if hybrid:
        t.linear("linear", hidden, hidden, role="other", op="linear", layers=hybrid)
        _shared_blocks(t, f, hidden, a, inter, hybrid)
    r = m.recurrent(ssm_dtype(f, dtype))
    both, alone = Layer((a, r), (Mlp(inter),)), Layer((r,), ())
    layers_ = tuple(both if kind == "hybrid" else alone for kind in types)
    return Parts(hidden, vocab, layers_, tuple(t.families), tied, f.integer("max_position_embeddings", default=4096))
