"""What runs inside one rank process: meet the others, run the target, report once, leave.

The process group is never destroyed: tearing gloo down while its threads live can hang, so a rank ends by ``os._exit``
after its report is out.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from meshwright.errors import InputError, MeshwrightError

#: Parameters of mallopt(3): blocks up to so many bytes come from the heap, and so many free bytes stay in it.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_BLOCK, _MOST_KEPT = 1 << 30, (1 << 31) - 1


def rank_main(
    rank: int,
    world: int,
    host: str,
    port: int,
    backend: str,
    timeout_s: float,
    pipe: Connection,
    target: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Body of a rank: sends ``("port", n)`` (rank 0), then ``("result", value)`` or ``("error", ...)``.

    A result goes through the pipe whole: torch's way of sending tensors would have the launcher hold an open file for
    each, of which a system may allow 1,024, and needs room in /dev/shm, of which a container may have 64 MiB.
    It leaves when the launcher closes the pipe: after every rank has reported, because rank 0 holds the store for all
    and a closed connection would make others fail, or when the launcher is killed, so that no rank is orphaned.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    torch.set_num_threads(1)
    keep_freed_memory()
    status = 0
    try:
        if rank:
            port = pipe.recv()
        watch = threading.Thread(target=_leave_with, args=(pipe,), daemon=True)
        watch.start()
        if world > 1:
            _meet(rank, world, host, port, backend, timeout_s, pipe)
        report = pickle.dumps(("result", target(rank, *args)), pickle.HIGHEST_PROTOCOL)
    except BaseException as error:
        report, status = pickle.dumps(("error", *described(error))), 1
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        pipe.send_bytes(report)
        watch.join()
    finally:
        os._exit(status)


def keep_freed_memory() -> None:
    """Have the C library keep large blocks for what comes next instead of handing them back to the system.

    A pass takes and frees the same large blocks again and again; glibc maps each of them anew, and first touching new
    pages of a gathered KV cache doubled an attention core's time (16 sequences of 160 tokens, torch 2.13, AVX2 EPYC in
    a virtual machine). Elsewhere nothing happens.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK)
        library.mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)


def _leave_with(pipe: Connection) -> None:
    """Wait for the launcher to close its end, or to die, and leave at once."""
    try:
        pipe.recv()
    except (EOFError, OSError):
        os._exit(0)


def _meet(rank: int, world: int, host: str, port: int, backend: str, timeout_s: float, pipe: Connection) -> None:
    """Rank 0 opens the rendezvous store (on a free port when ``port`` is 0) and tells the port; the others join."""
    timeout = timedelta(seconds=timeout_s)
    if rank == 0:
        store = open_store(host, port, world, timeout)
        pipe.send(("port", store.port))
    else:
        store = TCPStore(host, port, world, False, timeout)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def open_store(host: str, port: int, world: int, timeout: timedelta) -> TCPStore:
    """The rendezvous store of rank 0.

    Raises:
        InputError: the port is taken.
    """
    try:
        return TCPStore(host, port, world, True, timeout, wait_for_workers=False)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise InputError(
                f"port {port} on {host} is taken; choose another, or none and a free one is found"
            ) from None
        raise


def described(error: BaseException) -> tuple[type[MeshwrightError] | None, str, str, bool]:
    """``(class to raise or None, line, traceback, whether it only follows from another rank's end)`` of an error."""
    line = (str(error).strip().splitlines() or [""])[0][:500]
    if isinstance(error, MeshwrightError):
        return type(error), str(error), traceback.format_exc(), False
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "memory" in line and "alloc" in line):
        line = f"out of memory ({_wanted(line)})"
        return None, line, traceback.format_exc(), False
    frame = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({os.path.basename(frame[0].filename)}:{frame[0].lineno})" if frame else ""
    text = f"{type(error).__name__}: {line}{where}" if line else f"{type(error).__name__}{where}"
    return None, text, traceback.format_exc(), follows(error)


def _wanted(line: str) -> str:
    """Of what an allocator says the number of bytes."""
    match = re.search(r"allocate (\d+) bytes|Tried to allocate ([\d.]+ \w+)", line)
    return f"{int(match[1]):,} bytes were asked for" if match and match[1] else match[0] if match else "MemoryError"


def follows(error: BaseException) -> bool:
    """Whether an exception says that a peer went away or was too late, rather than what went wrong itself."""
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError | ConnectionError):
        return True
    words = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Timed out waiting",
        "gloo/transport",
        "Broken pipe",
        "shared memory of",
    )
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
