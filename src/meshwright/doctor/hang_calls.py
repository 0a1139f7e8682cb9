"""Findings from calls that do not match: skipped, extra, wrong, uneven ends."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from meshwright.doctor.advice import ADVICE
from meshwright.doctor.findings import Finding, ranks_text
from meshwright.doctor.source import in_loop_of
from meshwright.doctor.view import View
from meshwright.ledger.check import Divergence, divergences
from meshwright.ledger.matching import disagreement
from meshwright.ledger.stall import passed_by_all

#: Words in a stack of code that one rank often runs alone, or that all run once after the loop.
_ALONE = re.compile(r"save|checkpoint|ckpt|state_dict|export|log|push_to_hub|only_rank|is_main", re.IGNORECASE)
_AFTER = re.compile(
    r"barrier|eval|valid|test|finish|final|teardown|destroy|epoch_end|metric|gather|summary|end$", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Reading:
    """A divergence with its place in time and the finding it leads to."""

    divergence: Divergence
    finding: Finding
    at: float


def readings(view: View) -> list[Reading]:
    """All disagreements, the earliest first."""
    stall, lanes = view.stall, view.lanes
    found = divergences(lanes, lambda g, s: passed_by_all(stall, lanes, g, s), frozenset(stall.stale))
    out = []
    for divergence in found:
        strayed = divergence.by_stack and divergence.kind in {"jumped", "other"}
        if strayed and not set(divergence.guilty) <= set(stall.roots) - set(stall.pending):
            continue  # it waits somewhere itself, so that the line it came from explains nothing
        at = view.created(divergence.others + divergence.guilty, divergence.group, divergence.seq)
        out.append(Reading(divergence, _finding(view, divergence, at), at if at is not None else 1e18))
    return sorted(out, key=lambda r: (r.at, r.divergence.group, r.divergence.seq, r.divergence.guilty))


def _confidence(view: View, d: Divergence, sure: bool) -> str:
    """High only where the majority holds even if all absent members sided with the guilty."""
    members = view.incident.groups[d.group].members
    absent = sum(1 for m in members if m not in d.guilty and m not in d.others)
    if not d.clear:
        return "medium" if (sure or (d.usual and not d.known_before)) and not absent else "low"
    if sure and len(d.others) > len(d.guilty) + absent:
        return "high"
    return "medium" if sure or len(d.others) > len(d.guilty) + absent else "low"


def _kind_of_other(view: View, d: Divergence) -> tuple[str, str]:
    """Kind of a call in another's place, and in which respect it differs."""
    a = view.call(d.others[0], d.group, d.expected)
    b = view.call(d.guilty[0], d.group, d.found)
    what = disagreement(a, b)
    if what in {"wrong_root", "wrong_reduce_op"}:
        return "wrong_op", {"wrong_root": "root", "wrong_reduce_op": "reduction"}[what]
    kinds = {"wrong_op": "operation", "wrong_dtype": "element type", "wrong_shape": "shape", "wrong_splits": "splits"}
    return (what, kinds[what]) if what in kinds else ("wrong_shape", "shape")


def _names(view: View, stack: int) -> str:
    """Functions and files of the user's part of a stack, for the words in them."""
    if stack < 0:
        return ""
    frames = view.incident.stacks[stack]
    return " ".join(f"{f.function} {f.file.rpartition('/')[2]}" for f in frames if "torch/" not in f.file)


def _jumped(view: View, d: Divergence) -> tuple[str, str, bool]:
    """Kind, alternative and certainty where nothing lines up behind the divergence."""
    kind, _ = _kind_of_other(view, d)
    stacks = d.found_stack >= 0 and d.expected_stack >= 0
    if not stacks and not d.known_before:
        return kind, "a skipped or an extra call: nothing recorded behind it decides", False
    if not stacks:
        return "skipped_call", f"{kind}: nothing recorded after it decides", False
    words = _names(view, d.found_stack)
    op = view.incident.signatures[d.found].op
    if _ALONE.search(words) or d.guilty == (0,):
        return "extra_call", "the others skipped it", True
    a, b = view.incident.signatures[d.expected], view.incident.signatures[d.found]
    if a.op != b.op and b.op != "barrier" and (a.shapes_in, a.dtype) == (b.shapes_in, b.dtype):
        return "wrong_op", "an extra call: nothing recorded behind it decides", False
    told = _loop_told(view, d)
    if told is not None:
        if told:
            return "extra_call", "the others skipped it", True
        return "uneven_inputs", "an extra call on these ranks", True
    if d.known_before:
        return "uneven_inputs", "an extra call of code that all ranks reach elsewhere", False
    if _after_loop(view, d) and (d.usual or _AFTER.search(f"{words} {op}")):
        return "uneven_inputs", "an extra call on these ranks", False
    return "extra_call", "these ranks left their loop earlier (uneven inputs)", False


def after_loop(view: View, found_stack: int, usual: set[int]) -> bool:
    """Whether a call's line lies behind every line of the usual stacks in the outermost function where they part."""
    stacks = view.incident.stacks
    for frame in reversed(stacks[found_stack] if found_stack >= 0 else ()):
        lines = {f.line for n in usual for f in stacks[n] if (f.file, f.function) == (frame.file, frame.function)}
        if lines and frame.line not in lines:
            return frame.line > max(lines)
    return False


def _after_loop(view: View, d: Divergence) -> bool:
    """The same against what the others called up to the divergence; the script itself decides where it is at hand."""
    told = _loop_told(view, d)
    if told is not None:
        return not told
    lane = view.lanes.of[d.group][d.others[0]]
    stacks = set(memoryview(lane.stacks).cast("i")[: d.seq - lane.first])
    if not stacks:  # only active calls were dumped
        words = f"{_names(view, d.found_stack)} {view.incident.signatures[d.found].op}"
        return _AFTER.search(words) is not None and after_loop(view, d.found_stack, {d.expected_stack})
    return d.expected_stack in stacks and after_loop(view, d.found_stack, {n for n in stacks if n >= 0})


def _loop_told(view: View, d: Divergence) -> bool | None:
    """Whether the odd call is within the loops of the others' call, by the source; None where it is not at hand."""
    stacks = view.incident.stacks
    if d.found_stack < 0 or d.expected_stack < 0:
        return None
    for own, other in zip(reversed(stacks[d.found_stack]), reversed(stacks[d.expected_stack]), strict=False):
        if own != other:
            same = own.file == other.file and own.function == other.function
            return in_loop_of(own.file, own.line, other.line) if same else None
    return None


def _shifted(d: Divergence) -> tuple[str, tuple[int, ...], tuple[int, ...], int, int, bool]:
    """Kind, guilty, others, number and stack of the call in question, and whether a tie was broken by the rule.

    With a majority the guilty are the odd ones. Without, a call that the others know from elsewhere was skipped by
    those that lack it; one that only its own ranks ever reached is their extra call.
    """
    skipped = d.kind == "skipped"
    call, stack = (d.expected, d.expected_stack) if skipped else (d.found, d.found_stack)
    if d.clear:
        return ("skipped_call" if skipped else "extra_call"), d.guilty, d.others, call, stack, False
    has, lacks = (d.others, d.guilty) if skipped else (d.guilty, d.others)
    if d.usual if skipped else d.known_before:
        return "skipped_call", lacks, has, call, stack, True
    return "extra_call", has, lacks, call, stack, True


def _finding(view: View, d: Divergence, at: float | None) -> Finding:
    label = view.label(d.group)
    expected, found = view.call_text(d.expected), view.call_text(d.found)
    unknown = []
    if d.expected_stack < 0:
        unknown.append("dumps hold no call sites; set TORCH_INCLUDE_STACK_TRACE=1 (the default of NCCL dumps)")
    members = view.incident.groups[d.group].members
    absent = tuple(m for m in members if m not in d.guilty and m not in d.others)
    if absent:
        unknown.append(f"nothing of {ranks_text(absent)} at this call")
    if d.kind in {"skipped", "extra"}:
        base = _shift_finding(view, d, label)
    else:
        base = _other_finding(view, d, label, expected, found)
    guilty = base.guilty_ranks
    return replace(
        base,
        waiting_ranks=view.waiting(guilty),
        since=at,
        unknown=(*base.unknown, *unknown),
        advice=ADVICE[base.kind],
        group=label,
        seq=d.seq,
        expected=expected + view.where(d.expected_stack),
        found=found + view.where(d.found_stack),
    )


def _shift_finding(view: View, d: Divergence, label: str) -> Finding:
    kind, guilty, others, call, stack, tie = _shifted(d)
    text, who = view.call_text(call), ranks_text(guilty)
    many = f" and {d.count - 1} more" if d.count > 1 else ""
    verb = "skipped" if kind == "skipped_call" else "issued an extra"
    head = f"{who} {verb} {text}{many}{view.where(stack)}, call #{d.seq} of {label}"
    evidence = [
        f"{ranks_text(d.others)}: #{d.seq} is {view.call_text(d.expected)}{view.where(d.expected_stack)}",
        f"{ranks_text(d.guilty)}: #{d.seq} is {view.call_text(d.found)}{view.where(d.found_stack)}",
        f"the {d.matched} calls behind it line up again when {d.count} is taken "
        f"{'in' if d.kind == 'skipped' else 'out'} on {ranks_text(d.guilty)}",
    ]
    if d.by_stack:
        evidence.append("operations and shapes agree; only where they come from is shifted")
    other = ranks_text(others)
    alternative = f"{other} {'issued it as an extra call' if kind == 'skipped_call' else 'skipped it'}" if tie else None
    confidence = _confidence(view, d, d.matched >= 2)
    if kind == "skipped_call" and d.found_stack >= 0 and not d.known_before and _after_loop(view, d):
        kind, stack, alternative = "uneven_inputs", d.found_stack, f"{who} skipped {text}{many}"
        head = f"{who} left the loop earlier: {view.call_text(d.found)}{view.where(stack)}, call #{d.seq} of {label}"
    return Finding(
        kind,
        guilty,
        call_site=view.site(stack),
        confidence=confidence,
        headline=head,
        evidence=tuple(evidence),
        alternative=alternative,
        op=view.incident.signatures[call].op,
    )


def _other_finding(view: View, d: Divergence, label: str, expected: str, found: str) -> Finding:
    alternative: str | None
    if d.kind == "jumped":
        kind, alternative, sure = _jumped(view, d)
    else:
        kind, _ = _kind_of_other(view, d)
        same_line = d.found_stack >= 0 and d.found_stack == d.expected_stack
        sure, alternative = same_line or d.matched >= 1, None
    who = ranks_text(d.guilty)
    if kind == "skipped_call":
        head, stack, call = f"{who} skipped {expected}{view.where(d.expected_stack)}", d.expected_stack, d.expected
    elif kind == "extra_call":
        head, stack, call = f"{who} issued an extra {found}{view.where(d.found_stack)}", d.found_stack, d.found
    elif kind == "uneven_inputs":
        head, stack, call = f"{who} left the loop earlier: {found}{view.where(d.found_stack)}", d.found_stack, d.found
    else:
        named = {"wrong_op": "operation", "wrong_dtype": "element type", "wrong_splits": "splits"}.get(kind, "shape")
        head = f"{who} called {found} where {ranks_text(d.others)} called {expected} (wrong {named})"
        stack, call = d.found_stack, d.found
    if not d.clear and alternative is None:
        alternative = f"{ranks_text(d.others)} are wrong and {who} right: there is no majority"
    evidence = (
        f"{ranks_text(d.others)}: #{d.seq} is {expected}{view.where(d.expected_stack)}",
        f"{who}: #{d.seq} is {found}{view.where(d.found_stack)}",
    )
    return Finding(
        kind,
        d.guilty,
        call_site=view.site(stack),
        confidence=_confidence(view, d, sure),
        headline=f"{head}, call #{d.seq} of {label}",
        evidence=evidence,
        alternative=alternative,
        op=view.incident.signatures[call].op,
    )
