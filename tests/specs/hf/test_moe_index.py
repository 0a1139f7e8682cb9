"""The index of readers names exactly what the modules register, and loads a module only when it is needed."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module, util
from pathlib import Path

import pytest

from meshwright.specs.hf.moe_index import MOE_MODULES
from meshwright.specs.hf.registry import READERS


@pytest.mark.parametrize("module", MOE_MODULES)
def test_index_names_what_the_module_registers(module: str) -> None:
    import_module(f"meshwright.specs.hf.{module}")
    found = util.find_spec(f"meshwright.specs.hf.{module}")
    assert found is not None
    assert found.origin is not None
    text = Path(found.origin).read_text()
    declared = re.findall(r'"([^"]+)"', " ".join(re.findall(r"@architecture\(([^)]*)\)", text)))
    assert sorted(declared) == sorted(MOE_MODULES[module])
    assert set(declared) <= READERS.keys()


def test_no_name_is_claimed_twice() -> None:
    names = [name for known in MOE_MODULES.values() for name in known]
    assert len(names) == len(set(names))
    assert len(names) > 70


def test_reading_one_mixture_imports_neither_torch_nor_the_other_readers() -> None:
    program = (
        "import sys\n"
        "from meshwright.specs.hf.read import model_from_config\n"
        "sizes = dict(hidden_size=8, num_hidden_layers=1, vocab_size=8, num_attention_heads=2, intermediate_size=8)\n"
        "model_from_config(dict(sizes, model_type='mixtral', dtype='bfloat16'), 'm', 'm')\n"
        "loaded = {'torch', 'transformers', 'meshwright.specs.hf.deepseek_v4', 'meshwright.specs.hf.legacy'}\n"
        "print(sorted(loaded & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
