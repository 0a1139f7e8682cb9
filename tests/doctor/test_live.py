"""Hangs of real processes: right kind, ranks and line from what they leave, and reproductions that fail alike."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from meshwright.doctor.findings import Finding
from meshwright.doctor.hang import diagnose
from meshwright.doctor.incident import Incident
from meshwright.doctor.reproduce import build, render
from meshwright.doctor.rerun import judge

from .live.harness import incident, run
from .live.programs import EXPECTED, line_of

#: Run in ``make test``: gloo ends the processes itself, hand-offs, a death, two back ends.
SAMPLE = ("wrong_shape", "p2p_order", "killed", "two_back_ends")
#: Of what the issue lists, those that a reproduction must show.
HANGS = tuple(name for name in EXPECTED if name != "healthy")
AT_ONCE = 7
#: What else a folder may hold.
OTHER_FILES = ("dumps", "ledgers", "dumps ledgers stacks logs", "stacks logs", "logs")
MUST_FAIL_ALIKE = 14


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("live")


@cache
def _ran(scratch: Path, names: tuple[str, ...]) -> Path:
    folder = scratch / names[0]
    folder.mkdir()
    run(folder, list(names))
    return folder


def _read(scratch: Path, left: Path, name: str, seed: int = 0) -> tuple[list[Finding], Incident]:
    found = incident(left, name, scratch / f"incident {name} {seed}", seed)
    return diagnose(found), found


def _check(findings: list[Finding], name: str) -> None:
    kind, guilty, world, _ = EXPECTED[name]
    first = findings[0]
    assert (first.kind, set(first.guilty_ranks), first.call_site) == (kind, guilty, line_of(name)), first.headline
    assert not set(first.waiting_ranks) & guilty
    assert set(first.waiting_ranks) <= set(range(world))
    assert not any(f.confidence == "high" and set(f.guilty_ranks) - guilty for f in findings)


def _check_honest(left: Path, name: str, target: Path, kinds: str) -> None:
    """With other files than the case needs: right or unsure, no innocent rank with high confidence."""
    if not any(p.stat().st_size for kind in kinds.split() for p in (left / name / kind).iterdir()):
        return
    findings = diagnose(incident(left, name, target, 3, kinds))
    assert not [f for f in findings if f.confidence == "high" and set(f.guilty_ranks) - EXPECTED[name][1]], kinds


@pytest.mark.parametrize("name", SAMPLE)
def test_right_answer_of_a_real_hang(scratch: Path, name: str) -> None:
    _check(_read(scratch, _ran(scratch, SAMPLE), name)[0], name)


def test_a_killed_rank_leaves_the_call_that_it_was_in(scratch: Path) -> None:
    """The recorder writes before the backend sees a call; the last one of a rank that gloo ended is there."""
    _, found = _read(scratch, _ran(scratch, SAMPLE), "wrong_shape", 1)
    last = found.traces[2].signature[-1]
    assert found.signatures[last].shapes_in == ((12,),)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_real_hangs_and_their_reproductions(scratch: Path) -> None:
    """Every case right; of the reproductions at least ``MUST_FAIL_ALIKE`` fail the same way."""
    names = list(EXPECTED)
    programs = {}
    for start in range(0, len(names), AT_ONCE):
        part = tuple(names[start : start + AT_ONCE])
        left = scratch / f"all {start}"
        left.mkdir()
        run(left, list(part))
        for name in part:
            findings, found = _read(scratch, left, name, 2)
            _check(findings, name)
            for number, kinds in enumerate(OTHER_FILES):
                _check_honest(left, name, scratch / f"{name} {number}", kinds)
            if name in HANGS:
                programs[name] = build(findings[0], found)
                (scratch / f"{name}.py").write_text(render(programs[name], 3))
    again = scratch / "again"
    again.mkdir()
    for start in range(0, len(HANGS), AT_ONCE):
        run(again, [f"{name}@{scratch}/{name}.py" for name in HANGS[start : start + AT_ONCE]])
    outcomes = {name: judge((again / name / "out").read_text(), programs[name]) for name in HANGS}
    alike = [name for name in HANGS if outcomes[name].same]
    assert len(HANGS) >= 16
    assert len(alike) >= MUST_FAIL_ALIKE, {name: o.says for name, o in outcomes.items() if not o.same}


def test_every_case_names_a_line_where_there_is_one() -> None:
    assert {name for name in EXPECTED if line_of(name) is None} == {"killed", "healthy"}
