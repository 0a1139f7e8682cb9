"""Serving measured: ``python -m bench.serving.run PART [--model FOLDER] [--seconds N] [--rounds N] [--minutes N]``.

PART is ``goodput`` (beside vLLM CPU, with the time to healthy of both), ``predicted`` (TTFT and TPOT of a plan on the
calibrated machine beside measured ones), ``soak`` (mixed load at 90 % of the capacity) or ``all``. vLLM is started with
the Python that ``MESHWRIGHT_VLLM_PYTHON`` names. Every part writes its own key of ``bench/results/serving.json``.
Without ``--model`` the 12M Llama of ``bench.generation`` with random weights is served.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.generation.run import SMALL, SMALL_MODEL
from bench.serving.parts import Wanted, goodput, predicted, soak
from bench.serving.servers import ROOT
from bench.speed import commit, machine

RESULTS = ROOT / "bench" / "results" / "serving.json"
PARTS = ("goodput", "predicted", "soak")


def main() -> None:
    """Run the parts and write each as it ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("part", choices=(*PARTS, "all"))
    parser.add_argument("--model", type=Path)
    parser.add_argument("--seconds", type=float, default=30.0, help="of one load")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each server in goodput")
    parser.add_argument("--minutes", type=float, default=60.0, help="of the soak")
    parser.add_argument("--against", choices=("vllm", "vllm eager"), default="vllm")
    parser.add_argument("--quick", action="store_true", help="calibrate with few shapes")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        scratch = Path(folder)
        model = asked.model or _small(scratch)
        wanted = Wanted(model, asked.seconds, asked.rounds, asked.minutes, asked.against, quick=asked.quick)
        work: dict[str, Callable[[], dict[str, Any]]] = {
            "goodput": lambda: goodput(wanted),
            "predicted": lambda: predicted(wanted, scratch),
            "soak": lambda: soak(wanted),
        }
        for name in PARTS if asked.part == "all" else (asked.part,):
            _write(asked.out, name, work[name]())


def _small(scratch: Path) -> Path:
    from meshwright.runtime.checkpoint import write_random

    write_random(SMALL, scratch / SMALL_MODEL, seed=0)
    return scratch / SMALL_MODEL


def _write(path: Path, name: str, found: dict[str, Any]) -> None:
    """One part, with what it belongs to; the others stay."""
    parts = json.loads(path.read_text()) if path.exists() else {}
    parts[name] = {
        "made_by": f"python -m bench.serving.run {name}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "load_average": os.getloadavg(),
        **found,
    }
    path.write_text(json.dumps(parts, indent=1) + "\n")
    print(json.dumps(parts[name], indent=1))


if __name__ == "__main__":
    main()
