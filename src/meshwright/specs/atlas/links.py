"""Links by name: the table ``links.json``, and the custom form ``500GB/s`` or ``400Gb/s/node``.

Bandwidth is what one device sends in one direction at line rate (PCIe: the usable part), unless ``/node`` says
that all devices of a node share it. How much of it a collective reaches is the time model's business.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal

from meshwright.errors import InputError
from meshwright.specs.cluster import Link

#: Latency of a link that is given only by its bandwidth: NCCL's tuner for a network hop (tuning.cc, NET, LL).
CUSTOM_LATENCY_S = 5e-6

_UNITS = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_RATE = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*([KMGT]i?)(B/s|Bps|b/s|bps|bit/s)")


@cache
def _table() -> tuple[dict[str, Link], dict[str, str]]:
    raw: dict[str, Any] = json.loads(Path(__file__).with_name("links.json").read_text("utf-8"))
    links: dict[str, Link] = {}
    names: dict[str, str] = {}
    for name, row in raw["links"].items():
        links[name] = Link(
            name=name,
            kind=row["kind"],
            bandwidth_bytes_s=row["bandwidth_gb_s"] * 1e9,
            latency_s=row["latency_us"] / 1e6,
            per=row["per"],
            source=row["source"],
            switched=row.get("switched", True),
            max_devices=row.get("max_devices"),
        )
        names.update(dict.fromkeys((_key(name), *(_key(a) for a in row.get("aliases", ()))), name))
    return links, names


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def link_names() -> tuple[str, ...]:
    """Names of the atlas, in its order."""
    return tuple(_table()[0])


def parse_rate(text: str) -> float:
    """Bytes a second of ``500GB/s``, ``400Gb/s``, ``100Gbps`` (B: bytes, b: bits).

    Raises:
        InputError: not a number with such a unit, or not a positive one.
    """
    match = _RATE.fullmatch(text.strip())
    rate = float(match[1]) * _UNITS[match[2]] / (1 if match[3].startswith("B") else 8) if match else 0.0
    if not 1e3 <= rate <= 1e15:
        raise InputError(f"bandwidth: {text[:30]!r} is not a rate such as 300GB/s (bytes) or 400Gb/s (bits)")
    return rate


def find_link(text: str) -> Link:
    """The link of a name (``ib-400g``), an alias (``ndr``) or a custom rate (``500GB/s``).

    ``/node`` behind it: one adapter shared by the devices of a node; ``/device``: one for each device.

    Raises:
        InputError: no such link, with near names.
    """
    text = text.strip()
    base, _, scope = text.rpartition("/")
    if scope.lower() not in {"node", "device"}:
        base, scope = text, ""
    base = base.strip()
    links, names = _table()
    if (name := names.get(_key(base))) is not None:
        link = links[name]
    elif _RATE.fullmatch(base):
        link = Link(base, "infiniband", parse_rate(base), CUSTOM_LATENCY_S, source="the user; latency assumed 5 us")
    else:
        near = get_close_matches(_key(base), names, n=6, cutoff=0.6)
        hint = (
            ", ".join(dict.fromkeys(names[k] for k in near)) or "ib-400g, roce-400g, eth-100g, efa-3200g, nvlink-nvl72"
        )
        raise InputError(
            f"unknown link {text[:40]!r}; near: {hint}; or a rate such as 50GB/s or 400Gb/s/node "
            "(all: meshwright plan --devices)"
        )
    if scope:
        per: Literal["device", "node"] = "node" if scope.lower() == "node" else "device"
        if per != link.per:
            link = replace(link, name=f"{link.name}/{per}", per=per)
    return link
