"""What accelerate 1.15 refuses, with the place in its code that says so (paths relative to the package)."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.engines.accelerate.settings import STATES, STRATEGIES, WRAPS, Settings
from meshwright.engines.flagwords import shown
from meshwright.specs import checks
from meshwright.specs.checks import broken, divisors, named
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.rules import Rule
from meshwright.specs.splits import splits
from meshwright.specs.units import gib
from meshwright.specs.workload import Train, Workload

_PLUGIN = "accelerate utils/dataclasses.py FullyShardedDataParallelPlugin"
_MESH = "accelerate parallelism_config.py"


def check(spec: ModelSpec, layout: Layout, cluster: Cluster | None, workload: Workload | None) -> list[Rule]:
    """Every rule that a layout breaks, illegal ones first."""
    found = [
        *checks.world_fits(layout, cluster),
        *_not_here(layout),
        *_heads(spec, layout),
        *checks.zero_needs_ranks(layout),
        *checks.tp_inside_node(layout, cluster),
    ]
    if isinstance(workload, Train):
        found += checks.batches(layout, workload)
        found += checks.context_divides(layout, workload)
    return sorted(found, key=lambda rule: rule.severity != "illegal")


def _not_here(layout: Layout) -> Iterator[Rule]:
    asked = [
        (layout.pp > 1, f"no pipeline stages (pp {layout.pp})", "use distributed_type MEGATRON_LM, or fsdp"),
        (layout.ep > 1, f"no expert parallelism (ep {layout.ep})", "use --engine transformers, megatron or deepspeed"),
        (layout.zero in {1, 2}, f"no ZeRO-{layout.zero} of its own", "use FSDP (zero=3), or --engine deepspeed"),
        (layout.sp or layout.dcp > 1 or layout.virtual > 1, "no such degrees", "use dp, tp and cp"),
        (layout.cp_kind != "auto", "no choice of context parallelism by the layout", "leave cp_kind out"),
    ]
    for given, what, way in asked:
        if given:
            yield broken(
                "not_of_this_engine", "illegal", f"accelerate has {what}", way, "accelerate parallelism_config.py"
            )
    replicas = layout.fsdp.replicas if layout.fsdp is not None else 1
    if (layout.tp > 1 or layout.cp > 1) and layout.dp > 1 and replicas == layout.dp * layout.cp:
        yield broken(
            "ddp_with_tp",
            "illegal",
            f"tp {layout.tp} or cp {layout.cp} beside {layout.dp} pure replicas: the degrees do not compose with DDP",
            "set dp_shard_size above 1",
            f"{_MESH} __post_init__",
            tp=layout.tp,
            dp=layout.dp,
        )


def _heads(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    """Tensor parallelism is transformers' own: heads and KV heads are cut evenly or the forward fails."""
    for a in splits(spec).attentions:
        legal = divisors(a.heads, a.kv_heads) if a.kind == "gqa" else divisors(a.heads)
        for count, what in ((a.heads, "attention heads"), (a.kv_heads, "KV heads")):
            if count % layout.tp and not (what == "KV heads" and a.kind != "gqa"):
                yield broken(
                    "heads_divide_tp" if what == "attention heads" else "kv_heads_over_tp",
                    "illegal",
                    f"{count} {what} are not divisible by tp_size {layout.tp}",
                    f"choose tp_size from {named(legal, layout.tp)}",
                    "transformers distributed/tensor_parallel.py",
                    count=count,
                    tp=layout.tp,
                )


def plugin_rules(s: Settings) -> Iterator[Rule]:
    """What the FSDP plugin refuses or ignores, and processes against machines and degrees."""
    if s.kind == "FSDP":
        yield from _values(s)
        yield from _versions(s)
    if s.cpu and s.kind == "FSDP":
        yield cpu_rule()
    if s.processes and s.machines and s.processes % s.machines:
        yield broken(
            "processes_over_machines",
            "illegal",
            f"num_processes {s.processes} is not a multiple of num_machines {s.machines}; it counts all processes of "
            "all machines",
            f"use a multiple of {s.machines}",
            "accelerate utils/launch.py",
            processes=s.processes,
            machines=s.machines,
        )
    if s.machine_rank is not None and s.machines is not None and s.machine_rank >= s.machines:
        yield broken(
            "machine_rank_range",
            "illegal",
            f"machine_rank {s.machine_rank} of {s.machines} machines; they are numbered 0 to {s.machines - 1}",
            "give every machine its own number",
            "accelerate commands/launch.py",
            machine_rank=s.machine_rank,
            machines=s.machines,
        )
    yield from _degrees(s)


def cpu_rule() -> Rule:
    """Seen on two CPU processes: the plugin is there, the model is wrapped in DistributedDataParallel."""
    return broken(
        "fsdp_on_cpu",
        "unwise",
        "FSDP on CPU becomes DDP without a word: every process holds all of the model",
        "run on GPUs, or use torch's fully_shard or --engine transformers on CPU",
        "accelerate state.py (FSDP is chosen for accelerators only)",
    )


def _values(s: Settings) -> Iterator[Rule]:
    for value, allowed, key in (
        (s.strategy, STRATEGIES, "fsdp_sharding_strategy"),
        (s.wrap, WRAPS, "fsdp_auto_wrap_policy"),
        (s.state_dict, STATES, "fsdp_state_dict_type"),
    ):
        if value not in allowed:
            yield broken(
                "wrong_value",
                "illegal",
                f"{key} {shown(value)} is unknown",
                f"use one of {', '.join(allowed)}",
                _PLUGIN,
            )
    if s.version not in {1, 2}:
        yield broken("fsdp_version", "illegal", f"fsdp_version {s.version} is not 1 or 2", "use 2", _PLUGIN)


def _versions(s: Settings) -> Iterator[Rule]:
    word = s.reshard_text
    if s.version == 2 and word and word not in {"true", "false", "yes", "no", "0", "1", "y", "n", "on", "off"}:
        yield broken(
            "reshard_value",
            "illegal",
            f"fsdp_reshard_after_forward {shown(word)} with fsdp_version 2, which takes true or false",
            "use true for FULL_SHARD, false for SHARD_GRAD_OP",
            _PLUGIN,
        )
    if s.version == 2 and s.state_dict == "LOCAL_STATE_DICT":
        yield broken(
            "local_state_dict",
            "illegal",
            "fsdp_version 2 has no LOCAL_STATE_DICT",
            "use SHARDED_STATE_DICT or FULL_STATE_DICT",
            _PLUGIN,
        )
    if s.version == 2 and s.strategy in STRATEGIES[1:]:
        yield broken(
            "strategy_ignored",
            "unwise",
            f"fsdp_sharding_strategy {s.strategy} is ignored by fsdp_version 2, which shards fully",
            "use fsdp_reshard_after_forward: false for SHARD_GRAD_OP, dp_replicate_size for HYBRID_SHARD",
            _PLUGIN,
        )
    if s.version == 1 and word and word.upper() not in {"TRUE", s.strategy}:
        yield broken(
            "reshard_ignored",
            "unwise",
            f"fsdp_reshard_after_forward {shown(word)} is ignored by fsdp_version 1: {s.strategy} counts",
            "set fsdp_version: 2, or fsdp_sharding_strategy",
            _PLUGIN,
        )


def _degrees(s: Settings) -> Iterator[Rule]:
    d = {k: s.degrees.get(k, 1) for k in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}
    total = 1
    for n in d.values():
        total *= n
    if total == 1:
        return
    if s.processes is not None and total != s.processes and d["sp"] == 1:
        yield broken(
            "degrees_over_processes",
            "illegal",
            f"dp_replicate {d['dp_replicate']} x dp_shard {d['dp_shard']} x tp {d['tp']} x cp {d['cp']} = {total} is "
            f"not num_processes {s.processes}",
            f"change dp_shard_size so that the product is {s.processes}",
            f"{_MESH} _validate_accelerator",
            total=total,
            processes=s.processes,
        )
    if d["cp"] > 1 and d["sp"] > 1:
        yield broken(
            "cp_and_sp",
            "illegal",
            f"cp_size {d['cp']} and sp_size {d['sp']} exclude each other",
            "set one of them to 1",
            f"{_MESH} __post_init__",
            cp=d["cp"],
            sp=d["sp"],
        )
    if s.kind == "FSDP" and s.version == 2 and d["dp_shard"] == 1 and d["cp"] == 1:
        yield broken(
            "nothing_to_shard",
            "illegal",
            "FSDP is on and both dp_shard_size and cp_size are 1: there is no dimension to shard over",
            "lower tp_size so that dp_shard_size can be above 1, or start without FSDP",
            f"{_MESH} _validate_accelerator",
            dp_shard=1,
            tp=d["tp"],
        )
    if s.kind == "FSDP" and s.version == 1:
        yield broken(
            "parallelism_needs_fsdp2",
            "illegal",
            "a parallelism_config needs fsdp_version 2, the version is 1",
            "set fsdp_version: 2",
            "accelerate commands/launch.py _validate_launch_command, state.py",
            version=1,
        )


def model_rules(s: Settings, spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    """What depends on the model: wrapping, saving, Ulysses."""
    whole = spec.parameters("decoder") * 2
    if s.sharded and s.wrap == "NO_WRAP":
        yield broken(
            "no_wrap",
            "unwise",
            f"without fsdp_auto_wrap_policy the model is one unit: {gib(whole)} of bf16 parameters are gathered "
            "at once on every rank",
            "set fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            _PLUGIN,
            gathered_bytes=whole,
        )
    if s.sharded and s.state_dict == "FULL_STATE_DICT":
        yield broken(
            "full_state_dict",
            "unwise",
            f"FULL_STATE_DICT gathers the model on rank 0 at every save: {gib(2 * whole)} of fp32 parameters, and the "
            "optimizer besides",
            "set fsdp_state_dict_type: SHARDED_STATE_DICT and merge afterwards (accelerate merge-weights)",
            _PLUGIN,
            saved_bytes=2 * whole,
        )
    if s.degrees.get("sp", 1) > 1:
        for a in splits(spec).attentions:
            yield from checks.ulysses(a.heads, a.kv_heads, layout.cp)


def check_device(cluster: Cluster) -> list[Rule]:
    """FSDP on a machine without accelerators."""
    return [cpu_rule()] if cluster.device.kind == "cpu" else []
