"""Where fp32 itself is far from fp64, a gradient may be twice as far and no farther; weights are not excused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.prove.train import _tensors, rounding_of


def ranks_with(far: float, kind: str = "gradient") -> list[Any]:
    """One rank whose whole tensor ``w`` of 4 elements is ``far`` from a reference of length 1."""
    run = SimpleNamespace(kind=kind, name="w", region=(), start=0, count=4, far=far**2)
    return [SimpleNamespace(rank=0, runs=[run])]


@pytest.mark.parametrize(
    ("far", "own", "differs"), [(9e-6, 0.0, 0), (2e-5, 0.0, 1), (2e-5, 1.1e-5, 0), (3e-5, 1.1e-5, 1)]
)
def test_a_gradient_may_be_twice_as_far_as_one_process_in_fp32(far: float, own: float, differs: int) -> None:
    reference: Any = SimpleNamespace(lengths={"gradient/w": (1.0, 4)})
    rounding = rounding_of(reference, ranks_with(own))
    assert rounding == {"w": pytest.approx(own)}
    assert _tensors("gradient", reference, ranks_with(far), rounding).differs == differs


def test_an_element_that_no_rank_holds_is_never_rounding() -> None:
    reference: Any = SimpleNamespace(lengths={"gradient/w": (1.0, 5)})
    check = _tensors("gradient", reference, ranks_with(0.0), {"w": 1.0})
    assert check.differs == 1
    assert check.first == "gradient of w: 1 elements are held by no rank"
