"""``x W^T + b`` as one torch op, ``meshwright::linear``, computed the way that is fastest on this machine's CPU.

What was found on an AVX2 CPU with torch 2.13, one thread, as CPU time of ``F.linear`` over that of the way chosen. fp32
with the weight as the *left* operand, ``(W x^T)^T``: 256 x 1024 and 4 rows 1.9, 16 rows 1.2; 8192 x 256 and 4 rows 1.8,
16 rows 1.15; no gain where the output is wide and not very wide. bf16 widened to fp32 for the product: 1536 x 576 and
16 rows 3.4. CPUs that multiply bf16, and BLAS libraries that do not care which operand is which, answer the probe
differently: it measures both ways once a process.

Training asks for the same bits in every process, so its products are not probed: which way they take follows from their
shapes and the CPU alone (``_traced``).

The recorder sees the op as the matrix product it is, whichever way it is computed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.runtime.differentiable import Product

#: Rows and widths of the probe, and how often each way runs.
PROBE_ROWS, PROBE_SHAPE, PROBE_RUNS = 8, (256, 1024), 5
#: A way is taken when it is at least this much faster than ``F.linear``.
CLEARLY = 1.15
#: Rows from which oneDNN multiplies in training. Its speed over that of MKL, one thread, fp32, 1024 rows, on EPYC CPUs:
#: AVX2 forward 1.03 to 1.15, input gradients 0.7 to 1.04, weight gradients 0.5 to 1.0; AVX-512 1.5 to 2.5 in all three.
ONEDNN_ROWS = 64
#: Weights that gain as left operand: input at least so many times the output, or so many outputs.
NARROW, VERY_WIDE = 2, 4096

_library = torch.library.Library("meshwright", "FRAGMENT")
_library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T + b`` with a weight ``(N, K)``: ``(..., K)`` in, ``(..., N)`` out; autograd can go back through it."""
    if torch.is_grad_enabled() and (weight.requires_grad or x.requires_grad):
        traced: Tensor = Product.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return traced
    out: Tensor = torch.ops.meshwright.linear(x, weight, bias)
    return out


def _swapped(x: Tensor, weight: Tensor) -> Tensor:
    """The weight as the left operand."""
    return torch.mm(weight, x.t()).t().contiguous()


def _widened(x: Tensor, weight: Tensor) -> Tensor:
    """The product in fp32, rounded at the end."""
    return _swapped(x.float(), weight.float()).to(x.dtype)


@functools.cache
def _better(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The way to multiply a dtype on this machine, None for ``F.linear``; measured at the first product."""
    way = _swapped if dtype == torch.float32 else _widened
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(PROBE_SHAPE, generator=generator).to(dtype)
    x = torch.randn(PROBE_ROWS, PROBE_SHAPE[1], generator=generator).to(dtype)
    ours, plain = (_least_ns(functools.partial(f, x, weight)) for f in (way, F.linear))
    return way if plain >= CLEARLY * ours else None


def _least_ns(run: Callable[[], object]) -> int:
    """CPU time of the fastest of some runs."""
    times = []
    for _ in range(PROBE_RUNS):
        began = time.thread_time_ns()
        run()
        times.append(time.thread_time_ns() - began)
    return min(times)


def _gains(rows: int, weight: Tensor) -> bool:
    """Whether another way than ``F.linear`` may be faster for a weight."""
    if weight.dtype == torch.bfloat16:
        return rows > 1
    n, k = weight.shape
    return weight.dtype == torch.float32 and rows > 2 and (k >= NARROW * n or n >= VERY_WIDE)


@functools.cache
def _wide_registers() -> bool:
    """Whether torch computes with AVX-512 here."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def _traced(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A product of training: a parameter as the weight, or in a gradient, where the weight lies transposed."""
    rows = x.shape[0] if x.dim() == 2 else 0
    suits = weight.dtype == torch.float32 and rows >= ONEDNN_ROWS and torch.backends.mkldnn.is_available()
    suits = suits and bias is None and weight.numel() > 0
    if suits and (weight.is_contiguous() or _wide_registers()):
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return out
    return F.linear(x, weight, bias)


def _on_cpu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if weight.requires_grad or not weight.is_contiguous():
        return _traced(x, weight, bias)
    rows = x.numel() // max(1, x.shape[-1])
    way = _better(weight.dtype) if _gains(rows, weight) else None
    if way is None:
        return F.linear(x, weight, bias)
    out = way(x.reshape(rows, -1), weight)
    if bias is not None:
        out = out + bias
    return out.reshape(*x.shape[:-1], weight.shape[0])


_library.impl("linear", F.linear, "CompositeExplicitAutograd")
_library.impl("linear", _on_cpu, "CPU")
