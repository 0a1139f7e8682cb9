"""From DeepSpeed's JSON and the script's words to a layout, a workload and what memory depends on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from meshwright.engines.base import Invocation
from meshwright.engines.deepspeed.batch import resolve
from meshwright.engines.deepspeed.keys import VERSION, check_keys, flatten
from meshwright.engines.deepspeed.settings import Settings, read_settings
from meshwright.engines.sizes import unit_sizes
from meshwright.engines.trainer_args import TrainerArgs, read_trainer
from meshwright.engines.training import fill_dp
from meshwright.specs.checks import broken
from meshwright.specs.dtypes import size_bytes
from meshwright.specs.layout import Fsdp, Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.rules import Rule
from meshwright.specs.workload import Train

#: Workspaces that ``TrainEngine`` counts without any buckets (two cuBLAS workspaces of 32 MiB).
WORKSPACE_BYTES = 2 * 32 << 20
#: What a plain script trains with when it states no length.
DEFAULT = Train(fused_cross_entropy=False)


def understand(
    config: Mapping[str, Any],
    script: TrainerArgs,
    devices: int | None,
    spec: ModelSpec | None = None,
    device_bytes: int | None = None,
) -> Invocation:
    """What a configuration asks for.

    Args:
        config: the JSON object.
        script: what the script's own words state.
        devices: processes in all, None while not known: the data parallel degree is then 1.
        spec: the model, None while not known: buffers then count at their stated size.
        device_bytes: memory of a device, None while not known.

    Raises:
        InputError: a count that is no positive whole number.
    """
    s = read_settings(config, script)
    if spec is not None:
        s = filled(s, spec.hidden)
    layout = Layout(tp=s.tp, pp=s.pp, cp=s.sp, ep=s.ep, etp=s.etp, zero=s.stage)
    findings = [*check_keys(config), *script.findings, *contradictions(s, config), *mismatches(s, script)]
    notes: tuple[str, ...] = _notes(s, script)
    total = s.batch or s.micro or 1
    if devices is not None:
        layout, wrong = fill_dp(layout, devices)
        batch = resolve(s.batch, s.micro, s.accumulation, layout.dp)
        layout = layout.with_(micro_batch=batch.micro)
        total = batch.total
        findings += [*wrong, *(() if wrong else batch.findings)]
        notes += batch.notes
    elif s.micro:
        layout = layout.with_(micro_batch=s.micro)
    if spec is not None and s.stage == 3:
        layout = layout.with_(fsdp=_gathered(s, spec))
    if spec is not None:
        findings += bucket_rules(s, spec, layout)
        findings += stage_rules(s, spec, layout, device_bytes)
    return Invocation(
        engine="deepspeed",
        version=VERSION,
        model=script.model,
        layout=layout,
        workload=workload(s, script, total),
        train_options=options(s, layout, spec),
        given=flatten(config) + script.given,
        findings=tuple(findings),
        notes=notes,
    )


def filled(s: Settings, hidden: int) -> Settings:
    """Buckets that are ``auto``: Hugging Face's integration takes them from the width of the model.

    Source: transformers ``integrations/deepspeed.py`` trainer_config_finalize.
    """
    zero = "zero_optimization."
    if f"{zero}reduce_bucket_size" in s.automatic:
        s = replace(s, reduce_bucket=hidden * hidden)
    if f"{zero}stage3_prefetch_bucket_size" in s.automatic:
        s = replace(s, prefetch_bucket=int(0.9 * hidden * hidden))
    return s


def mismatches(s: Settings, script: TrainerArgs) -> Iterable[Rule]:
    """Numbers that the JSON and the script's arguments both state, and differently: the Trainer refuses them."""
    pairs = (
        ("train_micro_batch_size_per_gpu", s.micro, "--per_device_train_batch_size", script.micro_batch),
        ("gradient_accumulation_steps", s.accumulation, "--gradient_accumulation_steps", script.accumulation),
    )
    for key, stated, flag, given in pairs:
        if stated is not None and given is not None and stated != given:
            yield broken(
                "trainer_mismatch",
                "illegal",
                f"{key} {stated} in DeepSpeed's configuration, {flag} {given}: the Trainer refuses to start",
                f'set {key} to "auto", or give both the same',
                "transformers integrations/deepspeed.py fill_match",
                configuration=stated,
                argument=given,
            )
    if script.dtype in {"bf16", "f16"} and s.dtype not in {script.dtype, "f32"}:
        flag = "--bf16" if script.dtype == "bf16" else "--fp16"
        yield broken(
            "trainer_mismatch",
            "illegal",
            f"{flag} and {s.dtype} weights in DeepSpeed's configuration: the Trainer refuses to start",
            'set bf16.enabled and fp16.enabled to "auto"',
            "transformers integrations/deepspeed.py fill_match",
        )


def workload(s: Settings, script: TrainerArgs, total: int) -> Train:
    """Batch, precision, optimizer and recompute."""
    base = replace(
        DEFAULT,
        global_batch=total,
        param_dtype=s.dtype,
        grad_dtype=s.grad_dtype,
        master_weights=not s.half_master,
        state_dtype="bf16" if s.half_moments else "f32",
        recompute="full" if s.checkpointing else "none",
        offload="optimizer" if s.offload_optimizer != "none" and s.ratio < 1 else "none",
    )
    work = script.train(base)
    return replace(work, optimizer=s.optimizer) if s.optimizer is not None else work  # type: ignore[arg-type]


def options(s: Settings, layout: Layout, spec: ModelSpec | None) -> dict[str, object]:
    """Fields of ``TrainEngine``.

    Bytes a parameter: 2 of weights, 2 of gradients, 4 of master weights, 8 of moments, and 4 of fp32 gradients in the
    step; stage 1 divides the last three by the ranks, 2 the gradients, 3 the weights (ZeRO, arXiv:1910.02054, section
    5; ``estimate_zero2_model_states_mem_needs`` in ``runtime/zero/stage_1_and_2.py``: 2 + 18 / ranks).
    """
    mixed = s.dtype != "f32" and not s.half_master
    on_host = []
    if s.offload_optimizer != "none" and s.stage and s.ratio == 1:
        on_host += ["optimizer", "gradients"]
    if s.offload_param != "none" and s.stage == 3:
        on_host.append("parameters")
    made: dict[str, object] = {
        "preset": "deepspeed",
        "separate_main_grads": mixed,
        "half_shards": mixed and s.stage == 3,
        "workspace_bytes": WORKSPACE_BYTES + buffers(s, layout, spec),
    }
    if on_host:
        made["on_host"] = tuple(on_host)
    if s.ratio < 1:
        made["offload_fraction"] = s.ratio
    return made


def buffers(s: Settings, layout: Layout, spec: ModelSpec | None) -> int:
    """Bytes of gradient buckets beyond the gradients of one layer that are counted anyway, and of hpZ copies."""
    bucket = s.bucket_bytes
    if spec is None:
        return bucket
    sizes = unit_sizes(spec)
    if s.stage >= 2:
        counted = sizes.layer if s.stage == 3 else max(sizes.layer, sizes.root)
        bucket = max(0, bucket - size_bytes(s.grad_dtype) * counted // layout.tp)
    if s.stage == 3 and s.hpz > 1:
        bucket += size_bytes(s.dtype) * sizes.total // (s.hpz * layout.tp)
    return bucket


def _gathered(s: Settings, spec: ModelSpec) -> Fsdp:
    """Layers that are whole at once in stage 3.

    A parameter is released after its use unless it comes again within ``stage3_max_reuse_distance`` elements
    (``runtime/zero/partitioned_param_coordinator.py``): after the forward the last half of that distance is whole,
    since the backward comes back over it. ``stage3_prefetch_bucket_size`` more are fetched ahead.
    """
    whole = min(s.reuse_distance // 2, s.live) + s.prefetch_bucket
    layers = max(1, min(len(spec.layers), -(-whole // unit_sizes(spec).layer)))
    return Fsdp(prefetch=layers, param_dtype=s.dtype, reduce_dtype=s.grad_dtype)


def contradictions(s: Settings, config: Mapping[str, Any]) -> Iterable[Rule]:
    """Settings that exclude each other or do nothing."""
    if s.both:
        yield broken(
            "two_precisions", "illegal", "bf16 and fp16 are both enabled", "keep one", "DeepSpeed runtime/config.py"
        )
    if s.offload_param != "none" and s.stage < 3:
        yield broken(
            "offload_param_stage",
            "unwise",
            f"offload_param with ZeRO stage {s.stage}: parameters are whole on every device and are not offloaded",
            "use stage 3, or remove offload_param",
            "DeepSpeed runtime/zero/offload_config.py",
            stage=s.stage,
        )
    if s.offload_optimizer != "none" and s.stage == 0:
        yield broken(
            "offload_optimizer_stage",
            "unwise",
            "offload_optimizer with ZeRO stage 0 does nothing",
            "use stage 1, 2 or 3",
            "DeepSpeed runtime/zero/offload_config.py",
            stage=0,
        )
    if s.ratio < 1 and s.stage < 3:
        yield broken(
            "offload_ratio_stage",
            "illegal",
            f"offload_optimizer.ratio {s.ratio:g} with ZeRO stage {s.stage}: partial offload needs stage 3",
            "use stage 3 or ratio 1",
            "DeepSpeed runtime/zero/config.py offload_ratio_check",
            stage=s.stage,
        )
    if (s.half_master or s.half_moments) and s.stage == 0:
        yield broken(
            "half_master_stage",
            "illegal",
            "bf16_master_weights_and_grads needs ZeRO stage 1, 2 or 3; the stage is 0",
            "set zero_optimization.stage",
            "DeepSpeed runtime/config.py _do_error_check",
            stage=0,
        )
    if s.half_moments and not s.half_master:
        yield broken(
            "half_moments",
            "illegal",
            "bf16_optimizer_states needs bf16_master_weights_and_grads",
            "enable both or neither",
            "DeepSpeed runtime/config.py _do_error_check",
        )
    if s.stage == 3 and str(config.get("gradient_allreduce_op", "mean")).lower() == "sum":
        yield broken(
            "sum_with_stage3",
            "illegal",
            "gradient_allreduce_op sum is not supported with ZeRO stage 3",
            "use mean, or stage 1 or 2",
            "DeepSpeed runtime/config.py _do_error_check",
            stage=3,
        )


def bucket_rules(s: Settings, spec: ModelSpec, layout: Layout) -> Iterable[Rule]:
    """Buckets that cost more than the stage saves, and small gathers of stage 3."""
    if s.stage != 2 or layout.dp * layout.cp == 1 or "gradients" in options(s, layout, None).get("on_host", ()):  # type: ignore[operator]
        return
    ranks = layout.dp * layout.cp
    elements = unit_sizes(spec).total // layout.tp
    saved = size_bytes(s.grad_dtype) * elements * (ranks - 1) // ranks
    if s.bucket_bytes > saved:
        mib = 1 << 20
        yield broken(
            "buckets_exceed_saving",
            "unwise",
            f"gradient buckets of {s.bucket_bytes // mib} MiB (reduce_bucket_size {s.reduce_bucket:,}) against "
            f"{saved // mib} MiB of gradients that stage 2 saves over stage 1",
            f"lower reduce_bucket_size to at most {max(1, elements // 8):,}, or use stage 1",
            "DeepSpeed runtime/zero/stage_1_and_2.py setup_buckets",
            bucket_bytes=s.bucket_bytes,
            saved_bytes=saved,
        )


def stage_rules(s: Settings, spec: ModelSpec, layout: Layout, device_bytes: int | None) -> Iterable[Rule]:
    """Stage 3 where the states of stage 2 take less than half a device: it gathers every parameter twice a step.

    Source: Rajbhandari et al. (arXiv:1910.02054), section 7: 1.5 times the traffic of stages 0 to 2, in one gather a
    module; small modules cannot hide theirs.
    """
    ranks = layout.dp * layout.cp
    if s.stage != 3 or device_bytes is None or ranks == 1 or s.offload_param != "none":
        return
    elements = unit_sizes(spec).total // layout.tp
    sharded = 6 if s.offload_optimizer != "none" else 18
    needed = elements * 2 + elements * sharded // ranks
    if needed * 2 <= device_bytes:
        gib = 1 << 30
        yield broken(
            "stage2_would_do",
            "unwise",
            f"stage 3 gathers every parameter in forward and backward; the states of stage 2 need {needed / gib:.1f} "
            f"GiB of the {device_bytes / gib:.1f} of a device",
            "use stage 2; for small modules raise stage3_prefetch_bucket_size and stage3_param_persistence_threshold",
            "arXiv:1910.02054, section 7",
            needed_bytes=needed,
            device_bytes=device_bytes,
        )


def _notes(s: Settings, script: TrainerArgs) -> tuple[str, ...]:
    notes = []
    if s.automatic:
        few = ", ".join(s.automatic[:4]) + (f" and {len(s.automatic) - 4} more" if len(s.automatic) > 4 else "")
        notes.append(f"auto ({few}): taken from the script's arguments, else DeepSpeed's default ({s.dtype} weights)")
    if script.seq is None:
        notes.append(f"no sequence length is stated: {DEFAULT.seq} tokens are assumed")
    if s.hybrid:
        notes.append("hybrid_engine: the memory of its generation (max_out_tokens) is not counted")
    if s.pp > 1:
        notes.append(f"pipeline.stages {s.pp}: the script must build PipelineModule(num_stages={s.pp})")
    return tuple(notes)


def nested(given: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """The configuration back from its flattened leaves (``given`` of an invocation)."""
    root: dict[str, Any] = {}
    for path, text in given:
        if path.startswith("-"):
            continue
        holder = root
        *parents, last = path.split(".")
        for key in parents:
            below = holder.setdefault(key, {})
            holder = below if isinstance(below, dict) else {}
        try:
            holder[last] = json.loads(text)
        except ValueError:
            holder[last] = text
    return root


def script_of(given: Iterable[tuple[str, str]]) -> TrainerArgs:
    """The script's words back from ``given``."""
    return read_trainer([f"{name}={value}" for name, value in given if name.startswith("--")])
