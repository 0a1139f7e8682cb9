"""How SGLang counts ranks: sizes that rules, profile, parser and emitter share (``srt/runtime_context.py:73-218``)."""

from __future__ import annotations

from meshwright.specs.layout import Layout

#: Rows of embedding and head are padded to a multiple of this (layers/vocab_parallel_embedding.py:48; where that is
#: not divisible by the ranks, to a multiple of both).
VOCAB_PADDING = 64


def split_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of every stage: equally many, the last ``layers % stages`` stages one more (distributed/utils.py:110).

    61 layers over 4 stages: 15, 15, 15, 16.
    """
    each, more = divmod(layers, stages)
    return tuple(each + (1 if stage >= stages - more else 0) for stage in range(stages))


def expert_ranks(layout: Layout) -> int:
    """Ranks over which one expert is cut: MoE tensor parallel = tp_size / ep, unless the layout says otherwise."""
    if layout.etp is not None:
        return layout.etp
    return max(1, layout.tp * layout.cp * layout.dp // layout.ep)


def replica_ranks(layout: Layout) -> int:
    """Ranks of a stage of one replica where ``dp`` counts independent replicas of a mixture of experts, else 0.

    They are told from attention data parallelism by an expert set of every replica's own: ep x etp = tp x cp.
    """
    inside = layout.tp * layout.cp
    return inside if layout.dp > 1 and layout.ep * expert_ranks(layout) == inside else 0


def is_wide_ep(layout: Layout) -> bool:
    """Whole attention on every rank and experts dealt over all: dense blocks are whole too
    (``--moe-dense-tp-size 1``)."""
    return layout.dp > 1 and layout.ep > 1 and layout.tp == 1 and not replica_ranks(layout)


def wide_ranks(layout: Layout, moe: bool) -> int:
    """Ranks over which dense feed-forward blocks are cut: all of --tp-size (one replica of it), not attention tp."""
    if not moe or replica_ranks(layout) or is_wide_ep(layout):
        return layout.tp
    return layout.tp * layout.cp * layout.dp
