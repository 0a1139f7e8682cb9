"""Data parallelism: how gradients become sums over the data ranks, who updates what, and how parameters come back.

One class for every ZeRO stage (Rajbhandari et al. 2020, arXiv 1910.02054) behind one interface:

* 0, ``Replicated``: all_reduce of gradients; every rank updates everything.
* 1, ``ShardedStates``: reduce_scatter once a step, AdamW on a piece, all_gather of parameters.
* 2, ``ShardedGradients``: the same, but gradients are scattered after every micro-batch.
* 3, ``fsdp.FullySharded``: parameters are dealt out too (torch ``fully_shard``).

Stages 0 to 2 reduce flat buffers (``flat``) that are filled by hooks and launched while the backward goes on, in one
fixed order: that in which the backward of a chunk gets to them, and never one before its predecessor, so that all ranks
launch alike, whatever order their gradients come in and whether or not a parameter got one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.moves import buckets
from meshwright.runtime.collectives import all_reduce
from meshwright.runtime.mesh import Group
from meshwright.runtime.scope import scope
from meshwright.runtime.train import clip
from meshwright.runtime.train.flat import Flat, ScatteredEach, ScatteredOnce
from meshwright.runtime.train.optimizer import Optimizer, Run, Settings, make_optimizer
from meshwright.runtime.train.parameters import SUMS, Parameter
from meshwright.runtime.train.pieces import LocalPiece


class NonFiniteGradient(MeshwrightError):
    """The norm of the gradient is not a number or infinite: all ranks raise it, before anything is updated."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class DataOptions:
    """How a rank trains its parameters.

    Attributes:
        optimizer: its numbers.
        param_dtype: of working parameters; None: as they are given. Narrower than fp32: fp32 masters are kept.
        bucket_elements: a bucket is closed when it has so many (``moves.buckets.fill``).
        norm: 2 or inf, of the clip norm.
    """

    optimizer: Settings = field(default_factory=Settings)
    param_dtype: torch.dtype | None = None
    bucket_elements: int = buckets.BUCKET_ELEMENTS
    norm: float = 2.0


class DataParallel(Protocol):
    """What a training step asks of data parallelism. All ranks call the same in the same order.

    Attributes:
        optimizer: of this rank's part.
    """

    optimizer: Optimizer

    def before_backward(self, chunk: int, last: bool) -> None:
        """The backward of a micro-batch through one chunk begins; reductions may be launched in it.

        Not for a backward that is split in two: there ``microbatch_done`` alone launches.

        Args:
            chunk: number in the rank's list. last: no other micro-batch of the step follows through this chunk.
        """

    def microbatch_done(self, chunk: int, last: bool) -> None:
        """All gradients of a micro-batch through one chunk are there."""

    def finish_gradients(self) -> None:
        """Wait for all reductions and make the sums that follow them: gradients are then those of the whole batch."""

    def update(self, rate: float, most: float | None = None) -> float:
        """Clip to norm ``most``, update, bring parameters back; returns the norm before clipping.

        Raises:
            NonFiniteGradient: the norm is not finite.
        """

    def gradients(self) -> Iterator[LocalPiece]:
        """Gradients of this rank's part, after ``finish_gradients`` and before ``update``."""

    def pieces(self) -> Iterator[LocalPiece]:
        """Values and moments of this rank's part: live storage."""

    def loaded(self) -> None:
        """Values were written into ``pieces``: bring them into the working parameters. Collective."""

    def counters(self) -> dict[str, int]:
        """Numbers that belong to the optimizer's state."""

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """Take them from a checkpoint."""

    def resident(self) -> dict[str, list[Tensor]]:
        """Storage that stays from step to step: ``weights``, ``gradients``, ``optimizer``."""


class Bucketed:
    """Stages 0 to 2: ``DataParallel`` over flat buffers.

    Args:
        parameters: of all chunks of this rank. groups: ``dp+cp``, ``edp``, ``world`` and the axes in ``sums``.
        options: see there.
    """

    #: Kind of buffer of gradients that are complete after each backward, and of those that are not.
    kind: type[Flat] = Flat
    late_kind: type[Flat] = Flat
    #: Whether gradients are reduced after every micro-batch.
    each = False

    def __init__(self, parameters: Sequence[Parameter], groups: Mapping[str, Group], options: DataOptions) -> None:
        self.groups, self.options = groups, options
        self.device = parameters[0].tensor.device if parameters else torch.device("cpu")
        self.chunks: dict[int, list[Flat]] = {}
        for p in parameters:
            self.chunks.setdefault(p.chunk, [])
        for chunk, flats in self.chunks.items():
            flats += self._buckets([p for p in parameters if p.chunk == chunk and not p.late])
        self.late = list(self._late([p for p in parameters if p.late]))
        self.flats = [*(flat for flats in self.chunks.values() for flat in flats), *self.late]
        self.optimizer = make_optimizer(options.optimizer, self._runs())
        self._armed: dict[int, list[set[int]]] = {}
        self._next = dict.fromkeys(self.chunks, 0)
        for chunk, flats in self.chunks.items():
            for place, flat in enumerate(flats):
                self._watch(flat, chunk, place)
        for flat in self.late:
            self._watch(flat, None, 0)

    def _group(self, p: Parameter) -> Group:
        return self.groups[data_axis(self.groups, p.expert)]

    def _buckets(self, parameters: Sequence[Parameter]) -> Iterator[Flat]:
        """Buffers of a chunk in the order of its backward: last units first; dense parameters before experts."""
        units = sorted({p.unit for p in parameters}, reverse=True)
        sizes = [sum(p.tensor.numel() for p in parameters if p.unit == unit) for unit in units]
        for low, high in buckets.fill(sizes, self.options.bucket_elements):
            held = [p for unit in units[low:high] for p in parameters if p.unit == unit]
            yield from self._by_group(held, self.kind)

    def _late(self, parameters: Sequence[Parameter]) -> Iterator[Flat]:
        """Buffers of what is reduced at the end of the step, by the axes of its sums."""
        classes = sorted({p.sums for p in parameters}, key=lambda axes: [SUMS.index(a) for a in axes])
        for axes in classes:
            yield from self._by_group([p for p in parameters if p.sums == axes], self.late_kind)

    def _by_group(self, parameters: Sequence[Parameter], kind: type[Flat]) -> Iterator[Flat]:
        dtype = self.options.param_dtype
        for axis in dict.fromkeys(data_axis(self.groups, expert) for expert in (False, True)):
            held = [p for p in parameters if data_axis(self.groups, p.expert) == axis]
            if held:
                yield (kind if self.groups[axis].size > 1 else Flat)(held, self.groups[axis], dtype)

    def _watch(self, flat: Flat, chunk: int | None, place: int) -> None:
        """Let every gradient go to its buffer as soon as it is accumulated."""

        def hook(number: int) -> Callable[[Tensor], None]:
            def taken(_: Tensor) -> None:
                flat.take(number)
                if chunk is not None and chunk in self._armed:
                    self._armed[chunk][place].discard(number)
                    self._launch_ready(chunk)

            return taken

        for number, p in enumerate(flat.parameters):
            p.tensor.register_post_accumulate_grad_hook(hook(number))

    def before_backward(self, chunk: int, last: bool) -> None:
        """See ``DataParallel``."""
        if chunk in self.chunks and (last or self.each):
            self._armed[chunk] = [set(range(len(flat.parameters))) for flat in self.chunks[chunk]]

    def _launch_ready(self, chunk: int) -> None:
        """Launch the buffers of a chunk that have all gradients, up to the first that has not."""
        flats, waits = self.chunks[chunk], self._armed[chunk]
        while self._next[chunk] < len(flats) and not waits[self._next[chunk]]:
            self._launch(flats[self._next[chunk]])
            self._next[chunk] += 1

    def _launch(self, flat: Flat) -> None:
        name = "expert gradients" if flat.experts else "gradients"
        with scope(phase="backward", name=f"replicated {name}" if flat.sums else name, fresh=True):
            flat.launch()

    def microbatch_done(self, chunk: int, last: bool) -> None:
        """See ``DataParallel``."""
        flats = self.chunks.get(chunk, [])
        for flat in (*flats, *self.late):
            flat.take_all()
        self._armed.pop(chunk, None)
        if last or self.each:
            for flat in flats[self._next.get(chunk, 0) :]:
                self._launch(flat)
            self._next[chunk] = 0
        if self.each:
            for flat in flats:
                flat.wait()

    def finish_gradients(self) -> None:
        """See ``DataParallel``."""
        for flat in self.late:
            self._launch(flat)
        for flat in self.flats:
            flat.wait()
        for flat in self.late:
            for axis in flat.sums:
                with scope(phase="backward", name=f"{axis} sums", fresh=True):
                    sum_copies(flat.gradient, self.groups[axis])

    def update(self, rate: float, most: float | None = None) -> float:
        """See ``DataParallel``."""
        gradients = self._gradients()
        try:
            norm = clipped(self.counted(), gradients, self.groups["world"], self.device, most, self.options.norm)
            self.optimizer.step(gradients, rate)
        finally:
            self.drop_gradients()
        self.loaded()
        return norm

    def drop_gradients(self) -> None:
        """Those that come now begin a new sum."""
        for flat in self.flats:
            flat.restart()

    def _runs(self) -> list[Run]:
        """What the optimizer updates."""
        return [flat.run() for flat in self.flats]

    def _gradients(self) -> list[Tensor]:
        """Gradients of the runs."""
        return [flat.gradient for flat in self.flats]

    def counted(self) -> list[Tensor]:
        """Gradients that this rank counts in the norm."""
        return [piece for flat in self.flats for piece in flat.counted()]

    def loaded(self) -> None:
        """See ``DataParallel``."""
        with scope(phase="optimizer", name="parameters", fresh=True):
            for flat in reversed(self.flats):
                flat.gather()
        for flat in reversed(self.flats):
            flat.wait()

    def counters(self) -> dict[str, int]:
        """See ``DataParallel``."""
        return {"steps": self.optimizer.steps}

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """See ``DataParallel``."""
        self.optimizer.steps = counters["steps"]

    def gradients(self) -> Iterator[LocalPiece]:
        """See ``DataParallel``."""
        for flat in self.flats:
            yield from flat.pieces("gradient", flat.gradient)

    def pieces(self) -> Iterator[LocalPiece]:
        """See ``DataParallel``."""
        for number, flat in enumerate(self.flats):
            yield from flat.pieces("weight", flat.master)
            for key, tensors in self.optimizer.moments.items():
                yield from flat.pieces(key, tensors[number])

    def resident(self) -> dict[str, list[Tensor]]:
        """See ``DataParallel``."""
        moments = [x for tensors in self.optimizer.moments.values() for x in tensors]
        return {
            "weights": [flat.weight for flat in self.flats],
            "gradients": [flat.gradient if flat.whole is None else flat.whole for flat in self.flats],
            "optimizer": [*moments, *(flat.master for flat in self.flats if flat.separate)],
        }


class Replicated(Bucketed):
    """ZeRO-0."""


class ShardedStates(Bucketed):
    """ZeRO-1."""

    kind = late_kind = ScatteredOnce


class ShardedGradients(Bucketed):
    """ZeRO-2."""

    kind, late_kind, each = ScatteredEach, ScatteredOnce, True


def data_axis(groups: Mapping[str, Group], expert: bool) -> str:
    """Axis of the ranks that hold a parameter alike; experts have their own where these are other ranks."""
    return "edp" if expert and groups["edp"].ranks != groups["dp+cp"].ranks else "dp+cp"


def sum_copies(gradient: Tensor, group: Group) -> None:
    """Sum of the gradients of copies that saw different work, in place on all of them. Collective."""
    all_reduce(gradient, group)


def clipped(
    counted: Sequence[Tensor],
    gradients: Sequence[Tensor],
    world: Group,
    device: torch.device,
    most: float | None,
    kind: float,
) -> float:
    """Norm of the whole gradient; gradients are scaled in place so that it is at most ``most``. Collective.

    Raises:
        NonFiniteGradient: the norm is not finite.
    """
    with scope(phase="optimizer", name="gradient norm", fresh=True):
        norm = clip.total_norm(counted, world, device, kind)
    if not norm < float("inf"):
        raise NonFiniteGradient(f"the norm of the gradient is {norm}; take a lower learning rate or look at the data")
    scale = clip.factor(norm, most)
    present = [x for x in gradients if x.numel()]
    if scale < 1 and present:
        torch._foreach_mul_(present, scale)
    return norm
