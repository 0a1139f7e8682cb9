"""AMD devices of this machine from ``amd-smi`` or ``rocm-smi`` (both write JSON)."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from meshwright.specs.atlas.devices import match_device
from meshwright.specs.atlas.links import find_link
from meshwright.specs.cluster import Cluster
from meshwright.specs.detect_host import network_link
from meshwright.specs.probe import Probe

_UNIT_BYTES = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}

#: Most devices that are read of one machine.
MAX_GPUS = 256


def _json(text: str | None) -> Any:
    """JSON of a tool that may print warnings before it; None when there is none."""
    start = min((i for i in ((text or "").find("{"), (text or "").find("[")) if i >= 0), default=-1)
    if text is None or start < 0:
        return None
    try:
        return json.JSONDecoder().raw_decode(text[start:])[0]
    except (ValueError, RecursionError):
        return None


def parse_amd_smi(text: str | None) -> list[tuple[str, int]]:
    """(name, bytes) of every device of ``amd-smi static --asic --vram --json``."""
    data = _json(text)
    if isinstance(data, dict):
        data = data.get("gpu_data")
    return [found for row in (data if isinstance(data, list) else [])[:MAX_GPUS] if (found := _amd_smi_row(row))]


def _amd_smi_row(row: Any) -> tuple[str, int] | None:
    asic, vram = (row.get("asic"), row.get("vram")) if isinstance(row, dict) else (None, None)
    name = asic.get("market_name") if isinstance(asic, dict) else None
    size = vram.get("size") if isinstance(vram, dict) else None
    if not isinstance(name, str) or not name.isprintable() or not isinstance(size, dict):
        return None
    value, unit = size.get("value"), size.get("unit")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 40 or unit not in _UNIT_BYTES:
        return None
    return name[:80], value * _UNIT_BYTES[unit]


def parse_rocm_smi(text: str | None) -> list[tuple[str, int]]:
    """(name, bytes) of every card of ``rocm-smi --showproductname --showmeminfo vram --json``."""
    data = _json(text)
    cards = [card for key, card in _items(data) if re.fullmatch(r"card\d{1,3}", key) and isinstance(card, dict)]
    found: list[tuple[str, int]] = []
    for card in cards[:MAX_GPUS]:
        fields = {str(key).strip().lower(): str(value).strip() for key, value in card.items()}
        name = next((fields[k] for k in ("card series", "card model", "device name") if k in fields), "")
        size = fields.get("vram total memory (b)", "")
        if name and name.isprintable() and re.fullmatch(r"\d{1,15}", size):
            found.append((name[:80], int(size)))
    return found


def _items(data: Any) -> Iterator[tuple[str, Any]]:
    return iter(data.items() if isinstance(data, dict) else ())


def amd_cluster(probe: Probe) -> tuple[Cluster | None, list[str]]:
    """The AMD devices of this machine as one node, and notes; no cluster when there is no usable device.

    The links between devices are the atlas's: neither tool tells their bandwidth in a stable form.
    """
    rows = parse_amd_smi(probe.run(("amd-smi", "static", "--asic", "--vram", "--json")))
    tool = "amd-smi"
    if not rows:
        rows = parse_rocm_smi(probe.run(("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--json")))
        tool = "rocm-smi"
    if not rows:
        return None, []
    notes: list[str] = []
    (name, size), count = Counter(rows).most_common(1)[0]
    if count < len(rows):
        notes.append(f"devices differ: the {count} x {name} are planned for")
    device = match_device(name)
    if device is None:
        like = match_device("MI210")
        assert like is not None
        notes.append(f"{name} is not in the atlas: peaks and bandwidth of the {like.name} are taken")
        device = replace(like, name=name.replace(" ", "-"), source=f"not in the atlas; figures of {like.name}", note="")
    wide, seen = network_link(probe, count)
    if count > 1:
        notes.append(f"links between devices are not read: {device.intra.name} is assumed")
    notes.append(f"link between nodes: {seen}")
    if device.note:
        notes.append(f"{device.name}: {device.note}")
    agrees = abs(size - device.memory_bytes) <= 0.02 * size
    device = replace(
        device,
        memory_bytes=device.memory_bytes if agrees else size,
        memory_basis="detected",
        memory_source=f"{tool}: {size >> 20} MiB"
        + (f"; usable by the atlas: {device.memory_source}" if agrees else ""),
    )
    inter = wide or find_link(device.default_inter)
    return Cluster(
        1, count, device, device.intra, inter, wide is None, device.intra.switched, detected=True, notes=tuple(notes)
    ), []
