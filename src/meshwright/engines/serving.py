"""What readers of serving commands share: lengths behind a context limit, devices that an environment leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwright.specs.workload import Serve


def lengths(context: int | None) -> Serve:
    """Lengths of a request: the defaults of ``Serve``, or four fifths of a short context in and the rest out."""
    usual = Serve()
    if context is None or context >= usual.isl + usual.osl:
        return replace(usual, max_model_len=context)
    isl = max(1, context * 4 // 5)
    return Serve(isl=isl, osl=max(1, context - isl), max_model_len=context)


def visible_devices(env: Mapping[str, str]) -> int | None:
    """How many devices ``CUDA_VISIBLE_DEVICES`` leaves, or None."""
    text = env.get("CUDA_VISIBLE_DEVICES", "")
    parts = [p for p in text.split(",") if p.strip()]
    return len(parts) if parts and "$" not in text else None
