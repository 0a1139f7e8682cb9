"""The loss over a vocabulary, by pieces: logits of some tokens at a time, so that never all of them exist."""

from __future__ import annotations

#: Most logits of a piece on a rank (64 MiB in fp32).
MOST_LOGITS = 1 << 24


def loss_pieces(tokens: int, vocabulary: int) -> list[int]:
    """Tokens of every piece; the last may be shorter.

    Args:
        tokens: of a micro-batch on a rank. vocabulary: rows of the head on the rank that has the most, so that all
            ranks of tp cut alike.
    """
    each = max(1, min(tokens, MOST_LOGITS // vocabulary))
    whole, rest = divmod(tokens, each)
    return [each] * whole + [rest] * (rest > 0)
