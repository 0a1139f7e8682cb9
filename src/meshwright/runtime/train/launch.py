"""Ranks of a training run: started here, by torchrun or by Ray, and started again from the last checkpoint. No torch.

A run that loses a rank ends as a whole and begins anew from its last checkpoint. Where ranks are missing for good, dp
is reduced to what is left (``job.fewer``): the global batch stays, every replica reads more of it, the curve goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from meshwright.errors import IllegalLayoutError, InputError
from meshwright.runtime.launch.local import RankError, run_local, start_server
from meshwright.runtime.launch.torchrun import run_here, started_by_torchrun
from meshwright.runtime.train.job import TrainJob, fewer
from meshwright.runtime.train.watch import newest, says

if TYPE_CHECKING:
    from meshwright.runtime.train.loop import Summary

#: Bound on a whole run, and on every wait of a rank for another; steps have their own.
RUN_S = 14 * 86400.0
#: How often a run may fail at the same step before it goes on with fewer ranks.
SAME_STEP = 2

#: What ranks of a run import beside what all ranks need: once, by the server that they are forked from.
PRELOAD = ("meshwright.runtime.train.loop",)

Say = Callable[[str], None]
Run = Callable[[TrainJob], "list[Summary] | None"]


def body(rank: int, job: TrainJob) -> Summary:
    """Body of a rank; torch is imported here and not by the launcher."""
    from meshwright.runtime.train.loop import run_train

    return run_train(rank, job)


def on_this_machine(job: TrainJob) -> list[Summary]:
    """Run a job on local ranks.

    Raises:
        RankError: a rank failed, was killed, or a step took too long.
    """
    began = time.time()
    start_server(PRELOAD)
    backend = "nccl" if job.device == "cuda" else "gloo"
    try:
        return run_local(body, job.placement.layout.world, (job,), RUN_S, backend=backend)
    except RankError as error:
        left = newest(job.traces, began) if job.timeout_s else None
        raise (RankError(says(left, job.timeout_s), error.trace) if left is not None else error) from None


def on_ray(job: TrainJob, more: Mapping[str, Any]) -> list[Summary]:
    """Run a job on a Ray cluster; ``more``: see ``launch.ray.run_ray``.

    Raises:
        RankError: no room, or a rank failed or died.
    """
    from meshwright.runtime.launch.ray import run_ray

    backend = "nccl" if job.device == "cuda" else "gloo"
    return run_ray(body, job.placement.layout.world, (job,), RUN_S, placements=[job.placement], backend=backend, **more)


def under_torchrun(job: TrainJob, say: Say) -> list[Summary] | None:
    """Run a job as the rank that torchrun made of this process; results on the first rank, None elsewhere.

    A restart reads the rendezvous of its own attempt only where torchrun's agent holds it (``--standalone``,
    ``--rdzv-backend c10d``); torch's static rendezvous may meet ranks of the attempt before.

    Raises:
        IllegalLayoutError: no layout of so many ranks.
        RankError: it failed here; torchrun ends the others, and starts all anew when it was told so.
    """
    backend = "nccl" if job.device == "cuda" else "gloo"
    asked, job = job.placement.layout, fitted(job, int(os.environ["WORLD_SIZE"]))
    if os.environ["RANK"] == "0" and job.placement.layout != asked:
        say(f"{os.environ['WORLD_SIZE']} ranks, not {asked.world}: under {job.placement.layout} instead of {asked}")
    return run_here(body, job.placement.layout.world, (job,), RUN_S, backend=backend)[1]


def fitted(job: TrainJob, ranks: int) -> TrainJob:
    """The job for the ranks that there are: dp is reduced where they are fewer than the layout asks for.

    Raises:
        IllegalLayoutError: no dp makes so many ranks.
    """
    layout = job.placement.layout
    if layout.world == ranks:
        return job
    found = fewer(job, ranks)
    if found is None or found.world != ranks:
        least = layout.world // layout.dp
        raise IllegalLayoutError(
            f"layout {layout} needs {layout.world} ranks, {ranks} were started; with fewer, dp is reduced: a multiple "
            f"of {least} is needed that divides the global batch of {job.settings.global_batch}"
        )
    return job.on_layout(found)


def with_restarts(job: TrainJob, run: Run, restarts: int, say: Say) -> list[Summary] | None:
    """Run a job; when a rank is lost, again from the last checkpoint, up to ``restarts`` times.

    A run that fails twice behind the same checkpoint goes on with fewer ranks, where dp can be reduced.

    Raises:
        RankError: it failed once more than allowed.
    """
    fails: dict[int, int] = {}
    for left in range(restarts, -1, -1):
        try:
            return run(job)
        except RankError as error:
            if not left:
                raise
            job = job.from_latest()
            step = job.resume[1] if job.resume is not None else 0
            fails[step] = fails.get(step, 0) + 1
            if fails[step] >= SAME_STEP and (smaller := fewer(job, job.placement.layout.world - 1)) is not None:
                job, fails[step] = job.on_layout(smaller), 0
            say(f"{error}; going on from step {step} under {job.placement.layout}, {left - 1} restarts left")
    return None


def launch(job: TrainJob, restarts: int, say: Say, ray: Mapping[str, Any] | None = None) -> list[Summary] | None:
    """Run a job where it belongs: under torchrun its worker, with ``ray`` on a cluster, else on local ranks.

    Args:
        job: under torchrun it goes on from the last checkpoint of its folder, because a restart is the same command.
        restarts: how often a lost rank may be made good; torchrun does that itself (``--max-restarts``).
        say: is told of restarts. ray: arguments of ``launch.ray.run_ray``.

    Returns:
        Summaries of all ranks; None on a worker of torchrun that is not the first.

    Raises:
        RankError, IllegalLayoutError, InputError: as the ways to start say.
    """
    if restarts and job.base is None:
        raise InputError("--restarts: a run goes on from its checkpoints; name a folder with --checkpoint")
    if started_by_torchrun():
        return under_torchrun(job, say)
    if ray is not None:
        more = dict(ray)
        return with_restarts(job, lambda job: on_ray(job, more), restarts, say)
    return with_restarts(job, on_this_machine, restarts, say)
