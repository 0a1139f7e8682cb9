"""Where the shared measurements lie, for tests that need them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def shared_dir(*parts: str) -> Path:
    """Return a path inside the shared folder, or skip the test with the reason."""
    base = Path(os.environ.get("MESHWRIGHT_SHARED", ROOT.parent / "shared"))
    path = base.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"shared data not here: {'/'.join(('shared', *parts))}")
    return path
