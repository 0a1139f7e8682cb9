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
from meshwright.moves.expert import Exchange
from meshwright.plan.context_ops import attention_ops, cached_rows, context_way
from meshwright.plan.cores import Batch, recurrent_core
from meshwright.plan.moe_ops import moe_ops
from meshwright.plan.products import OUT_OPS, Kind, Product
from meshwright.plan.wire import Op, Shape, Ways, collective, compute, parts
from meshwright.specs.dtypes import DTYPE_BYTES
from meshwright.specs.layout import Layout
from meshwright.specs.model import Attention, Recurrent
from meshwright.specs.shares import ExpertGrid

#: Products behind the attention core: the output projection, and the first of two where it is factored.
AFTER_CORE = OUT_OPS | {"o_a"}


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


def layer_ops(c: Context, kind: Kind, moved: Exchange | None = None) -> list[Op]:
    """Forward of one layer. Norms before and after each block follow checkpoint order.

    Remembered by kind, but for a layer in which this rank moves just these rows to experts (``moved``).
    """
    known = c.cache.get(id(kind)) if moved is None else None
    if known is not None:
        return known
    blocks = [ops for ops in (mixer_ops(c, kind), ffn_ops(c, kind, moved)) if ops]
    norms = [c.norm("norm", width) for width in kind.norms]
    each = parts(len(norms), max(1, len(blocks)))
    out: list[Op] = []
    for number, block in enumerate(blocks):
        around = norms[number * each : (number + 1) * each]
        out += [*around[:1], *block, *around[1:]]
    if moved is None:
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
                again = c.layout.cp if p.op == "kv_b" and c.dealt and context_way(c) == "ring" else 1
                ops.append(c.product(p, _mixer_tokens(c, mixer, p))._replace(repeats=again))
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


def ffn_ops(c: Context, kind: Kind, moved: Exchange | None = None) -> list[Op]:
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
        ops += moe_ops(c, kind, kind.layer.moe, moved)
    return ops + [c.product(p, c.tokens) for p in kind.products if p.role == "other"]
