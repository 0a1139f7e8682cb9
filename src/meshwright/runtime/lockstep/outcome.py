"""What a dry-run found, in words: the verdict line, a row a rank, JSON. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

from meshwright.ledger.matching import Call, majority, splits_between
from meshwright.ledger.waiting import Verdict

#: Lines of the script's own output that are shown where a rank failed.
MAX_TAIL_LINES = 12


@dataclass(frozen=True, slots=True)
class Row:
    """One rank at the moment of the finding."""

    rank: int
    state: str
    op: str
    group: str
    call_site: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What ``check --world`` found.

    Attributes:
        code: 0 nothing found, 1 a finding, 2 it cannot be judged.
        kind: ``healthy``, a kind of ``ledger.waiting.Verdict``, ``raised``, ``no_progress``, ``unsafe_order``,
            ``cannot_run``.
        verdict: the line that answers.
        guilty_ranks: global ranks; empty where there is no majority.
        rows: a row a rank concerned.
        notes: further lines: clues, scope.
        steps: optimizer steps that were done.
        operations: collectives and hand-offs that were matched.
        world: number of ranks.
        seconds: ``start``, ``import``, ``run``, and ``cpu``, the CPU time of the run over all processes.
        tail: last lines that the guilty rank printed.
    """

    code: int
    kind: str
    verdict: str
    world: int
    guilty_ranks: tuple[int, ...] = ()
    rows: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()
    steps: int = 0
    operations: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    tail: tuple[str, ...] = ()


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Everything, with the keys of the doctor where they mean the same."""
    waiting = [r.rank for r in outcome.rows if r.state == "waits" and r.rank not in outcome.guilty_ranks]
    return {
        "verdict": outcome.verdict,
        "ok": outcome.code == 0,
        "kind": outcome.kind,
        "guilty_ranks": list(outcome.guilty_ranks),
        "waiting_ranks": waiting,
        "ranks": [
            {"rank": r.rank, "state": r.state, "op": r.op, "group": r.group, "call_site": r.call_site}
            for r in outcome.rows
        ],
        "notes": list(outcome.notes),
        "world": outcome.world,
        "steps": outcome.steps,
        "operations": outcome.operations,
        "seconds": {k: round(v, 2) for k, v in outcome.seconds.items()},
        "output": list(outcome.tail),
    }


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 2``, ``ranks 0, 1, 3``, ``ranks 0-6``."""
    found = sorted(set(ranks))
    runs: list[list[int]] = []
    for r in found:
        if runs and r == runs[-1][-1] + 1:
            runs[-1].append(r)
        else:
            runs.append([r])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 3 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(found) != 1 else ''} {', '.join(parts)}"


def from_answer(answer: Mapping[str, Any], world: int, timeout_s: float) -> Outcome:
    """The outcome of what the zygote answered."""
    exits = dict(enumerate(answer["exits"]))
    common = {k: answer[k] for k in ("steps", "operations", "seconds")}
    refused = [e["refused"] for e in exits.values() if e and e.get("refused")]
    if refused:
        return Outcome(2, "cannot_run", f"cannot dry-run: {refused[0]}", world, **common)
    if answer["how"] == "memory":
        gib = answer["memory_bytes"] / 2**30
        text = f"cannot dry-run: {world} ranks hold {gib:.1f} GiB; use a smaller --world or a smaller model"
        return Outcome(2, "cannot_run", text, world, **common)
    if answer["how"] == "space":
        return Outcome(2, "cannot_run", "cannot dry-run: the temporary folder runs out of space", world, **common)
    raised = {r: e for r, e in exits.items() if e and e["how"] in {"raised", "killed"}}
    verdict = _verdict(answer["verdict"])
    if raised and (verdict is None or verdict.kind in {"peer_failed", "peer_left", "stuck"}):
        return _raised(raised, verdict, answer, world, common)
    if verdict is not None:
        return _found(verdict, world, common)
    if answer["stacks"]:
        return _silent(answer, world, timeout_s, common)
    return _clean(answer, world, timeout_s, common)


def _verdict(found: Mapping[str, Any] | None) -> Verdict | None:
    if found is None:
        return None
    calls, shift = (tuple(_call(c) for c in found[k]) for k in ("calls", "shift"))
    pairs = {k: tuple(tuple(x) for x in found[k]) for k in ("left", "counts")}
    return Verdict(
        found["kind"], found["group"], tuple(found["guilty"]), calls, tuple(found["cycle"]),
        pairs["left"], shift, pairs["counts"],
    )  # fmt: skip


def _calls(values: Sequence[Sequence[Any]]) -> tuple[Call, ...]:
    return tuple(_call(v) for v in values)


def _call(values: Sequence[Any]) -> Call:
    def tuples(value: Any) -> Any:
        return tuple(tuples(v) for v in value) if isinstance(value, list) else value

    return Call(*(tuples(v) for v in values))


def what(call: Call, kind: str = "") -> str:
    """A call in words, with what a kind of disagreement is about."""
    group = "" if call.group in {"world", "start"} else f" of group {call.group}"
    if call.op in {"send", "recv"}:
        side = "anyone" if call.peer is None else f"rank {call.peer}"
        text = f"{call.op} {'to' if call.op == 'send' else 'from'} {side}"
    else:
        text = call.op
    if kind == "wrong_shape":
        shapes = (call.shapes_out if call.op == "scatter" else call.shapes_in) or call.shapes_out
        text += " of " + (" + ".join(str(list(s)) for s in shapes[:3]) or "nothing")
    elif kind == "wrong_dtype":
        text += f" in {call.dtype}"
    elif kind == "wrong_root":
        text += f" with root {call.peer}"
    elif kind == "wrong_reduce_op":
        text += f" ({call.reduce_op})"
    elif kind == "wrong_splits":
        sent, got = (list(s) if s is not None else "equal" for s in (call.splits_in, call.splits_out))
        text += f" that sends {sent} and expects {got}"
    elif kind == "group_order":
        text += f" of {ranks_text(call.creates or ())}"
    return text + group


def _at(sites: Iterable[str | None]) -> str:
    known = sorted({s for s in sites if s})
    return f" at {', '.join(known[:3])}" if known else ""


def _together(calls: Sequence[Call], kind: str) -> str:
    """Calls of one class: ``ranks 0, 1 call all_reduce at a.py:3``."""
    by_text: dict[str, list[Call]] = {}
    for call in calls:
        by_text.setdefault(what(call, kind), []).append(call)
    parts = []
    for text, same in by_text.items():
        ranks = [c.rank for c in same]
        parts.append(f"{ranks_text(ranks)} call{'s' if len(ranks) == 1 else ''} {text}{_at(c.call_site for c in same)}")
    return " and ".join(parts)


def _rows(calls: Iterable[Call], kind: str, left: Iterable[tuple[int, str, str]]) -> tuple[Row, ...]:
    rows = [Row(c.rank, "waits", what(c._replace(group="world"), kind), c.group, c.call_site or "") for c in calls]
    rows += [Row(r, f"{how}{': ' if why else ''}{why}"[:200], "", "", "") for r, how, why in left]
    return tuple(sorted(rows, key=lambda r: r.rank))


def _clue(verdict: Verdict) -> list[str]:
    """Where ranks first came to one collective from different lines, and how often each came."""
    notes = []
    if verdict.shift and verdict.kind != "group_order":
        notes.append(_lines(verdict.shift))
    counts: dict[int, list[int]] = {}
    for rank, count in verdict.counts:
        counts.setdefault(count, []).append(rank)
    if len(counts) > 1:
        each = "; ".join(f"{ranks_text(r)}: {n}" for n, r in sorted(counts.items(), key=lambda x: -len(x[1])))
        notes.append(f"collectives entered in group {verdict.group}: {each}")
    return notes


def _lines(shift: Sequence[Call]) -> str:
    """Where ranks came to one collective from different lines."""
    by_site: dict[str, list[int]] = {}
    for call in shift:
        by_site.setdefault(call.call_site or "?", []).append(call.rank)
    places = "; ".join(f"{ranks_text(r)} at {s}" for s, r in sorted(by_site.items(), key=lambda x: -len(x[1])))
    return f"first {what(shift[0])} that ranks reach from different lines: {places}"


def _found(verdict: Verdict, world: int, common: Mapping[str, Any]) -> Outcome:
    kind, calls = verdict.kind, verdict.calls
    if kind == "deadlock":
        text, shown = _circle(verdict), [c for c in calls if c.rank in verdict.cycle]
    elif kind in {"peer_left", "stuck"}:
        shown = [c for c in calls if c.group == verdict.group] or list(calls)
        text = _together(shown, "")
        if verdict.left:
            ranks = [r for r, _, _ in verdict.left]
            them = "it has" if len(ranks) == 1 else "they have"
            text = f"{text} and wait{'s' if len(shown) == 1 else ''} for {ranks_text(ranks)}; {them} ended"
    elif kind == "wrong_splits":
        text = _splits_text(calls, verdict.guilty)
    else:
        classes, _ = majority(calls)
        order = classes[1:] + classes[:1] if verdict.guilty else classes
        text = _together(order[0], kind) + " while " + "; ".join(_together(c, kind) for c in order[1:])
    return Outcome(
        1, kind, text, world, verdict.guilty, _rows(calls, kind, verdict.left), tuple(_clue(verdict)), **common
    )  # fmt: skip


def _splits_text(calls: Sequence[Call], guilty: tuple[int, ...]) -> str:
    """The first pair that disagrees, one that concerns the guilty rank: what is sent and what is expected."""
    for sender, receiver in permutations(sorted(calls, key=lambda c: c.rank not in guilty), 2):
        sent, expected = splits_between(sender, receiver)
        if sent is not None and expected is not None and sent != expected:
            return (
                f"rank {sender.rank} sends {sent} elements to rank {receiver.rank} in {what(sender)}"
                f"{_at([sender.call_site])} while rank {receiver.rank} expects {expected}{_at([receiver.call_site])}"
            )
    return "splits of all_to_all disagree"


def _circle(verdict: Verdict) -> str:
    by_rank = {c.rank: c for c in verdict.calls}
    parts = []
    for at, rank in enumerate(verdict.cycle):
        call, other = by_rank[rank], verdict.cycle[(at + 1) % len(verdict.cycle)]
        parts.append(f"rank {rank} in {what(call)}{_at([call.call_site])} waits for rank {other}")
    return "deadlock: " + "; ".join(parts)


def _raised(
    raised: Mapping[int, Mapping[str, Any]],
    verdict: Verdict | None,
    answer: Mapping[str, Any],
    world: int,
    common: Mapping[str, Any],
) -> Outcome:
    """Ranks that failed. All in one way: the script cannot be run here, and no rank is to blame."""
    reasons: dict[str, list[int]] = {}
    for rank, report in raised.items():
        site = f" ({report['site']})" if report.get("site") else ""
        reasons.setdefault(f"{_short(report.get('why') or report['how'])}{site}", []).append(rank)
    reason, ranks = min(reasons.items(), key=lambda item: (len(item[1]), item[1]))
    tail = tuple(answer["tails"][ranks[0]].splitlines()[-MAX_TAIL_LINES:]) if answer["tails"] else ()
    if len(raised) == world and len(reasons) == 1:
        return Outcome(2, "cannot_run", f"cannot dry-run: every rank fails: {reason}", world, tail=tail, **common)
    fails = f"{ranks_text(ranks)} fail{'s' if len(ranks) == 1 else ''}: {reason}"
    calls = verdict.calls if verdict is not None else ()
    left = [(r, "failed", f"{e.get('why') or ''}") for r, e in raised.items()]
    text = fails
    if calls:
        waiting = ranks_text(c.rank for c in calls)
        ops = sorted({what(c) for c in calls})
        single = len({c.rank for c in calls}) == 1
        at = _at(c.call_site for c in calls)
        text = f"{fails}; {waiting} wait{'s' if single else ''} in {', '.join(ops[:3])}{at}"
    guilty = tuple(sorted(ranks))
    notes = tuple(_clue(verdict)) if verdict is not None else ()
    return Outcome(1, "raised", text, world, guilty, _rows(calls, "", left), notes, tail=tail, **common)


def _short(text: str, limit: int = 160) -> str:
    """A reason cut at a word."""
    return text if len(text) <= limit else text[:limit].rsplit(" ", 1)[0] + " ..."


def _silent(answer: Mapping[str, Any], world: int, timeout_s: float, common: Mapping[str, Any]) -> Outcome:
    """Ranks that others wait for, and that said nothing for long: stuck or at work, which nobody can tell."""
    where = {int(r): place for r, place in answer["stacks"].items()}
    ranks = sorted(where)
    are, they = ("is", "it works") if len(ranks) == 1 else ("are", "they work")
    place = _at(where.values()) or " in code without a line"
    text = (
        f"cannot judge: after {timeout_s:g} s the others wait for {ranks_text(ranks)}, which {are}{place}; "
        f"raise --timeout if {they}"
    )
    rows = tuple(Row(r, "runs", "", "", where[r]) for r in ranks)
    return Outcome(2, "no_progress", text, world, tuple(ranks), rows, **common)


def _clean(answer: Mapping[str, Any], world: int, timeout_s: float, common: Mapping[str, Any]) -> Outcome:
    steps, operations = answer["steps"], answer["operations"]
    amount = f"{steps} step{'s' if steps != 1 else ''}" if steps else f"{operations} operations"
    scope = f"in {amount} at world {world} with these data"
    notes = [f"{operations} collectives and hand-offs matched"] if steps else []
    if answer["how"] == "timeout":
        notes.append(f"stopped after {timeout_s:g} s (--timeout); later steps were not seen")
    elif any(e and e["how"] == "stopped" for e in answer["exits"]):
        notes.append("stopped by --steps; later steps and the end of the script were not seen")
    if answer["leftovers"]:
        rest = [_call(c) for c in answer["leftovers"]]
        notes.append(f"never matched: {'; '.join(_together([c], '') for c in rest[:3])}")
    notes += [_lines(shift) + "; that is legal, and worth a look" for shift in map(_calls, answer["shifts"])]
    unsafe = _verdict(answer["unsafe"])
    if unsafe is not None:
        text = f"unsafe order {scope}: {_circle(unsafe).removeprefix('deadlock: ')}"
        rows = _rows([c for c in unsafe.calls if c.rank in unsafe.cycle], "", ())
        return Outcome(1, "unsafe_order", text, world, unsafe.cycle, rows, tuple(notes), **common)
    if not operations:
        return Outcome(2, "cannot_run", f"nothing to judge: no operation between ranks {scope}", world, **common)
    return Outcome(0, "healthy", f"no divergence {scope}", world, notes=tuple(notes), **common)
