"""A mixture of experts on one rank: router, dispatch, experts, combine, shared experts, sum over tp.

Two ways to count it. Before anything ran, tokens are taken as spread evenly over experts. Where a routing is known
(``moved``: which rows this rank sends and receives, ``moves.expert``) every split and every expert's product is exact.

Legend: T tokens, K experts a token visits, E experts, R rows on the experts of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.moves.expert import Exchange, dealt
from meshwright.plan.products import OUT_OPS, Kind, Product
from meshwright.plan.wire import Op, Shape, collective, nbytes, parts
from meshwright.specs.dtypes import DTYPE_BYTES
from meshwright.specs.model import Moe

if TYPE_CHECKING:
    from meshwright.plan.layer_ops import Context


@dataclass(frozen=True, slots=True)
class Routing:
    """Where tokens go in a mixture of experts.

    Attributes:
        span: ranks of the stage that share out one set of experts (etp x ep).
        feeders: data ranks (dp x cp) whose tokens meet there.
        sliced: each tp rank dispatches 1/tp of the tokens.
    """

    span: int
    feeders: int
    sliced: bool


def routing(c: Context) -> Routing:
    """Experts inside the tp group need no dispatch; beyond it tokens of several data ranks meet."""
    span, tp = c.grid.etp * c.grid.ep, c.layout.tp
    feeders = max(1, span // tp)
    expert_parallel = c.grid.ep > 1 and feeders > 1
    by_sp = c.sp and c.ways.moe_sp_slices
    return Routing(span, feeders, tp > 1 and expert_parallel and (by_sp or (c.ways.moe_tp_slices and c.grid.etp == 1)))


def moe_ops(c: Context, kind: Kind, m: Moe, moved: Exchange | None = None) -> list[Op]:
    """The block of one layer; with ``moved`` exact for this rank, else as if tokens were spread evenly."""
    return _even(c, kind, m) if moved is None else _exact(c, kind, m, moved)


def _even(c: Context, kind: Kind, m: Moe) -> list[Op]:
    """Router, dispatch, local experts, combine, shared experts, one sum over tp.

    Tokens are taken as spread evenly over experts: R = tokens x topk x local experts / experts, and the experts
    whose weights are read are those that a uniform choice is expected to touch, E (1 - (1 - k/E)^tokens). Modelled.
    """
    r = routing(c)
    t = parts(c.tokens, c.layout.tp) if r.sliced else c.tokens
    by_role: dict[str, list[Product]] = {}
    for p in kind.products:
        by_role.setdefault(p.role, []).append(p)
    experts, shared = by_role.get("expert", []), by_role.get("shared_expert", [])
    inner = [p for p in shared if p.op == "latent_in" or (m.latent and p.op == "in")]
    outer = [p for p in shared if p.op == "latent_out" or (m.latent and p.op == "out")]
    shared = [p for p in shared if p not in inner and p not in outer]
    whole_shared = not any(p.cut for p in shared if p.op in OUT_OPS)
    end = _sum(c, r, any(p.cut for p in experts), whole_shared)
    if r.sliced:
        piece = (t, c.hidden)
        ops = [] if c.sp else c.mark(collective("all_gather", "experts input", "tp", c.layout.tp, piece, c.dtype))
        ops += [] if whole_shared else c.enter("shared experts input")
    else:
        ops = c.enter("experts input", bool(end))
    ops += [c.product(p, t) for p in (*_routers(c, by_role.get("router", [])), *inner)]
    width = m.latent or c.hidden
    held_ = max((p.experts for p in experts), default=0)
    meeting = c.tokens * r.feeders
    routed = parts(meeting * m.topk * held_, m.experts)
    touched = min(held_, max(1, round(held_ * (1 - (1 - m.topk / m.experts) ** min(meeting, 1 << 20)))))
    ops += _dispatch(c, r, m, t, width, "dispatch")
    ops += [c.product(p, routed, touched) for p in sorted(experts, key=lambda p: p.op in OUT_OPS)]
    ops += _dispatch(c, r, m, t, width, "combine")
    shared_tokens = t if whole_shared else c.tokens
    ops += [c.product(p, t) for p in outer]
    ops += [c.product(p, shared_tokens) for p in sorted(shared, key=lambda p: p.op in OUT_OPS)]
    return ops + end


def _sum(c: Context, r: Routing, experts_cut: bool, whole_shared: bool) -> list[Op]:
    """The one sum over tp at the end of a mixture of experts (and what replaces it when tokens were sliced)."""
    tp = c.layout.tp
    if not r.sliced:
        partial = r.span > 1 and (r.feeders == 1 or experts_cut)
        return c.leave("experts output", partial or not whole_shared)
    out = [] if whole_shared else c.leave("shared experts output", True)
    if not c.sp:
        out += collective("all_gather", "experts output", "tp", tp, (parts(c.tokens, tp), c.hidden), c.dtype)
    return out


def _dispatch(c: Context, r: Routing, m: Moe, t: int, width: int, way: str) -> list[Op]:
    """Tokens to their experts (``dispatch``) and results back (``combine``)."""
    if r.feeders == 1:
        return []
    there = way == "dispatch"
    if c.ways.experts == "allgather_reducescatter":
        group = "ep" if r.sliced else "dp+cp" if c.layout.cp > 1 else "dp"
        n = r.span if r.sliced else r.feeders
        if there:
            return collective("all_gather", f"tokens {way}", group, n, (t, width), c.dtype)
        return collective("reduce_scatter", f"tokens {way}", group, n, (t * n, width), c.dtype)
    shape = (t * m.topk, width)
    ops = collective("all_to_all", f"tokens {way}", "ep", c.grid.ep, shape, c.dtype)
    if c.grid.etp > 1 and r.sliced:
        if there:
            return ops + collective("all_gather", "tokens to experts", "etp", c.grid.etp, shape, c.dtype)
        wide = (shape[0] * c.grid.etp, width)
        return collective("reduce_scatter", "tokens from experts", "etp", c.grid.etp, wide, c.dtype) + ops
    return ops


def _exact(c: Context, kind: Kind, m: Moe, moved: Exchange) -> list[Op]:
    """What a known routing makes this rank do: every expert with rows is a product of its own."""
    r = routing(c)
    of = {role: [p for p in kind.products if p.role == role] for role in ("router", "expert", "shared_expert")}
    shared = sorted(of["shared_expert"], key=lambda p: p.op in OUT_OPS)
    cut = any(p.cut for p in shared if p.op in OUT_OPS)
    end = _sum(c, r, any(p.cut for p in of["expert"]), not cut)
    piece = (parts(c.tokens, c.layout.tp), c.hidden)
    if not r.sliced:
        ops = c.enter("experts input")
    else:
        ops = [] if c.sp else c.mark(collective("all_gather", "experts input", "tp", c.layout.tp, piece, c.dtype))
        ops += c.enter("shared experts input") if cut else []
    ops += [c.product(p, sum(moved.sent) // m.topk) for p in _routers(c, of["router"])]
    ops += visit_ops(c, kind, moved)
    return ops + [c.product(p, c.tokens) for p in shared] + end


def _routers(c: Context, products: Sequence[Product]) -> list[Product]:
    """Routers in the element type in which the engine multiplies them."""
    return [p._replace(dtype=c.ways.router_dtype or p.dtype) for p in products]


def visit_ops(c: Context, kind: Kind, moved: Exchange) -> list[Op]:
    """Rows to the experts of this rank, through them and back: all that a pass without own tokens does.

    An expert without rows multiplies nothing, but in training it takes part, so that it has a gradient.
    """
    travels = routing(c).feeders > 1
    experts = sorted((p for p in kind.products if p.role == "expert"), key=lambda p: p.op in OUT_OPS)
    ops = _sent(c, moved) if travels else []
    for rows in moved.rows:
        ops += [_of_one(c, p, rows) for p in experts if rows or c.marks]
    if travels:
        ops.append(exchanged(c, "tokens combine", moved.received_rows, (c.hidden,), c.dtype, moved.index))
    return ops


def _of_one(c: Context, p: Product, rows: int) -> Op:
    """The product of one of the local experts."""
    return c.product(p._replace(experts=0, weight_bytes=p.weight_bytes // max(1, p.experts)), rows)


def _sent(c: Context, moved: Exchange) -> list[Op]:
    """How many rows come for each expert, as 64-bit numbers, then the rows."""
    held = [high - low for low, high in dealt(len(moved.sent), len(moved.received))]
    return [
        exchanged(c, "expert counts", held, (), "i64", moved.index),
        exchanged(c, "tokens dispatch", moved.sent_rows, (c.hidden,), c.dtype, moved.index),
    ]


def exchanged(c: Context, name: str, rows: Sequence[int], width: Shape, dtype: str, index: int) -> Op:
    """An uneven exchange over ep: ``rows`` to every member; what a rank keeps is not sent."""
    each = width[0] if width else 1
    splits = tuple(n * each for n in rows)
    shape = (sum(rows), *width)
    payload = nbytes(shape, dtype)
    wire = payload - splits[index] * DTYPE_BYTES[dtype]
    return Op("all_to_all", name, "ep", "ep", (shape,), dtype, payload, wire, 0, splits=splits)
