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
from meshwright.plan.calibration import PARTS, part
from meshwright.specs.units import GIB

MAX_LINE = 1 << 16
MAX_PLAN_BYTES = 64 << 20

#: Parts that a boot log may print, in the order of the table.
SHOWN = (*PARTS, "kv_cache", "total")


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


def printed_bytes(log: BootLog, name: str) -> int | None:
    """Bytes of a part on the rank that printed most of it (of the cache: least); None when none was printed."""
    by_rank: dict[str, int] = {}
    for holding in log.holdings:
        if part(holding.term, holding.tensor) == name:
            by_rank[holding.rank_class] = by_rank.get(holding.rank_class, 0) + holding.bytes
    if not by_rank:
        return None
    return min(by_rank.values()) if name == "kv_cache" else max(by_rank.values())


def predicted_bytes(plan: Mapping[str, Any], name: str) -> float | None:
    """Bytes of a part on the plan's worst rank; of the cache its pool."""
    memory = plan["memory"]
    if name == "kv_cache":
        return _number(memory.get("kv_pool_bytes"))
    worst, rows = memory.get("worst"), memory.get("holdings")
    if not isinstance(worst, dict) or not isinstance(rows, list):
        return None
    if name == "total":
        return _number(worst.get("total_bytes"))
    sizes = [
        _number(row.get("bytes")) or 0.0
        for row in rows
        if isinstance(row, dict)
        and row.get("rank_class") == worst.get("rank_class")
        and part(str(row.get("term")), str(row.get("tensor"))) == name
    ]
    return sum(sizes) if sizes else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def compare(log: BootLog, plan: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Predicted against printed, part by part; a part that neither side has is left out."""
    rows = [Difference(name, predicted_bytes(plan, name), _number(printed_bytes(log, name))) for name in SHOWN]
    rows.append(Difference("kv_cache_tokens", _number(plan.get("kv_cache_tokens")), log.kv_cache_tokens))
    seen = [row for row in rows if row.predicted is not None or row.printed is not None]
    return tuple(row for row in seen if row.term != "total" or row.printed is not None)


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
        "terms_bytes": {name: printed_bytes(log, name) for name in PARTS},
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
