"""Two numbers of vLLM that rules and profile share: the layer split and the vocabulary padding."""

from __future__ import annotations

#: Rows of embedding and head are padded to a multiple of this (layers/vocab_parallel_embedding.py).
VOCAB_PADDING = 64


def split_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of every stage as ``get_pp_indices`` deals them (distributed/utils.py:198).

    Each stage gets ``layers // stages``; the remainder goes one by one to the second-last stage and those before
    it, so the last stage (which holds the head) never gets more. 61 layers over 4 stages: 15, 15, 16, 15.
    """
    each, more = divmod(layers, stages)
    counts = [each] * stages
    for back in range(more):
        counts[stages - 2 - back] += 1
    return tuple(counts)
