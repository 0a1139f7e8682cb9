"""Random checkpoints, written once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runtime import tiny


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a small model by its name in ``tiny.MODELS``."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tiny.write(tmp_path_factory.mktemp(name), name)
        return made[name]

    return folder
