"""The DistributedConfig and the torchrun commands that start a layout with transformers."""

from __future__ import annotations

import json

from meshwright.engines.base import Emission, OutFile, Request
from meshwright.engines.torchrun.emit import torchrun_emission
from meshwright.engines.trainer_words import no_muon, script_words
from meshwright.engines.training import on_host
from meshwright.errors import InputError
from meshwright.specs.layout import Layout
from meshwright.specs.workload import Train

CONFIG = "distributed_config.json"
NOTE = (
    "replace train.py by a script that passes the file on: "
    "from_pretrained(..., distributed_config=DistributedConfig.from_dict(json.load(file)))"
)


def emit(request: Request) -> Emission:
    """Configuration and one command a node.

    Raises:
        InputError: serving, or something that transformers cannot do, with the engine that can.
    """
    work, layout = request.workload, request.layout
    if not isinstance(work, Train):
        raise InputError("transformers' distributed training is written here; serve with --engine vllm or sglang")
    _refuse(layout, work)
    no_muon(work)
    words = ["train.py", "--distributed_config", CONFIG, *_words(request.model, layout, work)]
    files = (OutFile(CONFIG, json.dumps(config(request, work), indent=2) + "\n", "fields of DistributedConfig"),)
    return torchrun_emission(words, layout.world, request.cluster, request.deployment, files, NOTE)


def _words(model: str, layout: Layout, work: Train) -> list[str]:
    """Script words; ``--bf16`` stands for a half-precision copy of fp32 parameters only."""
    words = script_words(model, layout, work)
    if not work.master_weights or work.param_dtype == "f32":
        for flag in ("--bf16", "--fp16"):
            if flag in words:
                at = words.index(flag)
                del words[at : at + 2]
    if work.param_dtype == "f32" and work.master_weights:
        words += ["--bf16", "True"]
    return words


def _refuse(layout: Layout, work: Train) -> None:
    replicas = layout.fsdp.replicas if layout.fsdp is not None else 1
    asked = [
        (layout.pp > 1, f"backward through pipeline stages (pp {layout.pp})", "--engine megatron or torchtitan"),
        (layout.cp > 1, f"context parallelism (cp {layout.cp})", "--engine accelerate or deepspeed"),
        (layout.zero in {1, 2}, f"ZeRO-{layout.zero}", "zero=3"),
        (layout.dp % replicas > 0, f"{replicas} replicas of dp {layout.dp}", "a divisor"),
        (layout.zero == 3 and layout.dp == replicas, "FSDP over one rank", "zero=0"),
        (work.offload == "activations", "offload of activations", "offload=optimizer (fsdp_cpu_offload)"),
        (layout.fsdp is not None and layout.fsdp.wrap == "model", "FSDP of the model as one unit", "wrap=layer"),
    ]
    for given, what, way in asked:
        if given:
            raise InputError(f"transformers has no {what}; use {way}")


def config(request: Request, work: Train) -> dict[str, object]:
    """Fields of ``DistributedConfig``."""
    layout = request.layout
    shards = layout.zero == 3
    replicas = (layout.fsdp.replicas if layout.fsdp is not None else 1) if shards else layout.dp
    made: dict[str, object] = {
        "tp_size": layout.tp,
        "fsdp_size": layout.dp // replicas,
        "dp_replicate_size": replicas,
        "pp_size": 1,
    }
    if layout.ep > 1:
        made["ep_size"] = layout.ep
    if layout.zero == 3:
        made["fsdp_cpu_offload"] = "parameters" in on_host(request) or work.offload == "optimizer"
        made["fsdp_mixed_precision"] = work.master_weights
    return made
