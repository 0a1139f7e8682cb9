"""A run that goes on is the run that was not interrupted: to the bit on its own layout, within 1e-5 under any other."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from meshwright.runtime.train import checkpoint, folders
from meshwright.runtime.train.progress import METRICS
from tests.runtime.train import runs

#: (saved under, goes on under). Sampled in make test; all in make prove-all.
PAIRS = (
    ("dp=2,zero=2", "tp=2"),
    ("dp=2,zero=2", "pp=2,zero=1"),
    ("tp=2", "dp=2,zero=1"),
    ("dp=2", "tp=2,sp=on"),
    ("dp=2,zero=3", "tp=1"),
    ("tp=1", "dp=4,zero=3"),
    ("pp=2,schedule=zbv", "tp=3"),
    ("tp=2,pp=2", "dp=2,zero=3,reshard_after_forward=off,prefetch=2"),
    ("dp=4,zero=2", "pp=2,dp=2,zero=1"),
    ("cp=2", "pp=2,schedule=interleaved,virtual=2"),
    ("tp=2,dp=2,zero=1", "cp=2,dp=2,zero=2"),
    ("pp=3,stage_layers=1+3+1", "dp=2,zero=2"),
    ("dp=2,zero=3,wrap=model", "tp=2,pp=2,schedule=gpipe"),
    ("tp=3", "cp=2,cp_kind=ring"),
    ("pp=2,zero=1,dp=2", "dp=4,zero=3,replicas=2"),
)
SAMPLED = PAIRS[:2]
MIXTURES = (("ep=2,dp=2", "tp=2"), ("tp=2,dp=2,ep=2,zero=1", "ep=4,dp=4,zero=2"), ("pp=2,dp=2,ep=2", "dp=2"))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def whole(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The uninterrupted run of a layout, trained once."""
    made: dict[str, Path] = {}

    def run(layout: str) -> Path:
        if layout not in made:
            made[layout] = tmp_path_factory.mktemp("whole") / "run"
            runs.train(dense, layout, made[layout])
        return made[layout]

    return run


def _losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / METRICS).read_text().splitlines()]


def _difference(a: Path, b: Path) -> float:
    """Largest norm of a difference over the norm, of all tensors of two checkpoints."""
    worst = 0.0
    for key in checkpoint.stored(a):
        if key.startswith("random/"):
            continue
        x, y = checkpoint.whole(a, key), checkpoint.whole(b, key)
        worst = max(worst, float((x - y).norm() / x.norm().clamp_min(1e-12)))
    return worst


@pytest.mark.parametrize(
    "layout",
    ["dp=2,zero=2"] + [pytest.param(x, marks=pytest.mark.slow) for x in ("tp=2,pp=2", "dp=2,zero=3", "tp=1")],
)
def test_the_same_layout_goes_on_to_the_bit(whole: Callable[[str], Path], tmp_path: Path, layout: str) -> None:
    """Every tensor, moment, random state and loss of the last step, and every byte of the last checkpoint's files."""
    run = whole(layout)
    copy = runs.copy_until(run, 2, tmp_path / "run")
    said = runs.resume(copy)
    assert said.step == 4
    assert _losses(copy) == _losses(run)[2:]
    last = folders.folder_name(4)
    for file in sorted((run / last).iterdir()):
        assert (copy / last / file.name).read_bytes() == file.read_bytes(), file.name
    assert checkpoint.stored(run / last)


def _goes_on(run: Path, straight: Path, layout: str, folder: Path) -> None:
    copy = runs.copy_until(run, 2, folder)
    runs.resume(copy, layout)
    pairs = zip(_losses(copy), _losses(straight)[2:], strict=True)
    assert max(abs(a - b) / b for a, b in pairs) < 1e-5
    last = folders.folder_name(4)
    assert _difference(straight / last, copy / last) < 1e-4
    kept = checkpoint.stored(straight / last)
    assert checkpoint.stored(copy / last) == kept


@pytest.mark.parametrize("pair", [*SAMPLED, *(pytest.param(p, marks=pytest.mark.slow) for p in PAIRS[2:])], ids=str)
def test_another_layout_goes_on_within_1e_5(
    whole: Callable[[str], Path], tmp_path: Path, pair: tuple[str, str]
) -> None:
    before, after = pair
    _goes_on(whole(before), whole(before), after, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("pair", MIXTURES, ids=str)
def test_a_mixture_of_experts_goes_on_under_another_layout(tmp_path: Path, pair: tuple[str, str]) -> None:
    folder = runs.write(tmp_path, mixture=True)
    runs.train(folder, pair[0], tmp_path / "run")
    _goes_on(tmp_path / "run", tmp_path / "run", pair[1], tmp_path / "copy")


#: Program of the process that is killed: trains, and tells the processes of its ranks.
KILLED = """
import sys
from pathlib import Path
from tests.runtime.train import runs
folder, run, layout = map(Path, sys.argv[1:4])
STEPS = int(sys.argv[4])
if (run / "latest").exists():
    runs.resume(run)
else:
    runs.train(folder, str(layout), run, steps=STEPS, save_every=1, keep=2)
"""


def _ranks(parent: int) -> list[int]:
    """Processes below a process that are ranks (children of its fork server)."""
    found, level = [], [parent]
    while level:
        level = [int(child) for pid in level for child in _children(pid)]
        found.append(level)
    return found[1] if len(found) > 1 else []


def _children(pid: int) -> list[str]:
    try:
        return [c for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]
    except OSError:
        return []


def _kill_a_rank(folder: Path, run: Path, layout: str, steps: int, draw: random.Random) -> None:
    """Start a run and kill one of its ranks at a random moment behind its first new checkpoint."""
    before = folders.steps(run)
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder), str(run), layout, str(steps)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        end = time.monotonic() + 90
        while folders.steps(run) == before and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 0.6))
        ranks = _ranks(process.pid)
        if ranks and process.poll() is None:
            os.kill(draw.choice(ranks), signal.SIGKILL)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        assert "was ended by signal 9" in said or "failed" in said, said[-2000:]


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_a_killed_rank_loses_nothing(dense: Path, tmp_path: Path, times: int) -> None:
    """Killed at random moments, also in the middle of a save: what is left is whole, the curve is the straight one."""
    draw = random.Random(times)
    run, layout, steps = tmp_path / "run", "dp=2,zero=1", 6 * times
    for _ in range(times):
        _kill_a_rank(dense, run, layout, steps, draw)
        found = folders.find(run)
        assert all(torch.isfinite(checkpoint.whole(found, key)).all() for key in checkpoint.stored(found))
    runs.resume(run)
    straight = tmp_path / "straight"
    runs.train(dense, layout, straight, steps=steps, save_every=0)
    assert _losses(run) == _losses(straight)
    last = folders.folder_name(steps)
    for file in ("index.json", "rank-00000.bin", "rank-00001.bin"):
        assert (run / last / file).read_bytes() == (straight / last / file).read_bytes(), file


def test_no_sample_is_read_twice_or_never_when_replicas_change(dense: Path, tmp_path: Path) -> None:
    """Positions in the checkpoints of a run that goes on under other numbers of replicas."""
    run = tmp_path / "run"
    runs.train(dense, "dp=2", run, steps=2)
    runs.resume(run, "tp=1", steps=3)
    positions = [json.loads((run / folders.folder_name(n) / "state.json").read_text())["position"] for n in (2, 3)]
    assert positions == [8, 12]
