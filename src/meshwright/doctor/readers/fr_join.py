"""Tells which rank wrote which dump, and joins counters with groups.

A dump does not name its rank. Its groups do: the rank is a member of all of them, and hand-offs name its place within
one. Where several ranks remain, a number in the file name that is among them decides; where that is contradictory as
well, the rank stays unknown and is said to be.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from meshwright.doctor.incident import COMPLETED, MAX_RANK, Group, Incident, Status, Trace
from meshwright.doctor.readers.fr_rows import Dump

_ENDINGS = re.compile(r"(?:\.(?:json|jsonl|pickle|pkl|pt|bin|dump|log|txt|gz|zst|xz|bz2))+$", re.IGNORECASE)
_RANK = re.compile(r"rank[_\-. ]?(\d{1,8})(?!.*rank[_\-. ]?\d)", re.IGNORECASE)
_LAST = re.compile(r"(\d{1,8})$")


def number_in_name(name: str) -> int | None:
    """The rank that a file name states: behind ``rank``, else the number at its end."""
    base = _ENDINGS.sub("", name.rpartition("/")[2].rpartition("!")[2])
    found = _RANK.search(base) or _LAST.search(base)
    return int(found[1]) if found else None


def candidates(dump: Dump, incident: Incident) -> set[int] | None:
    """Ranks that may have written a dump by its content; None when it says nothing."""
    found: set[int] | None = None
    for number in {*dump.config, *dump.columns["group"]}:
        members = incident.groups[number].members
        if members:
            found = set(members) if found is None else found & set(members)
    for number, place in dump.place:
        members = incident.groups[number].members
        if place < len(members):
            found = {members[place]} if found is None else found & {members[place]}
    return found


def _by_name(dumps: Sequence[Dump], options: Sequence[set[int] | None], known: dict[int, int]) -> dict[int, int]:
    """Ranks by file name, for dumps whose content leaves several; empty where names contradict anything."""
    stated = {place: number_in_name(dump.name) for place, dump in enumerate(dumps)}
    if any(stated[place] is not None and stated[place] != rank for place, rank in known.items()):
        return {}
    out: dict[int, int] = {}
    for place, found in enumerate(options):
        rank = stated[place]
        if place in known:
            continue
        if rank is None or rank >= MAX_RANK or (found is not None and rank not in found):
            return {}
        out[place] = rank
    taken = [*known.values(), *out.values()]
    return out if len(set(out.values()) - set(known.values())) == len(out) and taken else {}


def _assign(dumps: Sequence[Dump], incident: Incident) -> tuple[dict[int, int], dict[int, str]]:
    """Rank of every dump and where it comes from."""
    options = [candidates(dump, incident) for dump in dumps]
    known = {place: next(iter(found)) for place, found in enumerate(options) if found is not None and len(found) == 1}
    origin = dict.fromkeys(known, "content")
    changed = True
    while changed:
        changed = False
        taken = set(known.values())
        for place, found in enumerate(options):
            if place not in known and found is not None and len(left := found - taken) == 1:
                known[place], origin[place], changed = left.pop(), "content", True
                taken.add(known[place])
    for place, rank in _by_name(dumps, options, known).items():
        known[place], origin[place] = rank, "file name"
    taken = set(known.values())
    for place, found in enumerate(options):
        if place not in known:
            free = sorted((found or set()) - taken)
            rank = free[0] if free else next(r for r in range(len(dumps) + len(taken) + 1) if r not in taken)
            known[place], origin[place] = rank, "nothing"
            taken.add(rank)
    return known, origin


def _numbered(groups: Iterable[int], incident: Incident) -> list[int] | None:
    """Groups in the order in which the process made them, when their names are counters."""
    found = list(groups)
    names = [incident.groups[g].name for g in found]
    if not all(name.isdecimal() and len(name) < 12 for name in names):
        return None
    return [g for _, g in sorted(zip(map(int, names), found, strict=True))]


def _status(dump: Dump, ids: dict[str, int], incident: Incident) -> dict[int, Status]:
    """Counters by group. ``pg_status`` has the process's own numbers, ``pg_config`` has names; rows have both.

    Without rows, both count up in the order in which the process made its groups, so equal lengths join in order;
    ``ids`` is what peers with the same numbers show.
    """
    joined = dict(dump.ids)
    ordered = _numbered(dump.config, incident)
    if ordered is not None and len(ordered) == len(dump.status) and all(k.isdecimal() for k in dump.status):
        zipped = dict(zip(sorted(dump.status, key=int), ordered, strict=True))
        if all(zipped.get(key) == group for key, group in dump.ids.items() if key in zipped):
            joined = {**zipped, **joined}
    own = {incident.groups[g].desc: g for g in dump.config}
    for key, group in ids.items():
        desc = incident.groups[group].desc
        if key not in joined and desc and desc in own and own[desc] not in joined.values():
            joined[key] = own[desc]
    known = {}
    for key, (enqueued, started, completed) in dump.status.items():
        if key in joined:
            known[joined[key]] = Status(enqueued, started, completed)
    return known


def _peer_ids(dumps: Sequence[Dump]) -> dict[frozenset[str], dict[str, int]]:
    """What rows of all ranks say about ``pg_id``, by the set of ids that a rank has."""
    out: dict[frozenset[str], dict[str, int]] = {}
    for dump in dumps:
        out.setdefault(frozenset(dump.status), {}).update(dump.ids)
    return out


def _members_from_rows(dumps: Sequence[Dump], ranks: dict[int, int], incident: Incident) -> dict[int, int]:
    """Groups that the recorder lists without members (gloo), with the members that rows of all ranks show."""
    members: dict[int, set[int]] = {}
    for place, dump in enumerate(dumps):
        for number in set(dump.columns["group"]):
            if not incident.groups[number].members:
                members.setdefault(number, set()).add(ranks[place])
    world = set(ranks.values())
    out = {}
    for number, found in members.items():
        group = incident.groups[number]
        whole = world if group.desc == "default_pg" or (not group.name and not group.desc) else found
        out[number] = incident.groups.number(Group(group.name, group.desc, tuple(sorted(whole))))
    return out


def _trace(dump: Dump, rank: int, origin: str, status: dict[int, Status]) -> Trace:
    trace = Trace(rank, dump.name, "flight_recorder", dump.backend, rank_from=origin, meta=dump.meta)
    for name, column in dump.columns.items():
        setattr(trace, name, column)
    trace.status, trace.member_of = status, dump.config
    trace.settled = dump.backend != "gloo"
    done = trace.state.count(COMPLETED)
    if len(trace):
        reached = max((s.completed or -1 for s in status.values()), default=-1)
        early = trace.record[0] > 0 or min(trace.seq) > 1
        trace.active_only = trace.settled and not done and (reached > 0 or early)
        trace.wrapped = early and not trace.active_only
    elif dump.status:
        trace.active_only = any((s[2] if s[2] is not None else -1) > 0 for s in dump.status.values())
    return trace


def join(dumps: Sequence[Dump], incident: Incident) -> None:
    """Give every dump its rank and add it to the incident; what cannot be told is said in its lacks."""
    ranks, origin = _assign(dumps, incident)
    renamed = _members_from_rows(dumps, ranks, incident)
    peers = _peer_ids(dumps)
    for place, dump in enumerate(dumps):
        status = _status(dump, peers.get(frozenset(dump.status), {}), incident)
        if renamed:
            dump.columns["group"] = type(dump.columns["group"])("i", [renamed.get(g, g) for g in dump.columns["group"]])
            status = {renamed.get(g, g): s for g, s in status.items()}
        incident.add_trace(_trace(dump, ranks[place], origin[place], status))
        if dump.dropped:
            incident.lack(f"{dump.name}: {dump.dropped} rows are not a recorder's and were left out")
    _lacks(dumps, ranks, origin, incident)


def _lacks(dumps: Sequence[Dump], ranks: dict[int, int], origin: dict[int, str], incident: Incident) -> None:
    named = [ranks[p] for p in sorted(ranks) if origin[p] == "file name"]
    if named:
        incident.lack(
            f"{len(named)} of {len(ranks)} dumps do not say by their content which rank wrote them; the number in the "
            "file name is taken"
        )
    for place in sorted(ranks):
        if origin[place] == "nothing":
            incident.lack(f"{dumps[place].name}: neither content nor file name says which rank wrote it")
    groups = {n for dump in dumps for n in (*dump.config, *dump.columns["group"])}
    world = max([len(incident.groups[n].members) for n in groups] + [rank + 1 for rank in ranks.values()], default=0)
    if world:
        incident.world = max(incident.world or 0, world)
