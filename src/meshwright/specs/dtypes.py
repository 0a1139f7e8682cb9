"""Element types, by the names that safetensors headers use (lower case), with their sizes in bytes.

Source of the names: the safetensors format (its ``dtype`` field). Four-bit formats are stored packed, two
elements in one ``u8``; the table below therefore has whole bytes only.
"""

from __future__ import annotations

from meshwright.errors import InputError

DTYPE_BYTES: dict[str, int] = {
    "f64": 8,
    "f32": 4,
    "f16": 2,
    "bf16": 2,
    "f8_e4m3": 1,
    "f8_e5m2": 1,
    "f8_e8m0": 1,
    "i64": 8,
    "i32": 4,
    "i16": 2,
    "i8": 1,
    "u8": 1,
    "bool": 1,
}

#: What people and configuration files write, mapped to the names above.
ALIASES: dict[str, str] = {
    "float64": "f64",
    "float32": "f32",
    "float": "f32",
    "fp32": "f32",
    "float16": "f16",
    "half": "f16",
    "fp16": "f16",
    "bfloat16": "bf16",
    "fp8": "f8_e4m3",
    "fp8_e4m3": "f8_e4m3",
    "fp8_e5m2": "f8_e5m2",
    "float8_e4m3fn": "f8_e4m3",
    "float8_e5m2": "f8_e5m2",
    "float8_e8m0fnu": "f8_e8m0",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
}


def canonical(dtype: str) -> str:
    """Return the safetensors-style name of ``dtype`` (``"torch.bfloat16"``, ``"BF16"`` and ``"bf16"`` are one).

    Raises:
        InputError: the name is not known.
    """
    name = dtype.strip().lower().removeprefix("torch.")
    name = ALIASES.get(name, name)
    if name not in DTYPE_BYTES:
        raise InputError(f"unknown dtype {dtype[:40]!r}; known: {', '.join(sorted(DTYPE_BYTES))}")
    return name


def size_bytes(dtype: str) -> int:
    """Bytes of one element of ``dtype``."""
    return DTYPE_BYTES[canonical(dtype)]
