"""What an engine printed at an earlier start, used instead of the model of the same terms.

``check boot.log --save FILE`` writes it; ``plan serve --calibration FILE`` reads it. A measured term replaces the
modelled one where engine, tensor and pipeline degrees are those of the log; other layouts keep their model.

Of the terms, memory outside torch belongs to the machine more than to the model: ``calibrate --from boot.log`` keeps it
in the cluster file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import InputError
from meshwright.ledger.schema import Holding
from meshwright.specs.cluster import Device
from meshwright.specs.layout import Layout, parse_layout

MAX_BYTES = 1 << 20
#: Parts that a log may replace; the cache is what they leave.
PARTS = ("weights", "activations", "non_torch", "cuda_graphs")


@dataclass(frozen=True, slots=True)
class Calibration:
    """Terms of one boot, bytes on the rank that holds most of each.

    Attributes:
        engine: ``vllm``.
        model: as the log names it, or None.
        layout: degrees of the boot.
        terms_bytes: the ``PARTS`` that were printed.
        source: file it was read from.
    """

    engine: str
    model: str | None
    layout: Layout
    terms_bytes: Mapping[str, int]
    source: str

    def terms_for(self, layout: Layout, engine: str) -> Mapping[str, int]:
        """The measured terms that hold for a layout of an engine; empty when the boot was another one."""
        same = engine == self.engine and (layout.tp, layout.pp) == (self.layout.tp, self.layout.pp)
        return self.terms_bytes if same else {}


def read_calibration(path: Path) -> Calibration:
    """Read what ``check --save`` wrote.

    Raises:
        InputError: unreadable, or not such a file.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path}: larger than {MAX_BYTES >> 20} MiB; a file written by check --save is needed")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path}: not JSON; a file written by check --save is needed") from None
    terms = data.get("terms_bytes") if isinstance(data, dict) else None
    if not isinstance(terms, dict) or not isinstance(data.get("engine"), str):
        raise InputError(f"{path}: holds no engine with terms_bytes; a file written by check --save is needed")
    kept = {}
    for term in PARTS:
        value = terms.get(term)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 50:
            raise InputError(f"{path}: terms_bytes.{term} is {str(value)[:30]!r}; bytes are needed")
        kept[term] = value
    layout = data.get("layout")
    if layout is not None and not isinstance(layout, str):
        raise InputError(f"{path}: layout is {str(layout)[:30]!r}; text such as tp=2 is needed")
    model = data.get("model")
    return Calibration(
        data["engine"],
        model if isinstance(model, str) else None,
        parse_layout(layout) if layout else Layout(),
        kept,
        str(path),
    )


def booted_terms(device: Device, layout: Layout, engine: str) -> Mapping[str, int]:
    """The term that boot logs of this machine tell of a layout (cluster file, ``device.booted``); empty without one."""
    same = [b.outside_bytes for b in device.booted if (b.engine, b.tp, b.pp) == (engine, layout.tp, layout.pp)]
    return {"non_torch": max(same)} if same else {}


def part(term: str, tensor: str | None) -> str:
    """Which part a holding belongs to: its term, and of ``runtime`` CUDA graphs apart from what lies outside torch."""
    if term != "runtime":
        return term
    return "cuda_graphs" if tensor is not None and "graph" in tensor else "non_torch"


def measured_holdings(holdings: Sequence[Holding], measured: Mapping[str, int], name: str) -> list[Holding]:
    """The holdings of a rank class with every measured part in place of the counted or modelled one."""
    kept = [h for h in holdings if part(h.term, h.tensor) not in measured]
    terms = {"non_torch": "runtime", "cuda_graphs": "runtime"}
    return [*kept, *(Holding(name, terms.get(p, p), p, size, "calibrated") for p, size in measured.items() if size)]
