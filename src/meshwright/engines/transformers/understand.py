"""From a DistributedConfig or the Trainer's FSDP arguments to a layout, a workload and what memory depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.engines.base import Invocation
from meshwright.engines.trainer_args import TRAINER_VERSION, TrainerArgs, both_checkpoint, recomputed
from meshwright.engines.training import fill_dp
from meshwright.engines.transformers.config import Settings, read_config, trainer_fsdp
from meshwright.specs.checks import broken
from meshwright.specs.layout import Fsdp, Layout
from meshwright.specs.rules import Rule
from meshwright.specs.workload import Train

DEFAULT = Train(fused_cross_entropy=False)


def understand(
    config: Mapping[str, Any] | None,
    script: TrainerArgs,
    world: int | None,
    fsdp_config: Mapping[str, Any] | None = None,
) -> Invocation:
    """What is asked for.

    Args:
        config: a DistributedConfig, None without one.
        script: the script's own words.
        world: processes, None while not known.
        fsdp_config: the Trainer's ``--fsdp_config``, read.

    Raises:
        InputError: a size that is no whole number.
    """
    if config is not None:
        s, findings = read_config(config)
    else:
        s, findings = trainer_fsdp(script.fsdp or "", fsdp_config or {})
    layout, wrong = layout_of(s, script, world, mixed=s.mixed or script.dtype in {"bf16", "f16"})
    wrong += both_checkpoint(s.checkpointing, script)
    notes = [f"no sequence length is stated: {DEFAULT.seq} tokens are assumed"] if script.seq is None else []
    if script.micro_batch is None:
        notes.append("no batch is stated: one sequence a device is assumed")
    work = workload(s, script, layout)
    if not work.master_weights:
        notes.append("no mixed precision: parameters, gradients and moments in the checkpoint's bf16 are assumed")
    return Invocation(
        engine="transformers",
        version=TRAINER_VERSION,
        model=script.model,
        layout=layout,
        workload=work,
        train_options=options(s),
        given=script.given,
        findings=(*findings, *wrong, *script.findings),
        notes=tuple(notes),
    )


def layout_of(s: Settings, script: TrainerArgs, world: int | None, *, mixed: bool) -> tuple[Layout, list[Rule]]:
    """Degrees, and a rule when the mesh is not the world."""
    wrong: list[Rule] = []
    other = s.fsdp * s.replicas * s.pp
    tp = s.tp
    if tp is None:
        tp = max(1, (world or other) // other)
    layout = Layout(tp=tp, pp=s.pp, dp=s.fsdp * s.replicas, ep=s.ep, micro_batch=script.micro_batch or 1)
    if s.ep > 1:
        layout = layout.with_(etp=1)
    if s.trainer and world is not None:
        layout, rules = fill_dp(layout, world)
        wrong += rules
    elif world is not None and layout.world != world:
        wrong.append(
            broken(
                "mesh_over_world",
                "illegal",
                f"pp {s.pp} x dp_replicate {s.replicas} x fsdp {s.fsdp} x tp {tp} = {layout.world} processes are "
                f"needed, {world} are started",
                f"start {layout.world} processes, or change fsdp_size",
                "transformers distributed/utils.py initialize_distributed_mesh",
                mesh=layout.world,
                world=world,
            )
        )
    if s.trainer or s.fsdp > 1:
        knobs = Fsdp(
            wrap="layer" if s.wrap else "model",
            reshard_after_forward=s.reshard,
            param_dtype="bf16",
            reduce_dtype="f32" if mixed else "bf16",
            replicas=s.replicas,
        )
        layout = layout.with_(zero=3, fsdp=knobs)
    return layout, wrong


def workload(s: Settings, script: TrainerArgs, layout: Layout) -> Train:
    """Batch and precision.

    With mixed precision parameters stay in fp32 (sharded, or whole where nothing shards them); without it everything
    is in the dtype of the checkpoint, moments too (``torch.optim`` makes them like the parameters).
    """
    mixed = s.mixed or script.dtype in {"bf16", "f16"}
    total = layout.dp * layout.micro_batch * (script.accumulation or 1)
    base = replace(DEFAULT, global_batch=total)
    if mixed:
        base = replace(base, param_dtype="bf16" if layout.zero == 3 else "f32")
    else:
        base = replace(base, grad_dtype="bf16", master_weights=False, state_dtype="bf16")
    return recomputed(script.train(base), s.checkpointing, script)


def options(s: Settings) -> dict[str, object]:
    """Fields of ``TrainEngine``."""
    made: dict[str, object] = {"preset": "transformers"}
    if s.offload:
        made["on_host"] = ("parameters", "gradients", "optimizer")
    return made
