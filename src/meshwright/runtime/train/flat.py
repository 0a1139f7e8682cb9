"""Flat buffers: parameters one behind the other, and the part of their values, gradients and states that a rank keeps.

One class for every way to keep gradients: whole (ZeRO-0), whole until they are scattered once a step (ZeRO-1), and
scattered after every micro-batch (ZeRO-2). Gradients are sums over the data ranks, never means. Working parameters stay
whole in all three: every ``nn.Parameter`` becomes a view of the buffer.

Inside a buffer parameters with weight decay come first. A buffer that is dealt out is padded to a multiple of the ranks
(``moves.buckets.piece``); padding is zero and stays so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.moves import buckets
from meshwright.runtime.collectives import gather_into, scatter_into
from meshwright.runtime.mesh import Group
from meshwright.runtime.train.optimizer import Run
from meshwright.runtime.train.parameters import Parameter
from meshwright.runtime.train.pieces import LocalPiece
from meshwright.specs.shares import part


class Flat:
    """Parameters whose gradients are summed over one group and updated whole on all its ranks (ZeRO-0).

    Args:
        parameters: with one group, one chunk and one set of ``sums``. group: ranks that hold them alike.
        dtype: of the working parameters; None: as they are. In narrower types the values that are updated (``master``)
            are an fp32 copy of what the parameters held before.

    Attributes:
        numel: elements without padding. low, high: those that this rank updates, of the padded buffer.
        weight: working parameters, padded. master: values ``low`` to ``high`` that the optimizer updates; a view of
            ``weight`` unless ``separate``.
        gradient: sums of ``low`` to ``high``, valid when ``finish`` has returned.
    """

    sharded = False

    def __init__(self, parameters: Sequence[Parameter], group: Group, dtype: torch.dtype | None = None) -> None:
        self.parameters = sorted(parameters, key=lambda p: not p.decay)
        self.group, self.sums = group, parameters[0].sums
        self.experts = all(p.expert for p in parameters)
        sizes = [p.tensor.numel() for p in self.parameters]
        self.starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        self.numel = self.starts[-1]
        self.low, self.high, padded = self._bounds()
        first = parameters[0].tensor
        self.weight = first.new_zeros(padded, dtype=dtype or first.dtype)
        wide = torch.promote_types(first.dtype, torch.float32)
        self.separate = self.weight.dtype != wide
        values = first.new_zeros(padded, dtype=wide) if self.separate else self.weight
        with torch.no_grad():
            for p, low, high in self._slots():
                values[low:high].copy_(p.tensor.reshape(-1))
            self.weight.copy_(values)
        self.master = values[self.low : self.high].clone() if self.separate else self.weight[self.low : self.high]
        for p, low, high in self._slots():
            p.tensor.data = self.weight[low:high].view(p.tensor.shape)
        self.whole: Tensor | None = None
        self.work: dist.Work | None = None
        self.fresh = set(range(len(self.parameters)))
        self._allocate()

    def _bounds(self) -> tuple[int, int, int]:
        """First element that this rank updates, one past the last, and elements of the padded buffer."""
        return 0, self.numel, self.numel

    def _slots(self) -> Iterator[tuple[Parameter, int, int]]:
        yield from zip(self.parameters, self.starts, self.starts[1:], strict=False)

    def _allocate(self) -> None:
        """Make the buffer of gradients, whole; all of it but the padding is written before it is read."""
        self.whole = torch.zeros_like(self.weight, dtype=self.master.dtype)
        self.gradient = self.whole[self.low : self.high]

    def take(self, number: int) -> None:
        """Move the gradient of a parameter into the buffer, if it has one: the first is copied, others are added."""
        tensor = self.parameters[number].tensor
        if tensor.grad is None:
            return
        slot = self._open()[self.starts[number] : self.starts[number + 1]].view(tensor.shape)
        if number in self.fresh:
            slot.copy_(tensor.grad)
            self.fresh.discard(number)
        else:
            slot.add_(tensor.grad)
        tensor.grad = None

    def _open(self) -> Tensor:
        assert self.whole is not None
        return self.whole

    def take_all(self) -> None:
        """Move every gradient that lies at its parameter."""
        for number in range(len(self.parameters)):
            self.take(number)

    def launch(self) -> None:
        """Begin the reduction; parameters without a gradient take part with zero. Collective over the group."""
        whole = self._open()
        for number in sorted(self.fresh):
            whole[self.starts[number] : self.starts[number + 1]].zero_()
        self.fresh.clear()
        self.work = self._reduce(whole) if self.group.size > 1 else None

    def _reduce(self, whole: Tensor) -> dist.Work | None:
        work: dist.Work | None = dist.all_reduce(whole, group=self.group.pg, async_op=True)
        return work

    def wait(self) -> None:
        """Wait for what ``launch`` began."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def gather(self) -> None:
        """Bring the updated values into the working parameters. Collective where they are dealt out; see ``wait``."""
        own = self.weight[self.low : self.high]
        if self.separate:
            own.copy_(self.master)
        if self.sharded and self.group.size > 1:
            self.work = gather_into(self.weight, own, group=self.group.pg, async_op=True)

    def run(self) -> Run:
        """What the optimizer updates."""
        cut = sum(p.tensor.numel() for p in self.parameters if p.decay)
        return Run(self.master, min(max(cut, self.low), self.high) - self.low)

    def restart(self) -> None:
        """The step is over: gradients that come now begin a new sum."""
        self.fresh = set(range(len(self.parameters)))

    def counted(self) -> list[Tensor]:
        """Gradients that this rank counts in norms: replicas of one piece take a share each."""
        low, high = self.low, self.high
        if not self.sharded:
            low, high = part(self.numel, self.group.size, self.group.index)
        kept = ((max(low, a), min(high, b)) for p, a, b in self._slots() if p.counted)
        return [self.gradient[a - self.low : b - self.low] for a, b in kept if a < b]

    def pieces(self, kind: str, values: Tensor) -> Iterator[LocalPiece]:
        """Runs of single parameters in a tensor like ``master``."""
        for p, a, b in self._slots():
            low, high = max(a, self.low), min(b, self.high)
            if low < high:
                yield LocalPiece(p.name, kind, values[low - self.low : high - self.low], low - a)


class ScatteredOnce(Flat):
    """Gradients are whole until the last micro-batch and then scattered, in place; states are sharded (ZeRO-1)."""

    sharded = True

    def _bounds(self) -> tuple[int, int, int]:
        each = buckets.piece(self.numel, self.group.size)
        return self.group.index * each, (self.group.index + 1) * each, self.group.size * each

    def _reduce(self, whole: Tensor) -> dist.Work | None:
        work: dist.Work | None = scatter_into(self.gradient, whole, group=self.group.pg, async_op=True)
        return work


class ScatteredEach(ScatteredOnce):
    """Gradients are scattered after every micro-batch and summed in this rank's piece (ZeRO-2).

    The whole buffer lives from the first gradient of a backward to the end of its reduction.
    """

    def _allocate(self) -> None:
        self.gradient = torch.zeros_like(self.master)
        self.arrived: Tensor | None = None
        self.begun = False

    def _open(self) -> Tensor:
        if self.whole is None:
            self.whole = torch.zeros_like(self.weight, dtype=self.master.dtype)
        return self.whole

    def _reduce(self, whole: Tensor) -> dist.Work | None:
        self.arrived = torch.empty_like(self.gradient)
        work: dist.Work | None = scatter_into(self.arrived, whole, group=self.group.pg, async_op=True)
        return work

    def wait(self) -> None:
        """Wait for what ``launch`` began and add this rank's piece to its sum."""
        super().wait()
        if self.arrived is not None:
            self.gradient.add_(self.arrived) if self.begun else self.gradient.copy_(self.arrived)
            self.begun, self.arrived, self.whole = True, None, None
            super().restart()

    def restart(self) -> None:
        """See ``Flat``."""
        super().restart()
        self.begun = False
