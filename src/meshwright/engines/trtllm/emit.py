"""What to type to start TensorRT-LLM: one node, several nodes under MPI, instances of a dense model, context and
generation servers with the server that joins them; options without a flag go into a YAML file.

Sources: ``commands/serve.py`` (see ``bench/flags/trtllm.py``), ``docs/source/commands/trtllm-serve`` (``mpirun`` and
``srun`` with ``trtllm-llmapi-launch``), ``docs/source/features/disagg-serving.md``.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.engines import manifests
from meshwright.engines.base import Emission, OutFile, Request
from meshwright.engines.plainyaml import dump
from meshwright.errors import InputError
from meshwright.specs.atlas import models
from meshwright.specs.command import Command
from meshwright.specs.layout import Layout
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve

#: ``kv_cache_config.tokens_per_block`` when nothing is said.
DEFAULT_BLOCK = 32
PORT, CONTEXT_PORT, GENERATION_PORT = 8000, 8001, 8002
OPTIONS = ("connector", "name", "interface", "experts")
#: Names of ``cache_transceiver_config.backend`` (docs/source/features/disagg-serving.md).
CONNECTORS = {"nixl": "NIXL", "ucx": "UCX", "mpi": "MPI", "default": "DEFAULT"}

_KV_DTYPES = {"f8_e4m3": "fp8", "fp8": "fp8", "nvfp4": "nvfp4", "f16": "float16", "bf16": "bfloat16"}
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}

_Config = dict[str, object]


@dataclass(frozen=True, slots=True)
class Server:
    """One server: its flags, the options that have none, where it runs.

    Attributes:
        words: ``trtllm-serve`` with model and flags.
        config: options for its file.
        file: name of the file.
        ranks: devices it takes.
        first: number of its first node.
        per_node: devices of a node.
        devices: numbers of its devices on a shared node, empty: all.
        port: that it listens on.
        purpose: what it is for.
    """

    words: tuple[str, ...]
    config: _Config
    file: str
    ranks: int
    first: int
    per_node: int
    devices: tuple[int, ...]
    port: int
    purpose: str

    @property
    def nodes(self) -> int:
        """Nodes that it spans."""
        return -(-self.ranks // self.per_node)


def emit(request: Request) -> Emission:
    """Commands and files of a request.

    Raises:
        InputError: TensorRT-LLM cannot be started that way; the line says which way it can.
    """
    if not isinstance(request.workload, Serve):
        raise InputError("TensorRT-LLM serves and does not train; use --engine megatron or torchtitan")
    unknown = sorted(set(request.options) - set(OPTIONS))
    if unknown:
        raise InputError(f"unknown option {unknown[0][:30]!r} for TensorRT-LLM; known: {', '.join(OPTIONS)}")
    if request.deployment in {"ray", "headless", "hybrid", "kuberay", "lws"}:
        raise InputError(
            f"TensorRT-LLM is not started as {request.deployment} here; it has single, mp, slurm, external and pools"
        )
    settings = request.settings or ServeSettings()
    if request.prefill is not None:
        return _pools(request, request.prefill, request.workload, settings)
    if request.deployment == "pools":
        raise InputError("pools need the layout of the context side; give --prefill and --decode")
    if request.layout.dp > 1 and not is_attention_dp(request):
        return _instances(request, request.workload, settings)
    server = _server(request, request.layout, request.workload, settings, "serve", 0, PORT)
    if request.deployment == "single" and server.nodes > 1:
        raise InputError(
            f"{request.layout} needs {server.ranks} devices, a node has {server.per_node}; use mp or slurm over "
            f"{server.nodes} nodes"
        )
    files = _config_file(server)
    if request.deployment == "slurm":
        files = (*files, _sbatch(request, server))
    return Emission((_command(server, request),), (*files, *_host_file(server)), _notes(server, request))


def is_attention_dp(request: Request) -> bool:
    """Whether ``dp`` is attention data parallelism of one server; else independent instances of a dense model."""
    told = request.options.get("experts")
    if told is not None:
        return told.lower() in {"1", "true", "yes", "on"}
    if request.spec is not None:
        return request.spec.moe is not None
    if models.find(request.model) is not None:
        from meshwright.specs.hf.read import read_model

        return read_model(request.model).moe is not None
    return request.layout.ep > 1 or request.layout.etp is not None


def model_argument(name: str) -> str:
    """What the engine is given: an atlas name becomes the hub id it was read from."""
    entry = models.find(name)
    if entry is not None and "/" not in name:
        return next((alias for alias in models.aliases(entry) if "/" in alias), name)
    return f"./{name}" if name.startswith(("-", "$")) or name in {"serve", "disaggregated", "grpc"} else name


def _server(
    request: Request, layout: Layout, workload: Serve, settings: ServeSettings, purpose: str, first: int, port: int
) -> Server:
    cluster = request.cluster
    spread = layout.dp > 1
    ranks = layout.tp * layout.dp
    if spread and layout.tp > 1:
        raise InputError(f"attention data parallelism has tp 1 in TensorRT-LLM, not tp {layout.tp} x dp {layout.dp}")
    words = ["trtllm-serve", model_argument(request.model), "--backend", "pytorch", "--tp_size", str(ranks)]
    for flag, degree in (("--pp_size", layout.pp), ("--cp_size", layout.cp), ("--ep_size", layout.ep)):
        words += [flag, str(degree)] if degree > 1 else []
    words += ["--max_seq_len", str(workload.context)]
    for flag, value in (
        ("--max_batch_size", settings.max_num_seqs),
        ("--max_num_tokens", settings.max_num_batched_tokens),
        ("--kv_cache_free_gpu_memory_fraction", settings.utilization),
    ):
        if value is not None:
            words += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    server = Server(
        tuple(words),
        _config(layout, settings, spread),
        f"{manifests.deployment_name(request.options.get('name', request.model))}-{purpose}.yml",
        layout.world,
        first,
        cluster.devices_per_node,
        (),
        port,
        purpose,
    )
    if first + server.nodes > cluster.nodes:
        raise InputError(f"{layout} needs {layout.world} devices from node {first} on, {cluster} has {cluster.devices}")
    return server


def _config(layout: Layout, settings: ServeSettings, spread: bool) -> _Config:
    """Options that have no flag."""
    config: _Config = {"enable_attention_dp": True} if spread else {}
    cache: _Config = {}
    if settings.kv_dtype != "auto":
        if settings.kv_dtype not in _KV_DTYPES:
            raise InputError(f"TensorRT-LLM has no cache dtype {settings.kv_dtype}; it has fp8, nvfp4 and the model's")
        cache["dtype"] = _KV_DTYPES[settings.kv_dtype]
    if settings.block_size not in {None, DEFAULT_BLOCK}:
        cache["tokens_per_block"] = settings.block_size
    if cache:
        config["kv_cache_config"] = cache
    if layout.etp is not None:
        config["moe_tensor_parallel_size"] = layout.etp
    if layout.stage_layers and layout.pp > 1:
        config["pp_partition"] = list(layout.stage_layers)
    if settings.dtype:
        config["dtype"] = _DTYPES.get(settings.dtype, settings.dtype)
    if settings.enforce_eager:
        config["cuda_graph_config"] = None
    if settings.speculative:
        config["speculative_config"] = {
            "decoding_type": "MTP",
            "num_nextn_predict_layers": settings.speculative_tokens,
        }
    return config


def _full(server: Server) -> list[str]:
    words = [*server.words, "--host", "0.0.0.0", "--port", str(server.port)]
    return [*words, "--config", f"./{server.file}"] if server.config else words


def _launch(server: Server) -> list[str]:
    return ["trtllm-llmapi-launch", *_full(server)]


def _command(server: Server, request: Request) -> Command:
    """The command of one server: plain on one node, under ``mpirun`` from its first node over several."""
    env: list[tuple[str, str]] = []
    if server.devices:
        env.append(("CUDA_VISIBLE_DEVICES", ",".join(map(str, server.devices))))
    if server.nodes == 1:
        return Command(
            server.first if request.cluster.nodes > 1 else None, server.purpose, _join(_full(server)), tuple(env)
        )
    words = ["mpirun", "-np", str(server.ranks), "--hostfile", f"./{_hosts(server)}"]
    for name in ("NCCL_SOCKET_IFNAME",) if "interface" in request.options else ():
        words += ["-x", f"{name}={request.options['interface']}"]
    note = "typed on the first node; mpirun starts one process a device on every node of the host file"
    return Command(server.first, server.purpose, _join([*words, *_launch(server)]), tuple(env), note)


def _join(words: Sequence[str]) -> str:
    return " ".join(map(shlex.quote, words))


def _hosts(server: Server) -> str:
    return f"{server.purpose}.hosts"


def _host_file(server: Server) -> tuple[OutFile, ...]:
    if server.nodes == 1:
        return ()
    left, rows = server.ranks, []
    for node in range(server.first, server.first + server.nodes):
        rows.append(f"NODE{node} slots={min(left, server.per_node)}")
        left -= server.per_node
    return (OutFile(_hosts(server), "\n".join(rows) + "\n", "put the address of each node in place of NODE0, NODE1"),)


def _config_file(server: Server) -> tuple[OutFile, ...]:
    if not server.config:
        return ()
    return (OutFile(server.file, dump(server.config), f"options of the {server.purpose} server that have no flag"),)


def _sbatch(request: Request, server: Server) -> OutFile:
    """An sbatch script with one task a device, as MPI wants it."""
    name = manifests.deployment_name(request.options.get("name", request.model))
    each = min(server.ranks, server.per_node)
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={name}",
        f"#SBATCH --nodes={server.nodes}",
        f"#SBATCH --ntasks={server.ranks}",
        f"#SBATCH --ntasks-per-node={each}",
        f"#SBATCH --gpus-per-node={each}",
        "#SBATCH --exclusive",
        "set -eu",
    ]
    if "interface" in request.options:
        lines.append(f"export NCCL_SOCKET_IFNAME={shlex.quote(request.options['interface'])}")
    lines.append(f"srun --mpi=pmix --ntasks {server.ranks} --ntasks-per-node {each} {_join(_launch(server))}")
    return OutFile(f"{name}.sbatch", "\n".join(lines) + "\n", "sbatch it; one task a device, started by MPI")


def _instances(request: Request, workload: Serve, settings: ServeSettings) -> Emission:
    """Independent servers of a dense model, each on devices of its own."""
    layout, cluster = request.layout, request.cluster
    one = replace(layout, dp=1)
    if one.world > cluster.devices_per_node:
        raise InputError(
            f"an instance of {one} spans nodes of {cluster.devices_per_node} devices; start each with a deployment "
            "of its own (mp)"
        )
    most = cluster.devices_per_node // one.world
    if layout.dp > most * cluster.nodes:
        raise InputError(f"{layout.dp} instances of {one.world} devices do not fit {cluster}")
    servers = []
    for number in range(layout.dp):
        node, place = divmod(number, most)
        server = _server(request, one, workload, settings, "serve", node, PORT + place)
        devices = tuple(range(place * one.world, (place + 1) * one.world))
        servers.append(replace(server, devices=devices, purpose=f"instance {number}"))
    commands = tuple(_command(server, request) for server in servers)
    note = "instances do not know each other: put a load balancer (nginx, or the disaggregated server) in front"
    return Emission(commands, _config_file(servers[0]), (note, *_notes(servers[0], request)))


def _pools(request: Request, prefill: Layout, workload: Serve, settings: ServeSettings) -> Emission:
    """Context and generation servers, and the server that joins them."""
    connector = request.options.get("connector", "nixl")
    if connector not in CONNECTORS:
        raise InputError(f"TensorRT-LLM has no cache backend {connector[:20]!r}; it has {', '.join(CONNECTORS)}")
    for side, layout in (("context", prefill), ("generation", request.layout)):
        if layout.dp > 1 and not is_attention_dp(request):
            raise InputError(f"the {side} side has dp {layout.dp} of a dense model; give one instance, dp 1")
    transfer = {"backend": CONNECTORS[connector], "max_tokens_in_buffer": max(2048, workload.context)}
    first = _server(request, prefill, workload, settings, "context", 0, CONTEXT_PORT)
    shared = first.ranks + request.layout.world <= first.per_node
    start = 0 if shared else first.nodes
    second = _server(request, request.layout, workload, settings, "generation", start, GENERATION_PORT)
    first = replace(
        first,
        config={**first.config, "disable_overlap_scheduler": True, "cache_transceiver_config": transfer},
        devices=tuple(range(first.ranks)) if shared else (),
    )
    second = replace(
        second,
        config={**second.config, "cache_transceiver_config": transfer},
        devices=tuple(range(first.ranks, first.ranks + second.ranks)) if shared else (),
    )
    joined = {
        "hostname": "0.0.0.0",
        "port": PORT,
        "backend": "pytorch",
        "context_servers": {"num_instances": 1, "urls": [f"{_host(first)}:{first.port}"]},
        "generation_servers": {"num_instances": 1, "urls": [f"{_host(second)}:{second.port}"]},
    }
    name = "disagg.yaml"
    join = Command(0, "join", f"trtllm-serve disaggregated -c ./{name}", (), "once both servers answer /health")
    files = [OutFile(name, dump(joined), "where the context and generation servers are")]
    for server in (first, second):
        files += [*_config_file(server), *_host_file(server)]
    notes = [
        *_notes(second, request),
        "cache dtype and heads must be the same on both sides; sizes may differ (tensor and pipeline parallel are "
        "converted on the way)",
        "max_tokens_in_buffer is the longest request: a shorter buffer sends a prompt in pieces",
    ]
    commands = (_command(first, request), _command(second, request), join)
    return Emission(commands, tuple(files), tuple(notes))


def _host(server: Server) -> str:
    return "localhost" if server.devices else f"NODE{server.first}"


def _notes(server: Server, request: Request) -> tuple[str, ...]:
    notes = []
    if server.config:
        notes.append(f"{server.file} must lie where the command is typed; its options override the flags")
    if server.nodes > 1:
        notes.append("MPI needs passwordless ssh between the nodes, or Slurm with PMIx (deployment slurm)")
        if "interface" not in request.options:
            notes.append(
                "where a node has several networks set NCCL_SOCKET_IFNAME to the interface of the hosts' names"
            )
    if server.ranks > 1:
        notes.append("in a container give --ipc=host or 32 GiB of /dev/shm: ranks of a node exchange through it")
    if request.settings is not None and request.settings.quantization is not None:
        notes.append("quantization comes with the checkpoint in TensorRT-LLM; load a quantized one")
    return tuple(notes)
