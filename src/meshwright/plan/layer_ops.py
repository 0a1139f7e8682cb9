"""Everything a rank does in one decoder layer's forward, in order: products, cores, collectives.

Legend: T tokens of the rank's batch (over cp already divided), D model width, R routed tokens, tp etc. degrees.
Written as in the scaling book, a dense layer is

    x_TD -> q,k,v[T, N_tp] -> core -> o: {U_tp}[T, D] -> all_reduce -> gate,up[T, F_tp] -> down: {U_tp} -> all_reduce

and with sequence parallelism (sp) every all_reduce of T x D is a reduce_scatter to [T_tp, D] before the norm and an
all_gather after it (Korthikanti et al. 2022, arXiv 2205.05198).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from meshwright.moves.context import rows
from meshwright.plan.context_ops import attention_ops, cached_rows
from meshwright.plan.cores import Batch, recurrent_core
from meshwright.plan.products import OUT_OPS, Kind, Product
from meshwright.plan.wire import Op, Shape, Ways, collective, compute
from meshwright.specs.dtypes import DTYPE_BYTES
from meshwright.specs.layout import Layout
from meshwright.specs.model import Attention, Moe, Recurrent
from meshwright.specs.shares import ExpertGrid

#: Products behind the attention core: the output projection, and the first of two where it is factored.
AFTER_CORE = OUT_OPS | {"o_a"}


def parts(total: int, degree: int) -> int:
    """The largest of ``degree`` nearly equal parts."""
    return -(-total // degree)


@dataclass(frozen=True, slots=True)
class Context:
    """What the layers of one forward share.

    Attributes:
        layout, grid, ways: degrees, the ranks around experts, the engine's collectives.
        hidden: model width. dtype: of activations. kv_dtype: of the cache.
        batch: tokens of one data-parallel replica, before context parallelism.
        weight_dtype: element type that weights are multiplied in, or None for that of the checkpoint (training
            converts; then bytes are counted anew).
        marks: note where only the backward communicates (training).
    """

    layout: Layout
    grid: ExpertGrid
    ways: Ways
    hidden: int
    dtype: str
    kv_dtype: str
    batch: Batch
    weight_dtype: str | None = None
    marks: bool = False
    cache: dict[int, list[Op]] = field(default_factory=dict, compare=False)

    @property
    def tokens(self) -> int:
        """T: tokens of this rank's batch (a prompt is dealt over cp; a decode step is not)."""
        cp = self.layout.cp if self.batch.phase != "decode" else 1
        if self.dealt:
            return sum(count * rows(new, cp) for count, new, _ in self.batch.rows)
        return parts(self.batch.tokens, cp)

    @property
    def dealt(self) -> bool:
        """Prompts and cache are dealt over cp as in ``moves.context``."""
        return self.ways.context_dealt and self.layout.cp > 1 and self.batch.phase != "forward"

    @property
    def held_tokens(self) -> int:
        """Tokens between the blocks: T, or T/tp with sequence parallelism."""
        return parts(self.tokens, self.layout.tp) if self.sp else self.tokens

    @property
    def sp(self) -> bool:
        """Sequence parallelism that does something."""
        return self.layout.sp and self.layout.tp > 1

    @property
    def hidden_shape(self) -> tuple[int, int]:
        """Shape of the hidden states between blocks and stages."""
        return (self.held_tokens, self.hidden)

    def product(self, p: Product, tokens: int, experts: int = 0) -> Op:
        """``x_TK @ W_KN``; ``experts``: how many of the local experts are read (R tokens over all of them)."""
        act = DTYPE_BYTES[self.dtype]
        dtype, weight = p.dtype, p.weight_bytes
        if self.weight_dtype is not None:
            dtype, weight = self.weight_dtype, p.k * p.n * max(1, p.experts) * DTYPE_BYTES[self.weight_dtype]
        if p.experts:
            weight = weight * experts // p.experts
        moved = tokens * (p.k + p.n) * act + weight
        right = (experts, p.k, p.n) if p.experts else (p.k, p.n)
        return compute("matmul", p.name, ((tokens, p.k), right), dtype, moved, 2 * tokens * p.k * p.n)

    def norm(self, name: str, width: int) -> Op:
        """A norm reads and writes its input; its few operations are not counted as FLOPs."""
        shape = (self.held_tokens, width)
        moved = (2 * shape[0] + 1) * width * DTYPE_BYTES[self.dtype]
        return compute("norm", name, (shape,), self.dtype, moved, 0)

    def enter(self, name: str, cut: bool = True) -> list[Op]:
        """all_gather of the sharded sequence before a block (sp); else only the backward has a sum here."""
        tp = self.layout.tp
        if self.sp:
            return collective("all_gather", name, "tp", tp, self.hidden_shape, self.dtype)
        if not self.marks or not cut:
            return []
        return self.mark(collective("all_reduce", name, "tp", tp, (self.tokens, self.hidden), self.dtype))

    def mark(self, ops: list[Op]) -> list[Op]:
        """Collectives that only the backward has: their kind is kept in the name."""
        return [op._replace(op="mark", name=f"{op.op} {op.name}") for op in ops] if self.marks else []

    def leave(self, name: str, cut: bool) -> list[Op]:
        """Sum of the partial results of a block over tp: all_reduce, or reduce_scatter with sp."""
        if not cut:
            return []
        op, tp = "reduce_scatter" if self.sp else "all_reduce", self.layout.tp
        rows = self.held_tokens * tp if self.sp else self.tokens  # equal shares: the last is filled up
        return collective(op, name, "tp", tp, (rows, self.hidden), self.dtype)


def layer_ops(c: Context, kind: Kind) -> list[Op]:
    """Forward of one layer; remembered by kind. Norms before and after each block follow checkpoint order."""
    known = c.cache.get(id(kind))
    if known is not None:
        return known
    blocks = [ops for ops in (mixer_ops(c, kind), ffn_ops(c, kind)) if ops]
    norms = [c.norm("norm", width) for width in kind.norms]
    each = parts(len(norms), max(1, len(blocks)))
    out: list[Op] = []
    for number, block in enumerate(blocks):
        around = norms[number * each : (number + 1) * each]
        out += [*around[:1], *block, *around[1:]]
    c.cache[id(kind)] = out
    return out


def _split(products: Iterable[Product]) -> tuple[list[Product], list[Product]]:
    """Products before the core, and those after it."""
    before: list[Product] = []
    after: list[Product] = []
    for p in products:
        (after if p.op in AFTER_CORE else before).append(p)
    return before, after


def mixer_ops(c: Context, kind: Kind) -> list[Op]:
    """Token mixers of a layer: attention, recurrent, or both side by side (each with its own sum over tp)."""
    ops: list[Op] = []
    for mixer in kind.layer.mixers:
        softmax = isinstance(mixer, Attention)
        roles = {"attention", "indexer"} if softmax else {"recurrent"}
        before, after = _split(p for p in kind.products if p.role in roles)
        cut = any(p.cut for p in after)
        if not ops:
            ops += c.enter("mixer input", cut)
        latent = [p for p in before if p.op == "kv_b" and c.batch.phase == "decode"]
        for p in before:
            if p not in latent:
                ops.append(c.product(p, _mixer_tokens(c, mixer, p)))
        if isinstance(mixer, Attention):
            absorbed = [_absorbed(c, mixer, p) for p in latent]
            ops += [keys for keys, _ in absorbed]
            ops += attention_ops(c, kind, mixer)
            ops += [values for _, values in absorbed]
        else:
            ops.append(recurrent_core(mixer, _recurrent_heads(kind, mixer), _local(c), c.dtype))
        ops += [c.product(p, c.tokens) for p in after]
        ops += c.leave("mixer output", cut)
    return ops


def _local(c: Context) -> Batch:
    """The batch with its new tokens dealt over cp (states of a recurrent mixer pass from rank to rank)."""
    b = c.batch
    return b if c.layout.cp == 1 else Batch(b.phase, 1, c.tokens, b.past)


def _recurrent_heads(kind: Kind, r: Recurrent) -> int:
    return kind.units.get("ssm_heads") or kind.units.get("linear_v_heads") or r.heads


def _mixer_tokens(c: Context, mixer: Attention | Recurrent, p: Product) -> int:
    """T, but MLA unfolds keys and values of the whole context while it prefills."""
    if p.op == "kv_b" and c.batch.phase == "prefill":
        return cached_rows(c) if c.dealt else c.tokens + c.batch.cached
    return c.tokens


def _absorbed(c: Context, a: Attention, p: Product) -> tuple[Op, Op]:
    """``kv_b`` of MLA in a decode step, from both sides of the core and head by head (DeepSeek-V2, section 2.1.2).

    ``q_n W_k`` takes queries into the latent space, ``o_c W_v`` the result out of it; nothing is unfolded.
    """
    t, rank, nope, value = c.tokens, a.kv_lora_rank, a.head_dim - a.rope_head_dim, a.v_head_dim
    heads, act = p.n // (nope + value), DTYPE_BYTES[c.dtype]

    def each(side: str, k: int, n: int, width: int) -> Op:
        shapes: tuple[Shape, ...] = ((heads, t, k), (heads, k, n)) if heads > 1 else ((t, k), (k, n))
        moved = t * heads * (k + n) * act + p.weight_bytes * width // (nope + value)
        return compute("matmul", f"{p.name} {side}", shapes, p.dtype, moved, 2 * t * heads * k * n)

    return each("keys", nope, rank, nope), each("values", rank, value, value)


def ffn_ops(c: Context, kind: Kind) -> list[Op]:
    """Dense and sparse feed-forward blocks of a layer, then products that belong to neither."""
    ops: list[Op] = []
    dense = [p for p in kind.products if p.role == "mlp"]
    if dense:
        before, after = _split(dense)
        cut = any(p.cut for p in after)
        ops += c.enter("mlp input", cut)
        ops += [c.product(p, c.tokens) for p in (*before, *after)]
        ops += c.leave("mlp output", cut)
    if kind.layer.moe is not None:
        ops += _moe(c, kind, kind.layer.moe)
    return ops + [c.product(p, c.tokens) for p in kind.products if p.role == "other"]


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
    return Routing(span, feeders, tp > 1 and expert_parallel and (c.sp or (c.ways.moe_tp_slices and c.grid.etp == 1)))


def _moe(c: Context, kind: Kind, m: Moe) -> list[Op]:
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
    ops += [c.product(p, t) for p in (*by_role.get("router", []), *inner)]
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
