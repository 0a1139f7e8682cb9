"""The renderer of the documents, loaded from docs/render.py, and one runner that all tests of the documents share."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.shared import ROOT


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_render", ROOT / "docs" / "render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["docs_render"] = module
    spec.loader.exec_module(module)
    return module


render = _load()


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@cache
def runner() -> Any:
    """One for all tests, so that no command runs twice."""
    return render.Runner(Path(_folder().name))


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def plan(words: str) -> dict[str, Any]:
    """``meshwright plan WORDS --json`` as data."""
    code, output = runner().run(f"meshwright plan {words} --json")
    assert code in (0, 1), output
    data: dict[str, Any] = json.loads(output)
    assert code == (0 if data["ok"] else 1)
    return data
