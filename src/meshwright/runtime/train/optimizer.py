"""AdamW and SGD on the pieces that a rank updates: fp32 values and moments, whatever the working parameters are in.

The updates are those of torch (``torch._fused_adamw_``, ``torch._fused_sgd_``, the kernels behind
``torch.optim.AdamW(fused=True)`` and ``torch.optim.SGD(fused=True)``), applied to runs of flat buffers. They work
element by element, so a step is the same however the elements are cut into pieces.

Weight decay: AdamW multiplies the value (decoupled: Loshchilov and Hutter 2019, arXiv 1711.05101), SGD adds to the
gradient. Which elements it touches is ``parameters.decays``: matrices, but no norm, no bias and no embedding.
"""

from __future__ import annotations

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
    """Elements that are updated alike.

    Attributes:
        value: updated in place; fp32, or fp64 in a run of that precision.
        decay: whether weight decay applies.
    """

    value: Tensor
    decay: bool


class Optimizer(Protocol):
    """What the data parallel stages need of an optimizer.

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


def _by_decay(runs: Sequence[Run]) -> list[tuple[bool, list[int]]]:
    """Numbers of the runs that have elements, with and without weight decay."""
    both = ((decay, [i for i, run in enumerate(runs) if run.decay == decay and run.value.numel()]) for decay in (1, 0))
    return [(bool(decay), found) for decay, found in both if found]


class AdamW:
    """Adam with decoupled weight decay and bias correction."""

    def __init__(self, settings: Settings, runs: Sequence[Run]) -> None:
        self.settings, self.runs, self.steps = settings, tuple(runs), 0
        self.moments = {key: [torch.zeros_like(run.value) for run in runs] for key in ("exp_avg", "exp_avg_sq")}

    def step(self, gradients: Sequence[Tensor], rate: float) -> None:
        """See ``Optimizer``."""
        self.steps += 1
        s = self.settings
        for decay, numbers in _by_decay(self.runs):
            values = [self.runs[i].value for i in numbers]
            count = torch.tensor(float(self.steps), device=values[0].device)
            torch._fused_adamw_(
                values,
                [gradients[i] for i in numbers],
                [self.moments["exp_avg"][i] for i in numbers],
                [self.moments["exp_avg_sq"][i] for i in numbers],
                [],
                [count] * len(numbers),
                lr=rate,
                beta1=s.betas[0],
                beta2=s.betas[1],
                weight_decay=s.weight_decay if decay else 0.0,
                eps=s.eps,
                amsgrad=False,
                maximize=False,
            )


class Sgd:
    """Gradient descent with momentum: the first step takes the gradient itself, as the sum starts from zero."""

    def __init__(self, settings: Settings, runs: Sequence[Run]) -> None:
        self.settings, self.runs, self.steps = settings, tuple(runs), 0
        kept = runs if settings.momentum else ()
        self.moments = {"momentum": [torch.zeros_like(run.value) for run in kept]} if settings.momentum else {}

    def step(self, gradients: Sequence[Tensor], rate: float) -> None:
        """See ``Optimizer``."""
        self.steps += 1
        s = self.settings
        for decay, numbers in _by_decay(self.runs):
            torch._fused_sgd_(
                [self.runs[i].value for i in numbers],
                [gradients[i] for i in numbers],
                [self.moments["momentum"][i] for i in numbers] if s.momentum else [],
                weight_decay=s.weight_decay if decay else 0.0,
                momentum=s.momentum,
                lr=rate,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
            )
