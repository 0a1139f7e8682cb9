"""Unknown architectures: read as far as the fields allow."""

from __future__ import annotations

from meshwright.specs.hf.dense import llama
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.registry import Parts, names_of


def generic(f: Fields, dtype: str) -> Parts:
    """Read an unknown architecture as a Llama-like decoder."""
    f.assume(f"unknown architecture {(names_of(f) or ('without a name',))[0]}; read as a Llama-like decoder")
    return llama(f, dtype)
