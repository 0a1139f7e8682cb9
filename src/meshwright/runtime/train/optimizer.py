"""AdamW and SGD on the pieces that a rank updates: fp32 values and moments, whatever the working parameters are in.

The updates are those of torch (``torch._fused_adamw_``, ``torch._fused_sgd_``, the kernels behind
``torch.optim.AdamW(fused=True)`` and ``torch.optim.SGD(fused=True)``), applied to runs of flat buffers. They work
element by element, so a step is the same however the elements are cut into pieces, but for the last bit: the kernels
round the elements that do not fill a vector otherwise.

Weight decay: AdamW multiplies the value (decoupled: Loshchilov and Hutter 2019, arXiv 1711.05101), SGD adds to the
gradient. Which elements it touches is ``parameters.decays``: matrices, but no norm, no bias and no embedding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from meshwright.errors import InputError


@dataclass(frozen=True, slots=True)
class Settings:
    """Numbers of the optimizer.

    Attributes:
        kind: ``adamw`` or ``sgd``.
        betas, eps: of AdamW. momentum: of SGD.
        weight_decay: see the module.
    """

    kind: Literal["adamw", "sgd"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.9
    weight_decay: float = 0.1


@dataclass(frozen=True, slots=True)
class Run:
    """Elements that lie one behind the other.

    Attributes:
        value: ``(n,)``, updated in place; fp32, or fp64 in a run of that precision.
        decayed: weight decay applies to so many of the first.
    """

    value: Tensor
    decayed: int


class Optimizer(Protocol):
    """What data parallelism needs of an optimizer.

    Attributes:
        steps: updates so far; may be set after a load.
        moments: by name (``exp_avg``, ``exp_avg_sq``, ``momentum``) one tensor for every run, like its value.
    """

    steps: int
    moments: dict[str, list[Tensor]]

    def step(self, gradients: Sequence[Tensor], rate: float) -> None:
        """Update every run by its gradient (of the same shape and element type)."""


def make_optimizer(settings: Settings, runs: Sequence[Run]) -> Optimizer:
    """The optimizer of some runs; its moments are zero.

    Raises:
        InputError: an unknown kind.
    """
    known = {"adamw": AdamW, "sgd": Sgd}
    if settings.kind not in known:
        raise InputError(f"optimizer {settings.kind!r} cannot be run; choose one of {', '.join(known)}")
    return known[settings.kind](settings, runs)


class _Optimizer(ABC):
    """Runs cut where weight decay ends, and moments like their values."""

    def __init__(self, settings: Settings, runs: Sequence[Run], keys: Sequence[str]) -> None:
        self.settings, self.runs, self.steps = settings, tuple(runs), 0
        self.moments = {key: [torch.zeros_like(run.value) for run in runs] for key in keys}

    def _parts(self, tensors: Sequence[Tensor], decay: bool) -> list[Tensor]:
        """Of tensors like the runs what weight decay touches, or the rest; without empty ones."""
        parts = (x[: run.decayed] if decay else x[run.decayed :] for x, run in zip(tensors, self.runs, strict=True))
        return [part for part in parts if part.numel()]

    def step(self, gradients: Sequence[Tensor], rate: float) -> None:
        """See ``Optimizer``."""
        self.steps += 1
        for decay in (True, False):
            values = self._parts([run.value for run in self.runs], decay)
            if values:
                moments = [self._parts(of, decay) for of in self.moments.values()]
                weight_decay = self.settings.weight_decay if decay else 0.0
                self._update(values, self._parts(gradients, decay), moments, rate, weight_decay)

    @abstractmethod
    def _update(
        self,
        values: list[Tensor],
        gradients: list[Tensor],
        moments: list[list[Tensor]],
        rate: float,
        weight_decay: float,
    ) -> None:
        """One call of torch's kernel for runs of one weight decay; ``moments`` by key."""


class AdamW(_Optimizer):
    """Adam with decoupled weight decay and bias correction."""

    def __init__(self, settings: Settings, runs: Sequence[Run]) -> None:
        super().__init__(settings, runs, ("exp_avg", "exp_avg_sq"))

    def _update(
        self,
        values: list[Tensor],
        gradients: list[Tensor],
        moments: list[list[Tensor]],
        rate: float,
        weight_decay: float,
    ) -> None:
        count = torch.tensor(float(self.steps), device=values[0].device)
        first, second = moments
        torch._fused_adamw_(
            values,
            gradients,
            first,
            second,
            [],
            [count] * len(values),
            lr=rate,
            beta1=self.settings.betas[0],
            beta2=self.settings.betas[1],
            weight_decay=weight_decay,
            eps=self.settings.eps,
            amsgrad=False,
            maximize=False,
        )


class Sgd(_Optimizer):
    """Gradient descent with momentum: the first step takes the gradient itself, as the sum starts from zero."""

    def __init__(self, settings: Settings, runs: Sequence[Run]) -> None:
        super().__init__(settings, runs, ("momentum",) if settings.momentum else ())

    def _update(
        self,
        values: list[Tensor],
        gradients: list[Tensor],
        moments: list[list[Tensor]],
        rate: float,
        weight_decay: float,
    ) -> None:
        torch._fused_sgd_(
            values,
            gradients,
            *(moments or [[]]),
            weight_decay=weight_decay,
            momentum=self.settings.momentum,
            lr=rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )
