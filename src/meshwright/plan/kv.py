"""Bytes of the key-value cache on one rank: pages, groups, blocks, and what the engine prints about them.

Formulas: ``page = kv_heads_of_the_rank x block x (key width + value width) x bytes`` (MLA: one latent vector a token,
on every rank); a request holds whole blocks. Models whose layers cache in different ways (full, sliding window,
recurrent state) share one pool in *groups* of equally many layers, so that a block is worth the same bytes whatever
it holds (vLLM ``v1/core/kv_cache_utils.py``, ``v1/kv_cache_interface.py``, versions 0.19 to 0.33).
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Literal

from meshwright.errors import InputError
from meshwright.specs.dtypes import canonical, size_bytes
from meshwright.specs.model import Attention, Layer, Mixer, ModelSpec, Recurrent

Kind = Literal["full", "window", "chunk", "recurrent"]

#: Bytes of one cached vector of 512 latent values plus rope in the packed format of sparse MLA: fp8 latents, one f32
#: scale a 128 of them, rope left in bf16 (vLLM ``fp8_ds_mla``: 656 bytes for 512 + 64).
_MLA_SCALE_GROUP = 128
#: Packed entry of DeepSeek-V4's cache: 448 fp8 values, 64 rope values in bf16, 8 scale bytes (584 for 512).
_V4_SCALE_BYTES = 8
#: Page padding of DeepSeek-V4's groups, over the counted bytes of window and compressor states; calibrated on
#: two reports of request size against context (vLLM 0.22: 6.66 GiB at 30,000 tokens; 3.2e9 bytes + 3,300 a token).
V4_PADDING = 1.3
#: Tokens that the alignment of attention kernels asks of a raised block (GQA, MLA).
_ALIGNMENT = {"gqa": 16, "mla": 64}


@dataclass(frozen=True, slots=True)
class CacheRules:
    """How an engine keeps its cache.

    Attributes:
        block_size: tokens of a block before it is raised for recurrent layers.
        kv_dtype: ``auto`` (what the checkpoint asks for, else the compute dtype), ``fp8``, ``bf16``, ``nvfp4``, ...
        dtype: compute dtype, of convolution states and of ``auto``.
        in_flight: tokens of one engine step; a windowed layer holds them beside its window.
        groups: layers of different kinds share one pool of equal blocks; False: every layer counts its own bytes.
        windows: blocks behind a window are freed.
        window_share: where they are not, slots of windowed layers over those of full ones (SGLang's ratio).
        state_pages: pages a request holds of a recurrent state: 1, or 2 with prefix caching, which keeps a snapshot
            (off by default for recurrent models).
        speculative: draft tokens a step; each adds a state page and a convolution tap.
        uneven_group: group size becomes the largest kind when it has fewer layers than this times the smallest.
        held_back: blocks the engine never hands out.
    """

    block_size: int = 16
    kv_dtype: str = "auto"
    dtype: str = "bf16"
    in_flight: int = 8192
    groups: bool = True
    windows: bool = True
    window_share: float = 1.0
    state_pages: int = 1
    speculative: int = 0
    uneven_group: float = 1.5
    held_back: int = 1


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One cache of one layer on one rank: bytes a token (or of the whole state), and how far back it reaches;
    ``shape``: heads, key and value width, by which an engine tells caches of equal size apart; ``packed``: of a
    layout (DeepSeek-V4) whose pages hold entries of several kinds, counted by bytes."""

    layer: int
    kind: Kind
    token_bytes: Fraction
    state_bytes: int = 0
    reach: int = 0
    shape: tuple[int, ...] = ()
    mla: bool = False
    packed: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share block tables: ``(layer, page bytes)`` of every member."""

    kind: Kind
    reach: int
    block_size: int
    pages: tuple[tuple[int, int], ...]


def cache_dtype(spec: ModelSpec, kv_dtype: str, dtype: str) -> str:
    """Format of cached values: ``auto`` is what the checkpoint asks for, else the compute dtype.

    Raises:
        InputError: an unknown format.
    """
    name = kv_dtype.strip().lower()
    if name == "auto":
        asked = spec.quantization.kv_dtype if spec.quantization else None
        name = (asked or dtype).lower()
    if name.startswith(("fp8", "f8")) or name == "int8":
        sparse = any((a := layer.attention) and a.kind == "mla" and a.indexer for layer in spec.layers)
        return "fp8_ds_mla" if name == "fp8_ds_mla" or (sparse and name != "int8") else "fp8"
    if name in {"nvfp4", "fp4", "nvfp4_ds_mla"}:
        return "nvfp4"
    try:
        return canonical(name)
    except InputError:
        raise InputError(f"KV cache dtype {kv_dtype[:30]!r} is not known; use auto, bf16, f16, fp8 or nvfp4") from None


def _vector_bytes(values: int, form: str) -> Fraction:
    """Bytes of ``values`` cached numbers (nvfp4: half a byte each and a scale byte for every 16)."""
    if form in {"fp8", "fp8_ds_mla"}:
        return Fraction(values)
    if form == "nvfp4":
        return Fraction(values * 9, 16)
    return Fraction(values * size_bytes(form))


def attention_token_bytes(a: Attention, tp: int, form: str) -> Fraction:
    """Bytes that one token adds to the attention cache of one layer on one rank, the indexer's not included.

    KV heads are dealt over ``tp`` and replicated when there are fewer of them; an MLA latent is on every rank.
    """
    if a.shares_kv_with is not None:
        return Fraction(0)
    if a.kind == "mla":
        if form == "fp8_ds_mla" and a.compress_ratio == 1:
            scales = a.kv_lora_rank // _MLA_SCALE_GROUP * 4
            return Fraction(a.kv_lora_rank + scales + 2 * a.rope_head_dim)
        return _vector_bytes(a.kv_lora_rank + a.rope_head_dim, form)
    heads = max(1, -(-a.kv_heads // tp))
    return heads * _vector_bytes(a.head_dim + a.v_head_dim, form)


def indexer_token_bytes(a: Attention) -> Fraction:
    """Bytes of the sparse selector's key of one token: fp8 values and one f32 scale a 128 of them (132 for 128)."""
    if a.indexer is None or not a.indexer.heads:
        return Fraction(0)
    return Fraction(a.indexer.head_dim + max(1, a.indexer.head_dim // 128) * 4)


def state_bytes(r: Recurrent, tp: int, dtype: str, speculative: int = 0) -> int:
    """Bytes of one sequence's recurrent and convolution state of one layer on one rank."""
    heads = -(-r.heads // tp)
    channels = -(-r.conv_channels // tp)
    taps = max(0, r.conv_kernel - 1) + (speculative if r.conv_kernel else 0)
    return heads * r.head_dim * r.state_dim * size_bytes(r.state_dtype) + taps * channels * size_bytes(dtype)


def is_packed(spec: ModelSpec) -> bool:
    """Whether some layers cache compressed entries beside a window (DeepSeek-V4)."""
    return any((a := layer.attention) is not None and a.compress_ratio > 1 for layer in spec.layers)


def _v4_caches(index: int, a: Attention) -> list[LayerCache]:
    """Caches of a DeepSeek-V4 layer: a window of plain entries, compressed entries of everything, and the states of
    the compressors, which are f32 and live as long as the window (two numbers a value; overlapping windows, and an
    indexer with a compressor of its own, where the ratio is small enough to have an indexer)."""
    width = a.head_dim
    rope = a.rope_head_dim or 64
    entry = Fraction(width - rope + 2 * rope + _V4_SCALE_BYTES)
    states = 0
    if a.compress_ratio > 1:
        overlap = 2 if a.indexer else 1
        states = 2 * overlap * (width + (a.indexer.head_dim if a.indexer else 0)) * 4
    near = (entry + states) * Fraction(V4_PADDING).limit_denominator(100)
    caches = [LayerCache(index, "window", near, reach=a.window or 128, packed=True)]
    if a.compress_ratio > 1:
        far = (entry + indexer_token_bytes(a)) / a.compress_ratio
        caches.append(LayerCache(index, "full", far, packed=True))
    return caches


def layer_caches(spec: ModelSpec, tp: int, rules: CacheRules, mtp: bool = False) -> tuple[LayerCache, ...]:
    """Every cache of every layer on one rank of a ``tp`` group (``mtp``: draft layers too, numbered after the rest)."""
    form, packed = cache_dtype(spec, rules.kv_dtype, rules.dtype), is_packed(spec)
    layers: tuple[Layer, ...] = spec.layers + (spec.mtp_layers if mtp else ())
    known: dict[int, list[LayerCache]] = {}  # layers that are one object cache the same
    out: list[LayerCache] = []
    for index, layer in enumerate(layers):
        if id(layer) not in known:
            known[id(layer)] = [c for m in layer.mixers for c in _mixer_caches(index, m, tp, form, packed, rules)]
        out += [c if c.layer == index else replace(c, layer=index) for c in known[id(layer)]]
    return _shared_out(layers, out, rules)


def _shared_out(layers: tuple[Layer, ...], caches: list[LayerCache], rules: CacheRules) -> tuple[LayerCache, ...]:
    """``caches`` with those of windowed layers at their share of slots."""
    reach = [(a := layer.attention) is not None and a.reach is not None for layer in layers]
    mixed = any(reach) and any(layer.attention and not seen for layer, seen in zip(layers, reach, strict=True))
    if rules.windows or rules.window_share == 1 or not mixed:
        return tuple(caches)
    share = Fraction(rules.window_share).limit_denominator(1000)
    return tuple(replace(c, token_bytes=c.token_bytes * share) if reach[c.layer] else c for c in caches)


def _mixer_caches(index: int, mixer: Mixer, tp: int, form: str, packed: bool, rules: CacheRules) -> list[LayerCache]:
    if isinstance(mixer, Recurrent):
        size = state_bytes(mixer, tp, rules.dtype, rules.speculative)
        return [LayerCache(index, "recurrent", Fraction(0), state_bytes=size)]
    if packed:
        return _v4_caches(index, mixer)
    if mixer.shares_kv_with is not None or not mixer.causal:
        return []
    return _attention_caches(index, mixer, tp, form, rules)


def _attention_caches(index: int, a: Attention, tp: int, form: str, rules: CacheRules) -> list[LayerCache]:
    kind: Kind = "full"
    if rules.windows and a.window is not None:
        kind = "window"
    elif rules.windows and a.chunk is not None:
        kind = "chunk"
    reach = (a.reach or 0) if kind != "full" else 0
    shape = (max(1, -(-a.kv_heads // tp)), a.head_dim, a.v_head_dim)
    caches = [LayerCache(index, kind, attention_token_bytes(a, tp, form), 0, reach, shape, a.kind == "mla")]
    if a.indexer is not None and a.indexer.heads:
        caches.append(LayerCache(index, "full", indexer_token_bytes(a), mla=True))
    return caches


def _raised_block(caches: Iterable[LayerCache], block: int) -> int:
    """Block size at which an attention page is no smaller than a recurrent state (vLLM ``platforms/interface.py``)."""
    caches = tuple(caches)
    state = max((c.state_bytes for c in caches if c.kind == "recurrent"), default=0)
    attention = [c for c in caches if c.kind != "recurrent"]
    if not state or not attention:
        return block
    widest = max(attention, key=lambda c: c.token_bytes)
    step = _ALIGNMENT["mla" if widest.mla else "gqa"]
    return max(block, step * -(-state // int(step * widest.token_bytes)))


def _buckets(caches: tuple[LayerCache, ...]) -> list[list[LayerCache]]:
    """Caches of one kind, reach and size together; full attention of several sizes stays one kind when nothing else
    is there (MLA with an indexer)."""
    kinds = {(c.kind, c.reach) for c in caches}
    found: dict[tuple[object, ...], list[LayerCache]] = {}
    for c in caches:
        key: tuple[object, ...] = (c.kind, c.reach) if len(kinds) == 1 else (c.kind, c.reach, c.token_bytes, c.shape)
        found.setdefault(key, []).append(c)
    return list(found.values())


@dataclass(frozen=True)
class CachePlan:
    """The cache of one model on the ranks of one tensor-parallel group; the same on every pipeline stage but for the
    layers that the stage has (``layers`` below: a range or a frozen set of layer numbers)."""

    caches: tuple[LayerCache, ...]
    rules: CacheRules
    dcp: int = 1

    @cached_property
    def block_size(self) -> int:
        """Tokens of a full-attention block."""
        return _raised_block(self.caches, self.rules.block_size)

    @cached_property
    def grouped(self) -> bool:
        """Whether blocks of equal bytes are shared by groups of layers."""
        return self.rules.groups and not any(c.packed for c in self.caches)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Groups of layers; one for a uniform model."""
        buckets = _buckets(self.caches)
        if len(buckets) <= 1:
            return tuple(self._group(b, 0) for b in buckets)
        counts = [len(b) for b in buckets]
        size = max(counts) if max(counts) < min(counts) * self.rules.uneven_group else min(counts)
        page = max(self._page(b[0]) for b in buckets)
        split = [b[i :: -(-len(b) // size)] for b in buckets for i in range(-(-len(b) // size))]
        return tuple(self._group(part, page) for part in split)

    def _page(self, c: LayerCache) -> int:
        return c.state_bytes if c.kind == "recurrent" else int(self.block_size * c.token_bytes)

    def _group(self, part: list[LayerCache], page: int) -> Group:
        first = part[0]
        block = self.block_size
        if page and first.kind != "recurrent" and page % max(1, self._page(first)) == 0:
            block *= page // self._page(first)
        pages = tuple((c.layer, page or self._page(c)) for c in part)
        return Group(first.kind, first.reach, block, pages)

    def block_bytes(self, layers: Container[int]) -> int:
        """Bytes of one block on a rank that has ``layers``: its largest group decides."""
        return max((sum(p for at, p in g.pages if at in layers) for g in self.groups), default=0)

    def _group_blocks(self, g: Group, context: int) -> int:
        if g.kind == "recurrent":
            return self.rules.state_pages + self.rules.speculative
        tokens = -(-context // self.dcp)
        if g.kind == "window":
            return -(-min(g.reach - 1 + self.rules.in_flight, tokens) // g.block_size) + 1
        if g.kind == "chunk":
            tokens = min(g.reach + self.rules.in_flight, tokens)
        return -(-tokens // g.block_size)

    def request_blocks(self, context: int) -> int:
        """Blocks that one request of ``context`` tokens holds at its end, over all groups."""
        return sum(self._group_blocks(g, context) for g in self.groups)

    def request_bytes(self, layers: Container[int], context: int) -> int:
        """Bytes that one request of ``context`` tokens holds on a rank that has ``layers``."""
        if self.grouped:
            return self.request_blocks(context) * self.block_bytes(layers)
        size = self.rules.block_size
        total = Fraction(0)
        for c, count in self._tally(layers):
            tokens = -(-context // self.dcp)
            if c.kind != "full":
                tokens = min(tokens, c.reach + self.rules.in_flight)
            total += count * (c.state_bytes if c.kind == "recurrent" else -(-tokens // size) * size * c.token_bytes)
        return int(total)

    def _tally(self, layers: Container[int]) -> list[tuple[LayerCache, int]]:
        """Equal caches of ``layers``, counted."""
        if layers not in self._tallies:
            counts: dict[tuple[str, int, Fraction, int], tuple[LayerCache, int]] = {}
            for c in self.caches:
                if c.layer in layers:
                    key = (c.kind, c.reach, c.token_bytes, c.state_bytes)
                    counts[key] = (c, counts[key][1] + 1 if key in counts else 1)
            self._tallies[layers] = list(counts.values())
        return self._tallies[layers]

    @cached_property
    def _tallies(self) -> dict[Container[int], list[tuple[LayerCache, int]]]:
        return {}

    def growth_bytes(self, layers: Container[int], context: int) -> float:
        """Bytes that one more token adds at ``context``, blocks smoothed out; layers past their window add nothing."""
        total = Fraction(0)
        for c, count in self._tally(layers):
            if c.kind == "full" or context < c.reach + self.rules.in_flight:
                total += count * c.token_bytes
        return float(total / self.dcp)

    def blocks(self, pools: Iterable[tuple[Container[int], int]]) -> int:
        """Blocks of every rank, given ``(layers, pool bytes)`` of each: the minimum decides."""
        counts = [max(0, pool) // size for layers, pool in pools if (size := self.block_bytes(layers))]
        return min(counts, default=0)

    def concurrency(self, pools: Iterable[tuple[Container[int], int]], context: int) -> Fraction:
        """Requests of ``context`` tokens that the pools hold (fractions of a request counted), on the worst rank."""
        pools = tuple(pools)
        if self.grouped:
            need = self.request_blocks(context)
            return Fraction(self.blocks(pools), need) if need else Fraction(0)
        shares = [Fraction(max(0, pool), size) for at, pool in pools if (size := self.request_bytes(at, context))]
        return min(shares, default=Fraction(0))

    def tokens(self, pools: Iterable[tuple[Container[int], int]], max_model_len: int) -> int:
        """Tokens as the engine prints them: ``int(concurrency x max_model_len)``."""
        return int(self.concurrency(pools, max_model_len) * max_model_len)

    def pool_for(self, layers: Container[int], context: int, requests: int) -> int:
        """Bytes of pool that ``requests`` requests of ``context`` tokens need on a rank that has ``layers``."""
        if self.grouped:
            held = self.rules.held_back if requests else 0
            return (requests * self.request_blocks(context) + held) * self.block_bytes(layers)
        return requests * self.request_bytes(layers, context)

    def whole_requests(self, pools: Iterable[tuple[Container[int], int]], context: int) -> int:
        """Whole requests of ``context`` tokens that fit at once, the held-back block left out."""
        pools = tuple(pools)
        if self.grouped:
            need = self.request_blocks(context)
            return max(0, self.blocks(pools) - self.rules.held_back) // need if need else 0
        return int(self.concurrency(pools, context))

    def longest(self, pools: Iterable[tuple[Container[int], int]], limit: int) -> int:
        """Longest single request up to ``limit`` tokens, by bisection as the engine's error text does it."""
        pools = tuple(pools)
        if self.concurrency(pools, limit) >= 1:
            return limit
        low, high = 0, limit
        while low + 1 < high:
            middle = (low + high) // 2
            if self.concurrency(pools, middle) >= 1:
                low = middle
            else:
                high = middle
        return low


def cache_plan(spec: ModelSpec, tp: int = 1, dcp: int = 1, rules: CacheRules | None = None) -> CachePlan:
    """Cache of ``spec`` on the ranks of a ``tp`` group whose decode context is split ``dcp`` ways.

    Draft layers count when ``rules.speculative`` is above 0.
    """
    rules = rules or CacheRules()
    return CachePlan(layer_caches(spec, tp, rules, mtp=rules.speculative > 0), rules, dcp)
