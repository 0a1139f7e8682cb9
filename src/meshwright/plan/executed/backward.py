"""Backward of a list of forward ops as our own trainer runs it: what travels, and which products are multiplied.

Differences from ``plan.backward``, which counts what any engine does: the input that sequence parallelism gathered is
kept, the ring hands keys and values round once more beside their gradients, rows of experts return by the splits they
came by, and weight gradients are products of their own that a split backward puts off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from meshwright.moves.expert import Exchange
from meshwright.plan.layer_ops import Context
from meshwright.plan.moe_ops import exchanged
from meshwright.plan.wire import Op, collective, nbytes


@dataclass(slots=True)
class Backward:
    """``inputs``: input gradients with all that travels, in order; ``weights``: weight gradients."""

    inputs: list[Op] = field(default_factory=list)
    weights: list[Op] = field(default_factory=list)


def backward(c: Context, forward: Sequence[Op], moved: Exchange | None = None) -> Backward:
    """Backward of ``forward`` (its ops with marks), in reverse order; ``moved``: rows to and from experts in it."""
    out = Backward()
    hops = [op for op in forward if op.group == "cp" and op.op in {"send", "recv"}]
    for op in reversed(forward):
        if op.op == "matmul":
            if op.repeats > 1:  # keys and values of a latent, which the ring hands round once more
                out.inputs.append(op)
            into, of = _products(op)
            out.inputs.append(into)
            out.weights.append(of)
        elif op.group == "cp" and op.op in {"send", "recv"}:
            out.inputs += _ring(hops)
            hops = []
        elif op.stream != "compute":
            out.inputs += _travels(c, op, moved)
    return out


def _products(op: Op) -> tuple[Op, Op]:
    """``dX_TK = dY_TN W_NK`` and ``dW_NK = dY^T_NT X_TK``; a product that repeats has as many of both."""
    (t, k), (_, n) = op.shapes
    into = op._replace(name=f"{op.name} input gradient", shapes=((t, n), (n, k)))
    return into, op._replace(name=f"{op.name} weight gradient", shapes=((n, t), (t, k)))


def _ring(hops: Sequence[Op]) -> list[Op]:
    """Blocks go round again; at every step their gradients, in fp32, go on to the next place, home at the end."""
    if not hops:
        return []
    size = nbytes(hops[0].shapes[0], "f32")
    gone, come = (op._replace(name=f"{op.name} gradient", dtype="f32", payload=size) for op in hops[:2])
    there = [gone._replace(wire=size), come]
    out: list[Op] = []
    for step in range(0, len(hops), 2):
        out += [*hops[step : step + 2], *there]
    return out + there


def _travels(c: Context, op: Op, moved: Exchange | None) -> list[Op]:
    """What the backward sends where the forward sent, or noted (``mark``) that only the backward does."""
    name = f"{op.name} gradient"
    if op.op == "mark":
        kind, _, rest = op.name.partition(" ")
        return [op._replace(op=kind, name=f"{rest} gradient")]
    if op.op == "all_to_all":
        return _rows_back(c, op, name, moved) if op.splits is not None else [op._replace(name=name)]
    if op.group != "tp" or not c.sp:
        return []
    rows, *width = op.shapes[0]
    if op.op == "all_gather":
        return collective("reduce_scatter", name, "tp", c.layout.tp, (rows * c.layout.tp, *width), op.dtype)
    if op.op == "reduce_scatter":
        return collective("all_gather", name, "tp", c.layout.tp, (rows // c.layout.tp, *width), op.dtype)
    return []


def _rows_back(c: Context, op: Op, name: str, moved: Exchange | None) -> list[Op]:
    """Gradients of dispatched rows come back as results do, those of results go out as rows do; counts stay known."""
    assert moved is not None
    if op.dtype == "i64":
        return []
    rows = moved.received_rows if op.name == "tokens dispatch" else moved.sent_rows
    return [exchanged(c, name, rows, (c.hidden,), op.dtype, moved.index)]
