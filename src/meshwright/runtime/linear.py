"""``x W^T + b`` as one torch op, ``meshwright::linear``, computed the way that is fastest on this machine's CPU.

What was found on an AVX2 CPU (EPYC) with torch 2.13, one thread, fp32, weights that are not in the cache, as time of
``F.linear`` over that of ``(W x^T)^T``, the weight as the *left* operand (256 x 256, 1024 x 256, 256 x 1024,
1536 x 576, 2048 x 2048, 4096 x 1024): 4 to 8 rows 1.05 to 2.0, 16 rows 0.97 to 1.2, 9 to 15 rows 0.75 to 0.9, 2 and 3
rows 1.05 to 2.2 where the outputs are at least twice the inputs, elsewhere 0.75 to 1.1; of 8192 outputs also with
more than 16 rows (1.15). bf16 widened to fp32 for the product: 1536 x 576 and 16 rows 3.4. CPUs that multiply bf16, and
BLAS libraries that do not care which operand is which, answer the probe differently: it measures both ways once a
process. A weight stored by columns gains 1.1 to 1.2 of a step with one or two rows and loses as much with four to
eight.

Calling the op costs 15 to 70 us more than the product on this CPU, so that it is called only while a mode listens.

Training asks for the same bits in every process, so its products are not probed: which way they take follows from their
shapes and the CPU alone (``_traced``).

The recorder sees the op as the matrix product it is, whichever way it is computed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.runtime.differentiable import Product

#: Rows and widths of the probe, and how often each way goes through its weights: together they are larger than a second
#: level cache, because a weight that lies in it is multiplied as fast either way.
PROBE_ROWS, PROBE_SHAPE, PROBE_WEIGHTS, PROBE_RUNS = 4, (1024, 256), 16, 2
#: A way is taken when it is at least this much faster than ``F.linear``.
CLEARLY = 1.15
#: Rows from which oneDNN multiplies in training. Its speed over that of MKL, one thread, fp32, 1024 rows, on EPYC CPUs:
#: AVX2 forward 1.03 to 1.15, input gradients 0.7 to 1.04, weight gradients 0.5 to 1.0; AVX-512 1.5 to 2.5 in all three.
ONEDNN_ROWS = 64
#: Outputs over inputs from which a weight gains as the left operand with two rows, and outputs from which with many.
WIDE, VERY_WIDE = 2, 4096

_library = torch.library.Library("meshwright", "FRAGMENT")
_library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T + b`` with a weight ``(N, K)``: ``(..., K)`` in, ``(..., N)`` out; autograd can go back through it."""
    if torch.is_grad_enabled() and (weight.requires_grad or x.requires_grad):
        traced: Tensor = Product.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return traced
    if x.is_cpu and not torch._C._len_torch_dispatch_stack():
        return _on_cpu(x, weight, bias)
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
    weights = torch.ones(PROBE_WEIGHTS, *PROBE_SHAPE, dtype=dtype).unbind()
    x = torch.ones(PROBE_ROWS, PROBE_SHAPE[1], dtype=dtype)
    ours, plain = (_least_ns(f, x, weights) for f in (way, F.linear))
    return way if plain >= CLEARLY * ours else None


def _least_ns(multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: Sequence[Tensor]) -> int:
    """CPU time of the fastest of some rounds through all weights."""
    times = []
    for _ in range(PROBE_RUNS):
        began = time.thread_time_ns()
        for weight in weights:
            multiply(x, weight)
        times.append(time.thread_time_ns() - began)
    return min(times)


def _gains(rows: int, weight: Tensor) -> bool:
    """Whether another way than ``F.linear`` may be faster for a weight."""
    if weight.dtype == torch.bfloat16:
        return rows > 1
    if weight.dtype != torch.float32:
        return False
    n, k = weight.shape
    return 4 <= rows <= 8 or rows == 16 or (1 < rows < 4 and n >= WIDE * k) or (rows > 16 and n >= VERY_WIDE)


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
    rows = x.shape[0] if x.dim() == 2 else x.numel() // max(1, x.shape[-1])
    way = _better(weight.dtype) if _gains(rows, weight) else None
    if way is None:
        return F.linear(x, weight, bias)
    flat = x.dim() == 2
    out = way(x if flat else x.reshape(rows, -1), weight)
    if bias is not None:
        out = out + bias
    return out if flat else out.reshape(*x.shape[:-1], weight.shape[0])


_library.impl("linear", F.linear, "CompositeExplicitAutograd")
_library.impl("linear", _on_cpu, "CPU")
