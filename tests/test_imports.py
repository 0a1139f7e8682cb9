"""What may import what: the contracts of pyproject.toml hold and can fail; planning loads no heavy library."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright
from tests.shared import ROOT

#: What must not be loaded by planning unless asked for: each costs a tenth of a second or more, torch a whole one.
HEAVY = ("torch", "numpy", "polars", "plotly", "pydantic", "transformers", "pandas", "requests", "httpx", "networkx")

#: The argument vectors of ``meshwright`` that must stay light.
LIGHT = (
    ["--version"],
    ["plan", "serve", "smollm2-135m", "--on", "here", "--json"],
    ["plan", "serve", "smollm2-135m", "--on", "2x4xA100-80G@ib-200g", "--layout", "tp=1,pp=2", "--json"],
    ["plan", "train", "smollm2-135m", "--on", "8xH100", "--json"],
    ["plan", "serve", "smollm2-135m", "--on", "8xH100", "--perfetto", "/dev/null"],
    ["plan", "train", "smollm2-135m", "--on", "8xH100", "--layout", "pp=2,dp=4", "--perfetto", "/dev/null"],
    ["plan", "--devices"],
    ["plan", "--models"],
)


def run(code: str, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    env = {"PYTHONPATH": str(path)} if path else {}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", **env}
    )


LOADED = """
import json, sys
from contextlib import redirect_stdout, suppress
from io import StringIO
HEAVY = json.loads(sys.argv[1])
sys.argv = ["meshwright", *sys.argv[2:]]
code = 0
if len(sys.argv) > 1:
    from meshwright.cli.main import main
    with redirect_stdout(StringIO()):
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
else:
    import meshwright
print(json.dumps([code, sorted({m.split(".")[0] for m in sys.modules} & set(HEAVY))]))
"""


def loaded(*arguments: str, path: Path | None = None) -> tuple[int, list[str]]:
    done = run(LOADED, json.dumps(HEAVY), *arguments, path=path)
    assert done.returncode == 0, done.stderr[-2000:]
    code, names = json.loads(done.stdout.splitlines()[-1])
    return code, names


def test_import_meshwright_loads_nothing_heavy() -> None:
    assert loaded() == (0, [])


@pytest.mark.parametrize("arguments", LIGHT, ids=" ".join)
def test_planning_loads_nothing_heavy(arguments: list[str]) -> None:
    code, names = loaded(*arguments)
    assert names == []
    assert code in (0, 1)


def test_the_check_sees_what_is_loaded(tmp_path: Path) -> None:
    """A planted import of numpy in the plan path is found."""
    package = Path(meshwright.__file__).parent
    shutil.copytree(package, tmp_path / "meshwright", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "meshwright" / "__init__.py").write_text("import numpy\n")
    assert loaded(path=tmp_path) == (0, ["numpy"])


def test_import_contracts() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "0 broken" in done.stdout


@pytest.mark.parametrize(
    ("room", "planted", "contract"),
    [
        ("plan", "import torch\n", "Only runtime imports torch"),
        ("specs", "from meshwright.plan import memory\n", "Rooms stand on each other"),
        ("plan", "from meshwright import engines\n", "Rooms stand on each other"),
        ("ledger", "from meshwright.specs import cluster\n", "Rooms stand on each other"),
        ("moves", "from meshwright import ledger\n", "moves knows specs"),
        ("engines", "from meshwright import moves\n", "engines know specs and ledger"),
    ],
)
def test_a_planted_import_breaks_a_contract(room: str, planted: str, contract: str, tmp_path: Path) -> None:
    package = Path(meshwright.__file__).parent
    shutil.copytree(package, tmp_path / "src" / "meshwright", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "src" / "meshwright" / room / "planted.py").write_text(planted)
    done = lint_imports(tmp_path)
    assert done.returncode == 1
    assert f"{contract}" in done.stdout.split("Broken contracts")[1]


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Run the contracts of ``root/pyproject.toml`` on the package in ``root/src``."""
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); from importlinter.cli import lint_imports_command as c; c()"
    )
    arguments = [str(root / "src"), "--no-cache", "--no-logo"]
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=root, capture_output=True, text=True, timeout=60
    )
