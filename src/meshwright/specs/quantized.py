"""Quantized matrices under tensor parallelism: shards must end where blocks, groups and tiles end.

The kernels behind vLLM, SGLang and TensorRT-LLM agree on this (128 x 128 scale blocks of fp8, groups and Marlin tiles
of four-bit weights); an engine says over how many ranks it cuts a side, and where its code states the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from meshwright.specs.checks import broken, divisors, named
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec, Quantization
from meshwright.specs.rules import Rule
from meshwright.specs.splits import Width, splits

#: Marlin tiles: multiple of the output and of the input side of one rank (min_thread_n, min_thread_k).
MARLIN_N, MARLIN_K = 64, 128

#: Methods whose expert kernel pads a shard that ends inside a group (mxfp4: gpt-oss, layers/quantization/mxfp4.py).
_PADS_EXPERTS = frozenset({"mxfp4"})

#: Over how many ranks an engine cuts a side.
Degree = Callable[[Width, Layout], int]


@dataclass(frozen=True, slots=True)
class Places:
    """Where an engine's code states the rules: of scale blocks, and of groups and tiles."""

    blocks: str
    groups: str


def blocks_divide(spec: ModelSpec, layout: Layout, degree_of: Degree, places: Places) -> Iterator[Rule]:
    """Shards of quantized matrices that end inside a block, a group or a tile.

    Only sides that are cut count: a merged matrix that is not cut (the fused latent projections of MLA, width
    1536 + 576) may end inside a block with its last part.

    Args:
        spec: the model.
        layout: its degrees.
        degree_of: over how many ranks the engine cuts a side.
        places: where the engine says so.
    """
    quantization = spec.quantization
    if quantization is None:
        return
    seen: set[tuple[str, int, str]] = set()
    for width in splits(spec).quantized:
        degree = degree_of(width, layout)
        shard = shard_of(width, degree)
        if shard is None or degree == 1:
            continue
        for rule in _side(width, shard, quantization, degree, places):
            key = (width.name, width.size, rule.code)
            if key not in seen:
                seen.add(key)
                yield rule


def shard_of(width: Width, degree: int) -> int | None:
    """Elements of the side on one rank; None when it does not divide (another rule says so)."""
    if width.label == "kv_heads":
        degree = min(degree, width.heads)
    return width.size // degree if width.size % degree == 0 else None


def _side(width: Width, shard: int, q: Quantization, degree: int, places: Places) -> Iterator[Rule]:
    if block := width.block:
        if shard % block and width.label == "kv_heads" and width.size // width.heads % block:
            yield _head_ends_in_block(width, block, places)
        elif shard % block:
            yield _refuse("quant_block", width, shard, block, f"{q.method} block", degree, places.blocks)
        return
    if not q.group or not width.packed or q.method in _PADS_EXPERTS:
        return
    if width.side == "in" and shard % q.group and width.size != shard:
        yield _refuse("quant_group", width, shard, q.group, f"{q.method} group", degree, places.groups)
    elif q.weight_bits == 4 and q.method in {"awq", "gptq", "compressed-tensors"}:
        tile = MARLIN_N if width.side == "out" else MARLIN_K
        if shard % tile:
            yield broken(
                "marlin_tile",
                "unwise",
                f"{width.name} {width.size} / {degree} = {shard} is not a multiple of Marlin's "
                f"tile {tile}; a slower kernel or padding is used",
                f"{_way_out(width, tile)}",
                places.groups,
                shard=shard,
                tile=tile,
            )


def _head_ends_in_block(width: Width, block: int, places: Places) -> Rule:
    """Heads that end inside a block (MiMo-V2: 192 wide) need a loader of the model's own, which an engine may have."""
    head = width.size // width.heads
    return broken(
        "head_ends_in_block",
        "unwise",
        f"a KV head is {head} wide, not a multiple of the block of {block}: cutting the heads cuts blocks",
        "works only where the model's own loader handles it; tp 1 is safe",
        places.blocks,
        head=head,
        block=block,
    )


def _refuse(code: str, width: Width, shard: int, block: int, what: str, degree: int, where: str) -> Rule:
    return broken(
        code,
        "illegal",
        f"{width.name} width {width.size} / {degree} = {shard} is not a multiple of the {what} of {block}",
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
