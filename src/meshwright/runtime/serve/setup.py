"""From a request to serve to the configuration of the engine: legality, and how many blocks the cache has. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
        decode_block_size: of ranks that decode only, None: the same.
        prefix: equal beginnings share blocks. restarts: of ranks that died.
        kv_transport: between pools, ``torch`` or ``nixl``.
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
    decode_block_size: int | None = None
    kv_transport: str = "torch"


def engine_config(
    folder: Path, layout: str, profile: EngineProfile, wishes: Wishes, decode: str | None = None
) -> EngineConfig:
    """Look at the checkpoint and the layouts before any process starts.

    Args:
        folder: checkpoint. layout: of all ranks, or of those that prefill. profile: of our own engine.
        wishes: what the user says. decode: layout of ranks of their own that decode.

    Raises:
        InputError: a checkpoint that cannot be served, or sizes that contradict each other.
        IllegalLayoutError: a layout that our own runtime refuses.
    """
    model = read_folder(folder)
    placements = [_placed(model, text, profile) for text in (layout, decode) if text is not None]
    dtype = wishes.dtype or model.spec.dtype
    limits = Limits(wishes.sequences, wishes.batch_tokens, _length(model, wishes.length), wishes.queue)
    tokens = wishes.cache_tokens or cache_tokens(placements, dtype, limits, Probe())
    largest = max(wishes.block_size, wishes.decode_block_size or 0)
    if tokens // wishes.block_size * wishes.block_size < largest:
        raise InputError(f"a cache of {tokens} tokens holds no block of {largest}; give it more")
    return EngineConfig(
        model, placements[0], dtype, wishes.device, tokens // wishes.block_size, wishes.block_size, limits,
        wishes.prefix, restarts=wishes.restarts, decode=placements[1] if decode is not None else None,
        decode_block_size=wishes.decode_block_size, kv_transport=wishes.kv_transport,
    )  # fmt: skip


def _placed(model: Model, layout: str, profile: EngineProfile) -> Placement:
    wanted = parse_layout(layout)
    check_runnable(model.spec, wanted)
    return place(model.spec, wanted, profile)


def _length(model: Model, wanted: int | None) -> int:
    most = model.spec.max_positions
    if wanted is not None and most and wanted > most:
        raise InputError(f"--max-len {wanted} exceeds the {most} positions of {model.spec.name}; ask for fewer")
    return wanted or most or MAX_LENGTH


def cache_tokens(placements: Sequence[Placement], dtype: str, limits: Limits, probe: Probe) -> int:
    """Tokens of one replica's cache: what all sequences can have at most, or what a share of the free memory holds."""
    most = limits.sequences * limits.length
    free = free_memory_bytes(probe)
    if free is None:
        return most
    elements = sum(token_elements(p, rank) for p in placements for rank in range(p.layout.world))
    return int(max(limits.length, min(most, free * CACHE_SHARE / max(1, elements * DTYPE_BYTES[dtype]))))


def on_ray(config: EngineConfig, address: str | None) -> EngineConfig:
    """The same ranks as actors of a Ray cluster; they find the engine at the address of this node.

    Raises:
        InputError: Ray is not installed, or the cluster cannot be reached.
    """
    from meshwright.runtime.launch.ray import join, run_ray

    host = join(address, config.world)
    placements = [p for p in (config.placement, config.decode) if p is not None]

    def launch(target: Callable[..., Any], world: int, args: Sequence[Any], timeout_s: float, **more: Any) -> list[Any]:
        return run_ray(target, world, args, timeout_s, placements=placements, address=address, backend=more["backend"])

    return replace(config, launch=launch, host=host)
