"""Checkpoints of small models for training tests, written when asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runtime import moe_models, tiny


def folder_of(made: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a small model by its name in ``tiny.MODELS`` or ``moe_models.MIXTURES`` (mixtures first)."""

    @functools.cache
    def folder(name: str) -> Path:
        base = made.mktemp(name)
        if name in moe_models.MIXTURES:
            return moe_models.write(base, name, num_hidden_layers=5)
        return tiny.write(base, name)

    return folder
