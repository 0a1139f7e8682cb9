"""Rotary positions (Su et al., arXiv:2104.09864) and the ways of stretching them to longer contexts.

Legend: T tokens, H heads, d head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshwright.runtime.models.settings import Rope


def frequencies(rope: Rope, head_dim: int, device: torch.device) -> Tensor:
    """Angle per position of every pair of dimensions, ``(d / 2,)`` in fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
    inv = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return inv / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, inv)
    if rope.kind == "yarn":
        return _yarn(rope, inv, head_dim)
    return inv


def _llama3(rope: Rope, inv: Tensor) -> Tensor:
    """Long waves are stretched, short ones kept, those between blended (``apply_scaling`` of Llama 3.1)."""
    wavelength = 2 * math.pi / inv
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = (rope.original / wavelength - low) / (high - low)
    mixed = (1 - blend) * inv / rope.factor + blend * inv
    out = torch.where(wavelength > rope.original / low, inv / rope.factor, mixed)
    return torch.where(wavelength < rope.original / high, inv, out)


def _yarn(rope: Rope, inv: Tensor, head_dim: int) -> Tensor:
    """Ramp over dimensions between two numbers of rotations (Peng et al., arXiv:2309.00071, section 3.2)."""

    def dimension(rotations: float) -> float:
        return head_dim * math.log(rope.original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    steps = torch.arange(head_dim // 2, dtype=torch.float32, device=inv.device)
    keep = 1 - ((steps - low) / max(high - low, 1e-3)).clamp(0, 1)
    return inv / rope.factor * (1 - keep) + inv * keep


def turns(inv: Tensor, positions_T: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of absolute positions for ``turn``, each ``(T, 1, d)``, computed in fp32.

    The sine's first half is negated, so that turning is one product with the halves of x swapped.
    """
    angles = positions_T.float()[:, None] * inv[None, :]
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos), dim=-1)[:, None].to(dtype), torch.cat((-sin, sin), dim=-1)[:, None].to(dtype)


def turn(x_THd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs ``(i, i + d/2)``, the order of Hugging Face checkpoints."""
    return torch.addcmul(x_THd * cos, x_THd.roll(x_THd.shape[-1] // 2, dims=-1), sin)


def apart(x_THd: Tensor) -> Tensor:
    """Neighbouring pairs ``(2i, 2i + 1)`` in the order that ``turn`` takes: ``(i, i + d/2)``."""
    return x_THd.reshape(*x_THd.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
