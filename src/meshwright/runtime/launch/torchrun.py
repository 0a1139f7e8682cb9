"""The same target under torchrun: ranks that someone else started, met by the environment that torchrun sets."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from meshwright.errors import InputError
from meshwright.runtime.launch.local import RankError

#: What torchrun sets for every worker (torch.distributed.run, "Environment Variables").
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def started_by_torchrun(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this process is a worker of torchrun."""
    environment = os.environ if environment is None else environment
    return "TORCHELASTIC_RUN_ID" in environment and all(name in environment for name in NEEDED)


def run_here(
    target: Callable[..., Any], world: int, args: Sequence[Any] = (), timeout_s: float = 600.0, *, backend: str = "gloo"
) -> tuple[int, list[Any] | None]:
    """Run ``target(rank, *args)`` as the rank that torchrun made of this process.

    Returns:
        The rank, and on rank 0 the results of all ranks in rank order (None elsewhere).

    Raises:
        InputError: torchrun started another number of workers than the layout needs.
        RankError: the target failed here; torchrun ends the other workers.
    """
    import torch
    import torch.distributed as dist

    from meshwright.runtime.launch.rank import described, keep_freed_memory

    rank, started = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if started != world:
        raise InputError(f"the layout needs {world} ranks, torchrun started {started}; use --nproc-per-node {world}")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    keep_freed_memory()
    if world == 1:
        return 0, [target(0, *args)]
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        mine = target(rank, *args)
        results: list[Any] | None = [None] * world if rank == 0 else None
        dist.gather_object(mine, results, dst=0)
        dist.barrier()
    except Exception as error:
        kind, line, trace, _ = described(error)
        if kind is not None:
            raise
        raise RankError(f"rank {rank} of {world} failed: {line}", trace) from None
    return rank, results
