"""Collectives of several ranks: matched by number, by order, or by the shift that fits; misfits are left out."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from meshwright.doctor.readers.kineto import read_track
from meshwright.ledger.arrivals import Matched, match
from meshwright.ledger.tracks import Track
from tests.doctor.trace_maker import TraceMaker


def job(named: bool = True) -> TraceMaker:
    """Eight collectives of two kinds; rank n % 3 is last in the n-th."""
    m = TraceMaker(3, clocks=(0.0, 0.7, 2.0))
    m.begin()
    for n in range(8):
        for r in m.ranks:
            m.work(r, "forward", 0.004 if r == n % 3 else 0.001 + 0.0001 * n)
        m.meet("all_gather" if n % 4 == 3 else "all_reduce", 1024 * (n + 1), 0.0005, named=named)
    m.end()
    return m


def tracks(m: TraceMaker, drop: dict[int, int] | None = None, *, marked: bool = True) -> list[Track]:
    """Tracks, of some ranks without their first collectives; without marks of steps where told so."""
    out = []
    for r in m.ranks:
        document = m.document(r)
        kept: list[dict[str, Any]] = []
        left = (drop or {}).get(r, 0)
        for event in document["traceEvents"]:
            if not marked and event["name"].startswith("ProfilerStep"):
                continue
            if left and event["name"].startswith("nccl"):
                left -= 1
                continue
            kept.append(event)
        document["traceEvents"] = kept
        out.append(read_track(io.BytesIO(json.dumps(document).encode()), f"{r}"))
    return out


def lasts(found: Matched) -> list[int]:
    return [m.last for m in found.meetings]


@pytest.mark.parametrize("named", [True, False])
def test_clocks_are_set_and_the_last_one_found(named: bool) -> None:
    held = tracks(job(named))
    found = match(held)
    assert lasts(found) == [n % 3 for n in range(8)]
    assert (found.numbered, found.alone, found.doubtful) == (named, 0, 0)
    apart = [t.offset_ns - held[0].offset_ns for t in held]
    assert apart == [0, pytest.approx(-0.7e9, abs=2000), pytest.approx(-2.0e9, abs=2000)]
    assert found.spread_ns < 3000
    assert all(m.transfer_ns == pytest.approx(500_000, rel=0.02) for m in found.meetings)


def test_a_recording_that_begins_later_is_shifted() -> None:
    numbered, unnumbered = (tracks(job(named=True), {1: 2}, marked=False) for _ in range(2))
    for track in unnumbered:
        for call in track.calls:
            call.seq = None
    for held in (numbered, unnumbered):
        found = match(held)
        whole = [m for m in found.meetings if len(m.ranks) == 3]
        assert len(found.meetings) == 8
        assert [m.last for m in whole] == [n % 3 for n in range(2, 8)]
        assert all(len({c.payload_bytes for c in m.calls.values()}) == 1 for m in found.meetings)


def test_calls_that_cannot_have_been_one_are_left_out() -> None:
    held = tracks(job(named=False))
    for call in held[2].calls[:1]:
        call.started_ns, call.ended_ns = (call.started_ns or 0) + 10**9, (call.ended_ns or 0) + 10**9
    found = match(held)
    assert (len(found.meetings), found.doubtful) == (7, 3)
