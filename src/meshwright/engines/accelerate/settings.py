"""accelerate's YAML and flags as settings: kind, processes, FSDP, degrees, precision.

Sources: accelerate 1.15 ``commands/launch.py`` (flags win over the file), ``commands/config/config_args.py`` (keys),
``utils/launch.py``, ``utils/dataclasses.py`` (FullyShardedDataParallelPlugin), ``parallelism_config.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.engines.flagwords import shown
from meshwright.engines.launcher import ACCELERATE_VERSION, accelerate_flags
from meshwright.engines.plainyaml import load as load_yaml
from meshwright.errors import InputError
from meshwright.specs.checks import broken
from meshwright.specs.rules import Rule

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
STATES = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
_OTHERS = ("NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU", "NEURON")
KINDS = (
    *("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA", "TP"),
    *(f"MULTI_{kind}" for kind in _OTHERS),
)
#: A file is taken for accelerate's when it has one of these keys.
SIGNS = ("distributed_type", "fsdp_config", "compute_environment", "parallelism_config")
MAX_COUNT = 1 << 20
_DTYPES = {"bf16": "bf16", "fp16": "f16", "fp8": "bf16", "no": "f32"}


@dataclass(frozen=True, slots=True)
class Settings:
    """A configuration with its flags laid over it.

    Attributes:
        kind: ``distributed_type``.
        processes: in all, None when not stated.
        machines, machine_rank: as stated.
        dtype: of mixed precision; ``f32`` for ``no``.
        version: of FSDP.
        strategy: FSDP1's sharding strategy.
        reshard: FSDP2's ``reshard_after_forward``.
        reshard_text: as it was written.
        wrap: auto wrap policy.
        state_dict: state dict type.
        offload, checkpointing: parameters in host memory; activations recomputed.
        degrees: ``dp_replicate``, ``dp_shard``, ``tp``, ``cp``, ``sp`` where a parallelism configuration states them.
        cpu: ``use_cpu``.
        deepspeed: its section.
    """

    kind: str
    processes: int | None
    machines: int | None
    machine_rank: int | None
    dtype: str
    version: int
    strategy: str
    reshard: bool
    reshard_text: str
    wrap: str
    state_dict: str
    offload: bool
    checkpointing: bool
    degrees: Mapping[str, int]
    cpu: bool
    deepspeed: Mapping[str, Any]

    @property
    def sharded(self) -> bool:
        """FSDP shards something."""
        return self.kind == "FSDP" and not self.cpu and not (self.version == 1 and self.strategy == "NO_SHARD")


@cache
def known_keys() -> frozenset[str]:
    """Top-level keys of the YAML."""
    path = Path(__file__).with_name(f"config_{ACCELERATE_VERSION}.json")
    return frozenset(json.loads(path.read_text("utf-8"))["keys"])


def load(data: bytes, name: str) -> dict[str, Any] | None:
    """The configuration of a file, YAML or JSON; None when it is not accelerate's.

    Raises:
        InputError: it looks like one and cannot be read.
    """
    text = data.decode("utf-8", "replace")
    if not any(sign in text for sign in SIGNS):
        return None
    if text.lstrip().startswith("{"):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
    else:
        value = load_yaml(text, name)
    return value if isinstance(value, dict) and any(sign in value for sign in SIGNS) else None


def merged(config: Mapping[str, Any], flags: Mapping[str, str]) -> dict[str, Any]:
    """One flat mapping: nested sections under the names of their flags, flags of the command on top.

    ``commands/launch.py`` copies ``fsdp_config.x`` to ``fsdp_x``; keys of ``parallelism_config`` keep their name.
    """
    out: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and key not in {"deepspeed_config"}:
            prefix = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}.get(key, "")
            out |= {k if str(k).startswith(prefix) else prefix + str(k): v for k, v in value.items()}
        else:
            out[key] = value
    return out | {name.lstrip("-"): value for name, value in flags.items() if name.startswith("--")}


def read_settings(config: Mapping[str, Any], flags: Mapping[str, str], script_dtype: str | None) -> Settings:
    """Settings of a file and of the flags in front of the script.

    Raises:
        InputError: a count that is no whole number.
    """
    all_ = merged(config, flags)
    text = {k: "" if v is None else str(v) for k, v in all_.items()}
    kind = text.get("distributed_type", "").upper() or "NO"
    for flag, name in (("use_fsdp", "FSDP"), ("use_deepspeed", "DEEPSPEED"), ("multi_gpu", "MULTI_GPU")):
        kind = name if text.get(flag, "").lower() == "true" else kind
    degrees = {d: _count(all_, f"parallelism_config_{d}_size") for d in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}
    stated = {d: n for d, n in degrees.items() if n is not None}
    deepspeed = config.get("deepspeed_config")
    reshard = text.get("fsdp_reshard_after_forward", "").lower()
    version = _count(all_, "fsdp_version") or 1
    return Settings(
        kind=kind,
        processes=_count(all_, "num_processes"),
        machines=_count(all_, "num_machines"),
        machine_rank=_count(all_, "machine_rank", 0),
        dtype=script_dtype or _DTYPES.get(text.get("mixed_precision", "no").lower(), "f32"),
        version=version,
        strategy=_strategy(text.get("fsdp_sharding_strategy", "") or "FULL_SHARD"),
        reshard=reshard not in {"false", "no", "0"},
        reshard_text=reshard,
        wrap=text.get("fsdp_auto_wrap_policy", "").upper() or "NO_WRAP",
        state_dict=text.get("fsdp_state_dict_type", "").upper()
        or ("FULL_STATE_DICT" if version == 1 else "SHARDED_STATE_DICT"),
        offload=_on(text.get("fsdp_offload_params")),
        checkpointing=_on(text.get("fsdp_activation_checkpointing")),
        degrees=stated,
        cpu=_on(text.get("use_cpu")) or _on(text.get("cpu")),
        deepspeed=_deepspeed(deepspeed if isinstance(deepspeed, Mapping) else {}, text),
    )


def _deepspeed(section: Mapping[str, Any], text: Mapping[str, str]) -> dict[str, Any]:
    keys = ("deepspeed_config_file", "zero_stage", "offload_optimizer_device", "offload_param_device")
    out = dict(section)
    for key in (*keys, "gradient_accumulation_steps"):
        if text.get(key):
            out.setdefault(key, text[key])
    return out


def _strategy(text: str) -> str:
    return STRATEGIES[int(text) - 1] if text.isdecimal() and 1 <= int(text[:3]) <= len(STRATEGIES) else text.upper()


def _on(text: str | None) -> bool:
    return (text or "").lower() in {"true", "1", "yes"}


def _count(values: Mapping[str, Any], key: str, low: int = 1) -> int | None:
    value = values.get(key)
    if value in (None, "", -1, "-1"):
        return None
    try:
        number = int(str(value)) if not isinstance(value, bool) and len(str(value)) < 20 else -1
    except ValueError:
        number = -1
    if not low <= number <= MAX_COUNT:
        raise InputError(f"accelerate {key} {shown(str(value))} is not a whole number from {low} to {MAX_COUNT}")
    return number


def check_keys(config: Mapping[str, Any]) -> Iterator[Rule]:
    """Keys that accelerate refuses or silently ignores."""
    where = "accelerate commands/config/config_args.py from_yaml_file"
    for key in config:
        if key not in known_keys():
            close = get_close_matches(str(key), sorted(known_keys()), 1)
            yield broken(
                "unknown_key",
                "illegal",
                f"accelerate {ACCELERATE_VERSION} refuses a configuration with the key {shown(str(key))}",
                f"did you mean {close[0]!r}?" if close else "remove it",
                where,
            )
    flags = {f.name.lstrip("-") for f in accelerate_flags().flags}
    for name, prefix in (("fsdp_config", "fsdp_"), ("parallelism_config", "")):
        section = config.get(name)
        for key in section if isinstance(section, Mapping) else ():
            full = key if str(key).startswith(prefix) else f"{prefix}{key}"
            if full in flags:
                continue
            wanted = f"{name}_{key}" if f"{name}_{key}" in flags else None
            close = [wanted] if wanted else get_close_matches(full, sorted(flags), 1)
            yield broken(
                "unknown_key",
                "unwise",
                f"{name} has no key {shown(str(key))}: accelerate {ACCELERATE_VERSION} ignores it"
                + (" and the degree stays 1" if wanted else ""),
                f"write {close[0]}" if close else "remove it",
                "accelerate commands/launch.py _validate_launch_command",
            )
    kind = config.get("distributed_type")
    if kind is None:
        yield broken(
            "no_kind", "illegal", "the configuration has no distributed_type", "add distributed_type: FSDP", where
        )
    elif str(kind).upper() not in KINDS:
        yield broken(
            "unknown_kind",
            "illegal",
            f"distributed_type {shown(str(kind))} is not one of {', '.join(KINDS[:6])}",
            "use FSDP",
            "accelerate utils/dataclasses.py DistributedType",
        )
