"""The product that the decoder uses: right however it is computed, and seen by the recorder as one product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from meshwright.runtime import linear as module
from meshwright.runtime.linear import linear
from meshwright.runtime.record import Recorder


@pytest.mark.parametrize("way", [None, module._swapped])
@pytest.mark.parametrize("shape", [(1, 6), (2, 6), (5, 6), (2, 3, 6), (0, 6)])
@pytest.mark.parametrize("biased", [False, True])
def test_equals_the_plain_product(
    monkeypatch: pytest.MonkeyPatch, way: object, shape: tuple[int, ...], biased: bool
) -> None:
    monkeypatch.setattr(module, "_better", lambda _: way)
    x, weight = torch.randn(shape), torch.randn(9, 6)
    bias = torch.randn(9) if biased else None
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias))


def test_widened_is_at_least_as_exact_as_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_better", lambda _: module._widened)
    x, weight = (torch.randn(n, 300, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (5, 9))
    exact = x.double() @ weight.double().t()
    found = linear(x, weight)
    assert found.dtype == torch.bfloat16
    assert (found.double() - exact).abs().max() <= (F.linear(x, weight).double() - exact).abs().max() * 1.01


def test_the_recorder_sees_one_product() -> None:
    with Recorder(None, 0, matmuls=True) as recorder, torch.inference_mode():
        linear(torch.randn(5, 6), torch.randn(9, 6), torch.randn(9))
    (entry,) = recorder.ledger().entries
    assert (entry.op, entry.shapes, entry.flops) == ("matmul", ((5, 6), (6, 9)), 2 * 5 * 6 * 9)


def test_tensors_without_data() -> None:
    assert linear(torch.empty(5, 6, device="meta"), torch.empty(9, 6, device="meta")).shape == (5, 9)
