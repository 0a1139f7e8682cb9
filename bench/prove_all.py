"""Run every test, the slow ones in full, and write what happened: ``bench/results/prove_all.json``.

``make prove-all`` calls it. The file names commit, date and machine, so that a count of 2,000 round trips or a proof of
a real checkpoint can be looked up without running it again. Compositions of axes that were proven are listed one by one
(``tests/runtime/test_compositions.py`` notes them): model, layout, ranks, entries and products compared, worst distance
of a logit.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from bench.speed import commit, machine

RESULTS = Path(__file__).with_name("results") / "prove_all.json"
#: Longest tests that are listed.
LISTED = 25
#: Begins the name of a property by which a test says what it proved.
COMPOSITION = "composition "


def summary(report: Path) -> dict[str, object]:
    """Counts, failures, skips with their reasons, longest tests and proven compositions of pytest's JUnit file."""
    cases = list(ET.parse(report).getroot().iter("testcase"))
    failed, skipped = [], Counter[str]()
    times: list[tuple[float, str]] = []
    proven: dict[str, dict[str, object]] = {}
    for case in cases:
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        times.append((float(case.get("time", 0)), name))
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        elif (skip := case.find("skipped")) is not None:
            skipped[str(skip.get("message", ""))] += 1
        elif facts := composition(case):
            proven.setdefault(f"{facts.get('model')} {facts.get('layout')}", facts)
    return {
        "passed": len(cases) - len(failed) - sum(skipped.values()),
        "failed": failed,
        "skipped": dict(sorted(skipped.items())),
        "compositions": [proven[key] for key in sorted(proven)],
        "longest_s": [[name, round(seconds, 1)] for seconds, name in sorted(times, reverse=True)[:LISTED]],
    }


def composition(case: ET.Element) -> dict[str, object]:
    """What a test noted of the composition it proved; numbers as numbers."""
    facts: dict[str, object] = {}
    for row in case.iterfind("properties/property"):
        name, value = row.get("name", ""), row.get("value", "")
        if name.startswith(COMPOSITION):
            facts[name.removeprefix(COMPOSITION)] = int(value) if value.isdigit() else value
    return facts


#: The two parts of all tests, and the marker expression of each. Every part states its own commit and date.
PARTS = {"fast": "not slow", "slow": "slow"}


def main() -> int:
    """Run pytest on both parts, or on the one named first; exit 0 when every run passed."""
    words = sys.argv[1:]
    parts = [words.pop(0)] if words and words[0] in PARTS else list(PARTS)
    return max([run(part, words) for part in parts])


def run(part: str, extra: list[str]) -> int:
    """Run one part and write what happened beside the other part; pytest's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-q", "-n", "2", "--dist", "loadfile", "-m", PARTS[part], f"--junitxml={report}"]
        words += ["-o", "junit_family=xunit1", *extra]  # the family in which tests may note facts
        code = subprocess.run([sys.executable, "-m", "pytest", *words], check=False).returncode
        if not report.is_file():
            return code or 1
        found = {"commit": commit(), "date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine()}
        RESULTS.parent.mkdir(exist_ok=True)
        before = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
        results = {name: before[name] for name in PARTS if name in before} | {part: {**found, **summary(report)}}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"result: {RESULTS}")
    return code


if __name__ == "__main__":
    sys.exit(main())
