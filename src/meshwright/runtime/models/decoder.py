"""The dense decoder, cut by placement. With degree 1 on every axis the same code is the plain model.

::

    x_TD = embed(ids)                      rows of the vocabulary found here, summed over tp
    q, k, v = x W[D, H_tp d]               columns: heads of this rank
    x += sum over tp (attend(q) W[H_tp d, D])        rows: one all_reduce
    x += sum over tp (silu(x W[D, F_tp]) * (x W[D, F_tp])) W[F_tp, D]    one all_reduce
    logits = x[sampled] W[D, V_tp]         gathered on tp place 0

Legend: T tokens, D model width, H heads, d head width, F MLP width, V vocabulary, S sampled rows; ``_tp``: the share
of this rank, which need not be equal on all ranks. Which weight is cut where is read from the placement's intervals;
nothing here knows a tensor by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.errors import InputError
from meshwright.runtime.collectives import all_reduce, gather_logits
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.models.attention import attend
from meshwright.runtime.models.rope import frequencies, turn, turns
from meshwright.runtime.models.settings import Settings
from meshwright.runtime.scope import scope
from meshwright.runtime.serve.cache import Batch, PagedCache
from meshwright.specs.placement import Coordinate, Placement, Shard
from meshwright.specs.tensors import TensorFamily


@dataclass(frozen=True, slots=True)
class Linear:
    """``x W^T + b`` with this rank's rows or columns of W."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply and add the bias."""
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Block:
    """Weights of one layer on this rank."""

    norms: tuple[Tensor, Tensor]
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    qk_norms: tuple[Tensor, Tensor] | None
    gate: Linear
    up: Linear
    down: Linear
    head_dim: int
    window: int | None


class Decoder:
    """One rank's part of the model.

    Args:
        mesh: place and groups.
        weights: this rank's slices by checkpoint name (``checkpoint.load``).
        settings: numbers that no tensor holds.
        dtype: of weights and activations.
    """

    def __init__(self, mesh: Mesh, weights: Mapping[str, Tensor], settings: Settings, dtype: torch.dtype) -> None:
        placement, at = mesh.placement, mesh.coordinate
        self.mesh, self.settings, self.dtype = mesh, settings, dtype
        self.tp = mesh.group("tp")
        stage = placement.stages[at.pp]
        self.first, self.last, self.layers = stage.index == 0, stage.head, stage.layers
        shards = [s for s in placement.shards(at) if s.family.section == "decoder"]
        self.blocks = {i: _block(i, placement, shards, weights) for i in stage.layers}
        self.weights_bytes = sum(w.numel() * w.element_size() for w in weights.values())
        table = _ending(shards, "embedding")
        self.table = weights[table.family.template] if table else None
        self.rows = table.intervals[0][0] if table else (0, 0)
        if self.last:
            head = _ending(shards, "head") or table
            assert head is not None
            self.head = weights[head.family.template]
            self.widths = _widths(placement, at, head.family)
            self.final_norm = weights[_need(_ending(shards, "norm")).family.template]
        self.inv = frequencies(settings.rope, self.head_dim, mesh.device)

    @property
    def head_dim(self) -> int:
        """Width of a head, the same in all layers."""
        attention = self.mesh.placement.spec.layers[0].attention
        assert attention is not None
        return attention.head_dim

    @property
    def kv_heads(self) -> int:
        """KV heads that this rank holds and caches."""
        return self.blocks[self.layers[0]].k.weight.shape[0] // self.head_dim

    def cache(self, blocks: int, block_size: int) -> PagedCache:
        """An empty cache for the layers and heads of this rank."""
        return PagedCache(self.layers, blocks, block_size, self.kv_heads, self.head_dim, self.dtype, self.mesh.device)

    def embed(self, ids_T: Tensor) -> Tensor:
        """Hidden states ``(T, D)``: a rank looks up the ids whose rows it has, the rest is zero until the sum."""
        assert self.table is not None
        if self.tp.size == 1:
            return F.embedding(ids_T, self.table)
        low, high = self.rows
        mine = (ids_T >= low) & (ids_T < high)
        x_TD = F.embedding(torch.where(mine, ids_T - low, 0), self.table) * mine[:, None]
        with scope(name="embedding"):
            return all_reduce(x_TD, self.tp)

    def layer(self, i: int, x_TD: Tensor, batch: Batch, cache: PagedCache, turned: tuple[Tensor, Tensor]) -> Tensor:
        """One decoder layer with its two sums over tp; ``turned``: ``rotary(batch)``."""
        b = self.blocks[i]
        with scope(layer=i):
            h_TD = self._norm(x_TD, b.norms[0])
            a_THd = self._attention(i, b, h_TD, batch, cache, turned)
            x_TD = x_TD + self._sum(b.o, a_THd, "mixer output")
            h_TD = self._norm(x_TD, b.norms[1])
            return x_TD + self._sum(b.down, F.silu(b.gate(h_TD)) * b.up(h_TD), "mlp output")

    def _attention(
        self, i: int, b: Block, h_TD: Tensor, batch: Batch, cache: PagedCache, turned: tuple[Tensor, Tensor]
    ) -> Tensor:
        q, k, v = (linear(h_TD).view(h_TD.shape[0], -1, b.head_dim) for linear in (b.q, b.k, b.v))
        if b.qk_norms is not None:
            q, k = self._norm(q, b.qk_norms[0]), self._norm(k, b.qk_norms[1])
        cache.write(i, batch.slots_T, turn(k, *turned), v)
        return attend(turn(q, *turned), i, batch, cache, b.window)

    def _sum(self, linear: Linear, x: Tensor, name: str) -> Tensor:
        """Row-parallel product: partial sums over tp, then the bias once."""
        with scope(name=name):
            out = all_reduce(F.linear(x, linear.weight), self.tp)
        return out if linear.bias is None else out + linear.bias

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.settings.eps)

    def rotary(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the positions of a pass, for all its layers."""
        return turns(self.inv, batch.positions_T, self.settings.rope.attention_factor, self.dtype)

    def stage(self, x_TD: Tensor, batch: Batch, cache: PagedCache) -> Tensor:
        """All layers of this rank's stage."""
        turned = self.rotary(batch)
        for i in self.layers:
            x_TD = self.layer(i, x_TD, batch, cache, turned)
        return x_TD

    def logits(self, x_SD: Tensor) -> Tensor | None:
        """Logits ``(S, V)`` of the sampled rows on place 0 of tp, None on the other places."""
        x_SD = self._norm(x_SD, self.final_norm)
        with scope(name="logits"):
            return gather_logits(F.linear(x_SD, self.head), self.tp, self.widths)


def _need(shard: Shard | None) -> Shard:
    if shard is None:
        raise InputError("the tensor table has no final norm; the runtime cannot run this model")
    return shard


def _ending(shards: list[Shard], role: str) -> Shard | None:
    """The weight of a role outside the layers."""
    return next((s for s in shards if not s.layers and s.family.role == role and s.family.part == "weight"), None)


def _widths(placement: Placement, at: Coordinate, head: TensorFamily) -> tuple[int, ...]:
    """Rows of the head on every place of tp."""
    ranks = placement.group("tp", at)
    held = (placement.shards(placement.coordinate(rank)) for rank in ranks)
    return tuple(next(s.shape[0] for s in shards if s.family is head) for shards in held)


def _block(layer: int, placement: Placement, shards: list[Shard], weights: Mapping[str, Tensor]) -> Block:
    """Collect a layer's weights by role, product and part; norms go by their order in the table."""
    linears: dict[str, dict[str, Tensor]] = {}
    norms: dict[str, list[Tensor]] = {"norm": [], "attention": []}
    for shard in shards:
        family = shard.family
        if layer not in shard.layers:
            continue
        tensor = weights[family.template.replace("{layer}", str(layer))]
        if family.op:
            linears.setdefault(family.op, {})[family.part] = tensor
        else:
            norms[family.role].append(tensor)
    attention = placement.spec.layers[layer].attention
    assert attention is not None
    first, second = norms["norm"]
    qk = norms["attention"]
    made = {op: Linear(held["weight"], held.get("bias")) for op, held in linears.items()}
    return Block(
        norms=(first, second),
        qk_norms=(qk[0], qk[1]) if qk else None,
        head_dim=attention.head_dim,
        window=attention.window,
        **{op: made[op] for op in ("q", "k", "v", "o", "gate", "up", "down")},
    )
