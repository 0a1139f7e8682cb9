"""What is wrong or unwise in a vLLM command itself: flags, load balancing modes, connectors, environment.

Rules on the layout are in ``rules``; those that need the model or the cluster beside the command are in
``with_model``. Sources: engine/arg_utils.py:2380-2560, config/parallel.py, config/kv_transfer.py of 0.33.0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress

from meshwright.engines.base import Invocation
from meshwright.engines.flagtable import owners
from meshwright.engines.flagwords import Words, shown, unexpanded, whole_number
from meshwright.engines.vllm.program import Pasted
from meshwright.engines.vllm.rules import balanced_experts, offline_replicas
from meshwright.engines.vllm.settings import as_object, transfer_config
from meshwright.specs.checks import broken, divisors, named
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.rules import Rule, Severity

_ARGS = "vLLM engine/arg_utils.py:2380-2560"
_PARALLEL = "vLLM config/parallel.py"
_TRANSFER = "vLLM config/kv_transfer.py"

#: Fields of KVTransferConfig (config/kv_transfer.py of 0.33.0 and 0.26.0; others are refused).
_FIELDS = (
    "kv_connector engine_id kv_buffer_device kv_role kv_port kv_connector_extra_config kv_connector_module_path "
    "enable_permute_local_kv kv_load_failure_policy"
)
TRANSFER_FIELDS = frozenset(_FIELDS.split())
ROLES = ("kv_producer", "kv_consumer", "kv_both")

#: Connectors registered in kv_connector/factory.py of 0.33.0 (0.26.0: all but HiSparseConnector).
_REGISTERED = (
    "ExampleConnector ExampleHiddenStatesConnector LMCacheConnectorV1 LMCacheMPConnector NixlConnector "
    "NixlPullConnector NixlPushConnector MultiConnector HiSparseConnector MoRIIOConnector OffloadingConnector "
    "DecodeBenchConnector MooncakeConnector MooncakeStoreConnector FlexKVConnectorV1 SimpleCPUOffloadConnector "
    "HF3FSKVConnector"
)
CONNECTORS = frozenset(_REGISTERED.split())

#: Words for one thing in two engines: what vLLM calls it.
_CALLED = {
    "--tp-size": "--tensor-parallel-size",
    "--tp": "--tensor-parallel-size",
    "--pp-size": "--pipeline-parallel-size",
    "--dp-size": "--data-parallel-size",
    "--ep-size": "--enable-expert-parallel",
    "--ep": "--enable-expert-parallel",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--context-length": "--max-model-len",
    "--model-path": "the model as the first word",
    "--dist-init-addr": "--master-addr and --master-port",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--max-running-requests": "--max-num-seqs",
    "--tensor-model-parallel-size": "--tensor-parallel-size",
    "--pipeline-model-parallel-size": "--pipeline-parallel-size",
    "--kv-cache-free-gpu-mem-fraction": "--gpu-memory-utilization",
    "--max-seq-len": "--max-model-len",
}


def of_command(pasted: Pasted, layout: Layout, cut: tuple[int, ...]) -> Iterator[Rule]:
    """Findings that the command alone decides."""
    yield from _unknown(pasted)
    yield from _values(pasted)
    yield from _partition(layout, cut)
    yield from _engine_v0(pasted, layout)
    yield from _environment(pasted)
    yield from _load_balancing(pasted.words, layout)
    yield from _nodes(pasted.words, layout)
    yield from _visible(pasted, layout)
    yield from _experts(pasted.words, layout)
    yield from _connector(pasted.words, layout)


#: Tokens whose multiples are blocks of the attention on CPU (v1/attention/backends/cpu_attn.py, MultipleOf(32)).
CPU_BLOCK = 32


def with_model(invocation: Invocation, spec: ModelSpec, cluster: Cluster | None) -> list[Rule]:
    """Findings that need the model, or the cluster, beside the command."""
    layout, given = invocation.layout, dict(invocation.given)
    found: list[Rule] = []
    if invocation.deployment == "external":
        found += offline_replicas(spec, layout)
    if given.get("--enable-eplb") == "true" and layout.ep > 1:
        found += balanced_experts(spec, layout, _redundant(given))
    if cluster is not None:
        found += _one_node(invocation, layout, cluster)
        if cluster.device.kind == "cpu" and not spec.mla:
            found += _cpu_blocks(whole_number(given.get("--block-size", "")))
    return found


def _cpu_blocks(size: int | None) -> Iterator[Rule]:
    """Attention on CPU takes blocks of 32 tokens and multiples only; the start fails otherwise (seen with 0.32)."""
    if size is not None and size % CPU_BLOCK:
        yield broken(
            "cpu_block_size",
            "illegal",
            f"--block-size {size} is no multiple of {CPU_BLOCK}, which attention on CPU needs",
            f"use {-(-size // CPU_BLOCK) * CPU_BLOCK}, or leave it to vLLM (128)",
            "v1/attention/backends/cpu_attn.py",
            block_size=size,
            multiple=CPU_BLOCK,
        )


def _redundant(given: Mapping[str, str]) -> int:
    """Redundant experts that ``--eplb-config`` asks for, whole or as a dotted piece."""
    text = given.get("--eplb-config.num_redundant_experts")
    if text is None:
        with suppress(ValueError, RecursionError):
            config = json.loads(given.get("--eplb-config", "{}"))
            text = str(config.get("num_redundant_experts", 0)) if isinstance(config, dict) else None
    return whole_number(text or "") or 0


def _one_node(invocation: Invocation, layout: Layout, cluster: Cluster) -> Iterator[Rule]:
    """Without Ray and without ``--nnodes`` all ranks of a replica start on one node.

    Commands of one node are judged for every engine alike (``judge.verdict``); here those whose replicas lie on
    several nodes, or behind a load balancer.
    """
    world, here = layout.tp * layout.pp * layout.cp, cluster.devices_per_node
    given = dict(invocation.given)
    backend = given.get("--distributed-executor-backend")
    if (
        invocation.deployment == "single"
        or world <= here
        or (invocation.nodes or 1) > 1
        or backend in {"ray", "external_launcher"}
    ):
        return
    if given.get("--data-parallel-backend") == "ray":
        return
    nodes = -(-world // here)
    yield broken(
        "world_exceeds_node",
        "illegal",
        f"world size {world} (tp {layout.tp} x pp {layout.pp} x cp {layout.cp}) is larger than the {here} devices of "
        "this node",
        f"use --nnodes {nodes} with --node-rank and --master-addr on each node, or --distributed-executor-backend ray",
        f"{_PARALLEL}:1071",
        world=world,
        devices=here,
    )


def _unknown(pasted: Pasted) -> Iterator[Rule]:
    """Flags that this version does not have. vLLM stops at them, so they are illegal where the version is stated."""
    table = pasted.table
    severity: Severity = "illegal" if pasted.stated else "unwise"
    name = f"vLLM {table.version}"
    where = f"{name}, its parser"
    for word in dict.fromkeys(pasted.words.unknown):
        spelled = word.replace("_", "-")
        if spelled in table.removed:
            instead = table.removed[spelled] or "leave it out"
            yield broken("flag_removed", severity, f"{name} has no {shown(word)} any more", _use(instead), where)
        elif others := tuple(dict.fromkeys((*owners(spelled, "vllm"), *owners(word, "vllm")))):
            instead = _CALLED.get(spelled, "leave it out")
            message = f"{shown(word)} is a flag of {', '.join(others[:3])}, not of vLLM"
            yield broken("flags_mixed", "illegal", message, _use(instead), where)
        else:
            way = "leave it out" if pasted.stated else "name the version with --engine vllm-0.26, or leave it out"
            yield broken("flag_unknown", severity, f"{name} knows no flag {shown(word)} and stops", way, where)


def _use(instead: str) -> str:
    if instead.startswith("nothing"):
        why = instead.removeprefix("nothing").lstrip(": ")
        return f"leave it out: {why}" if why else "leave it out"
    return instead if instead.startswith("leave") else f"use {instead}"


def _values(pasted: Pasted) -> Iterator[Rule]:
    for problem in pasted.words.problems:
        if not unexpanded(problem):
            yield broken(
                "flag_value", "illegal", problem, "correct the value", f"vLLM {pasted.table.version}, its parser"
            )
    for given in pasted.words.given:
        if given.name == "--all2all-backend" and given.value in {"naive", "pplx"} and pasted.table.version >= "0.27":
            yield broken(
                "all2all_removed",
                "unwise",
                f"--all2all-backend {given.value} was removed; allgather_reducescatter is taken instead",
                "name a backend that is there: deepep_high_throughput, deepep_low_latency, nixl_ep",
                f"{_PARALLEL}:537",
            )


def _partition(layout: Layout, cut: tuple[int, ...]) -> Iterator[Rule]:
    if cut and len(cut) != layout.pp:
        yield broken(
            "partition_entries",
            "illegal",
            f"VLLM_PP_LAYER_PARTITION has {len(cut)} numbers for {layout.pp} pipeline stages",
            f"write {layout.pp} numbers that sum to the model's layers",
            "vLLM distributed/utils.py:198 get_pp_indices",
            entries=len(cut),
            stages=layout.pp,
        )


def _engine_v0(pasted: Pasted, layout: Layout) -> Iterator[Rule]:
    """``VLLM_USE_V1=0`` asks for the first engine, which never had data parallelism and is gone (envs.py)."""
    if pasted.env.get("VLLM_USE_V1") != "0":
        return
    gone = f"vLLM {pasted.table.version} does not read VLLM_USE_V1: engine V0 does not exist any more"
    if layout.dp > 1:
        yield broken(
            "engine_v0",
            "illegal",
            f"VLLM_USE_V1=0 with data parallel size {layout.dp}: engine V0 has no data parallelism, its ranks never "
            "join",
            "leave VLLM_USE_V1 out",
            gone,
            dp=layout.dp,
        )
    else:
        yield broken("engine_v0", "unwise", gone, "leave VLLM_USE_V1 out", "vLLM envs.py")


def _environment(pasted: Pasted) -> Iterator[Rule]:
    """Variables of vLLM's that this version does not read."""
    known = set(pasted.table.environment)
    for name in pasted.env:
        if known and name.startswith("VLLM_") and name not in known and name != "VLLM_USE_V1":
            flag = "--" + name.removeprefix("VLLM_").lower().replace("_", "-")
            instead = flag if any(f.name == flag for f in pasted.table.flags) else ""
            yield broken(
                "environment_unread",
                "unwise",
                f"vLLM {pasted.table.version} does not read {shown(name)}",
                f"use {instead}" if instead else "leave it out",
                "vLLM envs.py",
            )


def _load_balancing(words: Words, layout: Layout) -> Iterator[Rule]:
    dp, local = layout.dp, words.whole("--data-parallel-size-local", 0)
    rank, start = words.whole("--data-parallel-rank"), words.whole("--data-parallel-start-rank")
    external = bool(words.on("--data-parallel-external-lb")) or rank is not None
    hybrid = bool(words.on("--data-parallel-hybrid-lb"))
    if external and hybrid:
        yield _lb("external and hybrid load balancing exclude each other", "keep one of the two")
    if hybrid and words.on("--headless"):
        yield _lb("--data-parallel-hybrid-lb has an API server on every node, --headless has none", "drop --headless")
    if hybrid and local is None:
        yield _lb("--data-parallel-hybrid-lb needs the replicas of this node", "add --data-parallel-size-local")
    if external and local not in {None, 1}:
        yield _lb(f"external load balancing runs 1 replica a process, not {local}", "drop --data-parallel-size-local")
    if external and dp == 1:
        yield _lb("external load balancing with data parallel size 1", "set --data-parallel-size above 1")
    if external and rank is None and dp > 1 and (words.whole("--nnodes", 1) or 1) == 1:
        yield _lb(f"external load balancing of {dp} replicas does not say which this is", "add --data-parallel-rank")
    if rank is not None and not 0 <= rank < dp:
        yield _lb(f"data parallel rank {rank} of {dp} replicas", f"use 0 to {dp - 1}", rank=rank, dp=dp)
    if local is not None and local > dp:
        yield _lb(
            f"{local} replicas on this node of {dp} in all", "lower --data-parallel-size-local", local=local, dp=dp
        )
    if start is not None and not 0 <= start < dp:
        yield _lb(f"first data parallel rank {start} of {dp} replicas", f"use 0 to {dp - 1}", start=start, dp=dp)


def _lb(message: str, way_out: str, **numbers: int) -> Rule:
    return broken("load_balancing", "illegal", message, way_out, _ARGS, **numbers)


def _nodes(words: Words, layout: Layout) -> Iterator[Rule]:
    nodes, rank = words.whole("--nnodes", 1) or 1, words.whole("--node-rank") or 0
    backend = words.text("--distributed-executor-backend")
    if nodes == 1:
        return
    if backend == "ray" or words.text("--data-parallel-backend") == "ray":
        yield broken(
            "nodes_with_ray",
            "illegal",
            f"--nnodes {nodes} is for the mp backend; Ray counts its own nodes",
            "drop --nnodes, or drop ray",
            f"{_PARALLEL}:1106",
            nodes=nodes,
        )
    if layout.world % nodes:
        yield broken(
            "world_over_nodes",
            "illegal",
            f"world size {layout.world} is not divisible by --nnodes {nodes}",
            f"choose --nnodes from {named(divisors(layout.world), nodes)}",
            _ARGS,
            world=layout.world,
            nodes=nodes,
        )
    if not 0 <= rank < nodes:
        yield broken("node_rank", "illegal", f"--node-rank {rank} of {nodes} nodes", f"use 0 to {nodes - 1}", _ARGS)
    if rank > 0 and not words.on("--headless"):
        yield broken(
            "node_without_headless",
            "unwise",
            f"node {rank} starts a second API server beside node 0's",
            "add --headless on every node but the first",
            "vLLM docs, parallelism and scaling",
        )


def _visible(pasted: Pasted, layout: Layout) -> Iterator[Rule]:
    """Ranks of this node against the devices that it is shown."""
    words, seen = pasted.words, pasted.visible
    if seen is None or words.text("--distributed-executor-backend") == "ray":
        return
    replica = layout.tp * layout.pp * layout.cp
    nodes, local = words.whole("--nnodes", 1) or 1, words.whole("--data-parallel-size-local", 0)
    if words.find("--data-parallel-rank") is not None:
        local = 1
    ranks = layout.world // nodes if local is None else replica * min(local, layout.dp) // (nodes if local == 1 else 1)
    if ranks > seen and words.text("--data-parallel-backend") != "ray":
        yield broken(
            "ranks_exceed_visible",
            "illegal",
            f"{ranks} ranks on this node, which is shown {seen} devices",
            f"show it {ranks} devices (CUDA_VISIBLE_DEVICES, --gpus), or lower the degrees",
            f"{_PARALLEL}:1071",
            ranks=ranks,
            devices=seen,
        )


def _experts(words: Words, layout: Layout) -> Iterator[Rule]:
    eplb = words.on("--enable-eplb")
    redundant = as_object(words, "--eplb-config").get("num_redundant_experts", 0)
    if eplb and not words.on("--enable-expert-parallel"):
        yield broken("eplb_needs_ep", "illegal", "--enable-eplb without expert parallelism", "add -ep", _PARALLEL)
    if eplb and words.on("--enable-expert-parallel") and layout.tp * layout.cp * layout.dp == 1:
        yield broken("eplb_on_one_rank", "illegal", "--enable-eplb on 1 rank", "raise tp or dp, or drop it", _PARALLEL)
    if isinstance(redundant, int) and redundant and not eplb:
        message = f"{redundant} redundant experts without the load balancer"
        yield broken("redundant_without_eplb", "illegal", message, "add --enable-eplb, or use 0", _PARALLEL)


def _connector(words: Words, layout: Layout) -> Iterator[Rule]:
    config = transfer_config(words)
    if not config:
        return
    foreign = sorted(set(map(str, config)) - TRANSFER_FIELDS)
    if foreign:
        yield broken(
            "transfer_field",
            "illegal",
            f"--kv-transfer-config has no field {', '.join(shown(f) for f in foreign[:3])}",
            "use kv_connector, kv_role and kv_connector_extra_config",
            _TRANSFER,
        )
    name, role = config.get("kv_connector"), config.get("kv_role")
    if name is not None and role not in ROLES:
        said = "none" if role is None else shown(str(role))
        yield broken(
            "transfer_role", "illegal", f"kv_role is {said}", f"set it to one of {', '.join(ROLES)}", _TRANSFER
        )
    if isinstance(name, str) and name not in CONNECTORS and "kv_connector_module_path" not in config:
        message = f"no KV connector {shown(name)} is registered"
        yield broken(
            "transfer_connector", "illegal", message, "use NixlConnector or MooncakeConnector", "vLLM factory.py"
        )
    backend = words.text("--distributed-executor-backend")
    if layout.tp * layout.pp * layout.cp == 1 and layout.dp > 1 and backend != "mp":
        yield broken(
            "connector_in_one_process",
            "unwise",
            f"dp {layout.dp} replicas of 1 rank put a connector's worker and scheduler into one process, which has "
            "failed to start",
            "add --distributed-executor-backend mp",
            "vLLM v1/executor/uniproc_executor.py",
            dp=layout.dp,
        )
    block = words.whole("--block-size", 1)
    if block is not None and block <= 16 and str(name).startswith("Nixl"):
        yield broken(
            "transfer_blocks_small",
            "unwise",
            f"--block-size {block} cuts the cache into many small transfers",
            "use --block-size 64 on both sides",
            "vLLM NixlConnector, one descriptor a block and layer",
            block=block,
        )
