"""Layers and wrappers of torch that insist on a GPU: synchronised batch norm, FSDP1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class _Statistics(torch.autograd.Function):
    """The two collectives of SyncBatchNorm: statistics are gathered forward, gradient sums are reduced backward.

    Sizes are those of torch 2.13 torch/nn/modules/_functions.py: 2 C + 1 numbers a rank gathered, 2 C reduced. The
    layer itself is normalised by the rank's own statistics; only what is sent is the same.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        """Gather."""
        channels, size = x.shape[1], dist.get_world_size(group)
        ctx.channels, ctx.group = channels, group
        mine = torch.zeros(1, 2 * channels + 1)
        dist.all_gather_into_tensor(torch.empty(size, 2 * channels + 1), mine, group)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Reduce."""
        dist.all_reduce(torch.zeros(2 * ctx.channels), group=ctx.group)
        return gradients[0], None


def _batch_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        if not (self.training and dist.is_initialized()):
            return original(self, x)
        group = self.process_group or dist.group.WORLD
        if dist.get_world_size(group) > 1:
            x = _Statistics.apply(x, group)  # type: ignore[no-untyped-call]
        mean, var = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return nn.functional.batch_norm(x, mean, var, self.weight, self.bias, True, self.momentum or 0.1, self.eps)

    return forward


def _on_cpu(original: Callable[..., None]) -> Callable[..., None]:
    """FSDP1 takes the device from ``device_id``, or asks the accelerator."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["device_id"] = torch.device("cpu")
        original(self, *args, **kwargs)

    return init


def install() -> None:
    """Patch them for this process."""
    from torch.distributed.fsdp import FullyShardedDataParallel, _init_utils
    from torch.nn.parallel import DistributedDataParallel

    norm: Any = nn.SyncBatchNorm
    norm.forward = _batch_norm(norm.forward)
    parallel: Any = DistributedDataParallel
    parallel._passing_sync_batchnorm_handle = lambda self, module: None
    sharded: Any = FullyShardedDataParallel
    sharded.__init__ = _on_cpu(sharded.__init__)
    checks: Any = _init_utils
    checks._check_module_states_for_sync_module_states = lambda states: None
