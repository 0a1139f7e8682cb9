"""From accelerate's YAML, its flags and the script's words to a layout, a workload and what memory depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.engines.accelerate.rules import check_device, model_rules, plugin_rules
from meshwright.engines.accelerate.settings import Settings, check_keys, read_settings
from meshwright.engines.base import FileReader, Invocation
from meshwright.engines.deepspeed.keys import flatten
from meshwright.engines.deepspeed.keys import load as load_deepspeed
from meshwright.engines.deepspeed.understand import DEFAULT
from meshwright.engines.deepspeed.understand import understand as understand_deepspeed
from meshwright.engines.flagwords import shown
from meshwright.engines.launcher import ACCELERATE_VERSION
from meshwright.engines.trainer_args import TrainerArgs, both_checkpoint, recomputed
from meshwright.engines.training import fill_dp
from meshwright.errors import InputError
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Fsdp, Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.workload import Train


def understand(
    config: Mapping[str, Any],
    flags: Mapping[str, str],
    script: TrainerArgs,
    spec: ModelSpec | None = None,
    cluster: Cluster | None = None,
) -> Invocation:
    """What a configuration asks for; with the model and the cluster also what is left to them.

    Raises:
        InputError: a count that is no whole number.
    """
    s = read_settings(config, flags, script.dtype)
    world = s.processes or (cluster.devices if cluster is not None else None)
    findings = [*(check_keys(config) if config else ()), *script.findings, *plugin_rules(s)]
    findings += both_checkpoint(s.sharded and s.checkpointing, script)
    if cluster is not None and s.kind == "FSDP" and not s.cpu:
        findings += check_device(cluster)
    on_cpu = s.cpu or (cluster is not None and cluster.device.kind == "cpu")
    layout, wrong = layout_of(s, world, script, on_cpu)
    findings += wrong
    if spec is not None:
        findings += model_rules(s, spec, layout)
    notes = [f"no sequence length is stated: {DEFAULT.seq} tokens are assumed"] if script.seq is None else []
    if s.dtype == "f32":
        notes.append("mixed_precision is no: parameters of 4 bytes are assumed, as a model loaded in fp32 has")
    micro, steps = script.micro_batch or 1, script.accumulation or 1
    if script.micro_batch is None:
        notes.append("the script states no batch: one sequence a device is assumed")
    return Invocation(
        engine="accelerate",
        version=ACCELERATE_VERSION,
        model=script.model,
        layout=layout,
        workload=workload(s, script, layout.dp * micro * steps),
        train_options=options(s),
        nodes=s.machines,
        node_rank=s.machine_rank,
        devices=s.processes,
        given=flatten(config) + tuple(flags.items()) + script.given,
        findings=tuple(findings),
        notes=tuple(notes),
    )


def layout_of(s: Settings, world: int | None, script: TrainerArgs, on_cpu: bool) -> tuple[Layout, list[Any]]:
    """Degrees; the data parallel one from the world where it is known."""
    d = s.degrees
    cp = max(d.get("cp", 1), d.get("sp", 1))
    layout = Layout(tp=d.get("tp", 1), cp=cp, micro_batch=script.micro_batch or 1)
    dp = d.get("dp_replicate", 1) * d.get("dp_shard", 1)
    wrong: list[Any] = []
    if dp > 1:
        layout = layout.with_(dp=dp)
    elif world is not None:
        layout, rules = fill_dp(layout, world)
        wrong += rules
    if not s.sharded or on_cpu:
        return layout, wrong
    replicas = d.get("dp_replicate", 1)
    if s.version == 1 and s.strategy.startswith("HYBRID") and s.machines:
        replicas = s.machines
    knobs = Fsdp(
        wrap="model" if s.wrap == "NO_WRAP" else "layer",
        reshard_after_forward=s.reshard if s.version == 2 else s.strategy in {"FULL_SHARD", "HYBRID_SHARD"},
        param_dtype=s.dtype,
        replicas=replicas if layout.dp * layout.cp % replicas == 0 else 1,
    )
    return layout.with_(zero=3, fsdp=knobs), wrong


def workload(s: Settings, script: TrainerArgs, total: int) -> Train:
    """Batch, precision and recompute. Mixed precision keeps fp32 parameters and gradients (no half copies)."""
    mixed = s.dtype != "f32"
    base = replace(
        DEFAULT,
        global_batch=total,
        param_dtype=s.dtype if s.sharded else "f32",
        grad_dtype="f32",
        master_weights=True,
    )
    work = recomputed(script.train(base), s.checkpointing, script)
    return work if s.sharded or not mixed else replace(work, param_dtype="f32")


def options(s: Settings) -> dict[str, object]:
    """Fields of ``TrainEngine``. FSDP's offload keeps parameters, gradients and optimizer on the host."""
    made: dict[str, object] = {"preset": "accelerate"}
    if s.offload and s.sharded:
        made["on_host"] = ("parameters", "gradients", "optimizer")
    return made


def with_deepspeed(
    config: Mapping[str, Any],
    flags: Mapping[str, str],
    script: TrainerArgs,
    read: FileReader | None,
    devices: int | None,
    spec: ModelSpec | None = None,
) -> Invocation | None:
    """What ``distributed_type: DEEPSPEED`` asks for; None for another type.

    Raises:
        InputError: the DeepSpeed configuration that it names is missing or none.
    """
    s = read_settings(config, flags, script.dtype)
    if s.kind != "DEEPSPEED":
        return None
    section = s.deepspeed
    path = section.get("deepspeed_config_file")
    findings = [*(check_keys(config) if config else ()), *plugin_rules(s)]
    if path:
        data = read(str(path)) if read is not None else None
        inner = load_deepspeed(data, str(path)) if data is not None else None
        if inner is None:
            raise InputError(f"the DeepSpeed configuration {shown(str(path))} is not here, or is none")
    else:
        inner = _deepspeed(section, s, script)
    devices = s.processes or devices
    found = understand_deepspeed(inner, script, devices, spec)
    return replace(
        found,
        engine="accelerate",
        version=ACCELERATE_VERSION,
        nodes=s.machines,
        node_rank=s.machine_rank,
        devices=s.processes,
        given=found.given + tuple(flags.items()),
        findings=tuple(findings) + found.findings,
    )


def _deepspeed(section: Mapping[str, Any], s: Settings, script: TrainerArgs) -> dict[str, Any]:
    """The JSON that accelerate makes of its own keys (utils/dataclasses.py DeepSpeedPlugin; stage 2 by default)."""
    zero: dict[str, Any] = {
        "stage": int(str(section.get("zero_stage", 2))) if _digit(section.get("zero_stage", 2)) else 2
    }
    for key, name in (("offload_optimizer_device", "offload_optimizer"), ("offload_param_device", "offload_param")):
        device = str(section.get(key) or "none")
        if device != "none":
            zero[name] = {"device": device}
    half = {"bf16": {"bf16": {"enabled": True}}, "f16": {"fp16": {"enabled": True}}}.get(s.dtype, {})
    steps = section.get("gradient_accumulation_steps")
    return {
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": script.micro_batch or 1,
        "gradient_accumulation_steps": script.accumulation or (int(str(steps)) if _digit(steps) else 1),
        **half,
    }


def _digit(value: Any) -> bool:
    return str(value).isdecimal() and len(str(value)) < 7
