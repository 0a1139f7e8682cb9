"""The decoder, cut by placement. With degree 1 on every axis the same code is the plain model.

::

    x_TD = embed(ids)                      rows of the vocabulary found here, summed over tp
    x += mixer(norm(x)); x += ffn(norm(x)) every layer of the stage (models.layers)
    logits = x[sampled] W[D, V_tp]         gathered on tp place 0

Legend: T tokens, D model width, V vocabulary, S sampled rows; ``_tp``: the share of this rank, which need not be equal
on all ranks. Which weight is cut where is read from the placement's intervals; nothing here knows a tensor by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.errors import InputError
from meshwright.runtime.collectives import all_reduce, gather_logits
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.models.layers import build_layer
from meshwright.runtime.models.moe import MixtureOfExperts
from meshwright.runtime.models.parts import Linear, Norm, Step, Turned, layer_weights
from meshwright.runtime.models.rope import frequencies, turns
from meshwright.runtime.models.settings import Settings
from meshwright.runtime.parallel.context import ContextParallel
from meshwright.runtime.parallel.sequence import edges_of
from meshwright.runtime.scope import scope
from meshwright.runtime.serve.cache import Batch, CacheShape, PagedCache
from meshwright.runtime.serve.dealt import DealtCache
from meshwright.specs.placement import Coordinate, Placement, Shard
from meshwright.specs.tensors import TensorFamily


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
        self.tp, self.cp = mesh.group("tp"), mesh.group("cp")
        self.context = ContextParallel(self.cp, placement.layout.cp_kind == "ulysses") if self.cp.size > 1 else None
        self.edges = edges_of(placement.layout, self.tp)
        stage = placement.stages[at.pp]
        self.first, self.last, self.layers = stage.index == 0, stage.head, stage.layers
        shards = [s for s in placement.shards(at) if s.family.section == "decoder"]
        self.blocks = {
            i: build_layer(layer_weights(i, shards, weights), mesh, settings, self.edges) for i in stage.layers
        }
        self.shapes = cache_shapes(placement, at)
        self.weights_bytes = sum(w.numel() * w.element_size() for w in weights.values())
        table = _ending(shards, "embedding")
        self.table = weights[table.family.template] if table else None
        self.rows = table.intervals[0][0] if table else (0, 0)
        if self.last:
            head = _ending(shards, "head") or table
            assert head is not None
            self.head = Linear(weights[head.family.template])
            self.widths = _widths(placement, at, head.family)
            last = weights[_need(_ending(shards, "norm")).family.template]
            self.final_norm = Norm(last, settings.eps, settings.norm_offset)
        self.frequencies = tuple(frequencies(rope, self.rotary_width, mesh.device) for rope in settings.ropes)

    @property
    def rotary_width(self) -> int:
        """Dimensions of a head that turn, the same in all layers."""
        attention = self.mesh.placement.spec.layers[0].attention
        assert attention is not None
        return attention.rope_head_dim or attention.head_dim

    def cache(self, blocks: int, block_size: int) -> PagedCache:
        """An empty cache for the layers and heads of this rank, and its share of the tokens."""
        shapes = {layer: self.shapes[layer] for layer in self.layers}
        if self.context is not None:
            return DealtCache(shapes, blocks, block_size, self.dtype, self.mesh.device, self.cp)
        return PagedCache(shapes, blocks, block_size, self.dtype, self.mesh.device)

    def embed(self, ids_T: Tensor) -> Tensor:
        """Hidden states ``(T, D)``: a rank looks up the ids whose rows it has, the rest is zero until the sum."""
        assert self.table is not None
        if self.tp.size == 1:
            return self._scaled(F.embedding(ids_T, self.table))
        low, high = self.rows
        mine = (ids_T >= low) & (ids_T < high)
        x_TD = F.embedding(torch.where(mine, ids_T - low, 0), self.table) * mine[:, None]
        return self._scaled(self.edges.leave(x_TD, "embedding"))

    def _scaled(self, x_TD: Tensor) -> Tensor:
        """The embedding times its factor, which is rounded to the element type first, as in the published code."""
        scale = self.settings.embedding_scale
        return x_TD if scale == 1 else x_TD * torch.tensor(scale, dtype=self.dtype, device=x_TD.device)

    def rotary(self, batch: Batch) -> tuple[Turned, ...]:
        """Cosine and sine of the positions of a pass, for all its layers."""
        kinds = zip(self.frequencies, self.settings.ropes, strict=True)
        return tuple(turns(inv, batch.positions_T, rope.attention_factor, self.dtype) for inv, rope in kinds)

    def stage(
        self, x_TD: Tensor, batch: Batch, cache: PagedCache, after: Callable[[int], None] | None = None
    ) -> Tensor:
        """All layers of this rank's stage; ``after`` is told each one that is done."""
        step = Step(batch, cache, self.rotary(batch), self.context)
        for i in self.layers:
            x_TD = self.blocks[i](x_TD, step)
            if after is not None:
                after(i)
        return x_TD

    def idle(self) -> None:
        """A pass without tokens, of a replica that meets others at the experts."""
        like = torch.empty(0, dtype=self.dtype, device=self.mesh.device)
        for i in self.layers:
            self.blocks[i].idle(like)

    @property
    def sparse(self) -> list[MixtureOfExperts]:
        """The mixtures of experts of the stage, by layer."""
        return [ffn for i in self.layers if isinstance(ffn := self.blocks[i].ffn, MixtureOfExperts)]

    def ends(self, x_TD: Tensor, batch: Batch) -> Tensor:
        """Hidden states ``(S, D)`` of the rows whose logits are wanted, on every rank of the stage's replica."""
        x_SD = self.edges.enter(x_TD, "head input")[batch.sampled]
        if batch.here is None:
            return x_SD
        with scope(name="sampled rows"):
            return all_reduce(x_SD * batch.here, self.cp)

    def logits(self, x_SD: Tensor) -> Tensor | None:
        """Logits ``(S, V)`` of the sampled rows on place 0 of tp, None on the other places."""
        x_SV = self.head(self.final_norm(x_SD))
        with scope(name="logits"):
            logits = gather_logits(x_SV, self.tp, self.widths)
        cap = self.settings.logit_cap
        return logits if cap is None or logits is None else cap * torch.tanh(logits / cap)


def cache_shapes(placement: Placement, at: Coordinate) -> dict[int, CacheShape]:
    """What a token takes in the cache of every layer of a rank: KV heads held, width of a key and of a value head.

    Latent attention keeps one head, whole on every rank of tp: the latent as key, the turned key as value.
    """
    shapes = {}
    for shard in placement.shards(at):
        if shard.family.section == "decoder" and shard.family.op in {"k", "kv_a"} and shard.family.part == "weight":
            for layer in shard.layers:
                a = placement.spec.layers[layer].attention
                assert a is not None
                if a.kind == "mla":
                    shapes[layer] = CacheShape(1, a.kv_lora_rank, a.rope_head_dim)
                else:
                    shapes[layer] = CacheShape(shard.shape[0] // a.head_dim, a.head_dim, a.v_head_dim)
    return shapes


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
