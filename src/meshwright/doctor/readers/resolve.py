"""Settles, once everything is read, the ranks of facts that name only a process: ``pid`` and maybe ``host``.

The kernel's OOM killer, py-spy and Ray know processes, not ranks. Which rank a process is say NCCL's init lines (place
in the widest communicator), torchrun's failure table and tags with both. A pid that two ranks claim tells nothing
unless the host does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from meshwright.doctor.incident import Fact, Incident
from meshwright.doctor.readers.store import FILE_NAME, ONLY_RANK

#: How a rank was told that is as good as the line itself saying it.
SOUND = frozenset({None, "launcher", "mpirun", "default group", "same process"})


def resolve(incident: Incident, files: Mapping[str, set[int]]) -> None:
    """Fill in ranks by pid, drop those that only one file's looks gave, and note the size of the job.

    Args:
        incident: all of it.
        files: ranks that each log names itself.
    """
    _confirm(incident, files)
    widest = max(
        (n for f in incident.facts if f.kind == "comm_init" and isinstance(n := f.data.get("nranks"), int)), default=0
    )
    if incident.world is None and widest > 1:
        incident.world = widest
    by_process: dict[tuple[str | None, int], set[int]] = {}
    for fact in incident.facts:
        rank = _told(fact, widest)
        pid = fact.data.get("pid")
        if rank is not None and isinstance(pid, int):
            by_process.setdefault((None, pid), set()).add(rank)
            if isinstance(host := fact.data.get("host"), str):
                by_process.setdefault((host, pid), set()).add(rank)
    for fact in incident.facts:
        pid = fact.data.get("pid")
        if (fact.rank is None or fact.data.get("rank_from") == "file name") and isinstance(pid, int):
            host = fact.data.get("host")
            ranks = (
                by_process.get((host if isinstance(host, str) else None, pid)) or by_process.get((None, pid)) or set()
            )
            if len(ranks) == 1:
                fact.rank = next(iter(ranks))
                fact.data["rank_from"] = "pid"


def _told(fact: Fact, widest: int) -> int | None:
    """The rank of the process that a fact names, where it is sound."""
    if (
        fact.kind == "comm_init"
        and fact.data.get("nranks") == widest
        and isinstance(place := fact.data.get("comm_rank"), int)
    ):
        return place
    return fact.rank if fact.data.get("rank_from") in SOUND else None


def _confirm(incident: Incident, files: Mapping[str, set[int]]) -> None:
    """Drop ranks guessed from a file as a whole unless the files of the incident are one a rank.

    A lone log in which one rank's lines are tagged may hold other ranks' lines without a tag (a crash, a stack), and
    the number in a file's name may be a job's. One file a rank shows by at least two files that name one rank each, all
    different, and none that names several; for names, by "rank" in them or by two that differ in their number alone.
    """
    named = [ranks for ranks in files.values() if ranks]
    single = [next(iter(ranks)) for ranks in named if len(ranks) == 1]
    one_each = len(single) == len(named) >= 2 and len(set(single)) == len(single)
    families: dict[str, set[int]] = {}
    for fact in incident.facts:
        if fact.data.get("rank_from") == FILE_NAME and fact.rank is not None:
            families.setdefault(_family(fact), set()).add(fact.rank)
    for fact in incident.facts:
        how, family = fact.data.get("rank_from"), _family(fact)
        alone = len(families.get(family, ())) < 2 and "rank" not in family.lower()
        if (how == ONLY_RANK and not one_each) or (how == FILE_NAME and alone):
            fact.data["maybe_rank"] = fact.rank
            fact.data.pop("rank_from")
            fact.rank = None


def _family(fact: Fact) -> str:
    """The file's name with its numbers left out."""
    return re.sub(r"\d+", "#", fact.source.rsplit(":", 1)[0].rsplit("/", 1)[-1])
