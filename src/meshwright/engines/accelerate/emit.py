"""The YAML and the commands that start a layout with ``accelerate launch``."""

from __future__ import annotations

import shlex
from dataclasses import replace

from meshwright.engines.base import Emission, OutFile, Request
from meshwright.engines.plainyaml import dump
from meshwright.engines.start import INTERFACE, MAX_WRITTEN, PORT, quoted
from meshwright.engines.torchrun.emit import slurm, spread, under
from meshwright.engines.trainer_words import no_muon, script_words
from meshwright.engines.training import on_host
from meshwright.errors import InputError
from meshwright.specs.command import Command
from meshwright.specs.layout import Fsdp, Layout
from meshwright.specs.workload import Train

CONFIG = "accelerate.yaml"
_PRECISION = {"bf16": "bf16", "f16": "fp16", "f32": "no"}


def emit(request: Request) -> Emission:
    """Configuration and one command a node.

    Raises:
        InputError: serving, or something that accelerate cannot do, with the engine that can.
    """
    work, layout = request.workload, request.layout
    if not isinstance(work, Train):
        raise InputError("accelerate trains; serve with --engine vllm or sglang")
    _refuse(layout, work)
    no_muon(work)
    nodes, per_node = spread(layout.world, request.cluster)
    offload = "parameters" in on_host(request)
    text = dump(config(layout, work, nodes, offload))
    by_fsdp = replace(work, recompute="none") if layout.zero == 3 else work
    words = ["train.py", *script_words(request.model, layout, by_fsdp)]
    note = "replace train.py by a script that reads the Trainer's arguments"
    files = (OutFile(CONFIG, text, "accelerate's configuration, the same on every node"),)
    if under(request.deployment, nodes):
        inner = quoted([*_launch("$SLURM_PROCID"), *words])
        command, job = slurm(f"srun bash -c {shlex.quote(inner)}", nodes, per_node)
        return Emission((command,), (*files, job), (note,))
    return Emission(tuple(_commands(words, nodes, note)), files)


def _launch(rank: str) -> list[str]:
    """The launcher's words on one of several nodes."""
    meet = ["--main_process_ip", "$HEAD_IP", "--main_process_port", str(PORT), "--machine_rank", rank]
    return ["accelerate", "launch", "--config_file", CONFIG, *meet]


def _commands(words: list[str], nodes: int, note: str) -> list[Command]:
    if nodes == 1:
        words = ["accelerate", "launch", "--config_file", CONFIG, *words]
        return [Command(None, "train", quoted(words), (), note)]
    note += f"; set HEAD_IP to the address of node 0; {INTERFACE}"

    def command(node: int | None, rank: str, more: str = "") -> Command:
        return Command(node, "train", quoted([*_launch(rank), *words]), (), note + more)

    if nodes <= MAX_WRITTEN:
        return [command(n, str(n)) for n in range(nodes)]
    every = f" and NODE_RANK to the number of the node, 1 to {nodes - 1}"
    return [command(0, "0"), command(None, "$NODE_RANK", every)]


def _refuse(layout: Layout, work: Train) -> None:
    asked = [
        (layout.pp > 1, f"pipeline stages (pp {layout.pp})", "--engine megatron or deepspeed"),
        (layout.ep > 1, f"expert parallelism (ep {layout.ep})", "--engine transformers or megatron"),
        (layout.zero in {1, 2}, f"ZeRO-{layout.zero}", "zero=3, or --engine deepspeed"),
        (layout.zero == 0 and (layout.tp > 1 or layout.cp > 1) and layout.dp > 1, "tp or cp beside DDP", "zero=3"),
        (layout.cp > 1 and layout.zero < 3, "context parallelism without FSDP", "zero=3"),
        (work.offload != "none" and layout.zero < 3, "offload without FSDP", "zero=3"),
    ]
    for given, what, way in asked:
        if given:
            raise InputError(f"accelerate has no {what}; use {way}")


def config(layout: Layout, work: Train, nodes: int, offload: bool) -> dict[str, object]:
    """The YAML as a mapping."""
    made: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if layout.zero == 3 else "MULTI_GPU",
        "mixed_precision": _PRECISION[(layout.fsdp or Fsdp()).param_dtype if layout.zero == 3 else work.param_dtype],
        "num_machines": nodes,
        "num_processes": layout.world,
        "machine_rank": 0,
        "rdzv_backend": "static",
        "use_cpu": False,
    }
    if layout.zero == 3:
        knobs = layout.fsdp or Fsdp()
        made["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": knobs.reshard_after_forward,
            "fsdp_auto_wrap_policy": "NO_WRAP" if knobs.wrap == "model" else "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_offload_params": offload or work.offload == "optimizer",
            "fsdp_activation_checkpointing": work.recompute == "full",
            "fsdp_cpu_ram_efficient_loading": True,
        }
        if layout.tp > 1 or layout.cp > 1 or knobs.replicas > 1:
            made["parallelism_config"] = {
                "parallelism_config_dp_replicate_size": knobs.replicas,
                "parallelism_config_dp_shard_size": layout.dp // knobs.replicas,
                "parallelism_config_tp_size": layout.tp,
                "parallelism_config_cp_size": layout.cp,
            }
    elif layout.tp > 1:
        made["parallelism_config"] = {"parallelism_config_tp_size": layout.tp}
    return made
