"""The ladder: every rung passes on gloo, and stops at the first that fails, with where every rank stood."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from meshwright.doctor import climb as climbing
from meshwright.doctor.ladder import GROUPS, OPS, RUNGS, Rung, Step, members, sizes
from meshwright.errors import InputError


@pytest.mark.parametrize("world", [2, 3, 4, 7, 8])
def test_groups_cut_the_world_without_overlap(world: int) -> None:
    for name in GROUPS:
        sets = {m for rank in range(world) if (m := members(name, world, rank))}
        ranks = sorted(r for group in sets for r in group)
        assert ranks == (list(range(world)) if name != "pair" else [0, 1])
        for rank in range(world):
            assert not members(name, world, rank) or rank in members(name, world, rank)


def test_uneven_sizes_change_and_some_are_zero() -> None:
    step = Step("all_to_all", "world", 8, uneven=True)
    assert [sizes(step, 3, turn) for turn in range(3)] == [[0, 8, 16], [8, 16, 0], [16, 0, 8]]


def test_rungs_climb_and_know_their_operations() -> None:
    assert all(step.op in OPS and step.group in GROUPS for rung in RUNGS for step in rung.steps)
    assert {step.op for rung in RUNGS for step in rung.steps} == set(OPS)
    assert RUNGS[0].steps == (Step("all_reduce", "pair"),)


def test_all_rungs_pass_and_the_command_says_so() -> None:
    words = [sys.executable, "-m", "meshwright", "doctor", "--ladder", "--world", "3", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["passed"]
    assert len(said["rungs"]) == len(RUNGS)
    assert all(rung["seconds"] > 0 for rung in said["rungs"])


def test_a_rank_that_stays_away_is_seen_at_its_rung() -> None:
    rungs = (
        Rung("one", "nothing works", (Step("all_reduce"),)),
        Rung("two", "sums of two fail", (Step("all_reduce", "world", 4), Step("barrier"))),
        Rung("three", "never reached", (Step("barrier"),)),
    )
    ladder = climbing.climb(3, rungs=rungs, timeout_s=45, absent=(1, 2))
    assert not ladder.passed
    assert ladder.failed == 1
    assert ladder.verdict == 'rung 2 of 3, "two", fails: sums of two fail'
    stood = {stop.rank: stop for stop in ladder.stops}
    assert stood[0].inside
    assert stood[1].inside
    assert "all_reduce in world, 16 bytes" in stood[0].says
    assert stood[2].says == "has not entered the next rung's first call"


def test_bad_input_is_one_line() -> None:
    with pytest.raises(InputError, match=r"--world 1: a ladder needs 2 to 64 ranks"):
        climbing.climb(1)
    with pytest.raises(InputError, match=r"--backend 'mpi' is not known"):
        climbing.climb(2, "mpi")
