"""Commands and files that start exactly the requested point with vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwright.engines.base import Emission, OutFile, Request
from meshwright.engines.flagtable import find_flag
from meshwright.engines.vllm.command import model_argument, needs, noted
from meshwright.engines.vllm.deploy import SHARED_MEMORY, WAYS, Instance, reasons, usual
from meshwright.engines.vllm.deploy_files import Place, kuberay, leader_worker_set, slurm
from meshwright.engines.vllm.parse import short_version, table
from meshwright.engines.vllm.pools import pool_commands, pools
from meshwright.engines.vllm.profile import PROFILES
from meshwright.errors import InputError
from meshwright.specs.command import Command
from meshwright.specs.layout import Layout
from meshwright.specs.profile import ServeSettings
from meshwright.specs.splits import splits
from meshwright.specs.workload import Serve

#: Options of a request that vLLM's folder knows.
OPTIONS = ("connector", "image", "name", "interface", "all2all")

_MANAGERS = {"kuberay": kuberay, "lws": leader_worker_set, "slurm": slurm}


def emit(request: Request, version: str | None = None) -> Emission:
    """What to type on every node, and the files that go with it.

    Raises:
        InputError: training, an unknown option, too few devices, a way of starting that the layout does not allow, or
            pools whose connector refuses them; the line says which way it can be started.
    """
    workload = request.workload
    if not isinstance(workload, Serve):
        raise InputError("vLLM serves and does not train; use megatron or torchtitan")
    unknown = sorted(set(request.options) - set(OPTIONS))
    if unknown:
        raise InputError(f"vLLM has no option {unknown[0][:30]!r}; known: {', '.join(OPTIONS)}")
    name, wanted = model_argument(request.model)
    settings = request.settings or ServeSettings()
    profile = PROFILES[short_version(version)]
    if request.deployment == "pools" or request.prefill is not None:
        emission = _pools(request, name, workload, settings, profile.version)
    else:
        emission = _one(request, name, workload, settings, profile.version)
    written = noted(list(emission.commands), wanted)
    notes = [*reasons(written), *emission.notes, *((wanted,) if wanted else ())]
    return Emission(tuple(written), emission.files, tuple(notes))


def _one(request: Request, name: str, workload: Serve, settings: ServeSettings, version: str) -> Emission:
    layout, cluster = request.layout, request.cluster
    needs(layout.world, layout, cluster)
    extra, notes = _all_to_all(layout, request.options.get("all2all"), version, cluster.devices_per_node, "low_latency")
    instance = Instance(name, layout, cluster, workload, settings, (*extra, *_cache_words(request)))
    way = request.deployment or usual(instance)
    if way in _MANAGERS:
        place = Place.of(request.options, version, "eth0" if way != "slurm" else "ib0")
        used = replace(instance, cluster=replace(cluster, nodes=instance.nodes))
        commands, files = _MANAGERS[way](used, place)
        return Emission(tuple(commands), tuple(files), (*notes, *_files_notes(way, files)))
    if way == "external" and request.spec is not None and not splits(request.spec).moes:
        raise InputError(
            f"vLLM refuses external load balancing for a dense model; start {layout.dp} instances of their own without "
            "--data-parallel flags"
        )
    commands = WAYS[way](instance)
    return Emission(tuple(commands), (), (*notes, *_memory_note(commands)))


def _cache_words(request: Request) -> tuple[str, ...]:
    """The planned KV cache in words, on CPU.

    There vLLM takes a share of the host's memory less what the process holds at that moment (v1/worker/cpu_worker.py
    of 0.32, ``determine_available_memory``), so a start beside other processes would have other blocks than the plan.
    """
    if request.kv_cache_bytes is None or request.cluster.device.kind != "cpu":
        return ()
    return ("--kv-cache-memory-bytes", str(request.kv_cache_bytes))


def _pools(request: Request, name: str, workload: Serve, settings: ServeSettings, version: str) -> Emission:
    if request.prefill is None:
        raise InputError("pools need two layouts; give the prefill side as well (--prefill tp=8 --decode dp=16,ep=16)")
    if request.deployment not in {None, "pools"}:
        raise InputError(f"pools are started as pools, not as {request.deployment}")
    asked, each = request.options.get("all2all"), request.cluster.devices_per_node
    first, notes = _all_to_all(request.prefill, asked, version, each, "high_throughput")
    second, more = _all_to_all(request.layout, asked, version, each, "low_latency")
    both = pools(
        name,
        request.prefill,
        request.layout,
        request.cluster,
        workload,
        settings,
        request.options.get("connector", "nixl"),
        request.spec,
        (first, second),
    )
    commands = pool_commands(both)
    same = (
        "both sides must be the same vLLM version, model, dtype and cache dtype: the connectors compare a hash of them"
    )
    return Emission(tuple(commands), (), (*dict.fromkeys((*notes, *more)), same, *_memory_note(commands)))


def _all_to_all(
    layout: Layout, asked: str | None, version: str, each: int, phase: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Words for the all-to-all backend of expert parallelism, and what to know about it.

    ``deepep`` is high throughput for prefill and low latency for decode (DeepEP's two kernels).

    Raises:
        InputError: a backend that this version does not have.
    """
    if layout.ep == 1 or layout.dp == 1:
        return (), ()
    if asked is None:
        if layout.tp * layout.dp * layout.cp <= each:
            return (), ()
        return (), (
            "experts lie across nodes: the default allgather_reducescatter is what was counted; where DeepEP is "
            "installed, option all2all=deepep sends each token only to its experts",
        )
    backend = f"deepep_{phase}" if asked == "deepep" else asked
    flag = find_flag("--all2all-backend", table(version))
    if flag is None or backend not in flag.choices:
        known = ", ".join(flag.choices) if flag is not None else "none"
        raise InputError(f"all2all {backend[:40]!r} is not one of vLLM {version}'s: {known}")
    return ("--all2all-backend", backend), ()


def _memory_note(commands: Sequence[Command]) -> tuple[str, ...]:
    return (SHARED_MEMORY,) if any(c.text.startswith("vllm") for c in commands) else ()


def _files_notes(way: str, files: Sequence[OutFile]) -> tuple[str, ...]:
    shared = "/dev/shm is a memory volume of 16 GiB: ranks of a node exchange through it, a pod has 64 MiB by default"
    first = "set the interface with option interface=NAME if it is not the one written"
    ray = ("the image must hold Ray beside vLLM",) if way == "kuberay" else ()
    return (first, *(() if way == "slurm" else (shared,)), *ray, *(f"{f.path}: {f.purpose}" for f in files))
