"""Quantized matrices under tensor parallelism in vLLM: shards must end where blocks, groups and tiles end."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.specs.checks import broken, divisors, named
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec, Quantization
from meshwright.specs.rules import Rule
from meshwright.specs.splits import Width, splits

_FP8 = "vLLM model_executor/layers/quantization/utils/fp8_utils.py:1298-1376"
_MARLIN = "vLLM model_executor/layers/quantization/utils/marlin_utils.py:172"

#: Marlin tiles: multiple of the output and of the input side of one rank (min_thread_n, min_thread_k).
MARLIN_N, MARLIN_K = 64, 128

#: Methods whose expert kernel pads a shard that ends inside a group (mxfp4: gpt-oss, layers/quantization/mxfp4.py).
_PADS_EXPERTS = frozenset({"mxfp4"})


def degree_of(width: Width, layout: Layout) -> int:
    """How many ranks share the side."""
    if width.label == "expert_mlp":
        return 1 if layout.ep > 1 else layout.tp * layout.cp * layout.dp
    if width.label == "shared_mlp" and min(layout.ep, layout.tp, layout.dp) > 1:
        return 1
    return layout.tp


def shard_of(width: Width, layout: Layout) -> int | None:
    """Elements of the side on one rank; None when it does not divide (another rule says so)."""
    degree = degree_of(width, layout)
    if width.label == "kv_heads":
        degree = min(degree, width.heads)
    return width.size // degree if width.size % degree == 0 else None


def blocks_divide(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    """Shards of quantized matrices that end inside a block, a group or a tile.

    Only sides that are cut count: a merged matrix that is not cut (the fused latent projections of MLA, width
    1536 + 576) may end inside a block with its last part. The wheels of 0.26 and 0.33 agree.
    """
    quantization = spec.quantization
    if quantization is None:
        return
    seen: set[tuple[str, int, str]] = set()
    for width in splits(spec).quantized:
        shard = shard_of(width, layout)
        if shard is None or degree_of(width, layout) == 1:
            continue
        for rule in _side(width, shard, quantization, layout):
            key = (width.name, width.size, rule.code)
            if key not in seen:
                seen.add(key)
                yield rule


def _side(width: Width, shard: int, q: Quantization, layout: Layout) -> Iterator[Rule]:
    if block := width.block:
        if shard % block and width.label == "kv_heads" and width.size // width.heads % block:
            yield _head_ends_in_block(width, block)
        elif shard % block:
            yield _refuse("quant_block", width, shard, block, f"{q.method} block", layout, _FP8)
        return
    if not q.group or not width.packed or q.method in _PADS_EXPERTS:
        return
    if width.side == "in" and shard % q.group and width.size != shard:
        yield _refuse("quant_group", width, shard, q.group, f"{q.method} group", layout, _MARLIN)
    elif q.weight_bits == 4 and q.method in {"awq", "gptq", "compressed-tensors"}:
        tile = MARLIN_N if width.side == "out" else MARLIN_K
        if shard % tile:
            yield broken(
                "marlin_tile",
                "unwise",
                f"{width.name} {width.size} / {degree_of(width, layout)} = {shard} is not a multiple of Marlin's "
                f"tile {tile}; a slower kernel or padding is used",
                f"{_way_out(width, tile)}",
                _MARLIN,
                shard=shard,
                tile=tile,
            )


def _head_ends_in_block(width: Width, block: int) -> Rule:
    """Heads that end inside a block (MiMo-V2: 192 wide) need a loader of the model's own, which vLLM may have."""
    head = width.size // width.heads
    return broken(
        "head_ends_in_block",
        "unwise",
        f"a KV head is {head} wide, not a multiple of the block of {block}: cutting the heads cuts blocks",
        "works only where the model's own loader handles it; tp 1 is safe",
        _FP8,
        head=head,
        block=block,
    )


def _refuse(code: str, width: Width, shard: int, block: int, what: str, layout: Layout, where: str) -> Rule:
    return broken(
        code,
        "illegal",
        f"{width.name} width {width.size} / {degree_of(width, layout)} = {shard} is not a multiple of the "
        f"{what} of {block}",
        _way_out(width, block),
        where,
        shard=shard,
        block=block,
        size=width.size,
    )


def _way_out(width: Width, block: int) -> str:
    legal = [d for d in divisors(width.size) if (width.size // d) % block == 0 and d > 1] or [1]
    text = f"a degree of {named(legal, max(legal), 5)} keeps whole blocks"
    if width.label == "expert_mlp":
        return text + "; expert parallelism keeps every expert whole; replicas (dp) cut nothing"
    return text + "; use pipeline stages or replicas for the rest"
