"""From a request to serve to the configuration of the engine: legality, and how many blocks the cache has. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import InputError
from meshwright.moves.kv import token_elements
from meshwright.runtime.folder import Model, read_folder
from meshwright.runtime.job import DEFAULT_BLOCK_SIZE
from meshwright.runtime.models.settings import check_runnable
from meshwright.runtime.serve.engine import EngineConfig
from meshwright.runtime.serve.scheduler import Limits
from meshwright.specs.detect_host import free_memory_bytes
from meshwright.specs.dtypes import DTYPE_BYTES
from meshwright.specs.layout import parse_layout
from meshwright.specs.placement import Placement, place
from meshwright.specs.probe import Probe
from meshwright.specs.profile import EngineProfile

#: Share of the free memory of the host that the caches of all its ranks take where nothing is said.
CACHE_SHARE = 0.3
#: Positions of a model that says none.
MAX_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a user says of the server.

    Attributes:
        dtype, device: None: of the model; cpu.
        sequences: at most so many under way. batch_tokens: of a pass. length: tokens of a sequence, None: of the model.
        queue: that may wait. cache_tokens: of each replica, None: from the free memory. block_size: tokens of a block.
        prefix: equal beginnings share blocks. restarts: of ranks that died.
    """

    dtype: str | None = None
    device: str = "cpu"
    sequences: int = 64
    batch_tokens: int = 512
    length: int | None = None
    queue: int = 1024
    cache_tokens: int | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    prefix: bool = True
    restarts: int = 3


def engine_config(folder: Path, layout: str, profile: EngineProfile, wishes: Wishes) -> EngineConfig:
    """Look at the checkpoint and the layout before any process starts.

    Raises:
        InputError: a checkpoint that cannot be served, or sizes that contradict each other.
        IllegalLayoutError: a layout that our own runtime refuses.
    """
    model = read_folder(folder)
    wanted = parse_layout(layout)
    check_runnable(model.spec, wanted)
    placement = place(model.spec, wanted, profile)
    dtype = wishes.dtype or model.spec.dtype
    length = _length(model, wishes.length)
    limits = Limits(wishes.sequences, wishes.batch_tokens, length, wishes.queue, wanted.pp)
    tokens = wishes.cache_tokens or cache_tokens(placement, dtype, limits, Probe())
    blocks = max(1, tokens // wishes.block_size)
    if blocks * wishes.block_size < min(length, wishes.block_size):
        raise InputError(f"a cache of {tokens} tokens holds no block of {wishes.block_size}; give it more")
    return EngineConfig(
        model, placement, dtype, wishes.device, blocks, wishes.block_size, limits, wishes.prefix,
        restarts=wishes.restarts,
    )  # fmt: skip


def _length(model: Model, wanted: int | None) -> int:
    most = model.spec.max_positions
    if wanted is not None and most and wanted > most:
        raise InputError(f"--max-len {wanted} exceeds the {most} positions of {model.spec.name}; ask for fewer")
    return wanted or most or MAX_LENGTH


def cache_tokens(placement: Placement, dtype: str, limits: Limits, probe: Probe) -> int:
    """Tokens of one replica's cache: what all sequences can have at most, or what a share of the free memory holds."""
    world = placement.layout.world
    most = limits.sequences * limits.length
    free = free_memory_bytes(probe)
    if free is None:
        return most
    token_bytes = sum(token_elements(placement, rank) for rank in range(world)) * DTYPE_BYTES[dtype]
    return int(max(limits.length, min(most, free * CACHE_SHARE * placement.layout.dp / max(1, token_bytes))))
