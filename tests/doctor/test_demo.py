"""What ``make demo`` ends in: a run with a planted mistake hangs, and the doctor names rank, layer and line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.doctor.hang import diagnose
from meshwright.doctor.readers.walk import read_incident
from tests.runtime import tiny
from tests.shared import ROOT

DEMO = ROOT / "docs" / "demo" / "hang.py"


@pytest.mark.timeout(150)
def test_the_demo_hangs_and_is_explained(tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "model", "llama", vocab_size=5001)
    words = [sys.executable, str(DEMO), str(model), str(tmp_path / "incident")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the run hangs, as planted" in done.stdout
    first = diagnose(read_incident(tmp_path / "incident"))[0]
    line = next(n for n, text in enumerate(DEMO.read_text().splitlines(), 1) if "return honest(" in text)
    assert (first.kind, first.guilty_ranks, first.call_site) == ("skipped_call", (1,), f"hang.py:{line}")
    assert "layer 3, mixer output" in first.headline
    assert first.confidence == "high"
