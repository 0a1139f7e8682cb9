"""Small programs with one mistake each, run as ``programs.py NAME`` under ``meshwright.record`` by ``zygote.py``.

Every mistake is marked in its line with ``# mistake: NAME``; that line is what the doctor must name (for a call that
was skipped: the line that the others stand on). ``EXPECTED`` holds the right answers.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STEPS = 4
#: Step and rank of most mistakes.
WHEN, WHO = 2, 2


def tensor(size: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(size, dtype=dtype)


def step_sums(rank: int, step: int) -> None:
    """Three sums of equal size, as of three layers."""
    x = tensor()
    dist.all_reduce(x)
    if not (rank == WHO and step == WHEN):
        dist.all_reduce(x)  # mistake: skipped_equal
    dist.all_reduce(x)


def skipped_equal(rank: int, world: int) -> None:
    for step in range(STEPS):
        step_sums(rank, step)


def log_metrics(x: torch.Tensor) -> None:
    dist.all_reduce(x)  # mistake: extra_call


def extra_call(rank: int, world: int) -> None:
    x = tensor()
    for step in range(STEPS):
        dist.all_reduce(x)
        dist.all_reduce(x)
        if rank == WHO and step == WHEN:
            log_metrics(x)


def wrong_op(rank: int, world: int) -> None:
    x = tensor()
    for step in range(STEPS):
        dist.all_reduce(x)
        if rank == WHO and step == WHEN:
            dist.broadcast(x, 0)  # mistake: wrong_op
        else:
            dist.all_reduce(x)
        dist.all_gather([torch.empty(8) for _ in range(world)], x)


def wrong_shape(rank: int, world: int) -> None:
    for step in range(STEPS):
        size = 12 if rank == WHO and step == WHEN else 8
        dist.all_reduce(tensor(size))  # mistake: wrong_shape
        dist.all_reduce(tensor(4))


def wrong_dtype(rank: int, world: int) -> None:
    for step in range(STEPS):
        dtype = torch.float64 if rank == WHO and step == WHEN else torch.float32
        dist.all_reduce(tensor(8, dtype))  # mistake: wrong_dtype
        dist.all_reduce(tensor(4))


def wrong_splits(rank: int, world: int) -> None:
    for step in range(STEPS):
        sizes = [2] * world
        if rank == WHO and step == WHEN:
            sizes[0], sizes[1] = 1, 3
        dist.all_to_all_single(tensor(2 * world), tensor(2 * world), [2] * world, sizes)  # mistake: wrong_splits
        dist.all_reduce(tensor(4))


def group_order(rank: int, world: int) -> None:
    one, two = dist.new_group(group_desc="model"), dist.new_group(group_desc="data")
    for step in range(STEPS):
        if rank == WHO and step == WHEN:
            dist.all_reduce(tensor(), group=two)  # mistake: group_order
            dist.all_reduce(tensor(), group=one)
        else:
            dist.all_reduce(tensor(), group=one)
            dist.all_reduce(tensor(), group=two)


def hand_over(x: torch.Tensor, peer: int, first: bool) -> None:
    if first:
        dist.send(x, peer)
        dist.recv(x, peer)
    else:
        dist.recv(x, peer)
        dist.send(x, peer)


def p2p_order(rank: int, world: int) -> None:
    """Even ranks send first, odd ranks receive first; one even rank receives first as well."""
    x = tensor()
    for step in range(STEPS):
        if rank == WHO and step == WHEN:
            dist.recv(x, rank + 1)  # mistake: p2p_order
            dist.send(x, rank + 1)
        else:
            hand_over(x, rank ^ 1, rank % 2 == 0)
        dist.all_reduce(x)


def load_batch(rank: int, step: int) -> torch.Tensor:
    if rank == WHO and step == WHEN:
        time.sleep(600)  # mistake: data_stall
    return tensor()


def data_stall(rank: int, world: int) -> None:
    for step in range(STEPS):
        dist.all_reduce(load_batch(rank, step))


def raises(rank: int, world: int) -> None:
    for step in range(STEPS):
        dist.all_reduce(tensor())
        if rank == WHO and step == WHEN:
            raise ValueError(f"batch {step} holds 3 labels, 4 expected")  # mistake: raises
        dist.all_reduce(tensor(16))


def out_of_memory(rank: int, world: int) -> None:
    for step in range(STEPS):
        dist.all_reduce(tensor())
        if rank == WHO and step == WHEN:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
            resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
            bytearray(1 << 30)  # mistake: out_of_memory
        dist.all_reduce(tensor(16))


def killed(rank: int, world: int) -> None:
    for step in range(STEPS):
        dist.all_reduce(tensor())
        if rank == WHO and step == WHEN:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(tensor(16))


def uneven_epoch(rank: int, world: int) -> None:
    """One rank has a batch less."""
    for _ in range(STEPS - (rank == WHO)):
        dist.all_reduce(tensor())
        dist.all_reduce(tensor())
    evaluate()


def evaluate() -> None:
    loss = tensor()
    dist.all_reduce(loss)  # mistake: uneven_epoch


def save_checkpoint() -> None:
    dist.barrier()  # mistake: checkpoint_on_rank_0


def checkpoint_on_rank_0(rank: int, world: int) -> None:
    for step in range(STEPS):
        dist.all_reduce(tensor())
        dist.all_reduce(tensor(16))
        if rank == 0 and step == WHEN:
            save_checkpoint()


def branch(rank: int, world: int) -> None:
    """A rank without images skips the vision part."""
    for step in range(STEPS):
        images = not (rank == WHO and step == WHEN)
        x = tensor(32)
        dist.all_reduce(x)
        if images:
            dist.broadcast(tensor(24), 0)  # mistake: branch
        dist.all_reduce(tensor(16))


def two_back_ends(rank: int, world: int) -> None:
    """A sum in shared memory that one rank skips; it waits in gloo for those that wait for it in shared memory."""
    tp = channel(rank, world)
    for step in range(STEPS):
        dist.all_reduce(tensor(16))
        if not (rank == WHO and step == WHEN):
            torch.ops.meshwright.all_reduce_(tensor(), tp)  # mistake: two_back_ends
        torch.ops.meshwright.all_reduce_(tensor(4), tp)
        dist.all_reduce(tensor(24))


def two_back_ends_crossed(rank: int, world: int) -> None:
    """One rank enters gloo before shared memory."""
    tp = channel(rank, world)
    for step in range(STEPS):
        if rank == WHO and step == WHEN:
            dist.all_reduce(tensor(16))  # mistake: two_back_ends_crossed
            torch.ops.meshwright.all_reduce_(tensor(), tp)
        else:
            torch.ops.meshwright.all_reduce_(tensor(), tp)
            dist.all_reduce(tensor(16))


def channel(rank: int, world: int) -> int:
    """A stretch of shared memory that all ranks map."""
    from meshwright.runtime import transport

    store = dist.distributed_c10d._get_default_store()
    made = transport.open_channel(store, "live", rank, world, "tp", 600.0)
    assert made is not None
    return made.number


def wrong_root(rank: int, world: int) -> None:
    for step in range(STEPS):
        dist.all_reduce(tensor())
        dist.broadcast(tensor(16), 1 if rank == WHO and step == WHEN else 0)  # mistake: wrong_root
        dist.all_reduce(tensor(4))


def late_rank(rank: int, world: int) -> None:
    """A rank that does something slow on its own while the others wait at a barrier."""
    for step in range(STEPS):
        if rank == WHO and step == WHEN:
            time.sleep(600)  # mistake: late_rank
        dist.barrier()
        dist.all_reduce(tensor())


def healthy(rank: int, world: int) -> None:
    for _ in range(STEPS):
        dist.all_reduce(tensor())
        dist.all_gather([torch.empty(8) for _ in range(world)], tensor())
        dist.barrier()


#: Kind, guilty ranks, ranks of the job, what goes into the incident: dumps of the Flight Recorder, our ledgers, stacks.
EXPECTED: dict[str, tuple[str, set[int], int, str]] = {
    "skipped_equal": ("skipped_call", {2}, 4, "dumps"),
    "extra_call": ("extra_call", {2}, 4, "dumps"),
    "wrong_op": ("wrong_op", {2}, 4, "ledgers"),
    "wrong_shape": ("wrong_shape", {2}, 4, "ledgers"),
    "wrong_dtype": ("wrong_dtype", {2}, 4, "ledgers"),
    "wrong_splits": ("wrong_splits", {2}, 4, "ledgers"),
    "group_order": ("group_order", {2}, 4, "dumps"),
    "p2p_order": ("p2p_order", {2}, 8, "ledgers"),
    "data_stall": ("host_stuck", {2}, 4, "dumps stacks"),
    "raises": ("dead_rank", {2}, 4, "ledgers logs"),
    "out_of_memory": ("dead_rank", {2}, 4, "ledgers logs"),
    "killed": ("dead_rank", {2}, 4, "ledgers logs"),
    "uneven_epoch": ("uneven_inputs", {2}, 4, "dumps"),
    "checkpoint_on_rank_0": ("extra_call", {0}, 4, "dumps"),
    "branch": ("skipped_call", {2}, 5, "ledgers"),
    "two_back_ends": ("skipped_call", {2}, 4, "ledgers"),
    "two_back_ends_crossed": ("group_order", {2}, 4, "ledgers"),
    "wrong_root": ("wrong_op", {2}, 4, "ledgers"),
    "late_rank": ("host_stuck", {2}, 6, "ledgers stacks"),
    "healthy": ("healthy", set(), 4, "ledgers"),
}


def line_of(name: str) -> str | None:
    """``programs.py:LINE`` of a mistake; None where no line of the program is to blame."""
    for number, line in enumerate(Path(__file__).read_text().splitlines(), 1):
        if line.endswith(f"# mistake: {name}"):
            return f"programs.py:{number}"
    return None


def _dump_when_told(folder: Path, rank: int) -> None:
    """What a program's own watchdog does: write the Flight Recorder's dump when the launcher asks for it."""
    while not (folder / "dump").exists():
        time.sleep(0.05)
    recorder: Any = torch._C._distributed_c10d
    data = recorder._dump_fr_trace(True, True, False)
    (folder / "dumps" / f"trace_{rank}").write_bytes(data)


def main() -> None:
    """One rank, placed by RANK, WORLD_SIZE and LIVE_FOLDER."""
    rank, world, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(os.environ["LIVE_FOLDER"])
    faulthandler.register(signal.SIGUSR1, (folder / "stacks" / f"stack_{rank}").open("w"), all_threads=False)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=600)
    )
    threading.Thread(target=_dump_when_told, args=(folder, rank), daemon=True).start()
    dist.barrier()
    globals()[sys.argv[1]](rank, world)
    (folder / f"end_{rank}").touch()
    if not (folder / "dump").exists():
        time.sleep(600)


if __name__ == "__main__":
    main()
