"""ZeRO-3: torch's ``fully_shard`` (FSDP2) around the chunks of a rank, with the knobs of ``Layout.fsdp``.

What is dealt out are fp32 values, which are the master weights; parameters are gathered in ``param_dtype`` and
gradients reduced in ``reduce_dtype``, as sums. With a pipeline a unit is gathered once a step and reduced once at its
end, as torch.distributed.pipelining does. Parameters that no other rank holds, and a table that two chunks of a rank
share, which ``fully_shard`` refuses, are left to flat buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard

from meshwright.runtime.checkpoint import TORCH_DTYPES
from meshwright.runtime.mesh import Group, Mesh
from meshwright.runtime.scope import scope, where
from meshwright.runtime.train.data_parallel import Bucketed, DataOptions, data_axis, sum_copies
from meshwright.runtime.train.flat import Flat, ScatteredOnce
from meshwright.runtime.train.optimizer import Run
from meshwright.runtime.train.parameters import SUMS, Parameter
from meshwright.runtime.train.pieces import LocalPiece
from meshwright.specs.layout import Fsdp
from meshwright.specs.shares import part


class Sharded:
    """One parameter that ``fully_shard`` deals out, and this rank's rows of it.

    Args:
        parameter: as it was before. module, key: where it is registered. group: ranks that share it out.
        copies, copy: replicas of every piece, and which one this rank is (HSDP).
    """

    def __init__(
        self, parameter: Parameter, module: nn.Module, key: str, group: Group, copies: int = 1, copy: int = 0
    ) -> None:
        self.parameter, self.module, self.key = parameter, module, key
        self.copies, self.copy = copies, copy
        shape = parameter.tensor.shape
        each = -(-shape[0] // group.size)
        self.start = min(shape[0], group.index * each) * (shape.numel() // shape[0])

    @property
    def dealt(self) -> DTensor:
        """The parameter that is registered between steps."""
        found = self.module._parameters[self.key]
        assert isinstance(found, DTensor)
        return found

    @property
    def value(self) -> Tensor:
        """This rank's elements: ``(n,)``, live."""
        return self.dealt.to_local().detach().view(-1)

    @property
    def gradient(self) -> Tensor:
        """Their gradient, after the reduction; it stays the same storage until the next step."""
        grad = self.dealt.grad
        assert isinstance(grad, DTensor)
        return grad.to_local().detach().view(-1)

    def counted(self) -> list[Tensor]:
        """What this rank counts in norms: of replicas of a piece each a share."""
        if not self.parameter.counted:
            return []
        gradient = self.gradient
        low, high = part(gradient.numel(), self.copies, self.copy)
        return [gradient[low:high]]


class FullySharded(Bucketed):
    """ZeRO-3, ``data_parallel.DataParallel``.

    Args:
        mesh: with the groups of ``data_groups.data_mesh``. chunks: modules with ``layers``; their parameters become
            fp32 shards. parameters: of all chunks. options: ``param_dtype`` is that of what flat buffers hold.
    """

    kind, late_kind = Flat, ScatteredOnce

    def __init__(
        self, mesh: Mesh, chunks: Sequence[nn.Module], parameters: Sequence[Parameter], options: DataOptions
    ) -> None:
        layout = mesh.placement.layout
        self.knobs = layout.fsdp or Fsdp()
        self.once = layout.pp > 1
        self.roots = list(chunks)
        self.alone = {p.name for p in parameters if p.shared or mesh.group(data_axis(mesh.groups, p.expert)).size == 1}
        dealt = [p for p in parameters if p.name not in self.alone]
        self.sharded = list(_registered(mesh, chunks, dealt))
        self._wrap(mesh, parameters)
        super().__init__([p for p in parameters if p.name in self.alone], mesh.groups, options)
        self.device = mesh.device

    def _wrap(self, mesh: Mesh, parameters: Sequence[Parameter]) -> None:
        """Apply ``fully_shard`` to layers and chunks."""
        wide = torch.float64 if any(p.tensor.dtype == torch.float64 for p in parameters) else torch.float32
        for p in parameters:
            p.tensor.data = p.tensor.data.to(wide)
        whole, experts = _meshes(mesh)
        apart = {id(p.tensor) for p in parameters if p.expert} if experts is not None else set()

        def placed(tensor: nn.Parameter) -> ShardPlacementResult | None:
            return ShardPlacementResult(Shard(0), experts) if experts is not None and id(tensor) in apart else None

        options: dict[str, Any] = {
            "mesh": whole,
            "shard_placement_fn": placed if apart else None,
            "mp_policy": policy(self.knobs, wide),
            "ignored_params": {p.tensor for p in parameters if p.name in self.alone},
        }
        for root in self.roots:
            layers = list(root.layers) if self.knobs.wrap == "layer" else []  # type: ignore[arg-type]
            for layer in layers:
                fully_shard(layer, reshard_after_forward=self.knobs.reshard_after_forward and not self.once, **options)
            fully_shard(root, reshard_after_forward=False, **options)
            _configure(root, layers, self.knobs.prefetch, mesh.group("edp").pg if apart else None)
            if self.once:
                _synchronise(root, False)

    def _runs(self) -> list[Run]:
        runs = (Run(s.value, s.value.numel() if s.parameter.decay else 0) for s in self.sharded)
        return [*super()._runs(), *runs]

    def _gradients(self) -> list[Tensor]:
        return [*super()._gradients(), *(s.gradient for s in self.sharded)]

    def counted(self) -> list[Tensor]:
        """See ``Bucketed``."""
        return [*super().counted(), *(piece for s in self.sharded for piece in s.counted())]

    def finish_gradients(self) -> None:
        """See ``DataParallel``."""
        if self.once:
            for root in self.roots:
                with scope(phase="backward", fresh=True):
                    reduce_now(root)
        super().finish_gradients()
        classes = {s.parameter.sums for s in self.sharded if s.parameter.sums}
        for axes in sorted(classes, key=lambda axes: [SUMS.index(a) for a in axes]):
            gradients = [s.gradient for s in self.sharded if s.parameter.sums == axes]
            flat = torch.cat(gradients)
            for axis in axes:
                with scope(phase="backward", name=f"{axis} sums", fresh=True):
                    sum_copies(flat, self.groups[axis])
            for gradient, values in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(values)

    def drop_gradients(self) -> None:
        """See ``Bucketed``. Those of shards are freed."""
        super().drop_gradients()
        for s in self.sharded:
            s.dealt.grad = None
        if self.once:
            for root in self.roots:
                _synchronise(root, False)

    def gradients(self) -> Iterator[LocalPiece]:
        """See ``DataParallel``."""
        yield from super().gradients()
        for s in self.sharded:
            yield LocalPiece(s.parameter.name, "gradient", s.gradient, s.start)

    def pieces(self) -> Iterator[LocalPiece]:
        """See ``DataParallel``."""
        yield from super().pieces()
        for number, s in enumerate(self.sharded, len(self.flats)):
            yield LocalPiece(s.parameter.name, "weight", s.value, s.start)
            for key, tensors in self.optimizer.moments.items():
                yield LocalPiece(s.parameter.name, key, tensors[number], s.start)

    def resident(self) -> dict[str, list[Tensor]]:
        """See ``DataParallel``."""
        held = super().resident()
        held["weights"] += [s.value for s in self.sharded]
        held["gradients"] += [s.gradient for s in self.sharded if s.dealt.grad is not None]
        return held


def policy(knobs: Fsdp, wide: torch.dtype) -> MixedPrecisionPolicy:
    """Types of gathered parameters and of reduced gradients; a model in fp64 keeps to it."""
    if wide == torch.float64:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPES[knobs.param_dtype],
        reduce_dtype=TORCH_DTYPES[knobs.reduce_dtype],
        cast_forward_inputs=False,
    )


def reduce_now(root: nn.Module) -> None:
    """Reduce the gradients that backwards without reduction left at a chunk's parameters, the root's own first.

    Collective over the data ranks. The calls are those of torch.distributed.pipelining at the end of its step
    (``stage.perform_reduce_grad``).
    """
    _synchronise(root, True)
    state = fully_shard.state(root)  # type: ignore[attr-defined]
    for each in state._state_ctx.all_states:
        for group in each._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()


def _registered(mesh: Mesh, chunks: Sequence[nn.Module], parameters: Sequence[Parameter]) -> Iterator[Sharded]:
    """Where every parameter is registered, and the group that shares it out."""
    by_id = {id(p.tensor): p for p in parameters}
    copies = mesh.group("replicate")
    for chunk in chunks:
        for module in chunk.modules():
            for key, tensor in module._parameters.items():
                p = by_id.pop(id(tensor), None)
                if p is None:
                    continue
                if data_axis(mesh.groups, p.expert) == "edp":
                    yield Sharded(p, module, key, mesh.group("edp"))
                else:
                    yield Sharded(p, module, key, mesh.group("shard"), copies.size, copies.index)


def _configure(root: nn.Module, layers: Sequence[nn.Module], ahead: int, experts: dist.ProcessGroup | None) -> None:
    """Sums instead of means, names of what is sent, and which units are gathered ahead."""
    units = [root, *layers]
    for unit in units:
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_reduce_scatter_unused_params(True)
        number = getattr(unit, "number", None) if unit is not root else None
        # The public setters refuse a unit whose experts have their own ranks.
        for group in fully_shard.state(unit)._fsdp_param_groups:  # type: ignore[attr-defined]
            group._all_gather_comm = NamedGather(number, experts)
            group._reduce_scatter_comm = NamedScatter(number, experts)
    forward: list[Any] = units
    backward: list[Any] = list(layers)[::-1]
    for place, unit in enumerate(forward):
        unit.set_modules_to_forward_prefetch(forward[place + 1 : place + 1 + ahead])
    for place, unit in enumerate([root, *backward]):
        unit.set_modules_to_backward_prefetch(backward[place : place + ahead])


def _synchronise(root: nn.Module, now: bool) -> None:
    """Whether backwards of a chunk reduce gradients and give up gathered parameters."""
    assert isinstance(root, FSDPModule)
    root.set_is_last_backward(now)
    root.set_reshard_after_backward(now)
    root.set_requires_gradient_sync(now)


class _Named:
    """Says in the ledger what is sent: the unit's layer, and whether it is experts with their own group."""

    def __init__(self, layer: int | None, experts: dist.ProcessGroup | None) -> None:
        self.layer, self.experts = layer, experts

    def _scope(self, what: str, group: dist.ProcessGroup) -> scope:
        """A thread of the autograd engine knows no scope: it runs backwards."""
        name = f"expert {what}" if group is self.experts else what
        around = where()
        phase = around.phase or "backward"
        return scope(layer=self.layer, phase=phase, name=name, microbatch=around.microbatch, fresh=True)


class NamedGather(_Named, DefaultAllGather):
    """The all_gather of ``fully_shard``, named."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """See torch."""
        with self._scope("parameters", group):
            return super().__call__(output_tensor, input_tensor, group, async_op)


class NamedScatter(_Named, DefaultReduceScatter):
    """The reduce_scatter of ``fully_shard``, named."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work:
        """See torch."""
        with self._scope("gradients", group):
            return super().__call__(output_tensor, input_tensor, group, op, async_op)


def _meshes(mesh: Mesh) -> tuple[DeviceMesh, FSDPMeshInfo | None]:
    """Mesh over which parameters are dealt out, and that of experts where it is another one."""
    shard, copies, experts = mesh.group("shard"), mesh.group("replicate"), mesh.group("edp")
    if shard.size * copies.size == 1:
        return _device_mesh(mesh, [experts]), None
    whole = _device_mesh(mesh, [copies, shard] if copies.size > 1 else [shard])
    if data_axis(mesh.groups, True) == "dp+cp" or experts.size == 1:
        return whole, None
    return whole, FSDPMeshInfo(_device_mesh(mesh, [experts]), shard_mesh_dim=0)


def _device_mesh(mesh: Mesh, groups: Sequence[Group]) -> DeviceMesh:
    """The mesh of one or two dimensions that groups span: of (replicas, shards) the ranks in row-major order."""
    pgs = [group.pg for group in groups]
    assert all(pg is not None for pg in pgs)
    names = tuple(group.axis for group in groups)
    kind = mesh.device.type
    if len(groups) == 1:
        return DeviceMesh.from_group(pgs[0], kind, mesh_dim_names=names)  # type: ignore[arg-type]
    copies, shard = groups
    ranks = mesh.group("dp+cp").ranks
    grid = torch.tensor(ranks).view(copies.size, shard.size)
    return DeviceMesh.from_group(pgs, kind, mesh=grid, mesh_dim_names=names)  # type: ignore[arg-type]
