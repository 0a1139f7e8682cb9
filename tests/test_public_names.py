"""``import meshwright`` is empty-handed, and every public name is there when it is asked for."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import meshwright


def test_every_public_name_resolves_and_is_the_one_of_its_module() -> None:
    from meshwright import api
    from meshwright.specs.layout import Layout

    assert set(meshwright.__all__) == {*meshwright._HOMES, "__version__"}
    for name in meshwright.__all__:
        assert getattr(meshwright, name) is not None
    assert meshwright.plan_serve is api.plan_serve
    assert meshwright.Layout is Layout
    assert set(meshwright.__all__) <= set(dir(meshwright))


def test_star_import_gives_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from meshwright import *", names)
    assert set(meshwright.__all__) <= set(names)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'plan_everything'"):
        _ = meshwright.plan_everything


def test_import_loads_no_room() -> None:
    """Only the version is loaded; a first use loads its home and nothing heavy."""
    program = (
        "import json, sys, meshwright\n"
        "before = sorted(m for m in sys.modules if m.startswith('meshwright'))\n"
        "meshwright.Layout(tp=2)\n"
        "after = 'meshwright.specs.layout' in sys.modules\n"
        "print(json.dumps([before, after]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == [["meshwright", "meshwright.version"], True]
