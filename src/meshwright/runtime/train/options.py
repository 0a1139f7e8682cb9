"""What a training run is told beside model, layout and data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from meshwright.errors import InputError
from meshwright.runtime.train.lr import Cosine
from meshwright.runtime.train.optimizer import Settings


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Numbers of a training run.

    Attributes:
        optimizer: kind and numbers of the optimizer.
        rate: learning rate by step.
        clip: largest norm of the whole gradient; None: no bound.
        dtype: of the working parameters and of the computation: ``f32``, ``bf16``, or ``f64`` for proofs. Gradients are
            accumulated and reduced in fp32 (``f64``: in fp64), and so are master weights and moments.
        recompute: activations dropped in the forward: ``none``, ``selective`` (attention core), ``full`` (a layer).
        recompute_layers: layers a chunk that ``full`` applies to; None: all.
        aux: weight of the load-balancing loss of a mixture of experts; 0: none.
        bias_rate: step by which the balancing bias of a router moves; 0: it stays.
        seed: of whatever is drawn.

    Raises:
        InputError: a value out of range.
    """

    optimizer: Settings = field(default_factory=Settings)
    rate: Cosine = field(default_factory=lambda: Cosine(3e-4))
    clip: float | None = 1.0
    dtype: Literal["f32", "bf16", "f64"] = "f32"
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_layers: int | None = None
    aux: float = 0.0
    bias_rate: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise InputError(f"clip {self.clip:g} is no bound of a norm; it must be above 0")
        if self.dtype not in {"f32", "bf16", "f64"}:
            raise InputError(f"dtype {self.dtype[:10]!r} for training; choose f32, bf16 or f64")
