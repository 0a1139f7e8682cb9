"""transformers' ``DistributedConfig`` and the Trainer's FSDP arguments as settings.

Sources: transformers 5.24 ``distributed/configuration_utils.py`` (fields, defaults, checks), ``distributed/fsdp.py``
(mixed precision: bf16 parameters, fp32 reduction), ``training_args.py`` _process_fsdp_args.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.engines.flagwords import shown
from meshwright.engines.trainer_args import TRAINER_VERSION
from meshwright.errors import InputError
from meshwright.specs.checks import broken
from meshwright.specs.rules import Rule

_WHERE = "transformers distributed/configuration_utils.py"
#: A JSON object is taken for a DistributedConfig when it has one of these.
SIGNS = ("tp_size", "fsdp_size", "pp_size", "ep_size", "dp_replicate_size", "tp_plan")
MAX_DEGREE = 1 << 20
MAX_TEXT = 1 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """Degrees and switches.

    Attributes:
        tp: tensor parallel size, None: what the other sizes leave of the world (``tp_plan`` without ``tp_size``).
        fsdp, replicas, pp, ep: the other sizes.
        offload, mixed: ``fsdp_cpu_offload``, ``fsdp_mixed_precision``.
        trainer: the Trainer shards (``--fsdp``); ``fsdp`` is then what the world leaves.
        reshard, wrap, checkpointing: the Trainer's FSDP settings.
        tokens: ``ep_implementation``.
    """

    tp: int | None = 1
    fsdp: int = 1
    replicas: int = 1
    pp: int = 1
    ep: int = 1
    offload: bool = False
    mixed: bool = False
    trainer: bool = False
    reshard: bool = True
    wrap: bool = True
    checkpointing: bool | None = None
    tokens: str = "auto"


@cache
def fields() -> frozenset[str]:
    """Fields of ``DistributedConfig``."""
    path = Path(__file__).with_name(f"config_{TRAINER_VERSION}.json")
    return frozenset(json.loads(path.read_text("utf-8"))["fields"])


def as_config(text: str) -> dict[str, Any] | None:
    """A DistributedConfig written as JSON; None when the text is something else."""
    if len(text) > MAX_TEXT or not text.lstrip().startswith("{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or "architectures" in value or not any(sign in value for sign in SIGNS):
        return None
    return value if len(set(value) & fields()) * 2 >= len(value) else None


def read_config(config: Mapping[str, Any]) -> tuple[Settings, list[Rule]]:
    """Settings of a DistributedConfig, and what is wrong with it.

    Raises:
        InputError: a size that is no whole number.
    """
    sizes = {k: _size(config, k) for k in ("tp_size", "fsdp_size", "dp_replicate_size", "pp_size", "ep_size")}
    tp = sizes["tp_size"]
    ep = sizes["ep_size"]
    if ep is None and config.get("enable_expert_parallel") is True:
        ep = tp or 1
    if tp is None and config.get("tp_plan") is None:
        tp = 1
    settings = Settings(
        tp=tp,
        fsdp=sizes["fsdp_size"] or 1,
        replicas=sizes["dp_replicate_size"] or 1,
        pp=sizes["pp_size"] or 1,
        ep=ep or 1,
        offload=config.get("fsdp_cpu_offload") is True,
        mixed=config.get("fsdp_mixed_precision") is True,
        tokens=str(config.get("ep_implementation", "auto"))[:40],
    )
    return settings, list(_wrong(config, settings))


def _size(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_DEGREE:
        raise InputError(f"{key} {shown(str(value))} is not a whole number from 1 to {MAX_DEGREE}")
    return value


def _wrong(config: Mapping[str, Any], s: Settings) -> Iterator[Rule]:
    for key in config:
        if key not in fields():
            yield broken(
                "unknown_key",
                "unwise",
                f"DistributedConfig of transformers {TRAINER_VERSION} has no {shown(str(key))} and drops it",
                "remove it",
                f"{_WHERE} from_dict",
            )
    if config.get("enable_sequence_parallel") is True:
        yield broken(
            "sequence_parallel_idle",
            "unwise",
            "enable_sequence_parallel is reserved and does nothing in this version",
            "remove it",
            _WHERE,
        )
    if config.get("enable_expert_parallel") is True:
        yield broken(
            "expert_parallel_deprecated",
            "unwise",
            "enable_expert_parallel is deprecated",
            f"use ep_size={s.ep} with tp_plan {{}}, or leave tp_plan out to shard the dense modules too",
            _WHERE,
        )
    if s.ep > 1 and s.tp is not None:
        yield from _experts(s, s.tp)


def _experts(s: Settings, tp: int) -> Iterator[Rule]:
    if s.ep % tp:
        yield broken(
            "ep_over_tp",
            "illegal",
            f"ep_size {s.ep} is not a multiple of tp_size {tp}",
            f"use ep_size {max(tp, s.ep // tp * tp)}, or tp_size 1",
            f"{_WHERE} _validate_mesh_config",
            ep=s.ep,
            tp=tp,
        )
    elif (s.fsdp * tp) % s.ep:
        yield broken(
            "ep_over_ranks",
            "illegal",
            f"ep_size {s.ep} does not divide fsdp_size {s.fsdp} x tp_size {tp} = {s.fsdp * tp}",
            f"use ep_size {tp} or {s.fsdp * tp}",
            f"{_WHERE} _validate_mesh_config",
            ep=s.ep,
            ranks=s.fsdp * tp,
        )
    if s.tokens == "all_reduce" and s.ep != tp:
        yield broken(
            "ep_shared_batch",
            "illegal",
            f"ep_implementation all_reduce needs ep_size {s.ep} = tp_size {tp}: the group must share one batch",
            "use all_to_all",
            "transformers distributed/expert_parallel.py",
            ep=s.ep,
            tp=tp,
        )


def trainer_fsdp(words: str, config: Mapping[str, Any]) -> tuple[Settings, list[Rule]]:
    """The Trainer's ``--fsdp`` and ``--fsdp_config`` (prefix ``fsdp_`` may stand before its keys)."""
    found: list[Rule] = []
    inner = {str(k).removeprefix("fsdp_"): v for k, v in config.items()}
    parts = words.lower().split()
    version = inner.get("version", 2)
    if parts and parts != ["true"]:
        found.append(
            broken(
                "fsdp_words_deprecated",
                "unwise",
                f"--fsdp {shown(words)} is deprecated in transformers {TRAINER_VERSION}",
                "use --fsdp True and put the rest into --fsdp_config",
                "transformers training_args.py _apply_legacy_fsdp_to_config",
            )
        )
    only_first = {"no_shard", "hybrid_shard", "hybrid_shard_zero2"} & set(parts)
    if only_first and str(version) == "2":
        found.append(
            broken(
                "fsdp1_strategy",
                "illegal",
                f"--fsdp {sorted(only_first)[0]} exists with FSDP1 only, version 2 is the default",
                "use full_shard or shard_grad_op, or fsdp_config version 1",
                "transformers training_args.py _apply_legacy_fsdp_to_config",
            )
        )
    reshard = str(inner.get("reshard_after_forward", "shard_grad_op" not in parts)).lower()
    checkpointing = inner.get("activation_checkpointing")
    settings = Settings(
        trainer=True,
        reshard=reshard in {"true", "1", "full_shard"},
        wrap=str(inner.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")).upper() != "NO_WRAP",
        offload=str(inner.get("cpu_offload", "offload" in parts)).lower() == "true",
        checkpointing=None if checkpointing is None else str(checkpointing).lower() == "true",
    )
    return settings, found
