"""Mistakes to plant into a simulated job: one rank's program is changed, what the doctor must say is known."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from meshwright.doctor.incident import Incident
from meshwright.doctor.readers import Source, flight_recorder

from .fr_maker import Job, Op, Simulator, call, dump, edit, index, layout, site

LAYOUTS: dict[str, Callable[[], Job]] = {
    "dp8": lambda: layout(1, 8),
    "tp4dp2": lambda: layout(4, 2),
    "tp2pp2dp2": lambda: layout(2, 2, 2),
    "tp4dp2ep": lambda: layout(4, 2, 1, True),
    "dp4 without synchronisation": lambda: layout(1, 4, sync=False),
}
#: The rank on which mistakes are planted.
GUILTY = 3


def _axis(job: Job) -> str:
    return "TENSOR" if any(d == "TENSOR" and len(m) > 2 for d, m in job.groups.values()) else "DATA"


def _at(job: Job, nth: int = 5) -> int:
    return index(job, GUILTY, _axis(job), nth)


def _changed(job: Job, **fields: Any) -> Job:
    at = _at(job)
    return edit(job, GUILTY, lambda p: [*p[:at], replace(p[at], **fields), *p[at + 1 :]])


def _inserted(job: Job, **fields: Any) -> Job:
    at = _at(job)
    extra = replace(job.programs[GUILTY][at], site=site("extra_sync", 77), **fields)
    return edit(job, GUILTY, lambda p: [*p[:at], extra, *p[at:]])


def skipped(job: Job) -> Job:
    at = _at(job)
    return edit(job, GUILTY, lambda p: p[:at] + p[at + 1 :])


def skipped_two(job: Job) -> Job:
    at = _at(job, 4)
    return edit(job, GUILTY, lambda p: p[:at] + p[at + 2 :])


def host_hangs(job: Job) -> Job:
    at = index(job, GUILTY, "default_pg", 3)
    return edit(job, GUILTY, lambda p: [*p[:at], Op("host_hang")])


def device_hangs(job: Job) -> Job:
    """Its last three calls ended everywhere but are never seen to end on the rank itself, which then stops."""
    at = _at(job, 7)
    stopped = edit(job, GUILTY, lambda p: [*p[:at], Op("host_hang")])
    issued = sum(op.what in {"call", "send", "recv"} for op in stopped.programs[GUILTY])
    return replace(stopped, blind={GUILTY: issued - 3})


def checkpoint_on_rank_0(job: Job) -> Job:
    at = index(job, 0, "default_pg", 2) + 1
    return edit(job, 0, lambda p: [*p[:at], call("0", "barrier", 1, site("save_checkpoint", 70, loop=45)), *p[at:]])


def uneven(job: Job) -> Job:
    at = index(job, GUILTY, "default_pg", 3) + 1
    return edit(job, GUILTY, lambda p: [*p[: at + (p[at].what == "sync")], *p[-2:]])


def other_order(job: Job) -> Job:
    at = index(job, GUILTY, "default_pg", 2)

    def change(p: list[Op]) -> list[Op]:
        first, second = replace(p[at], site=site("swapped", 81)), replace(p[at - 1], site=site("swapped", 82))
        return [*p[: at - 1], first, Op("sync"), second, *p[at + 1 :]]

    return edit(job, GUILTY, change)


#: Name -> kind, guilty ranks, how to plant it.
MISTAKES: dict[str, tuple[str, set[int], Callable[[Job], Job]]] = {
    "skipped call": ("skipped_call", {GUILTY}, skipped),
    "two skipped calls": ("skipped_call", {GUILTY}, skipped_two),
    "extra call of another shape": ("extra_call", {GUILTY}, lambda j: _inserted(j, ins=((9,),), outs=((9,),))),
    "extra call of equal shape": ("extra_call", {GUILTY}, _inserted),
    "another operation": ("wrong_op", {GUILTY}, lambda j: _changed(j, name="broadcast")),
    "another shape": ("wrong_shape", {GUILTY}, lambda j: _changed(j, ins=((63,),), outs=((63,),))),
    "another type": ("wrong_dtype", {GUILTY}, lambda j: _changed(j, dtype="Half")),
    "host stands still": ("host_stuck", {GUILTY}, host_hangs),
    "device stands still": ("device_stuck", {GUILTY}, device_hangs),
    "checkpoint on rank 0": ("extra_call", {0}, checkpoint_on_rank_0),
    "fewer batches": ("uneven_inputs", {GUILTY}, uneven),
    "groups in another order": ("group_order", {GUILTY}, other_order),
    "none": ("healthy", set(), lambda j: j),
}


def incident(
    sim: Simulator,
    leave_out: tuple[int, ...] = (),
    rename: Callable[[int], str] = lambda r: f"dump_{r}",
    order: Callable[[list[int]], list[int]] = lambda ranks: ranks,
    **options: Any,
) -> Incident:
    """The incident that the dumps of a simulated job make."""
    sources = []
    for rank in order([r for r in range(sim.job.world) if r not in leave_out]):
        data = pickle.dumps(dump(sim, rank, **options), protocol=2)
        sources.append(source(rename(rank), data))
    found = Incident()
    flight_recorder.read_many(sources, found)
    return found


def source(name: str, data: bytes) -> Source:
    """Bytes as a reader gets them."""
    return Source(name, data[:4096], lambda: io.BytesIO(data), len(data))
