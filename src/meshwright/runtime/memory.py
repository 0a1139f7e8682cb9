"""Memory of this machine, asked before a large allocation: the kernel would end a rank without a word."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from meshwright.errors import InputError
from meshwright.specs.detect_host import free_memory_bytes
from meshwright.specs.probe import Probe


def local_ranks() -> int:
    """Ranks on this machine: what torchrun says, else all of the world."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(said) if said.isdecimal() and said != "0" else dist.get_world_size() if dist.is_initialized() else 1


def check_fits(what: str, size_bytes: int, device: torch.device, way_out: str, probe: Probe | None = None) -> None:
    """Refuse an allocation that all ranks of this machine make at once and that it cannot hold.

    Raises:
        InputError: both numbers and the way out.
    """
    if device.type == "meta":
        return
    if device.type == "cuda":
        free: int | None = torch.cuda.mem_get_info(device)[0]
        ranks, where = 1, str(device)
    else:
        free, ranks, where = free_memory_bytes(probe or Probe()), local_ranks(), "this machine"
    if free is not None and size_bytes * ranks > free:
        of = f" of {ranks} ranks" if ranks > 1 else ""
        raise InputError(f"{what}{of} takes {size_bytes * ranks:,} bytes, {free:,} are free on {where}; {way_out}")
