"""DeepSeek-V4: one shared KV head with compressed caches, hyper-connections, hashed routing in the first layers.

Facts: ``modeling_deepseek_v4.py`` of transformers 5.24 (its docstrings cite the paper's sections 2.1 to 2.3).
Keys and values of all heads are one vector a token, cached for ``sliding_window`` tokens; layers with a ratio of
4 (sparse) or 128 (heavily compressed) also cache one vector for every so many tokens of the whole context.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.errors import InputError
from meshwright.specs.hf.fields import MAX_LAYERS, Fields
from meshwright.specs.hf.moe import MoeNames, routed, shared_width
from meshwright.specs.hf.registry import Parts, architecture
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Attention, Indexer, Layer, Moe

MAX_HEADS = 1 << 14
RATIO = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
NAMES = MoeNames("ffn.experts.{expert}", ("w1", "w3", "w2"), "ffn.gate", shared="ffn.shared_experts")


@architecture("DeepseekV4ForCausalLM", "deepseek_v4")
def deepseek_v4(f: Fields, dtype: str) -> Parts:
    """DeepSeek-V4 Flash and Pro with their prediction layer (``mtp.0``; embedding and head are shared)."""
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    ratios = _ratios(f, n)
    mixers = tuple(_attention(f, ratio) for ratio in ratios)
    width = f.integer("moe_intermediate_size", "intermediate_size")
    keys = ("moe_intermediate_size", "intermediate_size")
    moe = routed(f, width=keys, shared=shared_width(f, width, "n_shared_experts", default=1))
    hashed = _hashed(f, n)
    tied = f.flag("tie_word_embeddings")
    t = Table(dtype)
    rows = seg("vocab", vocab)
    t.add("model.embed_tokens.weight", rows, hidden, role="embedding")
    t.norm("model.norm", hidden, dtype="f32")
    if not tied:
        t.add("head.weight", rows, hidden, role="head", op="head")
    mult = f.integer("hc_mult", default=4, high=64)
    _mixing(t, "model.hc_head.hc_", hidden, mult, (), head=True)
    _blocks(t, f, hidden, mixers, moe, tuple(range(n)))
    _routing(t, vocab, moe, tuple(range(n)), hashed)
    layers = tuple(Layer((a,), (moe,)) for a in mixers)
    longest = f.integer("max_position_embeddings", default=1048576, high=1 << 30)
    parts = Parts(hidden, vocab, layers, tuple(t.families), tied, longest)
    return _mtp(f, t, parts, moe, mult)


def _ratios(f: Fields, n: int) -> tuple[int, ...]:
    """Compression of each layer: 0 (window only), 4 or 128; the list may go on with the prediction layers."""
    if f.has("layer_types"):
        types = f.texts("layer_types")
        if len(types) < n or not set(types) <= RATIO.keys():
            raise InputError(f"{f.where}: layer_types must name one of {', '.join(RATIO)} for each of {n} layers")
        return tuple(RATIO[word] for word in types[:n])
    ratios = f.integers("compress_ratios", high=1 << 16)
    if not ratios:
        return tuple(128 if i < 2 or i % 2 == 0 else 4 for i in range(n))
    if len(ratios) < n:
        raise InputError(f"{f.where}: compress_ratios has {len(ratios)} items for {n} layers")
    if not set(ratios) <= set(RATIO.values()):
        raise InputError(f"{f.where}: compress_ratios has {sorted(set(ratios))[:6]}; known are 0, 4 and 128")
    return ratios[:n]


def _attention(f: Fields, ratio: int) -> Attention:
    x = None
    if ratio == 4:
        x = Indexer(
            f.integer("index_n_heads", default=64, high=MAX_HEADS),
            f.integer("index_head_dim", default=128),
            f.integer("index_topk", default=512, high=1 << 30),
        )
    return Attention(
        "gqa",
        f.integer("num_attention_heads", high=MAX_HEADS),
        1,
        f.integer("head_dim", default=512),
        0,
        window=f.integer("sliding_window", default=128, high=1 << 30),
        q_lora_rank=f.integer("q_lora_rank"),
        rope_head_dim=f.integer("qk_rope_head_dim", default=64),
        indexer=x,
        compress_ratio=max(1, ratio),
        sinks=True,
    )


def _hashed(f: Fields, n: int) -> tuple[int, ...]:
    if f.has("mlp_layer_types"):
        types = f.texts("mlp_layer_types")
        return tuple(i for i, word in enumerate(types[:n]) if word == "hash_moe")
    return tuple(range(min(n, f.integer("num_hash_layers", default=3, low=0, high=MAX_LAYERS))))


def _mixing(t: Table, name: str, hidden: int, mult: int, at: tuple[int, ...], *, head: bool = False) -> None:
    """Hyper-connection: maps ``mult`` residual streams to one input and back (head: only to one)."""
    out = mult if head else mult * (2 + mult)
    rows, scales = seg("fixed", out), seg("fixed", 1 if head else 3)
    t.add(f"{name}fn", rows, seg("model", mult * hidden), role="other", layers=at, dtype="f32")
    t.add(f"{name}base", rows, role="other", part="bias", layers=at, dtype="f32")
    t.add(f"{name}scale", scales, role="other", layers=at, dtype="f32")


def _blocks(
    t: Table,
    f: Fields,
    hidden: int,
    mixers: tuple[Attention, ...],
    moe: Moe,
    at: tuple[int, ...],
    kv_norm: str = "attn.norm",
) -> None:
    """Attention, compressors, selectors, experts, norms and hyper-connections of the layers ``at``."""
    a = mixers[0]
    groups = f.integer("o_groups", default=8, high=MAX_HEADS)
    low = f.integer("o_lora_rank", default=1024)
    if a.heads % groups:
        raise InputError(f"{f.where}: {a.heads} heads are not divisible by o_groups {groups}")
    mult = f.integer("hc_mult", default=4, high=64)
    q, rank, key = seg("heads", a.heads, a.head_dim), seg("fixed", a.q_lora_rank), seg("fixed", a.head_dim)
    t.linear("attn.wq_a", rank, hidden, role="attention", op="q_a", layers=at)
    t.linear("attn.wq_b", q, rank, role="attention", op="q_b", layers=at)
    t.linear("attn.wkv", key, hidden, role="attention", op="kv_a", layers=at)
    group = seg("heads", groups, low)
    t.linear("attn.wo_a", group, seg("fixed", a.heads // groups * a.head_dim), role="attention", op="o_a", layers=at)
    t.linear("attn.wo_b", hidden, group, role="attention", op="o", layers=at)
    t.norm("attn.q_norm", rank, layers=at, role="attention", dtype="f32")
    t.norm(kv_norm, key, layers=at, role="attention", dtype="f32")
    t.add(t.prefix + "attn.attn_sink", seg("heads", a.heads), role="attention", layers=at, dtype="f32")
    for ratio in (4, 128):
        mine = tuple(i for i, m in zip(at, mixers, strict=True) if m.compress_ratio == ratio)
        if mine:
            _compressor(t, "attn.compressor", hidden, a.head_dim * (2 if ratio == 4 else 1), a.head_dim, ratio, mine)
    chosen = tuple(i for i, m in zip(at, mixers, strict=True) if m.indexer)
    x = next((m.indexer for m in mixers if m.indexer), None)
    if x is not None:
        heads, name = seg("index_heads", x.heads, x.head_dim), "attn.indexer"
        _compressor(t, f"{name}.compressor", hidden, 2 * x.head_dim, x.head_dim, 4, chosen)
        t.linear(f"{name}.wq_b", heads, rank, role="indexer", op="index_q", layers=chosen)
        one = seg("index_heads", x.heads)
        t.linear(f"{name}.weights_proj", one, hidden, role="indexer", op="index_w", layers=chosen)
    _experts(t, hidden, moe, at)
    for norm in ("attn_norm", "ffn_norm"):
        t.norm(norm, hidden, layers=at, dtype="f32")
    for part in ("attn", "ffn"):
        _mixing(t, f"{t.prefix}hc_{part}_", hidden, mult, at)


def _compressor(t: Table, name: str, hidden: int, width: int, head_dim: int, ratio: int, at: tuple[int, ...]) -> None:
    """Gated pooling of ``ratio`` tokens into one cached vector; ratio 4 pools overlapping pairs (twice the width)."""
    role = "indexer" if "indexer" in name else "attention"
    rows = seg("fixed", width)
    for mat in ("wkv", "wgate"):
        t.linear(f"{name}.{mat}", rows, hidden, role=role, op=f"compress_{mat[1:]}", layers=at)  # type: ignore[arg-type]
    t.add(f"{t.prefix}{name}.ape", seg("fixed", ratio), rows, role=role, layers=at, dtype="f32")  # type: ignore[arg-type]
    t.norm(f"{name}.norm", seg("fixed", head_dim), layers=at, role=role, dtype="f32")  # type: ignore[arg-type]


def _experts(t: Table, hidden: int, moe: Moe, at: tuple[int, ...]) -> None:
    t.linear("ffn.gate", seg("fixed", moe.experts), hidden, role="router", op="router", layers=at)
    inner, wide = seg("expert_mlp", moe.intermediate), seg("shared_mlp", moe.shared_intermediate)
    for mat, op in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
        name = f"ffn.experts.{{expert}}.{mat}"
        dims = (hidden, inner) if op == "down" else (inner, hidden)
        t.linear(name, *dims, role="expert", op=op, layers=at, experts=moe.experts)
        if moe.shared_intermediate:
            dims = (hidden, wide) if op == "down" else (wide, hidden)
            t.linear(f"ffn.shared_experts.{mat}", *dims, role="shared_expert", op=op, layers=at)


def _routing(t: Table, vocab: int, moe: Moe, at: tuple[int, ...], hashed: tuple[int, ...]) -> None:
    """A table token -> experts in hashed layers, a bias of the scores in the others."""
    first = tuple(i for i in at if i in hashed)
    rest = tuple(i for i in at if i not in hashed)
    if first:
        dims, name = (seg("fixed", vocab), seg("fixed", moe.topk)), t.prefix + "ffn.gate.tid2eid"
        t.add(name, *dims, role="router", part="index", layers=first, dtype="i64", elements=0)
    if rest:
        bias, rows = t.prefix + "ffn.gate.bias", seg("fixed", moe.experts)
        t.add(bias, rows, role="router", part="bias", layers=rest, dtype="f32")


def _mtp(f: Fields, t: Table, parts: Parts, moe: Moe, mult: int) -> Parts:
    """Prediction layers: a window-only block, two projections, their norms and an own collapse of the streams.

    Source: DeepSeek's published ``inference/model.py`` (``MTPBlock``) and the names in the published index, where the
    norm of the cached vector is ``kv_norm`` (transformers writes it as ``norm``).
    """
    count = f.integer("num_nextn_predict_layers", default=0, low=0, high=MAX_LAYERS)
    if not count:
        return parts
    at, hidden = tuple(range(count)), parts.hidden
    extra = Table(t.dtype, "mtp.{layer}.", section="mtp")
    mixer = _attention(f, 0)
    _blocks(extra, f, hidden, (mixer,) * count, moe, at, kv_norm="attn.kv_norm")
    _routing(extra, parts.vocab, moe, at, ())
    for name in ("e_proj", "h_proj"):
        extra.linear(name, hidden, hidden, role="other", op="in", layers=at)
    for name in ("enorm", "hnorm", "norm"):
        extra.norm(name, hidden, layers=at, dtype="f32")
    _mixing(extra, extra.prefix + "hc_head_", hidden, mult, at, head=True)
    families = (*parts.families, *extra.families)
    return replace(parts, families=families, mtp_layers=(Layer((mixer,), (moe,)),) * count)
