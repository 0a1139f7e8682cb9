"""What is installed: exact constraints, a wheel with its data and no tests, a console script without torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from meshwright.version import VERSION
from tests.shared import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PINS = [line for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if not line.startswith("#")]


def canonical(requirement: str) -> str:
    """Normalised name of a requirement (PEP 503)."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def needs(names: set[str]) -> set[str]:
    """Installed distributions that the named ones need, without extras, themselves included."""
    found: set[str] = set()
    todo = set(names)
    while todo:
        name = todo.pop()
        if name in found:
            continue
        try:
            requires = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        found.add(name)
        todo |= {canonical(r) for r in requires if "extra ==" not in r}
    return found


def stated() -> set[str]:
    extras = PROJECT["project"]["optional-dependencies"]
    return {canonical(r) for r in [*PROJECT["project"]["dependencies"], *extras["run"], *extras["dev"]]}


# Constraints --------------------------------------------------------------------------------------------------------


def test_constraints_are_exact_and_name_no_host() -> None:
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", pin) for pin in PINS), PINS
    assert len({canonical(pin) for pin in PINS}) == len(PINS)
    assert "torch==2.13.0" in PINS


def test_constraints_hold_everything_that_is_installed() -> None:
    pinned = {canonical(pin) for pin in PINS}
    assert stated() <= pinned
    assert {canonical(r) for r in PROJECT["build-system"]["requires"]} <= pinned
    cuda = re.compile(r"nvidia-|cuda-|triton|colorama")
    assert {name for name in needs(stated()) if not cuda.match(name)} - pinned == set()


def test_planning_needs_no_torch() -> None:
    base = needs({canonical(r) for r in PROJECT["project"]["dependencies"]})
    assert not base & {"torch", "transformers", "pydantic"}
    assert "torch" in {canonical(r) for r in PROJECT["project"]["optional-dependencies"]["run"]}


# Files --------------------------------------------------------------------------------------------------------------


def test_licence_is_the_whole_text() -> None:
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["project"]["license"] == "Apache-2.0"


def test_changelog_knows_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert "## [Unreleased]" in text or f"## [{VERSION}]" in text


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    text = script.read_text("utf-8")
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in text
    assert re.search(r"^exec make test", text, re.MULTILINE)
    assert subprocess.run(["bash", "-n", script], timeout=10).returncode == 0


@pytest.mark.parametrize("target", ["demo", "test"])
def test_both_targets_set_themselves_up(target: str, tmp_path: Path) -> None:
    """In a folder without .venv the commands begin with making one and installing from the constraints."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    env = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    done = subprocess.run(
        ["make", "-n", target, f"PYTHON={sys.executable}"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    venv, install, *rest = [line for line in done.stdout.splitlines() if not line.startswith("test -n")]
    assert venv == f"{sys.executable} -m venv .venv"
    assert "PIP_CONSTRAINT=constraints.txt" in install
    assert ("[run,serve,dev]" in install) == (target == "test")
    wanted = "meshwright plan serve smollm2-135m --on here --html out/plan.html" if target == "demo" else "-m pytest"
    assert wanted in "\n".join(rest)


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, timeout=30, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.decode().split("\0") if name]


def test_tracked_files_name_no_path_of_a_machine() -> None:
    pattern = re.compile(
        rb"(?<![\w.])/(?:" + b"|".join((b"root", b"work", b"home/[a-z]+", b"Users/[a-z]+")) + rb")/[\w.]"
    )
    assert pattern.search(b"see /" + b"root/x")
    found = {
        str(path.relative_to(ROOT)): match[0]
        for path in tracked()
        if path.is_file() and path.stat().st_size < 4 << 20 and (match := pattern.search(path.read_bytes()))
    }
    assert found == {}


# The wheel ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (built,) = out.glob("*.whl")
    return built


def test_wheel_has_the_data_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name == f"meshwright-{VERSION}-py3-none-any.whl"
    assert {n.split("/")[0] for n in names} == {"meshwright", f"meshwright-{VERSION}.dist-info"}
    data = [
        p for p in (ROOT / "src" / "meshwright").rglob("*") if p.suffix in {".json", ".toml", ".html", ".js", ".css"}
    ]
    assert {str(p.relative_to(ROOT / "src")) for p in data} <= set(names)
    assert "meshwright/specs/atlas/devices.json" in names
    assert "meshwright/py.typed" in names
    assert not [n for n in names if n.split("/")[-1].startswith(("test_", "conftest")) or "__pycache__" in n]
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_wheel_asks_for_torch_only_as_an_extra(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    meta = Parser().parsestr(archive.read(f"meshwright-{VERSION}.dist-info/METADATA").decode())
    requires = meta.get_all("Requires-Dist") or []
    assert meta["Version"] == VERSION
    assert meta["Requires-Python"] == ">=3.11"
    assert [r for r in requires if canonical(r) == "torch"] == ["torch>=2.6; extra == 'run'"]
    entry = archive.read(f"meshwright-{VERSION}.dist-info/entry_points.txt").decode()
    assert "meshwright = meshwright.cli.main:main" in entry


def test_console_script_works_with_the_base_dependencies_alone(wheel: Path, tmp_path: Path) -> None:
    """A fresh environment that has the wheel and what it asks for, nothing else: plan runs, torch is not there."""
    venv, base = tmp_path / "venv", tmp_path / "base"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=60)
    base.mkdir()
    for name in needs({canonical(r) for r in PROJECT["project"]["dependencies"]}):
        dist = distribution(name)
        for top in {Path(f).parts[0] for f in dist.files or () if not str(f).startswith("..")} - {"__pycache__"}:
            source = Path(str(dist.locate_file(top)))
            if source.exists() and not (base / top).exists():
                (base / top).symlink_to(source)
    python = venv / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
        str(wheel),
    ]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "base.pth").write_text(f"{base}\n")

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": f"{venv / 'bin'}:/usr/bin:/bin", "HOME": str(tmp_path)}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)

    assert run(str(python), "-c", "import torch").returncode != 0
    assert run(str(venv / "bin" / "meshwright"), "--version").stdout.strip() == f"meshwright {VERSION}"
    plan = run(
        str(venv / "bin" / "meshwright"), "plan", "serve", "smollm2-135m", "--on", "8xH100", "--html", "plan.html"
    )
    assert plan.returncode == 0, plan.stderr[-2000:]
    assert "<html" in (tmp_path / "plan.html").read_text("utf-8")[:200].lower()
