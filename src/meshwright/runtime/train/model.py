"""The decoder for training: layers and chunks of a pipeline as modules, with the blocks that serving runs.

::

    chunks = build_chunks(mesh, weights, settings)
    x = chunks[0](None, batch)               hidden states (R, D), or the summed loss where the chunk is the last
    loss.backward(1 / tokens of the step)    gradients in chunk.weights()[name].grad, sums over all tokens

Parameters are registered under their checkpoint names with "/" for "."; a layer builds its blocks from whatever is
registered when it runs, so that FSDP may put gathered parameters in their places.

Legend: T tokens of a micro-batch on a rank, R rows between the blocks (T, or its share under sp), D model width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from meshwright.errors import InputError
from meshwright.moves.chunks import Chunk, model_chunks
from meshwright.runtime.checkpoint import own
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.models.layers import DecoderLayer, build_layer
from meshwright.runtime.models.moe import MixtureOfExperts
from meshwright.runtime.models.parts import Norm, Step, layer_weights
from meshwright.runtime.models.rope import frequencies, turns
from meshwright.runtime.models.settings import Settings, check_runnable
from meshwright.runtime.parallel.expert import AllToAll
from meshwright.runtime.parallel.tensor import Edges
from meshwright.runtime.train.attend import TrainStep
from meshwright.runtime.train.balance import Balance, TrainRouter, move_bias, train_router
from meshwright.runtime.train.batch import TrainBatch
from meshwright.runtime.train.edges import train_edges
from meshwright.runtime.train.experts import TrainAllToAll
from meshwright.runtime.train.loss import Vocabulary, vocabulary_loss
from meshwright.runtime.train.shared import axis_of, idle
from meshwright.specs.placement import Shard

#: No balancing loss, and biases that stay.
NO_BALANCE = Balance()
#: Ways of computing activations again in the backward: none, the attention core, whole layers.
RECOMPUTE = ("none", "selective", "full")


def registered(name: str) -> str:
    """The name of a module's parameter from that in the checkpoint."""
    return name.replace(".", "/")


def stored(name: str) -> str:
    """The name in the checkpoint from that of a module's parameter."""
    return name.replace("/", ".")


class _TakesPart(torch.autograd.Function):
    """Hands a tensor on; parameters that this rank leaves to others get a gradient of zero rather than none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *unused: Tensor) -> Tensor:
        ctx.unused = unused
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, ...]:
        return dx, *map(torch.zeros_like, ctx.unused)


def _trains(shard: Shard) -> bool:
    """Whether a tensor is trained by its gradient; the bias that balances experts is not."""
    return not (shard.family.role == "router" and not shard.family.op)


class TrainLayer(nn.Module):
    """One decoder layer.

    Args:
        number: of the layer. shards: of all layers of the rank. weights: parameters and states of this layer by
            checkpoint name. edges: of the chunk.
        again: recompute the layer in the backward.
    """

    def __init__(
        self,
        number: int,
        shards: list[Shard],
        weights: Mapping[str, Tensor],
        mesh: Mesh,
        settings: Settings,
        edges: Edges,
        balance: Balance,
        *,
        again: bool,
    ) -> None:
        super().__init__()
        self.number, self.again = number, again
        self._shards, self._mesh, self._settings, self._edges = shards, mesh, settings, edges
        self._balance = balance
        self._idle = [
            registered(name)
            for shard in shards
            if idle(mesh.placement, mesh.coordinate, shard)
            for name in names_of(shard, number)
        ]
        for name, weight in weights.items():
            if isinstance(weight, nn.Parameter):
                self.register_parameter(registered(name), weight)
            else:
                self.register_buffer(registered(name), weight)
        self._built: tuple[tuple[object, ...], DecoderLayer] | None = None
        self._router: TrainRouter | None = None

    def forward(self, x_RD: Tensor, step: TrainStep) -> Tensor:
        """``(R, D)`` in and out."""
        if not self.again or not torch.is_grad_enabled():
            return self._run(x_RD, step)
        with set_checkpoint_early_stop(False):  # so that every collective runs again, on all ranks alike
            out: Tensor = checkpoint(self._run, x_RD, step, use_reentrant=False, preserve_rng_state=False)
        return out

    def _run(self, x_RD: Tensor, step: TrainStep) -> Tensor:
        self._edges.begin(step.batch.tokens)
        block = self.block()
        if self._router is not None:
            self._router.counts.scale, self._router.counts.again = step.batch.aux_scale, self.number in step.ran
        step.ran.add(self.number)
        # A TrainStep answers everything that blocks of a training pass ask of a Step.
        out = block(x_RD, cast(Step, step))
        if isinstance(block.ffn, MixtureOfExperts):
            block.ffn.log.loads.clear()
        if self._idle:
            unused = (self._parameters[name] for name in self._idle)
            out = cast(Tensor, _TakesPart.apply(out, *unused))  # type: ignore[no-untyped-call]
        return out

    def block(self) -> DecoderLayer:
        """The layer made of the parameters that are registered now."""
        held = {name: x for name, x in (*self._parameters.items(), *self._buffers.items()) if x is not None}
        key = torch.is_inference_mode_enabled(), *((id(x), x.data_ptr()) for x in held.values())
        if self._built is None or self._built[0] != key:
            weights = {stored(name): x for name, x in held.items()}
            with torch.enable_grad():  # pieces of a parameter must know where they come from
                block = build_layer(
                    layer_weights(self.number, self._shards, weights), self._mesh, self._settings, self._edges
                )
            if isinstance(block.ffn, MixtureOfExperts):
                self._prepare(block.ffn)
            self._built = key, block
        return self._built[1]

    def _prepare(self, experts: MixtureOfExperts) -> None:
        """Experts with a backward, and a router that counts."""
        ways = experts.ways
        if isinstance(ways, AllToAll):
            experts.ways = TrainAllToAll(ways.experts, ways.group, ways.slices, ways.places)
        router = train_router(experts.router, self._balance, self._mesh, sliced=ways.slices > 1)
        if self._router is not None:
            router.counts.take(self._router.counts)
        self._router = experts.router = router

    @property
    def router(self) -> TrainRouter | None:
        """The router of a sparse layer that ran."""
        return self._router


class TrainChunk(nn.Module):
    """A run of layers with the ends of the model that it holds; see ``build_chunks``."""

    def __init__(
        self,
        chunk: Chunk,
        mesh: Mesh,
        held: Mapping[str, tuple[Tensor, Shard]],
        settings: Settings,
        recompute: str,
        recompute_layers: int | None,
        balance: Balance,
    ) -> None:
        super().__init__()
        placement = mesh.placement
        self.chunk, self.mesh, self.settings = chunk, mesh, settings
        self.first, self.last = chunk.first, chunk.last
        self.selective = recompute == "selective"
        self.edges = train_edges(placement.layout, mesh.group("tp"))
        self._held: dict[str, Shard] = {}
        shards = list(dict.fromkeys(shard for _, shard in held.values()))
        layers = []
        for index, number in enumerate(chunk.layers):
            own_ = {name: held[name][0] for shard in shards for name in names_of(shard, number)}
            again = recompute == "full" and (recompute_layers is None or index < recompute_layers)
            layers.append(TrainLayer(number, shards, own_, mesh, settings, self.edges, balance, again=again))
            self._held |= {name: held[name][1] for name in own_}
        self.layers = nn.ModuleList(layers)
        self._ends(held)
        self.dtype = next(iter(self.parameters())).dtype
        attention = placement.spec.layers[0].attention
        assert attention is not None
        width = attention.rope_head_dim or attention.head_dim
        self._frequencies = tuple(frequencies(rope, width, mesh.device) for rope in settings.ropes)

    def _ends(self, held: Mapping[str, tuple[Tensor, Shard]]) -> None:
        """Register embedding, final norm and head where the chunk has them."""
        outside = {s.family.role: (name, x, s) for name, (x, s) in held.items() if not s.layers}
        table, norm, head = (outside.get(role) for role in ("embedding", "norm", "head"))
        head = head or table
        wanted = {"embedding": table} if self.first else {}
        if self.last:
            wanted |= {"norm": norm, "head": head}
        self._names: dict[str, str] = {}
        for role, found in wanted.items():
            if found is None:
                raise InputError(f"the tensor table has no {role}; the runtime cannot train this model")
            name, x, shard = found
            self._names[role], self._held[name] = registered(name), shard
            if registered(name) not in self._parameters:
                self.register_parameter(registered(name), cast(nn.Parameter, x))

    def _end(self, role: str) -> Tensor:
        """The weight of an end that is registered now."""
        return cast(Tensor, getattr(self, self._names[role]))

    def forward(self, x_RD: Tensor | None, batch: TrainBatch) -> Tensor:
        """Hidden states ``(R, D)``, or on the last chunk the sum of the losses of this rank's tokens.

        Args:
            x_RD: hidden states of the chunk before; None on the first.
            batch: the micro-batch.
        """
        self.edges.begin(batch.tokens)
        if x_RD is None:
            x_RD = self._embed(batch.ids_T)
        layout = self.mesh.placement.layout
        turned = tuple(
            turns(inv, batch.positions_T, rope.attention_factor, x_RD.dtype)
            for inv, rope in zip(self._frequencies, self.settings.ropes, strict=True)
        )
        step = TrainStep(batch, turned, self.mesh.group("cp"), layout.cp_kind == "ulysses", self.selective)
        for layer in self.layers:
            x_RD = layer(x_RD, step)
        assert x_RD is not None
        return self._loss(x_RD, batch) if self.last else x_RD

    def _embed(self, ids_T: Tensor) -> Tensor:
        """A rank looks up the ids whose rows it has, the rest is zero until the sum over tp."""
        table = self._end("embedding")
        if self.mesh.group("tp").size == 1:
            x_TD = F.embedding(ids_T, table)
        else:
            low, high = self._rows("embedding")
            mine = (ids_T >= low) & (ids_T < high)
            x_TD = F.embedding(torch.where(mine, ids_T - low, 0), table) * mine[:, None]
            x_TD = self.edges.leave(x_TD, "embedding")
        scale = self.settings.embedding_scale
        return x_TD if scale == 1 else x_TD * torch.tensor(scale, dtype=x_TD.dtype, device=x_TD.device)

    def _loss(self, x_RD: Tensor, batch: TrainBatch) -> Tensor:
        """Final norm, head and loss."""
        norm = Norm(self._end("norm"), self.settings.eps, self.settings.norm_offset)
        x_TD = self.edges.enter(norm(x_RD), "head input")
        tp, vocabulary = self.mesh.group("tp"), self.mesh.placement.spec.vocab
        low, _ = self._rows("head")
        how = Vocabulary(tp, low, -(-vocabulary // tp.size), self.settings.logit_cap)
        return vocabulary_loss(x_TD, self._end("head"), batch.labels_T, how)

    def _rows(self, role: str) -> tuple[int, int]:
        """Rows of the vocabulary that this rank holds."""
        return self._held[stored(self._names[role])].intervals[0][0]

    def weights(self) -> dict[str, nn.Parameter]:
        """Parameters by checkpoint name, ends first, then layer by layer."""
        return {stored(name.rsplit(".", 1)[-1]): x for name, x in self.named_parameters()}

    def states(self) -> dict[str, Tensor]:
        """Tensors that no gradient trains, by checkpoint name."""
        return {stored(name.rsplit(".", 1)[-1]): x for name, x in self.named_buffers()}

    def held(self, name: str) -> Shard:
        """What of a tensor this rank holds."""
        return self._held[name]

    @property
    def sums(self) -> dict[str, str]:
        """Axis over which the gradient of a parameter is summed, for those where it must be (``train.shared``)."""
        axes = {name: axis_of(self.mesh.placement, self._held[name]) for name in self.weights()}
        return {name: axis for name, axis in axes.items() if axis is not None}

    @property
    def experts(self) -> frozenset[str]:
        """Parameters whose copies lie on the ranks of ``edp`` and not of ``dp+cp``."""
        return frozenset(name for name in self.weights() if self._held[name].family.role == "expert")

    def input_shape(self, batch: TrainBatch) -> tuple[int, int]:
        """``(R, D)`` of the hidden states between the blocks."""
        return self.edges.held(batch.tokens), self.mesh.placement.spec.hidden

    @property
    def routers(self) -> dict[int, TrainRouter]:
        """Routers of sparse layers that ran, by layer."""
        layers = cast(Iterable[TrainLayer], self.layers)
        return {layer.number: layer.router for layer in layers if layer.router is not None}

    def reset_counts(self) -> None:
        """Forget what routers counted: a new step begins."""
        for router in self.routers.values():
            router.counts.clear()

    @property
    def aux(self) -> Tensor:
        """This rank's part of the balancing losses since ``reset_counts``."""
        parts = [router.counts.loss for router in self.routers.values()]
        return torch.stack(parts).sum() if parts else torch.zeros((), device=self.mesh.device)

    def move_biases(self, rate: float) -> None:
        """Move the biases that balance experts, after the optimizer. Collective over the data ranks."""
        for router in self.routers.values():
            if router.correction is not None:
                move_bias(router.correction, router.counts, router.data, rate)


def names_of(shard: Shard, number: int) -> list[str]:
    """Checkpoint names of a family's tensors of one layer that the rank holds."""
    if number not in shard.layers:
        return []
    name = shard.family.template.replace("{layer}", str(number))
    return [name.replace("{expert}", str(expert)) for expert in shard.experts or (None,)]


def build_chunks(
    mesh: Mesh,
    weights: Mapping[str, Tensor],
    settings: Settings,
    *,
    recompute: str = "none",
    recompute_layers: int | None = None,
    balance: Balance = NO_BALANCE,
) -> list[TrainChunk]:
    """The chunks of this rank, in the order in which the model runs through them (``moves.chunks``).

    Args:
        mesh: with the groups of training (``train_mesh``). weights: this rank's slices by checkpoint name.
        recompute: one of ``RECOMPUTE``. recompute_layers: ``full`` for so many layers of every chunk only.
        balance: how experts are kept busy.

    Raises:
        InputError, IllegalLayoutError: another recompute, or what ``settings.check_runnable`` refuses.
    """
    if recompute not in RECOMPUTE:
        raise InputError(f"recompute {recompute[:20]!r}; choose from {', '.join(RECOMPUTE)}")
    placement, at = mesh.placement, mesh.coordinate
    check_runnable(placement.spec, placement.layout.with_(zero=0, virtual=1))
    held: dict[str, tuple[Tensor, Shard]] = {}
    for name, shard in own(placement, at):
        weight = weights[name]
        held[name] = (nn.Parameter(weight) if _trains(shard) else weight), shard
    return [
        TrainChunk(chunk, mesh, held, settings, recompute, recompute_layers, balance)
        for chunk in model_chunks(placement)[at.pp]
    ]
