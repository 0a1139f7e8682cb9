"""Small models for tests: a few layers, a few heads, every kind of block, built without any configuration file."""

from __future__ import annotations

from dataclasses import replace

from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Attention, Layer, Mlp, ModelSpec, Moe, Quantization, Recurrent
from meshwright.specs.tensors import Dim, TensorFamily


def gqa(
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 4,
    hidden: int = 16,
    intermediate: int = 24,
    vocab: int = 100,
    layers: int = 4,
    tied: bool = False,
    fused: bool = False,
    name: str = "small",
) -> ModelSpec:
    """A dense decoder; ``fused``: one qkv and one gate-up matrix."""
    t = Table("bf16")
    every = tuple(range(layers))
    rows = seg("vocab", vocab)
    t.add("model.embed_tokens.weight", rows, hidden, role="embedding")
    t.norm("model.norm", hidden)
    if not tied:
        t.add("lm_head.weight", rows, hidden, role="head", op="head")
    q, kv = seg("heads", heads, head_dim), seg("kv_heads", kv_heads, head_dim)
    if fused:
        t.linear("attn.qkv", (q, kv, kv), hidden, role="attention", op="qkv", layers=every, bias=True)
    else:
        for op, side in (("q", q), ("k", kv), ("v", kv)):
            t.linear(f"attn.{op}", side, hidden, role="attention", op=op, layers=every, bias=True)
    t.linear("attn.o", hidden, q, role="attention", op="o", layers=every)
    _mlp(t, hidden, intermediate, every, fused)
    t.norm("norm", hidden, layers=every)
    layer = Layer((Attention("gqa", heads, kv_heads, head_dim, head_dim),), (Mlp(intermediate),))
    return ModelSpec(name, "Small", "small", hidden, vocab, (layer,) * layers, tuple(t.families), tied, "bf16", 4096)


def _mlp(t: Table, hidden: int, intermediate: int, layers: tuple[int, ...], fused: bool = False) -> None:
    inner = seg("mlp", intermediate)
    if fused:
        t.linear("mlp.gate_up", (inner, inner), hidden, role="mlp", op="gate_up", layers=layers)
    else:
        t.linear("mlp.gate", inner, hidden, role="mlp", op="gate", layers=layers)
        t.linear("mlp.up", inner, hidden, role="mlp", op="up", layers=layers)
    t.linear("mlp.down", hidden, inner, role="mlp", op="down", layers=layers)


def _experts(t: Table, hidden: int, width: int, experts: int, layers: tuple[int, ...], packed: bool) -> None:
    inner = seg("expert_mlp", width)
    if packed:
        many = seg("experts", experts)
        pair: Dim = (inner, inner)
        t.add("layers.{layer}.experts.gate_up", many, hidden, pair, role="expert", op="gate_up", layers=layers)
        t.add("layers.{layer}.experts.down", many, inner, hidden, role="expert", op="down", layers=layers)
        return
    for op in ("gate", "up", "down"):
        out_dim, in_dim = (hidden, inner) if op == "down" else (inner, hidden)
        t.linear(f"experts.{{expert}}.{op}", out_dim, in_dim, role="expert", op=op, layers=layers, experts=experts)


def moe(
    heads: int = 8,
    kv_heads: int = 2,
    experts: int = 8,
    width: int = 16,
    shared: int = 0,
    layers: int = 4,
    dense: int = 1,
    hidden: int = 16,
    vocab: int = 128,
    packed: bool = False,
    mla: bool = False,
    head_dim: int = 4,
) -> ModelSpec:
    """A mixture of experts whose first ``dense`` layers are dense; ``packed``: all experts in one tensor."""
    t = Table("bf16")
    every, sparse = tuple(range(layers)), tuple(range(dense, layers))
    t.add("model.embed_tokens.weight", seg("vocab", vocab), hidden, role="embedding")
    t.add("lm_head.weight", seg("vocab", vocab), hidden, role="head", op="head")
    t.norm("model.norm", hidden)
    attention = _mla(t, heads, hidden, every) if mla else _plain_attention(t, heads, kv_heads, hidden, every, head_dim)
    if dense:
        _mlp(t, hidden, 24, every[:dense])
    t.linear("router", seg("experts", experts), hidden, role="router", op="router", layers=sparse)
    _experts(t, hidden, width, experts, sparse, packed)
    if shared:
        inner = seg("shared_mlp", shared)
        t.linear("shared.up", inner, hidden, role="shared_expert", op="up", layers=sparse)
        t.linear("shared.down", hidden, inner, role="shared_expert", op="down", layers=sparse)
    block = Moe(experts, min(2, experts), width, shared)
    blocks = (Layer((attention,), (Mlp(24),)),) * dense + (Layer((attention,), (block,)),) * (layers - dense)
    return ModelSpec("small-moe", "SmallMoe", "small", hidden, vocab, blocks, tuple(t.families), False, "bf16", 4096)


def _plain_attention(
    t: Table, heads: int, kv_heads: int, hidden: int, layers: tuple[int, ...], head_dim: int
) -> Attention:
    q, kv = seg("heads", heads, head_dim), seg("kv_heads", kv_heads, head_dim)
    for op, side in (("q", q), ("k", kv), ("v", kv)):
        t.linear(f"attn.{op}", side, hidden, role="attention", op=op, layers=layers)
    t.linear("attn.o", hidden, q, role="attention", op="o", layers=layers)
    return Attention("gqa", heads, kv_heads, head_dim, head_dim)


def _mla(t: Table, heads: int, hidden: int, layers: tuple[int, ...]) -> Attention:
    t.linear("attn.q_a", seg("fixed", 6), hidden, role="attention", op="q_a", layers=layers)
    t.linear("attn.q_b", seg("heads", heads, 6), seg("fixed", 6), role="attention", op="q_b", layers=layers)
    t.linear("attn.kv_a", seg("fixed", 10), hidden, role="attention", op="kv_a", layers=layers)
    t.linear("attn.kv_b", seg("heads", heads, 8), seg("fixed", 8), role="attention", op="kv_b", layers=layers)
    t.linear("attn.o", hidden, seg("heads", heads, 4), role="attention", op="o", layers=layers)
    return Attention("mla", heads, 1, 6, 4, q_lora_rank=6, kv_lora_rank=8, rope_head_dim=2)


def state_space(heads: int = 8, groups: int = 2, hidden: int = 16, layers: int = 2, vocab: int = 64) -> ModelSpec:
    """Mamba-2 mixers with one fused input projection (gate, x, B, C, dt) and an MLP."""
    t = Table("bf16")
    every = tuple(range(layers))
    t.add("model.embed_tokens.weight", seg("vocab", vocab), hidden, role="embedding")
    t.norm("model.norm", hidden)
    wide, group, one = seg("ssm_heads", heads, 4), seg("ssm_groups", groups, 3), seg("ssm_heads", heads)
    t.linear("in", (wide, wide, group, group, one), hidden, role="recurrent", op="in", layers=every)
    t.linear("out", hidden, wide, role="recurrent", op="out", layers=every)
    t.add("layers.{layer}.A", one, role="recurrent", layers=every)
    _mlp(t, hidden, 24, every)
    mixer = Recurrent("mamba2", heads, 4, 3, groups, 4, heads * 4 + 2 * groups * 3)
    layer = Layer((mixer,), (Mlp(24),))
    return ModelSpec(
        "small-ssm", "SmallSsm", "small", hidden, vocab, (layer,) * layers, tuple(t.families), True, "bf16", 4096
    )


def block_fp8(spec: ModelSpec, block: int, method: str = "fp8") -> ModelSpec:
    """The same model with fp8 weights and one scale for ``block`` x ``block`` weights."""
    return _quantized(spec, Quantization(method, 8, 0, (block, block)), "f8_e4m3", block, block)


def int4(spec: ModelSpec, group: int, method: str = "awq") -> ModelSpec:
    """The same model with four-bit weights, eight in an ``i32`` of the input side, one scale a ``group`` of inputs."""
    return _quantized(spec, Quantization(method, 4, group), "i32", 1, group, pack=8)


def _quantized(
    spec: ModelSpec, quantization: Quantization, dtype: str, out_block: int, in_block: int, pack: int = 1
) -> ModelSpec:
    families: list[TensorFamily] = []
    for f in spec.families:
        if f.op in {"", "router", "head"} or f.part != "weight":
            families.append(f)
            continue
        lead, (out_dim, in_dim) = f.dims[:-2], f.dims[-2:]
        base = f.template.removesuffix(".weight")
        common = {"role": f.role, "op": f.op, "layers": f.layers, "experts": f.experts}
        t = Table("bf16")
        t.add(base + ".qweight", *lead, out_dim, _coarse(in_dim, pack), dtype=dtype, elements=pack, **common)  # type: ignore[arg-type]
        t.add(
            base + ".scale", *lead, _coarse(out_dim, out_block), _coarse(in_dim, in_block), dtype="f32", part="scale",
            elements=0, **common,  # type: ignore[arg-type]
        )  # fmt: skip
        families += t.families
    return ModelSpec(
        spec.name, spec.architecture, spec.model_type, spec.hidden, spec.vocab, spec.layers, tuple(families),
        spec.tied, spec.dtype, spec.max_positions, quantization=quantization,
    )  # fmt: skip


def _coarse(dim: Dim, by: int) -> Dim:
    """Blocks of ``by`` elements: whole units where the width divides, else blocks of the whole segment."""
    out = []
    for s in dim:
        whole = s.width % by == 0
        out.append(seg(s.label, s.units, s.width // by) if whole else seg(s.label, -(-s.size // by)))
    return tuple(out)


def with_draft(spec: ModelSpec) -> ModelSpec:
    """The same model with one draft layer, with copies of embedding and head as DeepSeek-V3 stores them."""
    t = Table("bf16", "model.layers.{layer}.", "mtp")
    index = (len(spec.layers),)
    rows = seg("vocab", spec.vocab)
    t.linear("embed_tokens", rows, spec.hidden, role="embedding", op="", layers=index)
    t.linear("shared_head.head", rows, spec.hidden, role="head", op="head", layers=index)
    t.linear("eh_proj", spec.hidden, seg("fixed", 2 * spec.hidden), role="other", op="eh", layers=index)
    return replace(spec, families=(*spec.families, *t.families), mtp_layers=spec.layers[-1:])


def with_vision(spec: ModelSpec) -> ModelSpec:
    """The same model with a small encoder, its square matrices cut on their first labelled side only."""
    t = Table("bf16", "visual.{layer}.", "vision")
    wide = seg("vision", 12)
    t.linear("fc", wide, wide, role="other", op="fc", layers=(0, 1))
    return replace(spec, families=(*spec.families, *t.families))


def grouped_output(spec: ModelSpec, groups: int) -> ModelSpec:
    """The same model with an output projection made of ``groups`` groups of heads (DeepSeek-V4)."""
    families = []
    for f in spec.families:
        if f.op == "o" and f.role == "attention":
            out_dim, in_dim = f.dims
            size = sum(s.size for s in in_dim)
            f = replace(f, dims=(out_dim, (seg("heads", groups, size // groups),)))
        families.append(f)
    return replace(spec, families=tuple(families))
