"""What a run tells while it goes on: a line a second on the standard error, a row a step in a file. No torch."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.specs.model import ModelSpec, active_parameters

METRICS = "metrics.jsonl"
PERIOD_S = 1.0


def token_flops(spec: ModelSpec, seq: int) -> float:
    """FLOPs of forward and backward of one token.

    6 for every parameter that multiplies it (Kaplan et al., arXiv:2001.08361, section 2.1), the embedding, which is
    looked up, left out unless it is the head too; and 6 for every value of causal attention, half of which is masked.
    """
    looked_up = 0 if spec.tied else sum(f.parameters for f in spec.select("decoder") if f.role == "embedding")
    attention = sum(
        3 * min(seq, a.reach or seq) * a.heads * (a.head_dim + (a.v_head_dim or a.head_dim))
        for layer in spec.layers
        if (a := layer.attention) is not None
    )
    return 6.0 * (active_parameters(spec) - looked_up) + attention


@dataclass(frozen=True, slots=True)
class Row:
    """One step, as it is written down.

    Attributes:
        step: its number; the first is 1.
        loss, grad_norm: before the update. lr: of the update. tokens: valid ones.
        step_s: wall time. tokens_s: a second, over all ranks. mfu: share of the devices' peak; None: not known.
        seconds: of this rank by phase.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    step_s: float
    tokens_s: float
    mfu: float | None
    seconds: Mapping[str, float]

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        rounded = {phase: round(value, 6) for phase, value in self.seconds.items()}
        return {
            "step": self.step,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "tokens": self.tokens,
            "step_s": round(self.step_s, 6),
            "tokens_s": round(self.tokens_s, 1),
            "mfu": self.mfu,
            "seconds": rounded,
        }

    def line(self, steps: int) -> str:
        """As a user reads it."""
        mfu = f"  MFU {100 * self.mfu:.1f} %" if self.mfu is not None else ""
        parts = "  ".join(f"{phase} {value:.2f}" for phase, value in self.seconds.items() if value >= 0.005)
        return (
            f"step {self.step}/{steps}  loss {self.loss:.4f}  norm {self.grad_norm:.3g}  lr {self.lr:.2e}  "
            f"{self.tokens_s:,.0f} tokens/s{mfu}  {self.step_s:.2f} s: {parts}"
        )


class Progress:
    """Tells and writes down the steps of a run, on one rank.

    Args:
        steps: of the run. step: done already. base: folder of the run, or None.
    """

    def __init__(self, steps: int, step: int, base: Path | None) -> None:
        self.steps = steps
        self._told = 0.0
        self._file = _opened(base / METRICS, step) if base is not None else None

    def tell(self, row: Row) -> None:
        """A step is done."""
        if self._file is not None:
            self._file.write(json.dumps(row.plain()) + "\n")
            self._file.flush()
        now = time.monotonic()
        if row.step == self.steps or now - self._told >= PERIOD_S:
            self._told = now
            print(row.line(self.steps), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _opened(path: Path, step: int) -> Any:
    """The file of rows, without those that will be written again and without a line that was cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = []
    if path.is_file():
        for line in path.read_text("utf-8", "replace").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):
                continue
    path.write_text("".join(kept), "utf-8")
    return path.open("a", encoding="utf-8")
