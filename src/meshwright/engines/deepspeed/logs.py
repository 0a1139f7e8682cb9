"""DeepSpeed's memory lines: ``MA 0.5 GB  Max_MA 1.2 GB  CA 2.0 GB  Max_CA 2 GB`` (``runtime/utils.py``
see_memory_usage, printed with ``memory_breakdown``; gigabytes are 2^30 bytes, of the rank that prints)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from meshwright.engines.base import BootLog
from meshwright.ledger.schema import Holding

_LINE = re.compile(r"\bMA ([\d.]{1,12}) GB\s+Max_MA ([\d.]{1,12}) GB\s+CA ([\d.]{1,12}) GB\s+Max_CA ([\d.]{1,12}) GB")
_VERSION = re.compile(r"DeepSpeed info: version=([\w.+-]{1,30})")
MAX_LINES = 5_000_000
_GIB = 1 << 30


def read_log(lines: Iterable[str]) -> BootLog | None:
    """Largest allocation and reservation that the log prints; None when it has no such line."""
    allocated = reserved = -1.0
    version = ""
    for number, line in enumerate(lines):
        if number >= MAX_LINES:
            break
        text = line[:2000]
        if (seen := _VERSION.search(text)) is not None:
            version = seen[1]
        if (match := _LINE.search(text)) is not None:
            try:
                values = [float(v) for v in match.groups()]
            except ValueError:
                continue
            allocated, reserved = max(allocated, values[1]), max(reserved, values[3])
    if allocated < 0:
        return None
    rows = (
        Holding("rank 0", "allocated", "largest allocation (Max_MA)", int(allocated * _GIB), "measured"),
        Holding("rank 0", "reserved", "largest reservation (Max_CA)", int(reserved * _GIB), "measured"),
    )
    said = (
        "Max_CA",
        "what the allocator keeps, not what is used: freed buckets and gathered parameters stay in it",
    )
    return BootLog("deepspeed", version, rows, misleading=(said,))
