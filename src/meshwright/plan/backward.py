"""The backward of a list of forward ops: two products a product, and the mirror image of every collective.

A sum over tp (all_reduce) of the forward needs nothing in the backward, and the place where a block reads the
replicated input needs a sum there instead (the f and g of Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053,
section 3). So a dense layer has 2 all_reduces forward and 2 backward; with sequence parallelism 2 all_gathers and 2
reduce_scatters forward and as many backward (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2), plus 2
all_gathers where the engine keeps only the sharded input.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.plan.layer_ops import Context
from meshwright.plan.wire import Op, Shape, collective
from meshwright.specs.dtypes import DTYPE_BYTES

#: FLOPs of the attention backward over those of the forward: five products instead of two where the scores are
#: computed again (Dao 2023, FlashAttention-2, arXiv 2307.08691, section 3.1.2), four where they were kept.
CORE_BACKWARD = {"flash": (5, 2), "unfused": (4, 2)}


def backward_ops(c: Context, forward: Sequence[Op], attention: str, grad_dtype: str) -> list[Op]:
    """Backward of ``forward``, in reverse order.

    Args:
        c: what the forward was counted with. forward: its ops, marks included.
        attention: ``flash`` or ``unfused``. grad_dtype: of accumulated weight gradients.
    """
    out: list[Op] = []
    for op in reversed(forward):
        if op.op == "matmul":
            out += _products(op, c, grad_dtype)
        elif op.stream == "compute":
            out += _compute(op, attention)
        else:
            out += _mirror(op, c)
    return out


def _products(op: Op, c: Context, grad_dtype: str) -> list[Op]:
    """``dX_TK = dY_TN @ W_NK`` and ``dW_KN += X_KT @ dY_TN`` (the gradient is read and written)."""
    (tokens, k), right = op.shapes
    *lead, k_, n = right
    weights = k_ * n * (lead[0] if lead else 1)
    act = DTYPE_BYTES[c.dtype]
    transposed: Shape = (*lead, n, k_)
    grad_moved = tokens * (k + n) * act + 2 * weights * DTYPE_BYTES[grad_dtype]
    return [
        op._replace(name=f"{op.name} input gradient", shapes=((tokens, n), transposed)),
        op._replace(name=f"{op.name} weight gradient", shapes=((k, tokens), (tokens, n)), payload=grad_moved),
    ]


def _compute(op: Op, attention: str) -> list[Op]:
    more, less = CORE_BACKWARD[attention] if op.op == "attention" else (2, 1)
    return [op._replace(name=f"{op.name} gradient", flops=op.flops * more // less, payload=2 * op.payload)]


def _mirror(op: Op, c: Context) -> list[Op]:
    """The collective of the backward, or nothing."""
    if op.op == "mark":
        kind, _, name = op.name.partition(" ")
        return [op._replace(op=kind, name=f"{name} gradient")]
    name, group = f"{op.name} gradient", op.group or ""
    if op.op == "all_to_all":
        return [op._replace(name=name)]
    if op.op in {"send", "recv"}:
        return [op, op._replace(name=name, repeats=op.repeats + 1)]
    n = _ranks(c, group)
    shape = op.shapes[0]
    if op.op == "all_gather":
        if group == "tp" and not c.sp:
            return []
        again = [op._replace(name=f"{op.name} again")] if c.sp and c.ways.sp_gathers_again and group == "tp" else []
        return again + collective("reduce_scatter", name, group, n, (shape[0] * n, *shape[1:]), op.dtype)
    if op.op == "reduce_scatter":
        return collective("all_gather", name, group, n, (-(-shape[0] // n), *shape[1:]), op.dtype)
    return []


def _ranks(c: Context, group: str) -> int:
    """Members of a group."""
    sizes = {"ep": c.grid.ep, "etp": c.grid.etp, "dp+cp": c.layout.dp * c.layout.cp}
    if group == "ep" and c.ways.experts == "allgather_reducescatter":
        return c.grid.ep * c.grid.etp
    return sizes[group] if group in sizes else int(getattr(c.layout, group))
