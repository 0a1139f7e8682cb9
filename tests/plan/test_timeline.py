"""The predicted timeline: sums are the predicted times, the order is the schedule's, nothing overlaps wrongly."""

from __future__ import annotations

from collections import Counter

import pytest

from meshwright import Serve, Train, fill_ledger, plan_serve, plan_train
from meshwright.api import plan_pools, step_time, timelines
from meshwright.errors import InputError
from meshwright.ledger.schema import Entry
from meshwright.moves.pipeline import schedule, simulate
from meshwright.plan import timeline_train
from meshwright.plan.plan import Plan
from meshwright.plan.serving_time import ServingTime
from meshwright.plan.timeline import HOST, OVERHEAD, Track
from meshwright.plan.timeline_train import ACTION, WORDS, training_timeline

SERVED = {
    "dense": ("llama-3.1-8b", "1x8xH100-SXM", "tp=4"),
    "pipeline": ("llama-3.1-70b", "2x4xA100-80G@ib-200g", "tp=4,pp=2"),
    "one product": ("dbrx", "1x8xH100-SXM", "dp=8,ep=8"),
    "mixture": ("deepseek-v3", "2x8xH200-SXM@ib-400g", "tp=8,dp=2,ep=16"),
}
TRAINED = {
    "1f1b": "tp=2,pp=4,dp=2",
    "uneven": "tp=2,pp=4,dp=2,stage_layers=9+8+8+7",
    "interleaved": "tp=2,pp=4,dp=2,schedule=interleaved,virtual=2",
    "zb-h1": "tp=2,pp=4,dp=2,schedule=zb-h1",
    "zbv": "tp=2,pp=4,dp=2,schedule=zbv",
    "dualpipev": "tp=2,pp=4,dp=2,schedule=dualpipev",
    "fsdp": "dp=16,zero=3",
    "zero-2": "tp=2,dp=8,zero=2",
}


def served(name: str, **asked: object) -> Plan:
    model, on, layout = SERVED[name]
    return plan_serve(model, on, Serve(isl=2000, osl=200, concurrency=16, **asked), layout=layout)  # type: ignore[arg-type]


def trained(name: str, batch: int = 64) -> Plan:
    work = Train(seq=4096, global_batch=batch)
    return plan_train("llama-3.1-8b", "2x8xH100-SXM@ib-400g", work, layout=TRAINED[name])


def seconds(entry: Entry) -> float:
    assert entry.started_ns is not None
    assert entry.ended_ns is not None
    assert 0 <= entry.started_ns <= entry.ended_ns
    return (entry.ended_ns - entry.started_ns) / 1e9


def overlapping(track: Track) -> list[tuple[Entry, Entry]]:
    """Pairs of one stream that overlap without one holding the other."""
    found = []
    streams: dict[str | None, list[Entry]] = {}
    for entry in track.entries:
        streams.setdefault(entry.stream, []).append(entry)
    for entries in streams.values():
        open_: list[Entry] = []
        for e in sorted(entries, key=lambda e: (e.started_ns or 0, -(e.ended_ns or 0))):
            while open_ and (open_[-1].ended_ns or 0) <= (e.started_ns or 0):
                open_.pop()
            if open_ and (e.ended_ns or 0) > (open_[-1].ended_ns or 0):
                found.append((open_[-1], e))
            open_.append(e)
    return found


@pytest.mark.parametrize("name", SERVED)
def test_serving_sums_are_the_predicted_times(name: str) -> None:
    plan = served(name)
    assert plan.chosen is not None
    predicted = plan.chosen.cost.predicted
    assert isinstance(predicted, ServingTime)
    prefill, decode = timelines(plan)
    assert prefill.seconds == pytest.approx(dict(predicted.ttft_parts)["prefill"], rel=1e-9)
    alone = [s for part, s in predicted.tpot_parts if part != "prefill interference"]
    assert decode.seconds == pytest.approx(sum(alone), rel=1e-9)
    for timeline in (prefill, decode):
        ends = [track.entries[-1].ended_ns or 0 for track in timeline.tracks]
        assert max(ends) / 1e9 == pytest.approx(timeline.seconds, abs=1e-8)
    assert sum(map(seconds, prefill.tracks[0].entries)) * len(prefill.tracks) == pytest.approx(prefill.seconds, rel=0.2)


@pytest.mark.parametrize("name", SERVED)
def test_serving_entries_are_those_of_the_ledger_in_a_chain(name: str) -> None:
    plan = served(name)
    classes: dict[str, Counter[tuple[object, ...]]] = {}
    for e in fill_ledger(plan).entries:
        if e.phase == "prefill":
            key = (e.op, e.name, e.layer, e.shapes, e.payload_bytes, e.flops)
            classes.setdefault(e.rank_class, Counter())[key] += 1
    prefill = timelines(plan)[0]
    assert [t.stage for t in prefill.tracks] == list(range(len(prefill.tracks)))
    for track in prefill.tracks:
        own = [e for e in track.entries if e.op not in {OVERHEAD, HOST}]
        drawn = Counter((e.op, e.name, e.layer, e.shapes, e.payload_bytes, e.flops) for e in own)
        assert drawn == classes[track.rank_class]
        ends = [e.ended_ns for e in track.entries]
        starts = [e.started_ns for e in track.entries]
        assert starts[1:] == ends[:-1], "a pass is a chain without gaps"


def test_two_pools_show_the_prefill_of_the_one_and_the_decode_of_the_other() -> None:
    work = Serve(isl=2000, osl=200, concurrency=16)
    first, second = plan_pools("llama-3.1-8b", "2x8xH100-SXM", work, prefill="tp=2", decode="tp=4")
    both = timelines(second, first)
    assert [t.phase for t in both] == ["prefill", "decode"]
    assert both[0].seconds == timelines(first)[0].seconds
    assert both[0].seconds > timelines(second)[0].seconds


@pytest.mark.parametrize("name", TRAINED)
def test_training_sums_are_the_predicted_step(name: str) -> None:
    plan = trained(name)
    (step,) = timelines(plan)
    assert step.seconds == pytest.approx(step_time(plan).step.value, rel=1e-9)
    last = max(e.ended_ns or 0 for track in step.tracks for e in track.entries)
    assert last / 1e9 == pytest.approx(step.seconds, abs=1e-8)
    assert not [pair for track in step.tracks for pair in overlapping(track)]
    assert all(seconds(e) >= 0 for track in step.tracks for e in track.entries)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"])
def test_actions_are_those_of_the_schedule(name: str) -> None:
    plan = trained(name)
    assert plan.layout is not None
    table = schedule(plan.layout.schedule, 4, 32, plan.layout.virtual if name == "interleaved" else 1)
    for track in timelines(plan)[0].tracks:
        drawn = [e.name or "" for e in track.entries if e.op == ACTION]
        wanted = []
        for kind, chunk, microbatch in table.actions[track.stage]:
            wanted.append(f"{WORDS[kind]} {microbatch}" + (f", chunk {chunk}" if table.virtual > 1 else ""))
        assert drawn == wanted


def test_ops_lie_inside_their_action() -> None:
    for track in timelines(trained("zb-h1"))[0].tracks:
        actions = [e for e in track.entries if e.op == ACTION]
        inside = [e for e in track.entries if e.stream == "compute" and e.op != ACTION and e.phase != "optimizer"]
        assert len(inside) > 100
        for e in inside:
            held = [a for a in actions if (a.started_ns or 0) <= (e.started_ns or 0) < (a.ended_ns or 0)]
            assert [a.microbatch for a in held] == [e.microbatch]


def test_a_longer_stage_shows() -> None:
    def forward(track: Track) -> float:
        return next(seconds(e) for e in track.entries if e.op == ACTION)

    even, uneven = timelines(trained("1f1b"))[0], timelines(trained("uneven"))[0]
    middle = [forward(track) for track in uneven.tracks]
    assert middle[0] / middle[1] == pytest.approx(9 / 8, rel=0.03)
    assert forward(even.tracks[1]) / forward(even.tracks[2]) == pytest.approx(1.0, rel=1e-6)


def test_equal_times_for_every_action_are_the_plain_simulation() -> None:
    table = schedule("1f1b", 4, 8)
    own = simulate(table, seconds_of=lambda a: {"F": 1.0, "B": 2.0}[a.kind])
    assert own == simulate(table)
    slow = simulate(table, seconds_of=lambda a: {"F": 1.0, "B": 2.0}[a.kind] * (2 if a.chunk == 2 else 1))
    assert slow.makespan > own.makespan


def test_gathers_run_ahead_and_sums_behind() -> None:
    (step,) = timelines(trained("fsdp"))
    rows = step.tracks[0].entries
    gathers = [e for e in rows if e.op == "all_gather" and e.phase == "forward" and e.microbatch == 0]
    first = {e.layer: e for e in reversed(rows) if e.stream == "compute" and e.phase == "forward" and not e.microbatch}
    assert len(gathers) > 30
    for gather in gathers:
        if gather.layer is not None:
            assert (gather.ended_ns or 0) <= (first[gather.layer].started_ns or 0)
    ahead = [g for g in gathers if g.layer and (g.started_ns or 0) < (first[g.layer - 1].ended_ns or 0)]
    assert ahead, "no gather runs beside compute"


def test_a_long_step_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = trained("1f1b", batch=256)
    assert plan.chosen is not None
    work = plan.chosen.workload
    assert isinstance(work, Train)
    whole = training_timeline(plan.chosen.placement, plan.cluster, work, 4.0)
    monkeypatch.setattr(timeline_train, "MAX_ACTIONS", 300)
    monkeypatch.setattr(timeline_train, "MAX_DETAIL", 1)
    short = training_timeline(plan.chosen.placement, plan.cluster, work, 4.0)
    assert (whole.table.microbatches, short.table.microbatches) == (128, 36)
    assert whole.timeline.note == ""
    assert short.timeline.note == "the first 36 of 128 micro-batches"
    assert short.timeline.seconds < whole.timeline.seconds
    rows = [e for track in short.timeline.tracks for e in track.entries]
    inner = {e.microbatch for e in rows if e.op not in {ACTION, "send"}}
    assert inner == {0, None}
    pace = [max(end - start for start, end in s.simulation.spans[0]) for s in (whole, short)]
    assert pace[0] == pytest.approx(pace[1], rel=0.01), "both are scaled to the same step"


def test_an_illegal_layout_has_no_timeline() -> None:
    plan = plan_serve("llama-3.1-70b", "8xH100-SXM", layout="tp=3")
    with pytest.raises(InputError, match="illegal"):
        timelines(plan)
    with pytest.raises(InputError, match="illegal"):
        step_time(plan)
