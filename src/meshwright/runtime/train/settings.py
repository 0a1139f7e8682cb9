"""Numbers of a run as plain values: written into every checkpoint, read back by a run that goes on. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from meshwright.errors import InputError
from meshwright.specs.workload import Train

if TYPE_CHECKING:
    from meshwright.runtime.train.options import TrainOptions


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a run is told beside model, layout and data.

    Attributes:
        steps: of the whole run. seq: tokens of a sequence. global_batch: sequences of a step over all ranks.
        lr: highest learning rate. warmup: steps up to it. floor: share of it at the end.
        optimizer: ``adamw`` or ``sgd``. weight_decay: of matrices. clip: largest norm of the gradient; 0: no bound.
        recompute: ``none``, ``selective``, ``full``. dtype: of the computation: ``f32``, ``bf16``.
        aux: weight of the load-balancing loss of experts; 0: none. bias_rate: step of a balancing bias.
        seed: of the order of samples and of random weights.
        save_every: steps between checkpoints; 0: only at the end. keep: checkpoints that stay.
    """

    steps: int = 100
    seq: int = 512
    global_batch: int = 8
    lr: float = 3e-4
    warmup: int = 0
    floor: float = 0.1
    optimizer: Literal["adamw", "sgd"] = "adamw"
    weight_decay: float = 0.1
    clip: float = 1.0
    recompute: Literal["none", "selective", "full"] = "none"
    dtype: Literal["f32", "bf16"] = "f32"
    aux: float = 0.0
    bias_rate: float = 0.0
    seed: int = 0
    save_every: int = 0
    keep: int = 2

    def options(self) -> TrainOptions:
        """The same for a training step. Imports torch.

        Raises:
            InputError: a value out of range.
        """
        from meshwright.runtime.train.lr import Cosine
        from meshwright.runtime.train.optimizer import Settings
        from meshwright.runtime.train.options import TrainOptions

        return TrainOptions(
            Settings(self.optimizer, weight_decay=self.weight_decay),
            Cosine(self.lr, self.warmup, self.steps, self.floor),
            self.clip or None,
            self.dtype,
            self.recompute,
            aux=self.aux,
            bias_rate=self.bias_rate,
            seed=self.seed,
        )

    def workload(self) -> Train:
        """The same for the rules of a layout."""
        return Train(self.seq, self.global_batch, self.optimizer, self.recompute, param_dtype=self.dtype, dropout=0.0)

    def changed(self, given: Mapping[str, Any]) -> RunSettings:
        """With the values that are not None in ``given``."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def settings_from(raw: Any, where: str) -> RunSettings:
    """Settings as a checkpoint holds them.

    Raises:
        InputError: malformed.
    """
    known = {field.name: field.default for field in fields(RunSettings)}
    try:
        for name, value in raw.items():
            kind = (int, float) if isinstance(known[name], float) else type(known[name])
            if not isinstance(value, kind) or isinstance(value, bool):
                raise TypeError(name)
        return RunSettings(**raw)
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(f"{where}: settings of a run are malformed ({str(error)[:60]})") from None
