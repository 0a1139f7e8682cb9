"""Runs live cases and puts what they left into a fresh folder under random names."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

from meshwright.doctor.incident import Incident
from meshwright.doctor.readers.walk import read_incident
from tests.shared import ROOT

from .programs import EXPECTED

LIMIT_S = 150.0


def run(folder: Path, words: list[str], limit_s: float = LIMIT_S) -> None:
    """Run cases (or ``NAME@PROGRAM``) at the same time in ``folder``; all processes have ended by then."""
    command = [sys.executable, "-m", "tests.doctor.live.zygote", str(folder), *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "zygote.log").open("w") as log:
        subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=log, timeout=limit_s, check=True)
    failed = {path.stem: path.read_text() for path in folder.glob("*.failed")}
    assert not failed, failed


def incident_folder(left: Path, name: str, target: Path, seed: int = 0, kinds: str | None = None) -> Path:
    """What goes into the incident of a case, under names that say at most the rank (stacks: one stem for all)."""
    chance = random.Random(f"{name} {seed}")
    target.mkdir(parents=True)
    for kind in (kinds or EXPECTED[name][3]).split():
        files = sorted((left / name / kind).iterdir())
        chance.shuffle(files)
        stem = _word(chance)
        for path in files:
            _, mark, rank = path.name.rpartition("_")
            own = f"{stem}_stack" if kind == "stacks" else _word(chance)
            if path.stat().st_size:
                shutil.copy(path, target / (f"{own}_{rank}" if mark else own))
    return target


def _word(chance: random.Random) -> str:
    return "".join(chance.choice("ghijkmnop") for _ in range(9))


def incident(left: Path, name: str, target: Path, seed: int = 0, kinds: str | None = None) -> Incident:
    """The incident of a case as the doctor reads it; ``kinds``: other files than those of the case."""
    return read_incident(incident_folder(left, name, target, seed, kinds))
