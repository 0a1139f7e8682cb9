"""Sees the matrix products of a program, whichever op they run through."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.ledger.schema import Entry
from meshwright.runtime.c10d import dtype_name
from meshwright.runtime.scope import where

Shape = tuple[int, ...]

#: Index of the left and right operand of products of two matrices.
PLAIN: dict[str, tuple[int, int]] = {
    "aten::mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::bmm": (0, 1),
    "aten::baddbmm": (1, 2),
    "aten::mv": (0, 1),
    "aten::_int_mm": (0, 1),
    "aten::_scaled_mm": (0, 1),
}
#: Products with a weight that lies [out, in] or packed: the output says how wide it is.
LINEAR = frozenset(
    {"meshwright::linear", "aten::linear", "mkldnn::_linear_pointwise", "aten::mkldnn_linear", "mkl::_mkl_linear"}
)
#: Ops made of products.
COMPOSITE = frozenset({"aten::matmul", "aten::einsum", "aten::tensordot", "aten::inner", "aten::linalg_multi_dot"})
#: A product inside a scope of this name belongs to the attention core and is no product with a weight.
CORE = "attention core"


class ProductMode(TorchDispatchMode):
    """Hands an entry a matrix product to ``add``: shapes ``((T, K), (K, N))``, dtype, FLOPs, times.

    A mode must stand aside where a DTensor is an operand, or it misses what happens inside its operations. For
    programs that may compile themselves there is ``CompilingProductMode``.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch keeps its compiler out of the mode, for which it imports the compiler (2 s a process)."""
        return False

    def __init__(self, add: Callable[[Entry], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._add = add

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run ``func`` and note it when it is a product."""
        kwargs = kwargs or {}
        if any(kind is not Tensor and hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        name = func._schema.name
        if name not in PLAIN and name not in LINEAR:
            return self._other(func, name, args, kwargs)
        started = time.monotonic_ns()
        out = func(*args, **kwargs)
        ended = time.monotonic_ns()
        left, right = _operands(name, args, out)
        x: Tensor = args[PLAIN[name][0] if name in PLAIN else 0]
        op = "attention" if where().name == CORE else "matmul"
        entry = Entry("", op, stream="compute", shapes=(left, right), dtype=dtype_name(x.dtype))
        entry.flops = 2 * prod(left) * right[-1]
        entry.payload_bytes = (prod(left) + prod(right)) * x.element_size() + out.numel() * out.element_size()
        entry.wire_bytes = 0
        if x.device.type == "cpu":
            entry.enqueued_ns, entry.started_ns, entry.ended_ns = started, started, ended
            entry.state = "completed"
        else:
            entry.enqueued_ns, entry.state = started, "scheduled"
        self._add(entry)
        return out

    def _other(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an op that is no product. In inference mode composites come whole: those are taken apart here."""
        if torch.is_inference_mode_enabled() and name in COMPOSITE:
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        return func(*args, **kwargs)


class CompilingProductMode(ProductMode):
    """The same for any program: ``torch.compile`` in it stays out of the mode."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """As in ``ProductMode``."""
        return super().__torch_dispatch__(func, types, args, kwargs)


def _operands(name: str, args: Sequence[Any], out: Tensor) -> tuple[Shape, Shape]:
    """Shapes of the two operands; with a weight, rows are folded into one dimension; a batch of one is left out."""
    if name in PLAIN:
        at, by = PLAIN[name]
        left, right = tuple(args[at].shape), tuple(args[by].shape)
        if len(right) == 3 and right[0] == 1:
            left, right = left[1:], right[1:]
        return (left, right) if len(right) > 1 else (left, (*right, 1))
    x: Tensor = args[0]
    k, n = x.shape[-1], out.shape[-1]
    return (prod(x.shape[:-1]), k), (k, n)
