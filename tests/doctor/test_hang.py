"""Verdicts on simulated jobs: every kind of mistake in several layouts, with whatever recorders leave out."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from meshwright.doctor.findings import KINDS, Finding, ranks_text
from meshwright.doctor.hang import diagnose

from .fr_maker import Job, Op, Simulator, call, edit, layout, site
from .fr_mistakes import GUILTY, LAYOUTS, MISTAKES, incident


def _stalled(name: str, mistake: str) -> Simulator:
    return Simulator(MISTAKES[mistake][2](LAYOUTS[name]())).run()


def _blames_wrongly(findings: list[Finding], guilty: set[int]) -> bool:
    return any(f.confidence == "high" and set(f.guilty_ranks) - guilty for f in findings)


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_mistake_is_named_in_every_layout(name: str, mistake: str) -> None:
    kind, guilty, _ = MISTAKES[mistake]
    for options in ({}, {"timing": True}, {"status": False}, {"ring": 20}):
        findings = diagnose(incident(_stalled(name, mistake), **options))
        found = findings[0]
        assert (found.kind, set(found.guilty_ranks)) == (kind, guilty), (options, found.headline)
        assert not _blames_wrongly(findings, guilty)
        assert found.kind == "healthy" or found.advice


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_less_recorded_never_blames_the_innocent(name: str, mistake: str) -> None:
    """No call sites, only active calls: the kind may be another, the rank is right or not named with confidence."""
    kind, guilty, _ = MISTAKES[mistake]
    for options in ({"frames": False}, {"active_only": True}, {"frames": False, "active_only": True}):
        findings = diagnose(incident(_stalled(name, mistake), **options))
        assert not _blames_wrongly(findings, guilty), (options, findings[0].headline)
        if kind in {"host_stuck", "device_stuck", "healthy"}:
            assert (findings[0].kind, set(findings[0].guilty_ranks)) == (kind, guilty), options


def test_most_verdicts_stand_without_call_sites() -> None:
    right = Counter[bool]()
    for name in LAYOUTS:
        for mistake, (kind, guilty, _) in MISTAKES.items():
            found = diagnose(incident(_stalled(name, mistake), frames=False))[0]
            right[found.kind == kind and set(found.guilty_ranks) == guilty] += 1
    assert right[True] >= 0.75 * right.total()


@pytest.mark.parametrize("mistake", [m for m in MISTAKES if m != "none"])
def test_missing_dumps_are_said_and_never_mislead(mistake: str) -> None:
    guilty = MISTAKES[mistake][1]
    sim, chance = _stalled("tp4dp2", mistake), random.Random(mistake)
    world = range(sim.job.world)
    gone = [(r,) for r in world] + [tuple(chance.sample(world, 4)) for _ in range(8)]
    for leave_out in gone:
        findings = diagnose(incident(sim, leave_out))
        assert not _blames_wrongly(findings, guilty), (leave_out, findings[0].headline)
        assert any("no record of" in u for u in findings[0].unknown)


def test_order_and_names_of_files_mean_nothing() -> None:
    sim, chance = _stalled("tp2pp2dp2", "skipped call"), random.Random(3)
    first = diagnose(incident(sim))
    for turn in range(5):
        names = {r: f"{chance.getrandbits(40):x}x" for r in range(8)}
        shuffled = incident(sim, rename=names.__getitem__, order=lambda ranks: chance.sample(ranks, len(ranks)))
        again = diagnose(shuffled)
        assert [f.to_json() | {"unknown": []} for f in again] == [f.to_json() | {"unknown": []} for f in first], turn


def test_names_that_contradict_the_content_are_not_believed() -> None:
    sim = _stalled("tp4dp2", "host stands still")
    found = diagnose(incident(sim, rename=lambda r: f"rank_{7 - r}"))[0]
    assert set(found.guilty_ranks) == {GUILTY}


def test_a_rank_that_nothing_names_is_not_blamed_by_number() -> None:
    sim = Simulator(MISTAKES["host stands still"][2](_one_group())).run()
    found = diagnose(incident(sim, rename=lambda r: "abcdefgh"[r]))[0]
    assert (found.guilty_ranks, found.confidence) == ((), "low")
    assert any("which rank wrote it" in u for u in found.unknown)
    assert set(diagnose(incident(sim))[0].guilty_ranks) == {GUILTY}, "the number at the end of the name"


def _one_group(world: int = 4) -> Job:
    steps = [op for s in range(5) for op in (call("0", "all_reduce", 8, site("step", 10)), Op("sync"))]
    return Job({"0": ("default_pg", tuple(range(world)))}, [list(steps) for _ in range(world)])


def test_two_ranks_without_majority_follow_the_rule() -> None:
    job = _one_group(2)
    extra = call("0", "all_reduce", 20, site("step", 30))
    job = replace(edit(job, 0, lambda p: [*p[:4], extra, *p[4:]]), ahead=3)
    job = replace(job, programs=[[op for op in p if op.what != "sync"] for p in job.programs])
    found = diagnose(incident(Simulator(job).run()))[0]
    assert (found.kind, found.guilty_ranks, found.call_site) == ("extra_call", (0,), "train.py:30")
    assert (found.confidence, found.alternative) == ("medium", "rank 1 skipped it")


def test_sends_that_wait_for_each_other() -> None:
    groups = {"0": ("default_pg", (0, 1, 2, 3))}
    programs = []
    for rank in range(4):
        ahead, back = Op("send", "0", peer=(rank + 1) % 4), Op("recv", "0", peer=(rank - 1) % 4)
        programs.append([replace(ahead, site=site("ring", 5)), Op("sync"), replace(back, site=site("ring", 6))])
    found = diagnose(incident(Simulator(Job(groups, programs)).run()))[0]
    assert (found.kind, found.guilty_ranks) == ("p2p_order", (0, 1, 2, 3))


def test_two_ranks_that_both_send_first() -> None:
    both = [Op("send", "0", peer=1), Op("sync"), Op("recv", "0", peer=1)]
    other = [replace(op, peer=0) for op in both]
    found = diagnose(incident(Simulator(Job({"0": ("pp", (0, 1))}, [both, other])).run()))[0]
    assert (found.kind, found.guilty_ranks) == ("p2p_order", (0, 1))


def test_a_host_that_stops_behind_an_early_receive() -> None:
    """Its pending receive waits for a rank that waits for it: it is the one that stopped, no order is wrong."""
    groups = {"0": ("default_pg", tuple(range(8))), "t": ("TENSOR", (4, 5, 6, 7))}
    groups |= {f"p{r}": ("PIPELINE", (r, r + 4)) for r in range(4)}
    programs: list[list[Op]] = []
    for rank in range(8):
        pair, tensor = f"p{rank % 4}", call("t", "all_reduce", 8, site("layer", 10))
        receive = replace(Op("recv", pair, peer=0 if rank > 3 else 1), site=site("recv", 20))
        send = replace(Op("send", pair, peer=0 if rank > 3 else 1), site=site("send", 21))
        ops = [receive] if rank > 3 else []
        for _ in range(5):
            ops += [receive, tensor, tensor, Op("sync"), send] if rank > 3 else [send, receive, Op("sync")]
        programs.append(ops)
    for line in programs[4:]:
        line[:] = [op for op in line if op.what != "sync"]
    job = Job(groups, programs, overlap=True)
    hung = edit(job, 5, lambda p: [*p[:10], Op("host_hang")])
    assert hung.programs[5][9].what == "recv"
    found = diagnose(incident(Simulator(hung).run()))[0]
    assert (found.kind, found.guilty_ranks) == ("host_stuck", (5,))


def test_splits_that_do_not_add_up() -> None:
    job = layout(4, 2, ep=True)
    at = next(i for i, op in enumerate(job.programs[GUILTY]) if op.name == "all_to_all" and i > 6)
    programs = []
    for rank, ops in enumerate(job.programs):
        ops = [replace(o, ins=((40,),), outs=((40,),)) if o.name == "all_to_all" else o for o in ops]
        if rank == GUILTY:
            ops[at] = replace(ops[at], ins=((36,),))
        programs.append(ops)
    found = diagnose(incident(Simulator(replace(job, programs=programs)).run()))[0]
    assert (found.kind, set(found.guilty_ranks)) == ("wrong_splits", {GUILTY})


def test_empty_dumps_without_counters_are_told_by_their_silence() -> None:
    found = diagnose(incident(_stalled("tp4dp2", "host stands still"), active_only=True, status=False))[0]
    assert (found.kind, found.guilty_ranks, found.confidence) == ("host_stuck", (GUILTY,), "medium")


@pytest.mark.parametrize("guilty", [(9, 14), (200,), (0, 1, 2)])
def test_stuck_hosts_among_many_ranks(guilty: tuple[int, ...]) -> None:
    job = layout(4, 64, steps=2, layers=1)
    for rank in guilty:
        job = edit(job, rank, lambda p: [*p[:6], Op("host_hang")])
    found = diagnose(incident(Simulator(job).run(), frames=False, active_only=True))[0]
    assert (found.kind, found.guilty_ranks, found.confidence) == ("host_stuck", guilty, "high")


def test_json_form_and_words() -> None:
    found = diagnose(incident(_stalled("dp8", "another shape")))[0]
    row = found.to_json()
    assert row["kind"] in KINDS
    assert row["guilty_ranks"] == [GUILTY]
    assert isinstance(row["evidence"], list)
    assert ranks_text([0, 1, 2, 5]) == "ranks 0-2 and 5"
    assert ranks_text([]) == "no rank"
    assert ranks_text(range(0, 40, 2)).endswith("(20 in all)")
