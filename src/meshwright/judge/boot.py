"""A boot log beside the prediction: what the engine printed, term by term."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright import engines
from meshwright.engines.base import BootLog
from meshwright.errors import InputError
from meshwright.specs.units import GIB

MAX_LINE = 1 << 16
MAX_PLAN_BYTES = 64 << 20

#: Terms of a boot log, by the key of a plan's worst rank that predicts them.
TERMS = {
    "weights": "weights_bytes",
    "activations": "activations_bytes",
    "runtime": "runtime_bytes",
    "kv_cache": "kv_pool_bytes",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One term: predicted and printed, in bytes (or tokens)."""

    term: str
    predicted: float | None
    printed: float | None

    @property
    def relative(self) -> float | None:
        """Printed over predicted, less one."""
        if not self.predicted or self.printed is None:
            return None
        return self.printed / self.predicted - 1


def lines_of(path: Path) -> Iterator[str]:
    """Lines of a log that may be cut, huge or full of binary noise; none longer than 64 KiB.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            while chunk := file.readline(MAX_LINE):
                yield chunk.decode("utf-8", "replace")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None


def read_log(path: Path) -> BootLog:
    """The boot log of whichever engine printed it.

    Raises:
        InputError: no engine knows its lines.
    """
    for name in ("vllm", "sglang", "trtllm", "megatron", "torchtitan"):
        if name not in engines.FOLDERS:
            continue
        found = engines.load(name).read_log(lines_of(path))
        if found is not None:
            return found
    raise InputError(f"{path}: neither a configuration nor a boot log of a known engine ({', '.join(engines.FOLDERS)})")


def read_plan(path: Path) -> Mapping[str, Any]:
    """A plan that ``plan --json`` wrote.

    Raises:
        InputError: unreadable, or not such a file.
    """
    try:
        if path.stat().st_size > MAX_PLAN_BYTES:
            raise InputError(f"{path}: larger than {MAX_PLAN_BYTES >> 20} MiB; a plan written by plan --json is needed")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path}: not JSON; a plan written by plan --json is needed") from None
    if not isinstance(data, dict) or not isinstance(data.get("memory"), dict):
        raise InputError(f"{path}: holds no memory; a plan written by plan --json is needed")
    return data


def printed_bytes(log: BootLog, term: str) -> int | None:
    """Bytes of a term on the rank that printed most of it (of a pool: least); None when none was printed."""
    by_rank: dict[str, int] = {}
    for holding in log.holdings:
        if holding.term == term:
            by_rank[holding.rank_class] = by_rank.get(holding.rank_class, 0) + holding.bytes
    if not by_rank:
        return None
    return min(by_rank.values()) if term == "kv_cache" else max(by_rank.values())


def compare(log: BootLog, plan: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Predicted against printed, term by term; a term that neither side has is left out."""
    memory = plan["memory"]
    worst = memory.get("worst") if isinstance(memory.get("worst"), dict) else {}
    rows = []
    for term, key in TERMS.items():
        predicted = memory.get(key) if key == "kv_pool_bytes" else worst.get(key)
        predicted = float(predicted) if isinstance(predicted, int | float) else None
        printed = printed_bytes(log, term)
        if predicted is not None or printed is not None:
            rows.append(Difference(term, predicted, float(printed) if printed is not None else None))
    tokens = plan.get("kv_cache_tokens")
    if isinstance(tokens, int | float) or log.kv_cache_tokens is not None:
        predicted = float(tokens) if isinstance(tokens, int | float) else None
        rows.append(Difference("kv_cache_tokens", predicted, log.kv_cache_tokens))
    return tuple(rows)


def save_calibration(log: BootLog, path: Path) -> None:
    """Write the printed terms as a calibration that a later plan reads (JSON: engine, version, model, terms in bytes).

    Raises:
        InputError: the path cannot be written.
    """
    data = {
        "engine": log.engine,
        "version": log.version,
        "model": log.model,
        "layout": str(log.layout) if log.layout else None,
        "terms_bytes": {term: printed_bytes(log, term) for term in TERMS},
        "kv_cache_tokens": log.kv_cache_tokens,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--save {path}: {error.strerror or error}") from None


def gib_or_count(term: str, value: float | None) -> str:
    """``"12.10 GiB"``, ``"22,016"`` for tokens, ``"-"`` for unknown."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if term == "kv_cache_tokens" else f"{value / GIB:,.2f} GiB"
