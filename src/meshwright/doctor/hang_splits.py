"""All_to_all calls whose pieces do not add up: what the members send is not what they expect."""

from __future__ import annotations

from collections import Counter
from math import prod

from meshwright.doctor.advice import ADVICE
from meshwright.doctor.findings import Finding, ranks_text
from meshwright.doctor.hang_crossed import call_name, created
from meshwright.doctor.view import View
from meshwright.ledger.lanes import ints
from meshwright.ledger.stall import Pending


def splits(view: View, call: Pending) -> Finding | None:
    """A finding when the elements that enter an all_to_all on all members are not those that leave it.

    Whose splits are wrong is told where all others agree; where sizes differ on every rank (expert exchange) nobody
    can tell it from sizes alone.
    """
    kinds: dict[int, tuple[int, int, tuple[int, ...] | None]] = {}
    stacks: dict[int, int] = {}
    for member in view.incident.groups[call.group].members:
        trace = view.incident.traces.get(member)
        row = view.row_of(trace, call.group, call.seq) if trace is not None else None
        if trace is None or row is None:
            return None
        kind = view.incident.signatures[trace.signature[row]]
        if kind.op != "all_to_all":
            return None
        ins, outs = sum(map(prod, kind.shapes_in)), sum(map(prod, kind.shapes_out))
        kinds[member], stacks[member] = (ins, outs, kind.splits), trace.stack[row]
    order = Counter(kinds.values()).most_common()
    lead = len(order) > 1 and order[0][1] > len(kinds) // 2
    outs_known = any(outs for _, outs, _ in kinds.values())
    unequal = outs_known and sum(i for i, _, _ in kinds.values()) != sum(o for _, o, _ in kinds.values())
    odd = lead and not outs_known and any(s is not None for _, _, s in kinds.values())
    if not unequal and not odd:
        return None
    guilty = tuple(sorted(m for m, kind in kinds.items() if kind != order[0][0])) if lead else ()
    who = ranks_text(guilty) if guilty else "some rank"
    total = (sum(i for i, _, _ in kinds.values()), sum(o for _, o, _ in kinds.values()))
    told = (
        f"{total[0]} elements enter it and {total[1]} are expected" if unequal else "its splits differ from all others'"
    )
    where = view.where(stacks[guilty[0]]) if guilty else ""
    rows = tuple(
        f"rank {m}: sends {i}, expects {o if outs_known else 'unknown'}" + (f", splits {list(s)[:16]}" if s else "")
        for m, (i, o, s) in sorted(kinds.items())[:16]
    )
    return Finding(
        "wrong_splits",
        guilty,
        view.waiting(guilty),
        view.site(stacks[guilty[0]]) if guilty else None,
        created(view, call),
        "high" if unequal and len(guilty) == 1 and len(kinds) > 2 else "medium" if guilty else "low",
        f"{who} gave {call_name(view, call)} wrong splits{where}: {told}",
        rows,
        () if guilty else ("sizes differ on every rank: whose are wrong is not told by sizes",),
        ADVICE["wrong_splits"],
        None,
        view.label(call.group),
        call.seq,
        "all_to_all",
    )


def odd_splits(view: View) -> list[Finding]:
    """The first all_to_all of a group whose splits differ on few members, where all calls before had equal ones.

    Only recorders that write splits down show it (our own); what peers expected is not recorded.
    """
    out = []
    for group, lanes in sorted(view.lanes.of.items()):
        first, end = max(lane.first for lane in lanes.values()), min(lane.end for lane in lanes.values())
        signatures = view.incident.signatures
        for seq in range(first, end):
            kinds = {r: signatures[ints(x.kinds)[seq - x.first]] for r, x in lanes.items()}
            if any(k.op != "all_to_all" or k.splits is None for k in kinds.values()):
                continue
            order = Counter(k.splits for k in kinds.values()).most_common()
            if len(order) == 1:
                continue
            if order[0][1] > len(kinds) // 2 and len(kinds) > 2:
                out.append(_odd(view, group, seq, {r: k.splits for r, k in kinds.items()}, order[0][0]))
            break
    return out


def _odd(
    view: View, group: int, seq: int, given: dict[int, tuple[int, ...] | None], usual: tuple[int, ...] | None
) -> Finding:
    guilty = tuple(sorted(r for r, s in given.items() if s != usual))
    lane = view.lanes.of[group][guilty[0]]
    stack = ints(lane.stacks)[seq - lane.first]
    label, who = view.label(group), ranks_text(guilty)
    return Finding(
        "wrong_splits",
        guilty,
        view.waiting(guilty),
        view.site(stack),
        view.created(tuple(given), group, seq),
        "medium",
        f"{who} gave all_to_all #{seq} of {label} splits that differ from all others'{view.where(stack)}",
        tuple(f"rank {r}: splits {list(s or ())[:16]}" for r, s in sorted(given.items())[:16]),
        ("what the others expected to receive: only what is sent is recorded",),
        ADVICE["wrong_splits"],
        "the exchange is meant to be uneven from there on",
        label,
        seq,
        "all_to_all",
    )
