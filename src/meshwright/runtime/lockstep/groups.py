"""Process groups of a dry-run: always gloo, met through the coordinator, and never torn down.

Making a group is a collective of all ranks, so it is posted as one: groups made in another order on one rank are a
mistake that hangs. Tearing gloo down while its threads live can hang by itself, so it is left out; a rank ends by
``os._exit``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import TCPStore

from meshwright.runtime.launch.rank import open_store
from meshwright.runtime.lockstep import cuda
from meshwright.runtime.lockstep.hook import Hook

_HOST = "127.0.0.1"
#: No group times out by itself: what would wait is held by the coordinator.
_NEVER = timedelta(days=1)


@dataclass(slots=True)
class _State:
    """Backends as the script asked for them, by group, and whether it has ended the default group."""

    default: str = "nccl"
    asked: str = "nccl"
    backends: dict[str, str] = field(default_factory=dict)
    ended: bool = False


def _plain(backend: Any) -> str:
    """A backend by one name: what it says of the device, if it says several."""
    text = str(backend or "nccl").lower()
    pairs = dict(part.split(":", 1) for part in text.split(",") if ":" in part)
    return pairs.get("cuda", text)


def install(hook: Hook, rank: int, world: int) -> None:
    """Patch how this rank makes and ends process groups."""
    everyone, state = tuple(range(world)), _State()
    begun, get_backend = dist.is_initialized, dist.get_backend
    make_helper, make_tagged, begin = c10d._new_process_group_helper, c10d._new_group_with_tag, dist.init_process_group

    @functools.wraps(make_helper)
    def helper(
        size: int, place: Any, ranks: Any, backend: Any, store: Any, name: Any, *args: Any, **kwargs: Any
    ) -> Any:
        kwargs.update(timeout=_NEVER, device_id=None, backend_options=None)
        state.backends[str(name)] = state.asked
        if place is not None and place >= 0:
            hook.group_made(str(name), ranks or everyone, tags=state.asked != "nccl")
        return make_helper(size, place, ranks, "gloo", store, name, *args, **kwargs)

    @functools.wraps(make_tagged)
    def tagged(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        chosen = tuple(sorted(int(r) for r in ranks)) if ranks is not None else everyone
        if not kwargs.get("use_local_synchronization"):
            hook.held("new_group", "world", everyone, creates=chosen)
        elif rank in chosen:
            hook.held("new_group", f"new {chosen}"[:200], chosen, creates=chosen)
        kwargs["device_id"] = None
        state.asked = _plain(backend) if backend else state.default
        return make_tagged(ranks, None, "gloo", *args, **kwargs)

    @functools.wraps(begin)
    def init(*args: Any, **kwargs: Any) -> None:
        if begun():
            if not state.ended:
                raise ValueError("trying to initialize the default process group twice!")
            state.ended = False
            hook.held("init_process_group", "start", everyone)
            return
        state.asked = state.default = _plain(args[0] if args else kwargs.get("backend"))
        port = open_store(_HOST, 0, world, _NEVER) if rank == 0 else None
        answer = hook.held("init_process_group", "start", everyone, port=port.port if port is not None else None)
        store = port if port is not None else TCPStore(_HOST, int(answer["port"]), world, False, _NEVER)
        begin("gloo", store=store, rank=rank, world_size=world, timeout=_NEVER)

    def twin(pg: Any) -> Any:
        """A second group of the same ranks, for what a thread of the script sends meanwhile."""
        ranks, (_, store) = dist.get_process_group_ranks(pg), c10d._world.pg_map[pg]
        name = c10d.GroupName(f"{pg.group_name} in a thread")
        made = make_helper(len(ranks), pg.rank(), ranks, "gloo", store, name, timeout=_NEVER, group_desc=pg.group_desc)
        return made[0]

    def split(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("split_group needs NCCL")

    def stay(group: Any = None) -> None:
        if group is None or group is c10d.GroupMember.WORLD:
            state.ended = True

    def initialized() -> bool:
        return begun() and not (state.ended and cuda.outside_torch())

    def backend_of(group: Any = None) -> str:
        asked = state.backends.get(str((group or c10d._get_default_group()).group_name))
        return asked if asked and cuda.outside_torch() else get_backend(group)

    @contextmanager
    def one_by_one(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        """gloo cannot put calls together: each is made by itself."""
        yield c10d._CoalescingManager()

    owners: tuple[Any, ...] = (dist, c10d)
    for owner in owners:
        owner.init_process_group, owner.destroy_process_group, owner.split_group = init, stay, split
        owner._coalescing_manager = one_by_one
        owner.is_nccl_available = lambda: True
        owner.is_initialized, owner.get_backend = initialized, backend_of
    hook.make_group = twin
    owners[1]._new_process_group_helper, owners[1]._new_group_with_tag = helper, tagged
