"""The torchtitan command of a layout: degrees, batch, lengths, precision and checkpointing as flags."""

from __future__ import annotations

from meshwright.engines.base import Emission, Request
from meshwright.engines.start import Script, emission
from meshwright.engines.torchtitan.parallel import SCHEDULES, part_words
from meshwright.engines.torchtitan.settings import configuration_of
from meshwright.errors import InputError
from meshwright.specs.layout import Fsdp, Layout
from meshwright.specs.workload import Train


def emit(request: Request, version: str, layers: int | None = None) -> Emission:
    """Commands and files that start the requested point.

    Args:
        request: what is to be started; ``options`` may name ``module`` and ``config`` of the user's own.
        version: version of the configurations.
        layers: decoder layers, needed for more than two interleaved parts a rank.

    Raises:
        InputError: no configuration trains the model, or a setting that torchtitan does not have.
    """
    work, layout = request.workload, request.layout
    if not isinstance(work, Train):
        raise InputError("torchtitan trains; ask for training, or serve with --engine vllm")
    own = request.options.get("module"), request.options.get("config")
    module, config = own if all(own) else configuration_of(request.model, version)
    words = ["torchtitan.train", "--module", str(module), "--config", str(config)]
    words += [*degrees(layout), *_pipeline(layout, work, layers), *_training(layout, work)]
    words += _switches(request, layout)
    words.append(f"activation_checkpoint:{work.recompute}")
    name = request.options.get("name", "torchtitan")
    if not name.replace("-", "").replace("_", "").isalnum():
        raise InputError(f"option name {name[:40]!r} may hold letters, digits, - and _ only")
    notes = (f"--config {config} also sets data, optimizer and assets (hf_assets_path); change them with flags",)
    reason = "segments that grow keep the peak near what is allocated (torchtitan's run_train.sh sets it)"
    env = (("PYTORCH_ALLOC_CONF", "expandable_segments:True", reason),)
    return emission(Script(tuple(words), True, env, name, notes), layout.world, request.cluster, request.deployment)


def degrees(layout: Layout) -> list[str]:
    """Every degree, so that those of the configuration do not stand.

    Raises:
        InputError: sharding that torchtitan does not have.
    """
    if layout.zero in {1, 2}:
        raise InputError(f"torchtitan has no ZeRO-{layout.zero}; use zero=3 (FSDP) or zero=0 (copies)")
    knobs = layout.fsdp or Fsdp()
    copies = layout.dp if layout.zero == 0 else knobs.replicas
    if layout.dp % copies:
        raise InputError(f"{copies} FSDP replicas do not divide {layout.dp} data parallel ranks")
    values = {
        "data_parallel_replicate_degree": copies,
        "data_parallel_shard_degree": layout.dp // copies,
        "tensor_parallel_degree": layout.tp,
        "pipeline_parallel_degree": layout.pp,
        "context_parallel_degree": layout.cp,
        "expert_parallel_degree": layout.ep,
    }
    words = [w for key, value in values.items() for w in (f"--parallelism.{key}", str(value))]
    if layout.tp > 1:
        words.append(f"--parallelism.{'' if layout.sp else 'no_'}enable_sequence_parallel")
    if layout.zero == 3:
        policy = "default" if layout.fsdp is None else "always" if knobs.reshard_after_forward else "never"
        words += ["--parallelism.fsdp_reshard_after_forward", policy]
    return words


def _pipeline(layout: Layout, work: Train, layers: int | None) -> list[str]:
    if layout.pp == 1:
        return []
    names = {ours: theirs for theirs, ours in SCHEDULES.items()}
    if layout.schedule not in names:
        raise InputError(f"torchtitan has no pipeline schedule {layout.schedule}; it has {', '.join(names)}")
    words = ["--parallelism.pipeline_parallel_schedule", names[layout.schedule]]
    words += ["--parallelism.pipeline_parallel_microbatch_size", str(layout.micro_batch)]
    if layout.stage_layers:
        return [*words, "--parallelism.module_fqns_per_model_part", *part_words(layout)]
    if layout.schedule == "interleaved" and layout.virtual != 2:
        if layers is None:
            raise InputError(f"{layout.virtual} parts a rank depend on the model's layers, which are not known")
        parts = layout.pp * layout.virtual
        per = next((n for n in range(1, layers + 3) if -(-(layers + 2) // n) == parts), None)
        if per is None:
            raise InputError(
                f"{layers} layers cannot be dealt into {parts} parts by pipeline_parallel_layers_per_stage; name the "
                "layers of every stage"
            )
        words += ["--parallelism.pipeline_parallel_layers_per_stage", str(per)]
    return words


def _training(layout: Layout, work: Train) -> list[str]:
    """Lengths, batch and precision.

    Raises:
        InputError: an optimizer, precision or offload that flags cannot set.
    """
    if work.optimizer != "adamw":
        raise InputError(f"optimizer {work.optimizer} is part of a torchtitan configuration, no flag sets it")
    if work.offload == "activations":
        raise InputError("torchtitan offloads parameters and optimizer state, not activations")
    local = work.global_batch // layout.dp if layout.pp > 1 else layout.micro_batch
    words = ["--training.seq_len", str(work.seq), "--training.local_batch_size", str(local)]
    words += ["--training.global_batch_size", str(work.global_batch)]
    plain = work.param_dtype == "bf16" and not work.master_weights
    words += ["--training.dtype", "bfloat16" if plain else "float32"]
    words += ["--training.mixed_precision_param", "float32" if work.param_dtype == "f32" else "bfloat16"]
    if work.state_dtype == "bf16" and not plain:
        words += ["--optimizer.implementation", "fused_opt_states_bf16"]
    if work.offload == "optimizer":
        words.append("--training.enable_cpu_offload")
    return words


def _switches(request: Request, layout: Layout) -> list[str]:
    """CUDA graphs off where they refuse; asynchronous tensor parallelism needs the compiled model."""
    words = ["--training.disable_cuda_graphs"] if layout.pp > 1 or layout.ep > 1 else []
    if request.train_options.get("async_tp"):
        words += ["--compile.enable", "--compile.components", "model,loss", "--compile.enable_async_tensor_parallel"]
    return words
