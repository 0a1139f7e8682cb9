"""The end of the model as our own trainer runs it: final norm, head and loss, some tokens at a time.

Three sums of one number a token over tp, as Megatron-LM's ``vocab_parallel_cross_entropy`` has them.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.moves.loss import loss_pieces
from meshwright.plan.forward import head_product
from meshwright.plan.layer_ops import Context
from meshwright.plan.wire import Op, collective, parts
from meshwright.specs.placement import Placement, Shard


def loss_ops(placement: Placement, c: Context, ends: Sequence[Shard]) -> list[Op]:
    """Ops of one micro-batch; tokens go through head and loss in the pieces of ``moves.loss``."""
    ops = [c.norm("final norm", s.shape[0]) for s in ends if s.family.role == "norm" and s.family.part == "weight"]
    p = head_product(placement, ends)
    if p is None:
        return ops
    vocab, tp = placement.spec.vocab, c.layout.tp
    ops += c.enter("head input", p.n < vocab)
    for rows in loss_pieces(c.tokens, parts(vocab, tp)):
        ops.append(c.product(p, rows))
        for name in ("maximum", "target logit", "sum of exponentials"):
            ops += collective("all_reduce", f"loss {name}", "tp", tp, (rows,), "f32")
    return ops
