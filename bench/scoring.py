"""What every scorer of ``bench`` returns: one row a measured figure, and how rows are summed up."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean, median


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """One measured figure beside its prediction.

    Attributes:
        source: where the measurement comes from (the ``source`` column).
        group: what is left out as a whole when errors are cross-validated (the model, usually).
        name: enough to find the row again (model, layout, version).
        metric: what was measured.
        predicted: None when no answer is given; then ``reason`` says why.
        measured: the figure of the source.
        unit: of both.
        reason: why there is no answer, or a remark.
    """

    source: str
    group: str
    name: str
    metric: str
    predicted: float | None
    measured: float
    unit: str
    reason: str = ""

    @property
    def error(self) -> float | None:
        """Relative error (0.01 is 1 % too much), None without an answer or when zero was measured."""
        if self.predicted is None or self.measured == 0:
            return None
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class Summary:
    """Errors of a set of rows: how many, how many answered, median, mean and 90th percentile of the absolute error."""

    rows: int
    answered: int
    median: float | None
    mean: float | None
    p90: float | None
    worst: tuple[ScoreRow, ...]


def summarize(rows: list[ScoreRow], worst: int = 3) -> Summary:
    """Sum up the absolute relative errors of ``rows``."""
    scored = sorted(((abs(e), r) for r in rows if (e := r.error) is not None), key=lambda pair: pair[0])
    errors = [e for e, _ in scored]
    p90 = errors[min(len(errors) - 1, int(0.9 * len(errors)))] if errors else None
    return Summary(
        rows=len(rows),
        answered=sum(r.predicted is not None for r in rows),
        median=median(errors) if errors else None,
        mean=mean(errors) if errors else None,
        p90=p90,
        worst=tuple(r for _, r in scored[::-1][:worst]),
    )
