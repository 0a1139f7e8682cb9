"""Why a serving engine is slow, from its metrics: requests queue, or the KV cache is full."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from meshwright.doctor import slow_cache
from meshwright.doctor.findings import Finding
from meshwright.doctor.incident import Fact, Incident
from meshwright.doctor.slow_advice import ADVICE
from meshwright.doctor.slow_words import time_text

#: A queue counts from this many waiting requests, or when requests spend this share of the time to their first token
#: in it; the cache is full from this share on.
MIN_WAITING, QUEUE_SHARE, FULL = 4.0, 0.5, 0.95
#: Requests thrown out of the running ones, from which on it is a habit.
MIN_PREEMPTIONS = 1.0


def findings(incident: Incident) -> list[Finding]:
    """One an engine: pressure on the KV cache before queueing, which follows from it; else healthy."""
    return [_engine(engine, facts) for engine, facts in slow_cache.engines(incident).items()]


def _value(fact: Fact, key: str) -> float | None:
    found = fact.data.get(key)
    return found if isinstance(found, float) else None


def _mean(facts: Sequence[Fact], key: str) -> float | None:
    known = [v for f in facts if (v := _value(f, key)) is not None]
    return mean(known) if known else None


def _engine(engine: str, facts: Sequence[Fact]) -> Finding:
    waiting, running = _mean(facts, "waiting") or 0.0, _mean(facts, "running") or 0.0
    usage = _mean(facts, "kv_usage")
    counted = slow_cache.grown(facts, "retracted")  # of newer SGLang, beside a gauge of the same
    thrown = counted if counted is not None else slow_cache.grown(facts, "preemptions") or 0.0
    queue, first = _mean(facts[-1:], "queue_s"), _mean(facts[-1:], "ttft_s")
    full = usage is not None and usage >= FULL
    queued = waiting >= MIN_WAITING or (queue is not None and first is not None and queue > QUEUE_SHARE * first > 0)
    pressed = (thrown >= MIN_PREEMPTIONS and (full or waiting >= 1)) or (full and queued)
    kind = "kv_pressure" if pressed else "queueing" if queued else "healthy"
    numbers = [("waiting", waiting), ("running", running), ("kv_usage", usage or 0.0), ("preemptions", thrown)]
    numbers += [
        (k, v) for k, v in (("queue_s", queue), ("ttft_s", first), ("tpot_s", _mean(facts[-1:], "tpot_s"))) if v
    ]
    return Finding(
        kind,
        confidence="medium" if len(facts) < 3 else "high",
        headline=_headline(kind, engine, waiting, running, usage, thrown, queue, first),
        evidence=tuple(f"{f.text} ({f.source})" for f in facts[:4]),
        unknown=() if len(facts) > 2 else ("how it goes on: several scrapes, some seconds apart",),
        advice=ADVICE[kind],
        numbers=tuple(numbers),
    )


def _headline(
    kind: str,
    engine: str,
    waiting: float,
    running: float,
    usage: float | None,
    thrown: float,
    queue: float | None,
    first: float | None,
) -> str:
    name = f"engine {engine}" if engine else "the engine"
    in_queue = (
        f" {time_text(queue)} of {time_text(first)} to the first token is spent in the queue."
        if queue and first
        else ""
    )
    cache = f"{100 * usage:.0f} %" if usage is not None else "an unknown share"
    if kind == "kv_pressure":
        return (
            f"{name} has its KV cache {cache} full and threw out {thrown:.0f} running requests, which it computes "
            f"again; {waiting:.0f} wait.{in_queue}"
        )
    if kind == "queueing":
        return (
            f"{waiting:.0f} requests wait for {name} while {running:.0f} run; its KV cache is {cache} full.{in_queue}"
        )
    return f"{name} keeps up: {waiting:.0f} requests wait, {running:.0f} run, the KV cache is {cache} full"
