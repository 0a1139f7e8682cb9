"""Process groups of a dry-run: always gloo, met through the coordinator, and never torn down.

Making a group is a collective of all ranks, so it is posted as one: groups made in another order on one rank are a
mistake that hangs. Tearing gloo down while its threads live can hang by itself, so it is left out; a rank ends by
``os._exit``.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import TCPStore

from meshwright.runtime.launch.rank import open_store
from meshwright.runtime.lockstep.hook import Hook

_HOST = "127.0.0.1"
#: No group times out by itself: what would wait is held by the coordinator.
_NEVER = timedelta(days=1)


def install(hook: Hook, rank: int, world: int) -> None:
    """Patch how this rank makes and ends process groups."""
    everyone = tuple(range(world))
    make_helper, make_tagged, begin = c10d._new_process_group_helper, c10d._new_group_with_tag, dist.init_process_group

    @functools.wraps(make_helper)
    def helper(
        size: int, place: Any, ranks: Any, backend: Any, store: Any, name: Any, *args: Any, **kwargs: Any
    ) -> Any:
        kwargs.update(timeout=_NEVER, device_id=None, backend_options=None)
        if place is not None and place >= 0:
            hook.group_made(str(name), ranks or everyone)
        return make_helper(size, place, ranks, "gloo", store, name, *args, **kwargs)

    @functools.wraps(make_tagged)
    def tagged(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        chosen = tuple(sorted(int(r) for r in ranks)) if ranks is not None else everyone
        if not kwargs.get("use_local_synchronization"):
            hook.held("new_group", "world", everyone, creates=chosen)
        elif rank in chosen:
            hook.held("new_group", f"new {chosen}"[:200], chosen, creates=chosen)
        kwargs["device_id"] = None
        return make_tagged(ranks, None, "gloo", *args, **kwargs)

    @functools.wraps(begin)
    def init(*args: Any, **kwargs: Any) -> None:
        if dist.is_initialized():
            raise ValueError("trying to initialize the default process group twice!")
        port = open_store(_HOST, 0, world, _NEVER) if rank == 0 else None
        answer = hook.held("init_process_group", "start", everyone, port=port.port if port is not None else None)
        store = port if port is not None else TCPStore(_HOST, int(answer["port"]), world, False, _NEVER)
        begin("gloo", store=store, rank=rank, world_size=world, timeout=_NEVER)

    def split(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("split_group needs NCCL")

    def stay(group: Any = None) -> None:
        """Only the default group is forgotten, so that the script may ask whether it is initialised."""
        if group is None or group is c10d.GroupMember.WORLD:
            hook.link.tell(say="destroyed")

    owners: tuple[Any, ...] = (dist, c10d)
    for owner in owners:
        owner.init_process_group, owner.destroy_process_group, owner.split_group = init, stay, split
        owner.is_nccl_available = lambda: True
    owners[1]._new_process_group_helper, owners[1]._new_group_with_tag = helper, tagged
