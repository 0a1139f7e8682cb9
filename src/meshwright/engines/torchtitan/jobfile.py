"""Configuration files of torchtitan 0.1 and 0.2 (TOML): sections as settings of 0.3. 0.3 itself reads no file.

Source: pytorch/torchtitan ``torchtitan/config/job_config.py`` of v0.1.0 and v0.2.0; sections keep their names, except
``[model]`` (now ``--module`` and ``--config``), ``[job]``, ``[activation_checkpoint] mode`` (now a word behind the
flags), and switches that moved (``training.compile``, ``parallelism.enable_async_tensor_parallel``).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.engines.flagwords import SHOWN, shown
from meshwright.engines.torchtitan.settings import configurations
from meshwright.errors import InputError

MAX_BYTES = 1 << 20

#: Sections that tell a torchtitan file from another TOML file, with keys that only it has.
_TELLING = {
    "parallelism": {
        "data_parallel_shard_degree",
        "data_parallel_replicate_degree",
        "tensor_parallel_degree",
        "pipeline_parallel_degree",
        "context_parallel_degree",
    },
    "training": {"seq_len", "local_batch_size", "batch_size"},
}
_MOVED = {
    "training.compile": "compile.enable",
    "training.batch_size": "training.local_batch_size",
    "parallelism.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
    "experimental.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel",
}
_MODES = {"none", "full", "selective", "memory_budget"}


@dataclass(frozen=True, slots=True)
class Job:
    """What a file sets.

    Attributes:
        given: dotted name -> text.
        policy: activation checkpointing, or None.
        module, flavor: model as 0.1 and 0.2 name it.
        float8: a float8 converter is named.
        unread: keys that decide nothing here.
    """

    given: Mapping[str, str]
    policy: str | None = None
    module: str = ""
    flavor: str = ""
    float8: bool = False
    unread: tuple[str, ...] = field(default=())


def read_job(name: str, data: bytes) -> Job | None:
    """Read a file; None when it is not torchtitan's.

    Raises:
        InputError: over 1 MiB, or TOML that cannot be read.
    """
    if not name.lower().endswith(".toml"):
        return None
    if len(data) > MAX_BYTES:
        raise InputError(f"{name[:80]} has {len(data)} bytes; a torchtitan configuration has at most {MAX_BYTES}")
    try:
        raw = tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise InputError(f"{name[:80]} is not UTF-8 text") from None
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise InputError(f"{name[:80]} is not valid TOML: {str(error)[:100]}") from None
    if not any(isinstance(raw.get(k), dict) and keys & set(raw[k]) for k, keys in _TELLING.items()):
        return None
    return _job(raw)


def _job(raw: Mapping[str, Any]) -> Job:
    given: dict[str, str] = {}
    for section, values in raw.items():
        if not isinstance(values, dict) or section in {"model", "job", "activation_checkpoint"}:
            continue
        for key, value in values.items():
            name = _MOVED.get(f"{section}.{key}", f"{section}.{key}")
            if isinstance(value, bool | int | float | str):
                given[name] = str(value)
            elif isinstance(value, list) and value and all(isinstance(v, list) for v in value):
                given[name] = " ".join(",".join(map(str, v)) for v in value)
            elif isinstance(value, list):
                given[name] = ",".join(map(str, value))
    model = raw.get("model") if isinstance(raw.get("model"), dict) else {}
    mode = raw.get("activation_checkpoint", {})
    mode = mode.get("mode") if isinstance(mode, dict) else None
    if mode is not None and mode not in _MODES:
        raise InputError(f"[activation_checkpoint] mode {shown(str(mode))} is not one of {', '.join(sorted(_MODES))}")
    converters = model.get("converters", []) if isinstance(model, dict) else []
    etp = (
        raw.get("parallelism", {}).get("expert_tensor_parallel_degree")
        if isinstance(raw.get("parallelism"), dict)
        else 0
    )
    return Job(
        given=given,
        policy=None if mode is None else str(mode).replace("_", "-"),
        module=str(model.get("name", ""))[:SHOWN] if isinstance(model, dict) else "",
        flavor=str(model.get("flavor", ""))[:SHOWN] if isinstance(model, dict) else "",
        float8=isinstance(converters, list) and any("float8" in str(c) for c in converters),
        unread=("parallelism.expert_tensor_parallel_degree",) if etp not in {None, 0, 1} else (),
    )


def configuration_named(job: Job, version: str) -> str:
    """``module/config`` of 0.3 for the model that a file names; empty when there is none."""
    found = [
        name
        for name, c in configurations(version).items()
        if name.partition("/")[0] == job.module and str(c.get("flavor", "")).lower() == job.flavor.lower()
    ]
    return min(found, key=lambda name: (len(name), name)) if found else ""
