"""Micro-batches in flight: closed forms against the schedule's own table and against simulations."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.moves import pipeline
from meshwright.plan import train_inflight
from meshwright.plan.train_inflight import held_chunks, peak_held
from meshwright.specs.layout import Schedule


def _peak(schedule: Schedule, stage: int, p: int, m: int, v: int) -> int:
    return sum(peak_held([1] * v, schedule, stage, p, m, p))


@settings(max_examples=60, deadline=None)
@given(p=st.integers(1, 6), m=st.integers(1, 16))
def test_plain_schedules_hold_what_their_tables_hold(p: int, m: int) -> None:
    for name in ("gpipe", "1f1b"):
        table = pipeline.schedule(name, p, m)
        for stage in range(p):
            assert _peak(name, stage, p, m, 1) == pipeline.in_flight(table, stage)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(p=st.integers(2, 5), rounds=st.integers(1, 4), v=st.integers(2, 4))
def test_interleaved_holds_what_its_table_holds(p: int, rounds: int, v: int) -> None:
    table = pipeline.schedule("interleaved", p, p * rounds, v)
    for stage in range(p):
        assert _peak("interleaved", stage, p, p * rounds, v) == pipeline.in_flight(table, stage)


def test_last_rank_of_interleaved_by_hand() -> None:
    """(v - 1) G + 1 chunks, G the group; with larger groups more."""
    assert _peak("interleaved", 3, 4, 32, 3) == 2 * 4 + 1
    assert sum(peak_held([1, 1, 1], "interleaved", 3, 4, 30, 5)) == 2 * 5 + 1


def test_table_check_sees_a_wrong_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    real = train_inflight.warmup
    monkeypatch.setattr(train_inflight, "warmup", lambda *args: real(*args) + 1)
    with pytest.raises(AssertionError):
        test_last_rank_of_interleaved_by_hand()


def _zbv_peaks(p: int, m: int) -> list[int]:
    """Greedy simulation of the folded pipeline: a backward as soon as one is there, else a forward while at most 2p
    chunks are held, the second chunk before the first. One action a tick; a backward frees its chunk at once."""
    done_f: dict[tuple[int, int], int] = {}
    done_b: dict[tuple[int, int], int] = {}
    next_f = [[0, 0] for _ in range(p)]
    next_b = [[0, 0] for _ in range(p)]
    held, peaks = [0] * p, [0] * p
    places = [(s, 2 * p - 1 - s) for s in range(p)]
    tick = 0
    while any(n < m for pair in next_b for n in pair):
        tick += 1
        for s in range(p):
            for c in (0, 1):
                i, place = next_b[s][c], places[s][c]
                after = done_f if place == 2 * p - 1 else done_b
                key = (place, i) if place == 2 * p - 1 else (place + 1, i)
                if i < m and done_f.get((place, i), tick) < tick and after.get(key, tick) < tick:
                    next_b[s][c] += 1
                    done_b[(place, i)] = tick
                    held[s] -= 1
                    break
            else:
                for c in (1, 0):
                    i, place = next_f[s][c], places[s][c]
                    ready = place == 0 or done_f.get((place - 1, i), tick) < tick
                    if i < m and ready and held[s] < 2 * p:
                        next_f[s][c] += 1
                        done_f[(place, i)] = tick
                        held[s] += 1
                        peaks[s] = max(peaks[s], held[s])
                        break
        assert tick < 100 * m * p
    return peaks


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_folded_zero_bubble_holds_two_p_chunks_everywhere(p: int) -> None:
    assert _zbv_peaks(p, 4 * p) == [2 * p] * p
    for stage in range(p):
        assert _peak("zbv", stage, p, 4 * p, 2) == 2 * p


def _dualpipev_peak(p: int, rank: int, m: int) -> int:
    """Counts of the steps of DeepSeek's DualPipeV: warm-up forwards, then pairs of which the forward comes first."""
    first, second = 2 * (p - rank - 1), rank + 1
    held = first + 2 * second
    peak = held
    for _ in range(p - rank - 1):
        held -= 1
        held += 1
    for _ in range(min(2, m)):
        peak = max(peak, held + 1)
    return peak


@pytest.mark.parametrize("p", [1, 2, 4])
def test_dualpipev_holds_one_chunk_more(p: int) -> None:
    for rank in range(p):
        assert _peak("dualpipev", rank, p, 8 * p, 2) == _dualpipev_peak(p, rank, 8 * p) == 2 * p + 1


def test_zero_bubble_h1_equals_1f1b() -> None:
    assert (
        [_peak("zb-h1", s, 4, 8, 1) for s in range(4)] == [_peak("1f1b", s, 4, 8, 1) for s in range(4)] == [4, 3, 2, 1]
    )


@given(
    m=st.integers(1, 12),
    p=st.integers(1, 5),
    name=st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"]),
)
def test_never_more_than_all_micro_batches(m: int, p: int, name: Schedule) -> None:
    chunks = 2 if name in {"interleaved", "zbv", "dualpipev"} else 1
    for stage in range(p):
        for held in held_chunks(name, stage, p, m, chunks, p):
            assert all(0 <= n <= m for n in held)
