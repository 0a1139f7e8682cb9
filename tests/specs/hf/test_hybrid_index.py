"""The index of hybrid and multimodal readers lists exactly what their modules register."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from meshwright.specs.hf.hybrid_index import HYBRID_MODULES
from meshwright.specs.hf.registry import READERS, find_reader


@pytest.mark.parametrize("module", HYBRID_MODULES)
def test_module_registers_the_names_of_the_index(module: str) -> None:
    import_module(f"meshwright.specs.hf.{module}")
    registered = {name for name, reader in READERS.items() if reader.__module__ == f"meshwright.specs.hf.{module}"}
    assert registered == set(HYBRID_MODULES[module])


def test_names_are_in_the_index_once() -> None:
    names = [name for listed in HYBRID_MODULES.values() for name in listed]
    assert len(names) == len(set(names)) > 100
    assert all(find_reader(name) for name in names)


def test_reading_one_model_imports_no_other_family_and_no_torch() -> None:
    code = (
        "import sys; from meshwright.specs.hf.registry import find_reader; find_reader('mamba2');"
        "print(sorted(m for m in sys.modules if m in ('torch', 'numpy', 'meshwright.specs.hf.vision')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
