"""The files and the command that start a layout with DeepSpeed: ``ds_config.json``, a host file, ``deepspeed ...``."""

from __future__ import annotations

import json

from meshwright.engines.base import Emission, OutFile, Request
from meshwright.engines.deepspeed.understand import WORKSPACE_BYTES
from meshwright.engines.start import INTERFACE, quoted
from meshwright.engines.torchrun.emit import slurm_torchrun, spread, under
from meshwright.engines.trainer_words import script_words
from meshwright.engines.training import on_host
from meshwright.errors import InputError
from meshwright.specs.command import Command
from meshwright.specs.dtypes import size_bytes
from meshwright.specs.layout import Layout
from meshwright.specs.workload import Train

CONFIG, HOSTS = "ds_config.json", "hostfile"
#: Elements of a gradient bucket that are written out (the default, runtime/zero/config.py).
BUCKET = 500_000_000
_DTYPES = {"bf16": "bf16", "f16": "fp16", "f32": "fp32"}


def emit(request: Request) -> Emission:
    """Configuration, host file and command of a layout.

    Raises:
        InputError: serving, or something that DeepSpeed cannot do, with the way it can.
    """
    work, layout = request.workload, request.layout
    if not isinstance(work, Train):
        raise InputError("DeepSpeed trains; serve with --engine vllm or sglang")
    _refuse(layout, work)
    nodes, per_node = spread(layout.world, request.cluster)
    files = [OutFile(CONFIG, json.dumps(config(request, work), indent=2) + "\n", "DeepSpeed's configuration")]
    script = ["train.py", "--deepspeed", CONFIG, *script_words(request.model, layout, work)]
    note = "replace train.py by a script that reads the Trainer's arguments"
    notes = (
        (f"{layout.pp} stages: the script must build PipelineModule(num_stages={layout.pp})",) if layout.pp > 1 else ()
    )
    if under(request.deployment, nodes):
        command, job = slurm_torchrun(script, layout.world, request.cluster)
        return Emission((command,), (*files, job), (note, *notes))
    launcher = ["deepspeed", "--num_gpus", str(per_node)]
    if nodes > 1:
        text = "".join(f"node-{n} slots={per_node}\n" for n in range(nodes))
        files.append(OutFile(HOSTS, text, "hosts and their devices"))
        launcher = ["deepspeed", "--hostfile", HOSTS]
        note += f"; put the names of the {nodes} nodes in {HOSTS}, which ssh must reach without a password; {INTERFACE}"
    command = Command(0 if nodes > 1 else None, "train", quoted([*launcher, *script]), (), note)
    return Emission((command,), tuple(files), notes)


def _refuse(layout: Layout, work: Train) -> None:
    if layout.fsdp is not None and layout.fsdp.replicas > 1:
        raise InputError(
            f"DeepSpeed shards over all data parallel ranks; {layout.fsdp.replicas} replicas (MiCS) were removed: use "
            "replicas=1, or --engine accelerate"
        )
    if layout.stage_layers or layout.virtual > 1 or layout.schedule != "1f1b":
        raise InputError("DeepSpeed's pipeline runs 1f1b and splits layers itself; drop stage_layers and schedule")
    if work.offload == "activations":
        raise InputError("activations are offloaded by the script (checkpointing), not by DeepSpeed's configuration")
    if work.recompute == "selective":
        raise InputError("the Trainer recomputes whole layers or nothing, not selective parts; use recompute full")
    rounds = layout.dp * layout.micro_batch
    if work.global_batch % rounds:
        raise InputError(
            f"a global batch of {work.global_batch} is not a multiple of dp {layout.dp} x micro-batch "
            f"{layout.micro_batch} = {rounds}"
        )


def config(request: Request, work: Train) -> dict[str, object]:
    """The JSON object; every degree and number that matters is written out.

    ``train_batch_size`` follows from the other two: the Trainer computes it from all processes, tensor and sequence
    parallel ones included, and refuses another one. The learning rate is the script's (``auto``).
    """
    layout = request.layout
    made: dict[str, object] = {
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": work.global_batch // (layout.dp * layout.micro_batch),
        "zero_optimization": _zero(request, work),
    }
    half = {"bf16": "bf16", "f16": "fp16"}.get(work.param_dtype)
    if half is not None:
        made[half] = {"enabled": True}
        if not work.master_weights:
            made[half] = {"enabled": True, f"{half}_master_weights_and_grads": True}
        if not work.master_weights and work.state_dtype == "bf16" and half == "bf16":
            made[half] = {
                "enabled": True,
                "bf16_master_weights_and_grads": True,
                "bf16_optimizer_states": True,
            }
    if work.grad_dtype != work.param_dtype:
        made["data_types"] = {"grad_accum_dtype": _DTYPES[work.grad_dtype]}
    kind = {"adamw": "AdamW", "muon": "Muon"}.get(work.optimizer)
    if kind is not None:
        made["optimizer"] = {"type": kind, "params": {"lr": "auto"}}
    if layout.tp > 1:
        made["tensor_parallel"] = {"autotp_size": layout.tp}
    if layout.cp > 1:
        made["sequence_parallel_size"] = layout.cp
        made["data_parallel_size"] = layout.dp
    if layout.pp > 1:
        made["pipeline"] = {"stages": layout.pp}
    if layout.ep > 1:
        made["expert_parallel"] = {"enabled": True, "autoep_size": layout.ep}
        if layout.etp is not None:
            made["expert_parallel"] = {
                "enabled": True,
                "autoep_size": layout.ep,
                "expert_tensor_parallel_size": layout.etp,
            }
    return made


def _zero(request: Request, work: Train) -> dict[str, object]:
    layout = request.layout
    zero: dict[str, object] = {"stage": layout.zero}
    if layout.zero == 0:
        return zero
    zero |= {"contiguous_gradients": True, "overlap_comm": True, "reduce_bucket_size": _bucket(request, work)}
    hosted = on_host(request)
    if "optimizer" in hosted or work.offload == "optimizer":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if "parameters" in hosted and layout.zero == 3:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if layout.zero == 3:
        zero |= {"stage3_max_live_parameters": 10**9, "stage3_max_reuse_distance": 10**9}
    return zero


def _bucket(request: Request, work: Train) -> int:
    """Elements of a bucket: as counted in ``workspace_bytes`` when that is stated, else the default."""
    stated = request.train_options.get("workspace_bytes")
    if not isinstance(stated, int) or stated <= WORKSPACE_BYTES:
        return BUCKET
    copies = 2 if request.layout.zero < 3 else 1
    return max(1, min(BUCKET, (stated - WORKSPACE_BYTES) // (copies * size_bytes(work.grad_dtype))))
