"""Decoders of 2019 to 2023: GPT-2, GPT-Neo, GPT-J, GPT-NeoX, CodeGen, OPT, BLOOM, MPT, StarCoder, Falcon, BioGPT.

Tensor names and defaults are those of the classes in transformers 5.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.errors import InputError
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.fused import by_group, by_head, qkv_dim
from meshwright.specs.hf.registry import Parts, architecture
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Attention, Layer, Mlp
from meshwright.specs.tensors import Dim, Segment


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes that all of them share."""

    hidden: int
    vocab: int
    layers: int
    a: Attention
    inter: int

    @property
    def every(self) -> tuple[int, ...]:
        return tuple(range(self.layers))

    @property
    def rows(self) -> Segment:
        return seg("vocab", self.vocab)

    @property
    def out(self) -> Segment:
        return seg("heads", self.a.heads, self.a.head_dim)

    @property
    def inner(self) -> Segment:
        return seg("mlp", self.inter)


def _sizes(f: Fields, *, kv_heads: int | None = None, inter: int | None = None) -> _Sizes:
    hidden = f.integer("hidden_size", "n_embed", "n_embd", "d_model")
    heads = f.integer("num_attention_heads", "n_head", "n_heads", "num_heads", high=1 << 14)
    if hidden % heads:
        raise InputError(f"{f.where}: hidden size {hidden} is not a multiple of {heads} attention heads")
    width = hidden // heads
    a = Attention("gqa", heads, kv_heads or heads, width, width)
    n = f.layers("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    inter = inter or f.integer("n_inner", "ffn_hidden_size", "ffn_dim", "intermediate_size", default=4 * hidden)
    return _Sizes(hidden, f.integer("vocab_size"), n, a, inter)


def _parts(s: _Sizes, t: Table, tied: bool, positions: int, *, learned: int = 0, head: str = "lm_head") -> Parts:
    """Parts with equal layers; the head is added where it is not tied."""
    if not tied:
        t.add(f"{head}.weight", s.rows, s.hidden, role="head", op="head")
    layers = (Layer((s.a,), (Mlp(s.inter, gated=False),)),) * s.layers
    return Parts(s.hidden, s.vocab, layers, tuple(t.families), tied, positions, learned_positions=learned)


def _norms(t: Table, s: _Sizes, final: str, *names: str, bias: bool = True) -> None:
    for name in names:
        t.norm(name, s.hidden, layers=s.every, bias=bias)
    t.norm(final, s.hidden, bias=bias)


def _qkv(t: Table, s: _Sizes, name: str, dim: Dim, *, bias: bool = True) -> None:
    t.linear(name, dim, s.hidden, role="attention", op="qkv", layers=s.every, bias=bias)


def _separate(t: Table, s: _Sizes, base: str, *, bias: bool) -> None:
    for op in ("q", "k", "v"):
        t.linear(f"{base}.{op}_proj", s.out, s.hidden, role="attention", op=op, layers=s.every, bias=bias)


def _out(t: Table, s: _Sizes, name: str, *, bias: bool = True) -> None:
    t.linear(name, s.hidden, s.out, role="attention", op="o", layers=s.every, bias=bias)


def _mlp(t: Table, s: _Sizes, up: str, down: str, *, bias: bool = True) -> None:
    t.linear(up, s.inner, s.hidden, role="mlp", op="up", layers=s.every, bias=bias)
    t.linear(down, s.hidden, s.inner, role="mlp", op="down", layers=s.every, bias=bias)


def _positions(f: Fields, default: int) -> int:
    return f.integer("max_position_embeddings", "n_positions", "seq_length", "max_seq_len", default=default)


def _gpt2_like(f: Fields, dtype: str) -> tuple[_Sizes, Table, int]:
    """Prefix, embedding and learned positions of GPT-2 and StarCoder."""
    s, positions = _sizes(f), _positions(f, 1024)
    t = Table(dtype, prefix="transformer.h.{layer}.")
    t.add("transformer.wte.weight", s.rows, s.hidden, role="embedding")
    t.add("transformer.wpe.weight", seg("fixed", positions), s.hidden, role="embedding")
    return s, t, positions


@architecture("GPT2LMHeadModel", "gpt2")
def gpt2(f: Fields, dtype: str) -> Parts:
    """GPT-2 (and the sizes of the GPT-3 paper): weights lie [in, out]."""
    s, t, positions = _gpt2_like(f, dtype)

    def linear(name: str, into: Dim, out: Dim, op: str, role: str) -> None:
        base = t.prefix + name
        t.add(f"{base}.weight", into, out, role=role, op=op, layers=s.every)  # type: ignore[arg-type]
        t.add(f"{base}.bias", out, role=role, op=op, part="bias", layers=s.every)  # type: ignore[arg-type]

    model: Dim = (seg("model", s.hidden),)
    linear("attn.c_attn", model, qkv_dim(s.a), "qkv", "attention")
    linear("attn.c_proj", (s.out,), model, "o", "attention")
    linear("mlp.c_fc", model, (s.inner,), "up", "mlp")
    linear("mlp.c_proj", (s.inner,), model, "down", "mlp")
    _norms(t, s, "transformer.ln_f", "ln_1", "ln_2")
    return _parts(s, t, f.flag("tie_word_embeddings", default=True), positions, learned=positions)


@architecture("GPTBigCodeForCausalLM", "gpt_bigcode")
def gpt_bigcode(f: Fields, dtype: str) -> Parts:
    """StarCoder 1 and SantaCoder: one KV head, unless ``multi_query`` is off."""
    s, t, positions = _gpt2_like(f, dtype)
    single = f.flag("multi_query", default=True)
    if single:
        s = _sizes(f, kv_heads=1)
    _qkv(t, s, "attn.c_attn", qkv_dim(s.a) if single else by_head(s.a))
    _out(t, s, "attn.c_proj")
    _mlp(t, s, "mlp.c_fc", "mlp.c_proj")
    _norms(t, s, "transformer.ln_f", "ln_1", "ln_2")
    return _parts(s, t, f.flag("tie_word_embeddings", default=True), positions, learned=positions)


def _neo_kinds(f: Fields, n: int) -> tuple[str, ...]:
    """Global or local for each layer: ``attention_layers``, else ``attention_types`` ([kinds, times] pairs)."""
    if f.has("attention_layers"):
        return f.texts("attention_layers", length=n)
    _, value = f.get("attention_types")
    kinds: list[str] = []
    for pair in value if isinstance(value, list) else [[["global", "local"], n]]:
        match pair:
            case [list(names), int(times)] if 0 < times <= n and all(isinstance(x, str) for x in names):
                kinds += (names[:n] * times)[:n]
            case _:
                raise InputError(
                    f"{f.where}: attention_types holds {str(pair)[:40]}; a list of kinds and a count is needed"
                )
        if len(kinds) >= n:
            break
    if len(kinds) < n:
        raise InputError(f"{f.where}: attention_types names {len(kinds)} layers of {n}")
    return tuple(kinds[:n])


@architecture("GPTNeoForCausalLM", "gpt_neo")
def gpt_neo(f: Fields, dtype: str) -> Parts:
    """GPT-Neo: global and local layers in turn, learned positions."""
    s, positions = _sizes(f), _positions(f, 2048)
    t = Table(dtype, prefix="transformer.h.{layer}.")
    t.add("transformer.wte.weight", s.rows, s.hidden, role="embedding")
    t.add("transformer.wpe.weight", seg("fixed", positions), s.hidden, role="embedding")
    _separate(t, s, "attn.attention", bias=False)
    _out(t, s, "attn.attention.out_proj")
    _mlp(t, s, "mlp.c_fc", "mlp.c_proj")
    _norms(t, s, "transformer.ln_f", "ln_1", "ln_2")
    parts = _parts(s, t, f.flag("tie_word_embeddings", default=True), positions, learned=positions)
    kinds = _neo_kinds(f, s.layers)
    window = f.integer("window_size", default=256)
    local = Attention("gqa", s.a.heads, s.a.heads, s.a.head_dim, s.a.head_dim, window=window)
    ffn = (Mlp(s.inter, gated=False),)
    layers = tuple(Layer((local if kind == "local" else s.a,), ffn) for kind in kinds)
    return Parts(s.hidden, s.vocab, layers, parts.families, parts.tied, positions, learned_positions=positions)


@architecture("GPTNeoXForCausalLM", "gpt_neox")
def gpt_neox(f: Fields, dtype: str) -> Parts:
    """GPT-NeoX and Pythia: qkv by head, head called ``embed_out``."""
    s, bias = _sizes(f), f.flag("attention_bias", default=True)
    t = Table(dtype, prefix="gpt_neox.layers.{layer}.")
    t.add("gpt_neox.embed_in.weight", s.rows, s.hidden, role="embedding")
    _qkv(t, s, "attention.query_key_value", by_head(s.a), bias=bias)
    _out(t, s, "attention.dense", bias=bias)
    _mlp(t, s, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    _norms(t, s, "gpt_neox.final_layer_norm", "input_layernorm", "post_attention_layernorm")
    return _parts(s, t, f.flag("tie_word_embeddings"), _positions(f, 2048), head="embed_out")


def _gptj_like(f: Fields, dtype: str, *, fused: bool) -> Parts:
    s = _sizes(f)
    t = Table(dtype, prefix="transformer.h.{layer}.")
    t.add("transformer.wte.weight", s.rows, s.hidden, role="embedding")
    if fused:
        # Four blocks, each with the queries, values and keys of a quarter of the heads.
        blocks = 4 if s.a.heads % 4 == 0 else 1
        _qkv(t, s, "attn.qkv_proj", (seg("heads", blocks, 3 * s.hidden // blocks),), bias=False)
    else:
        _separate(t, s, "attn", bias=False)
    _out(t, s, "attn.out_proj", bias=False)
    _mlp(t, s, "mlp.fc_in", "mlp.fc_out")
    _norms(t, s, "transformer.ln_f", "ln_1")
    tied = f.flag("tie_word_embeddings")
    t.add("lm_head.bias", s.rows, role="head", op="head", part="bias")
    return _parts(s, t, tied, _positions(f, 2048))


@architecture("GPTJForCausalLM", "gptj")
def gptj(f: Fields, dtype: str) -> Parts:
    """GPT-J: attention without biases beside the MLP; the head has a bias."""
    return _gptj_like(f, dtype, fused=False)


@architecture("CodeGenForCausalLM", "codegen")
def codegen(f: Fields, dtype: str) -> Parts:
    """CodeGen: GPT-J with fused qkv."""
    return _gptj_like(f, dtype, fused=True)


@architecture("OPTForCausalLM", "opt")
def opt(f: Fields, dtype: str) -> Parts:
    """OPT: learned positions (two more rows than positions), a narrow embedding in the 350M model."""
    s, positions = _sizes(f), _positions(f, 2048)
    narrow = f.integer("word_embed_proj_dim", default=s.hidden)
    bias = f.flag("enable_bias", default=True)
    affine = f.flag("layer_norm_elementwise_affine", default=True)
    base = "model.decoder"
    t = Table(dtype, prefix=base + ".layers.{layer}.")
    t.add(f"{base}.embed_tokens.weight", s.rows, narrow, role="embedding")
    t.add(f"{base}.embed_positions.weight", seg("fixed", positions + 2), s.hidden, role="embedding")
    if narrow != s.hidden:
        t.linear(f"{base}.project_in", s.hidden, narrow, role="embedding", op="in")
        t.linear(f"{base}.project_out", narrow, s.hidden, role="head", op="out")
    _separate(t, s, "self_attn", bias=bias)
    _out(t, s, "self_attn.out_proj", bias=bias)
    _mlp(t, s, "fc1", "fc2", bias=bias)
    last = f.flag("do_layer_norm_before", default=True) and not f.flag("_remove_final_layer_norm")
    if affine:
        for name in ("self_attn_layer_norm", "final_layer_norm"):
            t.norm(name, s.hidden, layers=s.every, bias=True)
        if last:
            t.norm(f"{base}.final_layer_norm", s.hidden, bias=True)
    tied = f.flag("tie_word_embeddings", default=True)
    if not tied:
        t.add("lm_head.weight", s.rows, narrow, role="head", op="head")
    parts = _parts(s, t, True, positions, learned=positions + 2)
    return Parts(s.hidden, s.vocab, parts.layers, parts.families, tied, positions, learned_positions=positions + 2)


@architecture("BloomForCausalLM", "bloom")
def bloom(f: Fields, dtype: str) -> Parts:
    """BLOOM: ALiBi, qkv by head, a norm behind the embedding."""
    s = _sizes(f, inter=4 * f.integer("hidden_size", "n_embed", "n_embd"))
    t = Table(dtype, prefix="transformer.h.{layer}.")
    t.add("transformer.word_embeddings.weight", s.rows, s.hidden, role="embedding")
    t.norm("transformer.word_embeddings_layernorm", s.hidden, bias=True)
    _qkv(t, s, "self_attention.query_key_value", by_head(s.a))
    _out(t, s, "self_attention.dense")
    _mlp(t, s, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    _norms(t, s, "transformer.ln_f", "input_layernorm", "post_attention_layernorm")
    return _parts(s, t, f.flag("tie_word_embeddings", default=True), _positions(f, 2048))


@architecture("MptForCausalLM", "MPTForCausalLM", "mpt")
def mpt(f: Fields, dtype: str) -> Parts:
    """MPT: no biases; ``Wqkv`` holds queries, keys and values one after the other."""
    wide = f.integer("expansion_ratio", default=4, high=64) * f.integer("d_model")
    s = _sizes(f, inter=wide)
    t = Table(dtype, prefix="transformer.blocks.{layer}.")
    t.add("transformer.wte.weight", s.rows, s.hidden, role="embedding")
    _qkv(t, s, "attn.Wqkv", qkv_dim(s.a), bias=False)
    _out(t, s, "attn.out_proj", bias=False)
    _mlp(t, s, "ffn.up_proj", "ffn.down_proj", bias=False)
    _norms(t, s, "transformer.norm_f", "norm_1", "norm_2", bias=False)
    return _parts(s, t, f.flag("tie_word_embeddings", default=True), _positions(f, 2048))


@architecture("FalconForCausalLM", "RWForCausalLM", "falcon", "RefinedWeb", "RefinedWebModel")
def falcon(f: Fields, dtype: str) -> Parts:
    """Falcon 7B (one KV head), 40B and 180B (KV groups, two norms side by side) and RW (ALiBi, by head)."""
    grouped = f.flag("new_decoder_architecture") or f.text("model_type") == "RefinedWeb"
    single = f.flag("multi_query", default=True)
    heads = f.integer("num_attention_heads", "n_head", high=1 << 14)
    kv_heads = f.integer("num_kv_heads", "n_head_kv", default=heads) if grouped else 1 if single else heads
    if heads % kv_heads:
        raise InputError(f"{f.where}: {heads} attention heads are not a multiple of {kv_heads} KV heads")
    s, bias = _sizes(f, kv_heads=kv_heads), f.flag("bias")
    t = Table(dtype, prefix="transformer.h.{layer}.")
    t.add("transformer.word_embeddings.weight", s.rows, s.hidden, role="embedding")
    dim = by_group(s.a) if grouped else qkv_dim(s.a) if single else by_head(s.a)
    _qkv(t, s, "self_attention.query_key_value", dim, bias=bias)
    _out(t, s, "self_attention.dense", bias=bias)
    _mlp(t, s, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", bias=bias)
    names: tuple[str, ...] = ("input_layernorm",)
    if not f.flag("parallel_attn", default=True):
        names = ("input_layernorm", "post_attention_layernorm")
    if grouped and f.integer("num_ln_in_parallel_attn", default=2) == 2:
        names = ("ln_attn", "ln_mlp")
    _norms(t, s, "transformer.ln_f", *names)
    return _parts(s, t, f.flag("tie_word_embeddings", default=True), _positions(f, 2048))


@architecture("BioGptForCausalLM", "biogpt")
def biogpt(f: Fields, dtype: str) -> Parts:
    """BioGPT: learned positions, as in OPT."""
    s, positions = _sizes(f), _positions(f, 1024)
    t = Table(dtype, prefix="biogpt.layers.{layer}.")
    t.add("biogpt.embed_tokens.weight", s.rows, s.hidden, role="embedding")
    t.add("biogpt.embed_positions.weight", seg("fixed", positions + 2), s.hidden, role="embedding")
    _separate(t, s, "self_attn", bias=True)
    _out(t, s, "self_attn.out_proj")
    _mlp(t, s, "fc1", "fc2")
    _norms(t, s, "biogpt.layer_norm", "self_attn_layer_norm", "final_layer_norm")
    tied = f.flag("tie_word_embeddings", default=True)
    return _parts(s, t, tied, positions, learned=positions + 2, head="output_projection")
