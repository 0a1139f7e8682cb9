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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("rows", "bias"), [(0, False), (3, True), (64, False), (200, True), (200, False)])
def test_gradients_equal_those_of_the_plain_product(dtype: torch.dtype, rows: int, bias: bool) -> None:
    """Without a row the gradient of the weight is zero, not none, whoever multiplies."""
    random = torch.Generator().manual_seed(rows)
    x, w, b = (torch.randn(shape, generator=random).to(dtype) for shape in ((rows, 96), (72, 96), (72,)))
    tensors = [t.requires_grad_() for t in ((x, w, b) if bias else (x, w))]
    dy = torch.randn((rows, 72), generator=random).to(dtype)
    found = torch.autograd.grad(linear(*tensors), tensors, dy)
    want = torch.autograd.grad(F.linear(*tensors), tensors, dy)
    for f, g in zip(found, want, strict=True):
        torch.testing.assert_close(f, g)


@pytest.mark.parametrize("wide", [False, True])
def test_training_takes_the_same_way_every_time(monkeypatch: pytest.MonkeyPatch, wide: bool) -> None:
    """No probe: the same bits again, and in every process."""
    monkeypatch.setattr(module, "_wide_registers", lambda: wide)
    monkeypatch.setattr(module, "_better", lambda _: pytest.fail("a probe decided"))
    x, w = torch.randn(200, 512, requires_grad=True), torch.randn(96, 512, requires_grad=True)
    first, again = (torch.autograd.grad(linear(x, w).square().sum(), (x, w)) for _ in range(2))
    want = torch.autograd.grad(F.linear(x, w).square().sum(), (x, w))
    for a, b, c in zip(first, again, want, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-2)
