"""The same target on a Ray cluster: one actor a rank, a tp group within a node, stages across nodes.

Ranks meet as torch.distributed ranks do: rank 0 opens the rendezvous store on its node, the others join it by address.
Ray places, starts and stops them, and tells when one died; nothing of the training goes through Ray.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from meshwright.errors import InputError, MeshwrightError
from meshwright.moves.together import tp_groups
from meshwright.runtime.launch.local import RankError
from meshwright.specs.placement import Placement

SIOCGIFADDR = 0x8915
#: How long a cluster may take to find room for all ranks.
ROOM_S = 60.0


def run_ray(
    target: Callable[..., Any],
    world: int,
    args: Sequence[Any] = (),
    timeout_s: float = 600.0,
    *,
    placements: Sequence[Placement] = (),
    address: str | None = None,
    backend: str = "gloo",
) -> list[Any]:
    """Run ``target(rank, *args)`` as ``world`` actors and return their results in rank order.

    Args:
        target: an importable function, installed on every node; each rank has initialised torch.distributed (unless
            ``world`` is 1).
        world: number of ranks.
        args: the same for all ranks; serialized by Ray.
        timeout_s: bound on the whole call and on every collective in it.
        placements: which ranks form a tp group, pool after pool; none: all lie wherever there is room.
        address: of the cluster; None: the one of the environment (``RAY_ADDRESS``), or a local one made for this call.
        backend: of torch.distributed; with ``nccl`` in it: one GPU a rank.

    Raises:
        InputError: Ray is not installed, or the cluster cannot be reached.
        RankError: no room for all ranks, a rank failed or died, or no result in time. All ranks are ended by then.
        MeshwrightError: as a rank raised it.
    """
    if importlib.util.find_spec("ray") is None:
        raise InputError("--launch ray needs the package ray: pip install 'meshwright[ray]'")
    import ray

    started = _connect(ray, address, world)
    gpus = 1 if "nccl" in backend else 0
    groups = tp_groups(placements) or [(rank,) for rank in range(world)]
    bundles = [{"CPU": float(len(ranks)), "GPU": float(len(ranks) * gpus)} for ranks in groups]
    room = ray.util.placement_group(bundles, strategy="PACK")
    actors: list[Any] = []
    try:
        if lacking := shortage(bundles, _alive(ray)):
            raise RankError(lacking)
        if not room.wait(ROOM_S):
            raise RankError(
                f"the Ray cluster had no room for {_counted(bundles)} within {ROOM_S:g} s, though it is large enough; "
                f"others use it, or the groups do not go into its nodes together ({_listed(_alive(ray))})"
            )
        actors = _actors(ray, room, groups, gpus)
        return _collect(ray, actors, (target, tuple(args), world, backend, timeout_s), timeout_s)
    finally:
        for actor in actors:
            ray.kill(actor)
        ray.util.remove_placement_group(room)
        if started:
            ray.shutdown()


def join(address: str | None, world: int) -> str:
    """Join the cluster and stay in it; the address of this node.

    Raises:
        InputError: Ray is not installed, or the cluster cannot be reached.
    """
    if importlib.util.find_spec("ray") is None:
        raise InputError("--launch ray needs the package ray: pip install 'meshwright[ray]'")
    import ray

    _connect(ray, address, world)
    return str(ray.util.get_node_ip_address())


def _connect(ray: Any, address: str | None, world: int) -> bool:
    """Join the cluster; True where this call did."""
    if ray.is_initialized():
        return False
    local = address is None and not os.environ.get("RAY_ADDRESS")
    try:
        if local:
            ray.init(
                address="local", num_cpus=world, include_dashboard=False, log_to_driver=True, logging_level="ERROR"
            )
        else:
            ray.init(address=address or "auto", log_to_driver=True, logging_level="ERROR")
    except Exception as error:  # Ray raises a bare one where its own processes do not come up
        if local:
            raise RankError(f"Ray did not start on this machine ({str(error).splitlines()[0][:150]})") from None
        raise InputError(f"--address {address}: no Ray cluster there ({str(error).splitlines()[0][:100]})") from None
    return True


def _alive(ray: Any) -> dict[str, Mapping[str, float]]:
    """Resources of every node that is alive, by its address; of several at one address by address and number."""
    return _named([(str(n["NodeManagerAddress"]), n["Resources"]) for n in ray.nodes() if n["Alive"]])


def _named(nodes: Sequence[tuple[str, Mapping[str, float]]]) -> dict[str, Mapping[str, float]]:
    out: dict[str, Mapping[str, float]] = {}
    for address, has in nodes:
        same = sum(name.split(" ")[0] == address for name in out)
        out[f"{address} ({same + 1})" if same else address] = has
    return out


def _words(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {kind}" for kind, amount in resources.items() if amount) or "nothing"


def _counted(bundles: Sequence[Mapping[str, float]]) -> str:
    """``"1 x 2 CPU and 3 x 1 CPU"``."""
    return " and ".join(f"{count} x {need}" for need, count in Counter(map(_words, bundles)).items())


def _listed(nodes: Mapping[str, Mapping[str, float]]) -> str:
    own = ({kind: has.get(kind, 0.0) for kind in ("CPU", "GPU")} for has in nodes.values())
    return ", ".join(f"{address} has {_words(has)}" for address, has in zip(nodes, own, strict=True)) or "no node"


def shortage(bundles: Sequence[Mapping[str, float]], nodes: Mapping[str, Mapping[str, float]]) -> str:
    """Why a cluster can never hold some groups of ranks, each on one node; empty where it can.

    Args:
        bundles: what each group needs. nodes: what each node has, used or not.
    """
    largest = max(bundles, key=lambda need: tuple(need.values()))
    if not any(all(has.get(kind, 0.0) >= need for kind, need in largest.items()) for has in nodes.values()):
        return (
            f"a tp group needs {_words(largest)} on one node, and no node of the Ray cluster has that "
            f"({_listed(nodes)}); take a smaller tp, or larger nodes"
        )
    total = {kind: sum(need.get(kind, 0.0) for need in bundles) for kind in largest}
    had = {kind: sum(has.get(kind, 0.0) for has in nodes.values()) for kind in largest}
    if any(had[kind] < amount for kind, amount in total.items()):
        return (
            f"{len(bundles)} groups of ranks need {_words(total)}, the cluster has {_words(had)} ({_listed(nodes)}); "
            "take fewer ranks, or add nodes"
        )
    return ""


def _actors(ray: Any, room: Any, groups: Sequence[tuple[int, ...]], gpus: int) -> list[Any]:
    """One actor a rank, each in the bundle of its group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle = {rank: number for number, ranks in enumerate(groups) for rank in ranks}
    remote = ray.remote(Rank)
    return [
        remote.options(
            num_cpus=1,
            num_gpus=gpus,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=bundle[rank]),
        ).remote(rank)
        for rank in sorted(bundle)
    ]


def _collect(ray: Any, actors: list[Any], what: tuple[Any, ...], timeout_s: float) -> list[Any]:
    """Have all ranks run; the first that fails ends the wait."""
    due = time.monotonic() + timeout_s
    try:
        where = ray.get(actors[0].open.remote(len(actors), timeout_s), timeout=ROOM_S)
        running = {actor.run.remote(where, *what): rank for rank, actor in enumerate(actors)}
        results: dict[int, Any] = {}
        while running:
            ready, _ = ray.wait(list(running), timeout=max(0.0, due - time.monotonic()))
            if not ready:
                raise RankError(
                    f"no result of ranks {sorted(running.values())} within {timeout_s:g} s; all were stopped"
                )
            for reference in ready:
                rank = running.pop(reference)
                results[rank] = _result(ray, reference, rank, len(actors))
    except ray.exceptions.GetTimeoutError:
        raise RankError(f"no Ray actor came up within {ROOM_S:g} s") from None
    except ray.exceptions.RayActorError:
        raise RankError(f"rank 0 of {len(actors)} died before the others met it; they were stopped") from None
    return [results[rank] for rank in range(len(actors))]


def _result(ray: Any, reference: Any, rank: int, world: int) -> Any:
    """What a rank reported, or its error."""
    try:
        kind, *values = ray.get(reference)
    except ray.exceptions.RayActorError:
        raise RankError(f"rank {rank} of {world} died; the others were stopped") from None
    if kind == "result":
        return values[0]
    error, line, trace, _ = values
    if error is not None:
        raise error(line)
    raise RankError(f"rank {rank} of {world} failed: {line}; the others were stopped", trace)


class Rank:
    """One rank as an actor."""

    def __init__(self, rank: int) -> None:
        self.rank, self.place = rank, ""
        self.store: Any = None

    def open(self, world: int, timeout_s: float) -> tuple[str, int]:
        """Rank 0: open the rendezvous store; ``(host, port)``."""
        import ray

        from meshwright.runtime.launch.rank import open_store

        host = ray.util.get_node_ip_address()
        self.store = open_store(host, 0, world, timedelta(seconds=timeout_s))
        return host, self.store.port

    def run(
        self,
        where: tuple[str, int],
        target: Callable[..., Any],
        args: tuple[Any, ...],
        world: int,
        backend: str,
        timeout_s: float,
    ) -> tuple[Any, ...]:
        """Meet the others, run the target; ``("result", value)`` or ``("error", ...)`` as ``rank.described`` says."""
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import TCPStore

        from meshwright.runtime.launch.rank import described, keep_freed_memory

        torch.set_num_threads(1)
        keep_freed_memory()
        timeout = timedelta(seconds=timeout_s)
        try:
            if world > 1:
                store = self.store or TCPStore(*where, world, False, timeout)
                self.place = _interface()
                dist.init_process_group(backend, store=store, rank=self.rank, world_size=world, timeout=timeout)
            return "result", target(self.rank, *args)
        except BaseException as error:
            kind, line, trace, after = described(error)
            line = f"{line} on {self.place}" if self.place else line
            return "error", kind if kind is None or issubclass(kind, MeshwrightError) else None, line, trace, after


def _interface() -> str:
    """Have gloo use the interface that has this node's address in the cluster; its name and address, for messages."""
    import ray

    address = str(ray.util.get_node_ip_address())
    name = os.environ.get("GLOO_SOCKET_IFNAME") or interface_of(address)
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name
    return f"{address} ({name or 'interface unknown'})"


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address; None where none has it, or the system does not say (Linux does).

    ``SIOCGIFADDR`` of netdevice(7).
    """
    if address == "127.0.0.1" and sys.platform == "linux":
        return "lo"
    with suppress(ImportError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        import fcntl

        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(asked.fileno(), SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
