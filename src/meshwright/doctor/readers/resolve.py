"""Settles, once everything is read, the ranks of facts that name only a process: ``pid`` and maybe ``host``.

The kernel's OOM killer, py-spy and Ray know processes, not ranks. Which rank a process is say NCCL's init lines (place
in the widest communicator), torchrun's failure table and tags with both. A pid that two ranks claim tells nothing
unless the host does.
"""

from __future__ import annotations

from meshwright.doctor.incident import Fact, Incident

#: How a rank was told that is as good as the line itself saying it.
SOUND = frozenset({None, "launcher", "mpirun", "default group", "same process"})


def resolve(incident: Incident) -> None:
    """Fill in ranks by pid, and the size of the job where NCCL tells it."""
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
