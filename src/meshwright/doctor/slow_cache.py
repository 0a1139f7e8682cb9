"""Keys and values on their way from prefill to decode: what moves, how fast, and against what the link carries.

Three sources: our ledgers, whose hand-offs named ``KV blocks`` are matched by pair of ranks and layer; metrics of the
engines' connectors (NIXL, Mooncake, SGLang's own); sends in traces of a job that has no backward pass. Of hand-offs the
time counts in which any of a pair was under way, from when both sides were there: several layers share the link.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from meshwright.doctor.findings import Finding, ranks_text
from meshwright.doctor.incident import Fact, Incident
from meshwright.doctor.peak import Peak
from meshwright.doctor.slow_advice import ADVICE, CACHE_ADVICE
from meshwright.doctor.slow_comm import peak_bytes_s
from meshwright.doctor.slow_view import view_of
from meshwright.doctor.slow_words import bytes_text, of_text, rate_text, time_text
from meshwright.ledger.schema import Entry

#: Transfers matter from this share of the time to the first token on. The link is slow where they matter and reach less
#: than this share of what it can be expected to carry, broken below the second share; and a pair where it reaches less
#: than half of what the others do.
MATTERS, SLOW, BROKEN, UNLIKE = 0.2, 0.4, 0.1, 0.5
#: Bytes a second that connectors reach over faster links (``transfer_gb_s`` of ``plan/constants/timing.json``).
REACHED = 33e9
#: Messages below this say more of latency than of the link.
MIN_BYTES = 256 << 10
CACHE, HAND_OFFS = "the KV cache", "hand-offs"

#: Source and target rank, bytes, and when it was under way (Unix nanoseconds).
Move = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Moved:
    """What moved over one way.

    Attributes:
        what, way: for people, ``the KV cache``, ``from rank 0 to rank 2``. ranks: of both ends.
        count: transfers. size_bytes: of all. busy_s: seconds in which they were under way.
        each_s: of one. first_s: of the time to the first token, None unknown.
        failed: transfers that failed, and requests whose blocks expired.
    """

    what: str
    way: str
    ranks: tuple[int, ...]
    count: float
    size_bytes: float
    busy_s: float
    each_s: float
    first_s: float | None = None
    failed: float = 0.0

    @property
    def bytes_s(self) -> float:
        """Bytes a second while anything was under way."""
        return self.size_bytes / self.busy_s

    @property
    def share(self) -> float:
        """Of the time to the first token; 0 unknown."""
        return self.each_s / self.first_s if self.first_s else 0.0


def moved(incident: Incident) -> list[Moved]:
    """All ways, the slowest first."""
    found = [m for facts in engines(incident).values() if (m := _of_metrics(facts)) is not None]
    found += _of_moves(CACHE, _cache_moves(incident))
    found += _of_moves(HAND_OFFS, _trace_moves(incident))
    return sorted(found, key=lambda m: m.bytes_s)


def findings(incident: Incident) -> list[Finding]:
    """One for what is slow of them: a link, or too many bytes for it; none where nothing matters."""
    ways, found = moved(incident), []
    for place, way in enumerate(ways):
        others = [m.bytes_s for n, m in enumerate(ways) if n != place and m.what == way.what == CACHE and m.ranks]
        usual = median(others) if others and way.ranks else None
        kind = _kind(way, _peak(incident, way), usual)
        if kind is not None:
            found.append(_finding(incident, way, kind, ways, usual))
    return found[:2]


def lines(incident: Incident) -> tuple[str, ...]:
    """What moves, for people."""
    return tuple(_line(m, _peak(incident, m)) for m in moved(incident)[:4])


def healthy(incident: Incident) -> Finding | None:
    """Where the cache moves and that is all that is known: how fast."""
    said = lines(incident)
    if not said:
        return None
    unknown = ("what the rest of a step takes: profiler traces, or /metrics of the engine",)
    return Finding("healthy", headline=f"{said[0]}; no pair is slower than its like", unknown=unknown)


def _peak(incident: Incident, way: Moved) -> Peak | None:
    """Of the link between the pools of a plan; for sends in traces else that of the device, inside a node."""
    told = incident.peaks
    if told is not None and way.what == CACHE:
        return told.pools or told.inter
    if way.what == CACHE:
        return None
    known = peak_bytes_s(view_of(incident))
    return Peak(*known) if known is not None else None


def _kind(way: Moved, peak: Peak | None, usual: float | None) -> str | None:
    large = way.count and way.size_bytes / way.count >= MIN_BYTES
    if not large:
        return "latency_bound_comm" if way.share >= MATTERS else None
    if usual is not None and way.bytes_s < UNLIKE * usual:
        return "slow_link"
    if peak is not None:
        share = way.bytes_s / (min(peak.bytes_s, REACHED) if way.what == CACHE else peak.bytes_s)
        if share < BROKEN or (share < SLOW and way.share >= MATTERS):
            return "slow_link"
    return "bandwidth_bound_comm" if way.share >= MATTERS else None


def _finding(incident: Incident, way: Moved, kind: str, ways: Sequence[Moved], usual: float | None) -> Finding:
    peak = _peak(incident, way)
    text = f"{_line(way, peak)}"
    if way.share:
        text += f"; {of_text(way.each_s, way.first_s or 0.0)} to the first token is this transfer"
    if kind == "slow_link" and usual is not None and way.bytes_s < UNLIKE * usual:
        text += f"; other pairs reach {rate_text(usual)}"
    numbers = [
        ("bytes_s", way.bytes_s),
        ("bytes", way.size_bytes),
        ("transfers", way.count),
        ("transfer_s", way.each_s),
    ]
    if peak is not None:
        numbers += [("peak_bytes_s", peak.bytes_s), ("share", way.bytes_s / peak.bytes_s)]
    if way.first_s is not None:
        numbers += [("ttft_s", way.first_s), ("share_of_ttft", way.share)]
    return Finding(
        kind,
        way.ranks,
        confidence="medium",
        headline=text,
        evidence=tuple(_line(m, _peak(incident, m)) for m in ways[:6]),
        unknown=() if peak is not None else ("what the link carries: --against plan.json of the two pools",),
        advice=(*CACHE_ADVICE, *(ADVICE["slow_link"] if kind == "slow_link" else ())),
        op="send",
        numbers=tuple(numbers),
    )


def _line(way: Moved, peak: Peak | None) -> str:
    share = f", {100 * way.bytes_s / peak.bytes_s:.0f} % of the peak of {peak.name}" if peak is not None else ""
    failed = f"; {way.failed:.0f} failed or expired" if way.failed else ""
    count = f"{way.count:.0f} transfers of {bytes_text(way.size_bytes / way.count)}" if way.count else "transfers"
    each = f"({count}, {time_text(way.each_s)} each)"
    plural = "moves" if way.what != HAND_OFFS else "move"
    return " ".join(f"{way.what} {plural} at {rate_text(way.bytes_s)} {way.way}{share} {each}{failed}".split())


def engines(incident: Incident) -> dict[str, list[Fact]]:
    """Scrapes of every engine in the order of time, which counts of its histograms tell: files have any name."""
    by: dict[str, list[Fact]] = {}
    for fact in incident.facts:
        if fact.kind == "serving":
            by.setdefault(str(fact.data.get("engine", "")), []).append(fact)
    for facts in by.values():
        if len({f.source.rpartition(":")[0] for f in facts}) > 1:
            facts.sort(key=_counted)
    return by


def _counted(fact: Fact) -> float:
    """Everything that only grows, together."""
    grows = (v for k, v in fact.data.items() if k.endswith("_count") or k in ("preemptions", "retracted"))
    return sum(v for v in grows if isinstance(v, float))


def grown(facts: Sequence[Fact], key: str) -> float | None:
    """How much a counter grew between scrapes; of a single one, or after a restart, what it says."""
    known = [v for f in facts if isinstance(v := f.data.get(key), float)]
    if not known:
        return None
    return known[-1] - known[0] if len(known) > 1 and known[-1] >= known[0] else known[-1]


def _of_metrics(facts: Sequence[Fact]) -> Moved | None:
    """Of one engine's connector; a decode engine that pulls, or a prefill engine that pushes, counts its own."""
    size, busy = grown(facts, "kv_transfer_bytes_sum"), grown(facts, "kv_transfer_s_sum")
    count = grown(facts, "kv_transfer_s_count")
    if not size or not busy:
        mib, ms = grown(facts, "kv_transfer_mb_sum"), grown(facts, "kv_transfer_ms_sum")
        size, busy, count = (mib or 0.0) * (1 << 20), (ms or 0.0) / 1e3, grown(facts, "kv_transfer_ms_count")
    rate, took = _last(facts, "kv_transfer_gib_s"), _last(facts, "kv_transfer_ms")
    if not size and rate and took:  # SGLang until 0.5: of the latest transfer
        size, busy, count = rate * (1 << 30) * took / 1e3, took / 1e3, 1.0
    if not size or not busy or size < 0 or busy <= 0:
        return None
    failed = sum(grown(facts, key) or 0.0 for key in ("kv_failed", "kv_expired"))
    first = mean_grown(facts, "ttft_s") if count and count > 0 else None
    count = max(count or 0.0, 1.0)
    name = str(facts[-1].data.get("engine", ""))
    return Moved(CACHE, f"of engine {name}" if name else "", (), count, size, busy, busy / count, first, failed)


def mean_grown(facts: Sequence[Fact], key: str) -> float | None:
    """The mean of a histogram over what came between scrapes, or over all where nothing did."""
    total, often = grown(facts, f"{key}_sum"), grown(facts, f"{key}_count")
    if not often:
        total, often = (_last(facts, f"{key}_{end}") for end in ("sum", "count"))
    return total / often if total and often and total > 0 and often > 0 else None


def _last(facts: Sequence[Fact], key: str) -> float | None:
    found = facts[-1].data.get(key)
    return found if isinstance(found, float) else None


def _cache_moves(incident: Incident) -> Iterable[Move]:
    """Hand-offs of the cache in our ledgers: by pair and layer in the order of issue, because prompts cross."""
    sides: dict[str, dict[tuple[int, int, int | None], list[Entry]]] = {}
    for rank, calls in incident.cache_calls.items():
        for call in calls:
            if call.peer is None:
                continue
            pair = (rank, call.peer) if call.op == "send" else (call.peer, rank)
            sides.setdefault(call.op, defaultdict(list))[(*pair, call.layer)].append(call)
    for key, sent in sides.get("send", {}).items():
        got = sides.get("recv", {}).get(key, [])
        for a, b in zip(sent, got, strict=False):
            begun, ended = max(a.enqueued_ns or 0, b.enqueued_ns or 0), b.ended_ns or 0
            if a.payload_bytes and a.payload_bytes == b.payload_bytes and ended > begun:
                yield key[0], key[1], a.payload_bytes, begun, ended


def _trace_moves(incident: Incident) -> Iterable[Move]:
    """Sends of a job without backward pass and optimizer: one that serves."""
    if not incident.tracks or any(t.recorder != "kineto" for t in incident.tracks):
        return
    view = view_of(incident)
    if not view.tracks or view.mean_s("backward", "optimizer") > 0:
        return
    for meeting in view.meetings:
        if meeting.op == "send" and meeting.payload_bytes and len(meeting.calls) == 2 and meeting.transfer_ns > 0:
            source = next((r for r, c in meeting.calls.items() if c.op == "send"), None)
            target = next((r for r, c in meeting.calls.items() if c.op == "recv"), None)
            if source is not None and target is not None and meeting.end_ns[target] > meeting.arrived_ns:
                yield source, target, meeting.payload_bytes, meeting.arrived_ns, meeting.end_ns[target]


def _of_moves(what: str, moves: Iterable[Move]) -> list[Moved]:
    by: dict[tuple[int, int], list[Move]] = defaultdict(list)
    for move in moves:
        by[move[0], move[1]].append(move)
    out = []
    for (source, target), held in by.items():
        busy = _union_ns((m[3], m[4]) for m in held) / 1e9
        each = median(m[4] - m[3] for m in held) / 1e9
        way = f"from {ranks_text((source,))} to {ranks_text((target,))}"
        ranks = tuple(sorted((source, target)))
        out.append(Moved(what, way, ranks, len(held), sum(m[2] for m in held), busy, each))
    return out


def _union_ns(spans: Iterable[tuple[int, int]]) -> int:
    """Nanoseconds that any of the spans holds."""
    total, reached = 0, 0
    for begun, ended in sorted(spans):
        total += max(0, ended - max(begun, reached))
        reached = max(reached, ended)
    return total
