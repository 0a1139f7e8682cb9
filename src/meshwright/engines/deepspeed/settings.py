"""DeepSpeed's JSON as settings: stage, offload, buckets, precision, degrees, batch.

Defaults are those of 0.19.8 (``keys_0.19.8.json``). ``auto`` is what Hugging Face's integration fills in from the
script's arguments (transformers ``integrations/deepspeed.py``); without one the engine's default counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.engines.deepspeed.keys import inside, section
from meshwright.engines.flagwords import shown
from meshwright.engines.trainer_args import TrainerArgs
from meshwright.errors import InputError
from meshwright.specs.dtypes import size_bytes

MAX_COUNT = 1 << 40

#: Optimizers of ``runtime/config.py`` DEEPSPEED_OPTIMIZERS -> ours (moments: two, one, Muon's).
_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "lamb": "adamw", "muadam": "adamw", "muadamw": "adamw"} | {
    "lion": "sgd",
    "adagrad": "sgd",
    "musgd": "sgd",
    "sgd": "sgd",
    "muon": "muon",
}
_DTYPES = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "f16", "float16": "f16", "fp32": "f32", "float32": "f32"}


@dataclass(frozen=True, slots=True)
class Settings:
    """A configuration with its defaults.

    Attributes:
        stage: ZeRO stage.
        tp, sp, pp, ep, etp: AutoTP, Ulysses, pipeline, AutoEP degrees.
        micro, accumulation, batch: ``train_micro_batch_size_per_gpu`` and so on; None when left out or ``auto``.
        dtype, grad_dtype: of the model, and of the gradients that are accumulated.
        half_master: fp32 master weights are left out (``bf16_master_weights_and_grads``).
        half_moments: moments in bf16.
        optimizer: ours, or None when the script makes it.
        offload_optimizer, offload_param: ``none``, ``cpu``, ``nvme``.
        ratio: part of the optimizer that is offloaded (stage 3).
        contiguous, overlap: gradient buckets are buffers, and there are two of them.
        reduce_bucket, prefetch_bucket: elements.
        reuse_distance, live, persistence: stage 3: elements.
        hpz: ranks of the secondary partition of stage 3.
        checkpointing: ``activation_checkpointing`` asks for something.
        automatic: keys that are ``auto``.
        both: bf16 and fp16 are both on.
        hybrid: the hybrid engine (training and generation in turns) is on.
        data_parallel: ``data_parallel_size`` beside ``sequence_parallel_size``.
    """

    stage: int = 0
    tp: int = 1
    sp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    micro: int | None = None
    accumulation: int | None = None
    batch: int | None = None
    dtype: str = "f32"
    grad_dtype: str = "f32"
    half_master: bool = False
    half_moments: bool = False
    optimizer: str | None = None
    offload_optimizer: str = "none"
    offload_param: str = "none"
    ratio: float = 1.0
    contiguous: bool = True
    overlap: bool = False
    reduce_bucket: int = 500_000_000
    prefetch_bucket: int = 50_000_000
    reuse_distance: int = 1_000_000_000
    live: int = 1_000_000_000
    persistence: int = 100_000
    hpz: int = 1
    checkpointing: bool = False
    automatic: tuple[str, ...] = ()
    both: bool = False
    hybrid: bool = False
    data_parallel: int | None = None

    @property
    def bucket_bytes(self) -> int:
        """Gradient buckets: one of ``reduce_bucket_size``, two when stages 1 and 2 overlap the reduction.

        Source: ``runtime/zero/stage_1_and_2.py`` setup_buckets, ``runtime/zero/stage3.py`` (one buffer for good).
        ``allgather_bucket_size`` is no buffer: ``all_gather_into_tensor_dp_groups`` gathers in place.
        """
        if self.stage == 0 or not self.contiguous:
            return 0
        return self.reduce_bucket * size_bytes(self.grad_dtype) * (2 if self.overlap and self.stage < 3 else 1)


def read_settings(config: Mapping[str, Any], script: TrainerArgs) -> Settings:
    """Settings of a configuration.

    Raises:
        InputError: a count that is no positive whole number.
    """
    zero = config.get("zero_optimization")
    if isinstance(zero, bool):
        zero = {"stage": int(zero)}
    zero = zero if isinstance(zero, Mapping) else {}
    stage = _whole(_value(zero, "zero_optimization", "stage"), "zero_optimization.stage", 0)
    dtype, both = _dtype(config, script)
    grad = inside(config, "data_types.grad_accum_dtype")
    overlap = _value(zero, "zero_optimization", "overlap_comm")
    legacy = {old: zero.get(old) is True for old in ("cpu_offload", "cpu_offload_param")}
    optimizer = inside(config, "optimizer.type")
    checkpointing = config.get("activation_checkpointing")
    return Settings(
        stage=min(stage, 3),
        tp=_degree(
            inside(config, "tensor_parallel.autotp_size") or inside(config, "tensor_parallel.tp_size"), "autotp_size"
        ),
        sp=_degree(config.get("sequence_parallel_size"), "sequence_parallel_size"),
        pp=_degree(inside(config, "pipeline.stages"), "pipeline.stages"),
        ep=_degree(inside(config, "expert_parallel.autoep_size"), "autoep_size")
        if _on(inside(config, "expert_parallel.enabled"))
        else 1,
        etp=_etp(config),
        micro=_batch(config, "train_micro_batch_size_per_gpu", script.micro_batch),
        accumulation=_batch(config, "gradient_accumulation_steps", script.accumulation),
        batch=_batch(config, "train_batch_size", None),
        dtype=dtype,
        grad_dtype=_DTYPES.get(str(grad), dtype) if isinstance(grad, str) else dtype,
        half_master=_on(inside(config, f"{'fp16' if dtype == 'f16' else 'bf16'}.{_half(dtype)}")),
        half_moments=_on(inside(config, "bf16.bf16_optimizer_states")),
        optimizer=_OPTIMIZERS.get(str(optimizer).lower(), "adamw") if optimizer is not None else script.optimizer,
        offload_optimizer=_device(zero, "offload_optimizer", legacy["cpu_offload"]),
        offload_param=_device(zero, "offload_param", legacy["cpu_offload_param"]),
        ratio=_ratio(inside(zero, "offload_optimizer.ratio")),
        contiguous=_on(_value(zero, "zero_optimization", "contiguous_gradients")),
        overlap=stage == 3 if overlap is None else _on(overlap),
        reduce_bucket=_elements(zero, "reduce_bucket_size"),
        prefetch_bucket=_elements(zero, "prefetch_bucket_size"),
        reuse_distance=_elements(zero, "max_reuse_distance"),
        live=_elements(zero, "max_live_parameters"),
        persistence=_elements(zero, "param_persistence_threshold"),
        hpz=_degree(zero.get("zero_hpz_partition_size"), "zero_hpz_partition_size"),
        checkpointing=isinstance(checkpointing, Mapping)
        and any(
            _on(checkpointing.get(k)) for k in ("partition_activations", "cpu_checkpointing", "number_checkpoints")
        ),
        automatic=tuple(_automatic(config)),
        both=both,
        hybrid=_on(inside(config, "hybrid_engine.enabled")),
        data_parallel=None
        if config.get("data_parallel_size") is None
        else _degree(config["data_parallel_size"], "data_parallel_size"),
    )


def _half(dtype: str) -> str:
    return "fp16_master_weights_and_grads" if dtype == "f16" else "bf16_master_weights_and_grads"


def _automatic(config: Mapping[str, Any], path: str = "") -> list[str]:
    """Keys that are ``auto`` (two levels, as Hugging Face fills them in)."""
    found = []
    for key, value in config.items():
        here = f"{path}.{key}" if path else key
        if value == "auto":
            found.append(here)
        elif isinstance(value, Mapping) and path.count(".") < 2:
            found += _automatic(value, here)
    return found


def _dtype(config: Mapping[str, Any], script: TrainerArgs) -> tuple[str, bool]:
    bf16 = inside(config, "bf16.enabled")
    bf16 = inside(config, "bfloat16.enabled") if bf16 is None else bf16
    fp16 = inside(config, "fp16.enabled")
    both = _on(bf16) and _on(fp16)
    if bf16 == "auto" or fp16 == "auto":
        if script.dtype is not None:
            return script.dtype, False
        if not _on(bf16) and not _on(fp16):
            return "bf16" if bf16 == "auto" else "f16", False
    if _on(bf16):
        return "bf16", both
    return ("f16" if _on(fp16) else "f32"), both


def _value(holder: Mapping[str, Any], name: str, key: str) -> Any:
    """A value under any of its spellings, its default when left out or ``auto``."""
    row = section(name).get(key, {})
    for spelling in (key, row.get("alias") or key):
        value = holder.get(spelling)
        if value is not None and value != "auto":
            return value
    return row.get("default")


def _on(value: Any) -> bool:
    return value is True or (isinstance(value, (int, float)) and value > 0) or str(value).lower() == "true"


def _whole(value: Any, name: str, low: int = 1) -> int:
    try:
        number = int(float(value)) if not isinstance(value, bool) else -1
        exact = float(value) == number
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{name} {shown(str(value))} is not a whole number") from None
    if not exact or not low <= number <= MAX_COUNT:
        raise InputError(f"{name} {shown(str(value))} is not a whole number from {low} to {MAX_COUNT}")
    return number


def _elements(zero: Mapping[str, Any], key: str) -> int:
    return _whole(_value(zero, "zero_optimization", key), f"zero_optimization.{key}", 0)


def _degree(value: Any, name: str) -> int:
    return 1 if value in ("auto", None, 0) else min(_whole(value, name), 1 << 20)


def _etp(config: Mapping[str, Any]) -> int | None:
    value = inside(config, "expert_parallel.expert_tensor_parallel_size")
    return None if value is None else _degree(value, "expert_tensor_parallel_size")


def _batch(config: Mapping[str, Any], key: str, script: int | None) -> int | None:
    value = config.get(key)
    if value is None:
        return None
    return script if value == "auto" else _whole(value, key)


def _device(zero: Mapping[str, Any], key: str, legacy: bool) -> str:
    device = inside(zero, f"{key}.device")
    if device is None:
        return "cpu" if legacy else "none"
    return str(device) if str(device) in {"cpu", "nvme"} else "none"


def _ratio(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and 0 <= value <= 1 else 1.0
