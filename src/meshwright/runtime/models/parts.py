"""The pieces blocks are made of, and the weights of one layer sorted by role, product and part.

Nothing here knows a tensor by name: role, ``op`` and ``part`` come from the tensor table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.errors import InputError
from meshwright.runtime.differentiable import RmsNorm
from meshwright.runtime.linear import linear
from meshwright.runtime.models.attention import Scores, attend, one
from meshwright.runtime.parallel.context import ContextParallel, Unfold
from meshwright.runtime.serve.cache import Batch, PagedCache
from meshwright.specs.placement import Shard

#: Activations by their names in ``Settings``.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}

#: Cosine and sine of the positions of a pass.
Turned = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers share in one pass.

    Attributes:
        batch: its tokens. cache: of this rank.
        turned: ``Decoder.rotary``: one pair for every kind of rotary positions of the model.
        context: attention over all ranks of cp; None: over the cache of this rank alone.
    """

    batch: Batch
    cache: PagedCache
    turned: tuple[Turned, ...]
    context: ContextParallel | None = None

    def keep(self, layer: int, k_THd: Tensor, v_THd: Tensor) -> None:
        """Write keys and values of the pass into the cache of a layer."""
        self.cache.write(layer, self.batch.slots_T, *self.batch.stored(k_THd, v_THd))

    def attend(self, q_THd: Tensor, layer: int, how: Scores) -> Tensor:
        """Attention of queries of the pass to the cache of a layer: ``(T, H v)``."""
        return (self.context.attend if self.context else attend)(q_THd, layer, self.batch, self.cache, how)

    def unfolded(self, q_THd: Tensor, layer: int, how: Scores, unfold: Unfold, weight: Tensor) -> Tensor:
        """The same where keys and values are made of what the cache holds: ``(T, H v)``.

        Args:
            unfold: makes them. weight: which it multiplies with, for its gradient (training).
        """
        b = self.batch
        pairs = [self.cache.read(layer, b.table_BM[row], n) for row, n in enumerate(b.contexts)]
        left, right = (torch.cat(side) for side in zip(*pairs, strict=True))
        if self.context is not None:
            return self.context.prefill(q_THd, left, right, b, how, unfold)
        k, v = unfold(left, right)
        rows = zip(q_THd.split(b.lengths), k.split(b.contexts), v.split(b.contexts), strict=True)
        return torch.cat([one(q_T, k_S, v_S, how) for q_T, k_S, v_S in rows]).flatten(1)


class Part(Protocol):
    """A mixer or a feed-forward block: hidden states after the norm in, what the residual adds out.

    It enters and leaves tensor parallelism itself (``parallel.tensor.Edges``).
    """

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        """Run the block on the tokens of a pass."""
        ...


@dataclass(frozen=True, slots=True)
class Linear:
    """``x W^T + b`` with this rank's rows or columns of W."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply and add the bias."""
        return linear(x, self.weight, self.bias)

    def partial(self, x: Tensor) -> Tensor:
        """Multiply only: the bias of a row-parallel product is added once, after the sum."""
        return linear(x, self.weight)


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm over the last dimension; ``offset`` is added to its weight."""

    weight: Tensor
    eps: float
    offset: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise; with an offset in fp32, because 1 + w of bf16 would lose what w holds."""
        if torch.is_grad_enabled():
            out: Tensor = RmsNorm.apply(x, self.weight, self.eps, self.offset)  # type: ignore[no-untyped-call]
            return out
        if not self.offset and x.dtype == torch.float32:
            return _normed(x, self.eps) * self.weight
        if not self.offset:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = self.weight.float() + self.offset
        return F.rms_norm(x.float(), wide.shape, wide, self.eps).to(x.dtype)


def _normed(x: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)`` in half the time of ``F.rms_norm`` on CPU (torch 2.13, 16 x 256: 26 of 54 us)."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    shrink: Tensor = (length * length / x.shape[-1] + eps).rsqrt_()
    return x * shrink


@dataclass(slots=True)
class LayerWeights:
    """One layer's weights on this rank.

    Attributes:
        layer: its number.
        tensors: by ``(role, op)``: by part (``weight``, ``bias``, ...); not those of single experts.
        experts: by op: by part: one tensor for every expert held, in order of ``held``.
        held: numbers of the experts that this rank holds, for families stored expert by expert.
        plain: tensors without an op by role, in the order of the table (norms, sinks).
        shards: of the layer, for whoever needs the intervals.
    """

    layer: int
    tensors: dict[tuple[str, str], dict[str, Tensor]] = field(default_factory=dict)
    experts: dict[str, dict[str, list[Tensor]]] = field(default_factory=dict)
    held: tuple[int, ...] = ()
    plain: dict[str, list[Tensor]] = field(default_factory=dict)
    shards: list[Shard] = field(default_factory=list)

    def linear(self, role: str, op: str) -> Linear:
        """The product ``op`` of a role.

        Raises:
            InputError: the tensor table has none.
        """
        found = self.tensors.get((role, op))
        if found is None:
            raise InputError(f"layer {self.layer}: no {role} weight {op!r}; the runtime cannot run this model")
        return Linear(found["weight"], found.get("bias"))

    def norms(self, role: str, eps: float, offset: float = 0.0) -> tuple[Norm, ...]:
        """Norms of a role in the order of the table."""
        return tuple(Norm(weight, eps, offset) for weight in self.plain.get(role, ()))


def layer_weights(layer: int, shards: Sequence[Shard], weights: Mapping[str, Tensor]) -> LayerWeights:
    """Sort the weights of a layer."""
    out = LayerWeights(layer)
    for shard in shards:
        family = shard.family
        if layer not in shard.layers:
            continue
        out.shards.append(shard)
        name = family.template.replace("{layer}", str(layer))
        if family.experts:
            out.held = shard.experts
            part = out.experts.setdefault(str(family.op), {}).setdefault(family.part, [])
            part += [weights[name.replace("{expert}", str(expert))] for expert in shard.experts]
        elif family.op:
            out.tensors.setdefault((family.role, family.op), {})[family.part] = weights[name]
        else:
            out.plain.setdefault(family.role, []).append(weights[name])
    return out
