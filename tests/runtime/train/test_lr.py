"""Warm-up and cosine."""

from __future__ import annotations

import pytest

from meshwright.errors import InputError
from meshwright.runtime.train.lr import Cosine


def test_warm_up_then_cosine_to_the_floor() -> None:
    rate = Cosine(1.0, warmup=4, total=12, floor=0.2).rate
    assert [rate(i) for i in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert rate(4) == 1.0
    assert rate(8) == pytest.approx(0.6)
    assert rate(12) == rate(500) == pytest.approx(0.2)
    assert all(rate(i) > rate(i + 1) for i in range(4, 12))


def test_torch_s_schedule_gives_the_same() -> None:
    import torch

    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=0.3)
    other = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.03)
    ours = Cosine(0.3, total=20, floor=0.1)
    for step in range(21):
        assert ours.rate(step) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        other.step()


def test_without_an_end_the_peak_is_kept() -> None:
    assert {Cosine(0.1, warmup=2).rate(i) for i in (1, 2, 9999)} == {0.1}


@pytest.mark.parametrize("numbers", [(-1.0, 0, None, 0.1), (1.0, 5, 4, 0.1), (1.0, 0, None, 1.5), (1.0, -1, None, 0.1)])
def test_numbers_that_make_no_schedule_are_refused(numbers: tuple[float, int, int | None, float]) -> None:
    with pytest.raises(InputError):
        Cosine(*numbers)
