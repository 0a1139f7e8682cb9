"""Logs as jobs leave them, of every generation of torch and every launcher, for the tests and the fuzzer."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import tarfile
import zipfile
from collections.abc import Callable, Sequence

#: Generations of the watchdog's lines, by the torch release that began to print them so.
GENERATIONS = ("1.12", "1.13", "2.1", "2.3", "2.5", "2.6")

Tag = Callable[[int], str]

#: What launchers put before each line of a process, by name.
TAGS: dict[str, Tag] = {
    "bare": lambda rank: "",
    "ray": lambda rank: f"(RayWorkerWrapper pid={5000 + rank}, ip=10.0.0.{rank // 8}) ",
    "torchrun": lambda rank: f"[default{rank % 8}]:",
    "torchrun rank": lambda rank: f"[rank{rank}]:",
    "srun": lambda rank: f"{rank}: ",
    "mpirun": lambda rank: f"[1,{rank}]<stderr>:",
    "compose": lambda rank: f"trainer-{rank}  | ",
    "kubectl": lambda rank: f"[pod/job-{rank}/main] ",
    "wall clock": lambda rank: "[2026-03-04 05:06:07] ",
    "cri": lambda rank: "2026-03-04T05:06:07.123456789Z stderr F ",
    "vllm": lambda rank: f"(Worker_TP{rank % 8} pid={5000 + rank}) ",
}


def watchdog_lines(
    generation: str,
    rank: int,
    seq: int = 59958,
    op: str = "ALLREDUCE",
    numel: int = 8388608,
    enqueued: int = 59998,
    lib: str = "NCCL",
    group: tuple[int, str, str, int] | None = None,
) -> list[str]:
    """What a rank prints when a collective times out. ``group``: id, name, description and the rank's place in it."""
    number, name, desc, place = group or (0, "0", "default_pg", rank)
    clock = f"E304 05:06:07.{rank % 1_000_000_000:09d} "
    tag = f"[rank{rank}]:[{clock}" if generation >= "2.3" else "[E "
    sized = f"NumelIn={numel}, NumelOut={numel}" if generation >= "2.1" else f"TensorShape=[{numel}]"
    counted = "" if generation == "1.12" else f"SeqNum={seq}, "
    work = f"Work{lib}({counted}OpType={op}, {sized}, Timeout(ms)=600000)"
    lines = [
        f"{tag}ProcessGroup{lib}.cpp:632] [Rank {place}] Watchdog caught collective operation timeout: {work} ran for "
        f"{600077 + rank} milliseconds before timing out."
    ]
    counts = f"last enqueued NCCL work: {enqueued}, last completed NCCL work: {seq - 1}."
    if generation == "2.3":
        lines.append(f"{tag}ProcessGroup{lib}.cpp:1709] [PG {name} Rank {place}] Timeout at NCCL work: {seq}, {counts}")
    elif generation == "2.5":
        lines.append(
            f"{tag}ProcessGroup{lib}.cpp:1785] [PG ID {number} PG GUID {name}({desc}) Rank {place}] Exception (either "
            f"an error or timeout) detected by watchdog at work: {seq}, {counts}"
        )
    elif generation == "2.6":
        lines.append(
            f"{tag}ProcessGroup{lib}.cpp:2271] [PG ID {number} PG GUID {name}({desc}) Rank {place}]  failure detected "
            f"by watchdog at work sequence id: {seq} PG status: last enqueued work: {enqueued}, last completed work: "
            f"{seq - 1}"
        )
    return lines


def dump_signal_line(rank: int, sender: int | None, enqueued: int, completed: int) -> str:
    """What a rank prints that is told to dump; ``sender`` None: it timed out itself."""
    who = "this local rank" if sender is None else f" rank {sender}"
    return (
        f"[rank{rank}]:[E304 05:06:08.000000001 ProcessGroupNCCL.cpp:1987] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] "
        f"Received a dump signal due to a collective timeout from {who} and we will try our best to dump the debug "
        "info. "
        f"Last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}.This is most likely caused by "
        "incorrect usages of collectives, e.g., wrong sizes used across ranks"
    )


def failed_stack_lines(rank: int, frames: Sequence[tuple[str, str, int]]) -> list[str]:
    """The stack of the failed collective, innermost first, as the Flight Recorder knows it."""
    head = f"[rank{rank}]:[E304 05:06:07.9 ProcessGroupNCCL.cpp:801] Stack trace of the failed collective: "
    return [head, *(f"#{i} {name} from {file}:{line}" for i, (name, file, line) in enumerate(frames)), ""]


def traceback_lines(error: str, frames: Sequence[tuple[str, str, int]], rank: int | None = None) -> list[str]:
    """A traceback, outermost frame first; with ``rank`` as torch 2.3 on prints it."""
    tag = "" if rank is None else f"[rank{rank}]: "
    lines = ["Traceback (most recent call last):"]
    for name, file, line in frames:
        lines += [f'  File "{file}", line {line}, in {name}', f"    {name}()"]
    return [tag + line for line in [*lines, error]]


def pyspy_lines(pid: int, frames: Sequence[tuple[str, str, int]], command: str = "python train.py") -> list[str]:
    """``py-spy dump`` of a process, innermost frame first."""
    return [
        f"Process {pid}: {command}",
        "Python v3.11.9 (/usr/bin/python3.11)",
        "",
        f'Thread {pid} (idle): "MainThread"',
        *(f"    {name} ({file}:{line})" for name, file, line in frames),
        f'Thread {pid + 9} (idle): "Thread-1 (_pin_memory_loop)"',
        "    wait (threading.py:327)",
        "    get (queue.py:180)",
    ]


def faulthandler_lines(threads: Sequence[Sequence[tuple[str, str, int]]]) -> list[str]:
    """What ``faulthandler.dump_traceback_later`` prints: the main thread last, innermost frames first."""
    lines = ["Timeout (0:05:00)!"]
    for number, frames in enumerate(threads):
        lines.append(f"Thread 0x00007f12{number:08x} (most recent call first):")
        lines += [f'  File "{file}", line {line} in {name}' for name, file, line in frames]
        lines.append("")
    return lines


def torchrun_table(rank: int, local_rank: int, pid: int, code: int, signal: str = "SIGKILL") -> list[str]:
    """The table at the end of a job under torchrun."""
    reason = f"Signal {-code} ({signal}) received by PID {pid}" if code < 0 else "To enable traceback see: https://x"
    return [
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "=" * 60,
        "train.py FAILED",
        "-" * 60,
        "Failures:",
        "  <NO_OTHER_FAILURES>",
        "-" * 60,
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2026-03-04_05:06:07",
        "  host      : gpu-03",
        f"  rank      : {rank} (local_rank: {local_rank})",
        f"  exitcode  : {code} (pid: {pid})",
        "  error_file: <N/A>",
        f"  traceback : {reason}",
        "=" * 60,
    ]


def nccl_lines(rank: int, world: int, calls: Sequence[tuple[str, int]] = (), comm_id: str = "0xabc123") -> list[str]:
    """NCCL's INFO lines of one rank: it joins, connects, and calls (name, count) in order."""
    head = f"node{rank // 8}:{9000 + rank}:{9100 + rank} [{rank % 8}] NCCL INFO "
    comm = f"0x55d0{rank:04x}"
    who = (
        f"comm {comm} rank {rank} nranks {world} cudaDev {rank % 8} nvmlDev {rank % 8} busId {rank}000 commId {comm_id}"
    )
    lines = [
        f"{head}NCCL version 2.27.3+cuda12.8",
        f"{head}NET/IB : No device found.",
        f"{head}NET/Socket : Using [0]eth0:10.0.0.{rank // 8}<0>",
        f"{head}Using network Socket",
        f"{head}ncclCommInitRankConfig {who} - Init START",
        f"{head}Channel 00/0 : {rank}[{rank % 8}] -> {(rank + 1) % world}[{(rank + 1) % 8}] via SHM/direct/direct",
        f"{head}Channel 01/0 : {rank}[{rank % 8}] -> {(rank + 1) % world}[{(rank + 1) % 8}] via SHM/direct/direct",
        f"{head}ncclCommInitRankConfig {who} - Init COMPLETE",
    ]
    for number, (name, count) in enumerate(calls):
        lines.append(
            f"{head}{name}: opCount {number:x} sendbuff 0x7f00 recvbuff 0x7f01 count {count} datatype 7 op 0 root 0 "
            f"comm {comm} [nranks={world}] stream 0x5"
        )
    return lines


def interleave(streams: Sequence[Sequence[str]], seed: int = 0) -> list[str]:
    """Lines of several processes in one file: each in its order, else at random."""
    rng = random.Random(seed)
    left = [list(reversed(lines)) for lines in streams if lines]
    mixed = []
    while left:
        place = rng.randrange(len(left))
        mixed.append(left[place].pop())
        if not left[place]:
            left.pop(place)
    return mixed


def tagged(tag: str, rank: int, lines: Sequence[str]) -> list[str]:
    """Lines behind a launcher's tag."""
    return [TAGS[tag](rank) + line for line in lines]


def text(lines: Sequence[str]) -> bytes:
    """Lines as a file."""
    return ("\n".join(lines) + "\n").encode()


def tar_of(members: dict[str, bytes], mode: str = "w") -> bytes:
    """A tar (``w``, ``w:gz``, ``w:bz2``, ``w:xz``)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:  # type: ignore[call-overload]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def zip_of(members: dict[str, bytes]) -> bytes:
    """A zip."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as held:
        for name, data in members.items():
            held.writestr(name, data)
    return out.getvalue()


def samples() -> dict[str, bytes]:
    """Small files of every format, the seeds of the fuzzer."""
    stack = [("all_reduce", "torch/distributed/distributed_c10d.py", 3174), ("step", "/job/train.py", 72)]
    every = [line for g in GENERATIONS for line in watchdog_lines(g, 3, group=(2, "9", "TP", 1))]
    every += [dump_signal_line(1, 3, 59957, 59957), *failed_stack_lines(2, stack)]
    ray = interleave(
        [tagged("ray", r, watchdog_lines("2.6", r) + traceback_lines("ValueError: x", stack)) for r in range(3)]
    )
    ras = {
        "nccl_version": "2.29.1",
        "communicators_count": 1,
        "communicators": [
            {
                "hash": "0xae",
                "size": 2,
                "ranks": [{"rank": 0, "pid": 1, "status": {}, "collective_counts": {"AllReduce": 4}}],
                "missing_ranks": [{"rank": 1, "pid": 2, "status": {"considered_dead": True}}],
            }
        ],
    }
    inspector = {
        "header": {"id": "0x7f", "rank": 2, "n_ranks": 8},
        "metadata": {"dump_timestamp_us": 1748030377748202, "hostname": "h", "pid": 7},
        "coll_perf": {"coll": "AllReduce", "coll_sn": 1407, "coll_msg_size_bytes": 17, "coll_exec_time_us": 61974},
    }
    deaths = [
        *torchrun_table(5, 5, 14750, -9),
        "kernel: [12345.678901] Out of memory: Killed process 14750 (python) total-vm:1kB, anon-rss:2048kB",
        "kernel: [12345.678901] NVRM: Xid (PCI:0000:53:00): 79, pid=14750, GPU has fallen off the bus.",
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:2345",
        "what():  [enforce fail at ../gloo/pair.cc:446] op.preamble.length <= op.nbytes. 8192 vs 4096",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 2 has a total capacity of 79 GiB",
        "srun: error: node3: task 5: Out Of Memory",
    ]
    logs = {
        "watchdog.log": text(every),
        "ray.log": text(ray),
        "nccl.log": text(
            [*nccl_lines(0, 2, [("AllReduce", 8), ("Send", 4)]), "host:1:2 [0] x.cc:1 (f) NCCL WARN NET/IB : y"]
        ),
        "deaths.log": text(deaths),
        "stacks.log": text([*faulthandler_lines([stack, stack]), *traceback_lines("KeyError: 'x'", stack, 1)]),
        "pyspy.txt": text(pyspy_lines(4242, stack)),
        "env.txt": text(["NCCL_SOCKET_IFNAME=eth0", "export NCCL_DEBUG=INFO", "PyTorch version: 2.13.0+cpu"]),
        "ras.json": json.dumps(ras).encode(),
        "inspector.json": json.dumps(inspector, indent=1).encode() * 2,
        "hang.prom": b'# TYPE XPU_TIMER_COMMON_HANG gauge\nXPU_TIMER_COMMON_HANG{ip="1",rank="4"} 1\n',
    }
    watchdog = logs["watchdog.log"]
    return logs | {
        "a.log.gz": gzip.compress(watchdog, mtime=0),
        "a.log.bz2": bz2.compress(watchdog),
        "a.log.xz": lzma.compress(watchdog),
        "a.tar": tar_of({"x/rank0.log": watchdog, "nccl.log": logs["nccl.log"]}),
        "a.tgz": tar_of({"x/rank0.log": watchdog, "b.zip": zip_of({"n.log": logs["nccl.log"]})}, "w:gz"),
        "a.zip": zip_of({"x/rank0.log": watchdog, "y.gz": gzip.compress(logs["deaths.log"], mtime=0)}),
    }
