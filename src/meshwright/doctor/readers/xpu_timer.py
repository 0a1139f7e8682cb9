"""Prometheus text of xpu_timer (dlrover) and of NCCL's Inspector: what each rank's watcher last measured.

``XPU_TIMER_COMMON_HANG`` is 1 where the watcher saw no kernel of the rank finish for its time-out. On a hang it is
often 1 on all ranks, the innocent ones included: it tells that ranks hang, and who causes it only where few do not.
"""

from __future__ import annotations

import re
from typing import BinaryIO

from meshwright.doctor.incident import Incident
from meshwright.doctor.readers import Source
from meshwright.errors import InputError

NAME = "metrics"

_HEAD = re.compile(rb"(?:^|\n)# (?:TYPE|HELP) \w{1,200} |(?:^|\n)(?:XPU_TIMER_|nccl_)\w{1,100}\{")
_SAMPLE = re.compile(
    r"(?P<name>[A-Za-z_:][\w:]{0,120})\{(?P<labels>[^}]{0,4000})\} (?P<value>\S{1,40})(?: (?P<ms>\d{10,16}))?\s*$"
)
_LABEL = re.compile(r'(\w{1,60})="((?:[^"\\]|\\.){0,200})"')
_WANTED = ("XPU_TIMER_", "nccl_")
#: Samples kept of a file besides those of hangs, of which all are.
MAX_SAMPLES = 20_000


def sniff(head: bytes, name: str) -> bool:
    """Whether it is Prometheus text."""
    return head[:1] != b"{" and _HEAD.search(head) is not None


def read(source: Source, incident: Incident) -> None:
    """Note one ``metric`` fact a sample of the two tools; others are not about ranks.

    Raises:
        InputError: the stream is broken.
    """
    try:
        with source.open() as stream:
            _samples(stream, source.name, incident)
    except (OSError, EOFError) as error:
        raise InputError(f"{source.name}: cannot be read to its end ({error})") from None


def _samples(stream: BinaryIO, name: str, incident: Incident) -> None:
    number = kept = dropped = 0
    while raw := stream.readline(8192):
        number += 1
        text = raw.decode("utf-8", "replace").strip()
        match = _SAMPLE.match(text) if text.startswith(_WANTED) else None
        value = _number(match["value"]) if match else None
        if match is None or value is None:
            continue
        labels = dict(_LABEL.findall(match["labels"]))
        rank = int(labels["rank"]) if labels.get("rank", "").isdecimal() and len(labels["rank"]) < 8 else None
        data: dict[str, object] = {"name": match["name"], "value": value, "labels": labels}
        if match["name"] == "XPU_TIMER_COMMON_HANG":
            data["hung"] = value > 0
        elif kept >= MAX_SAMPLES:
            dropped += 1
            continue
        at = int(match["ms"]) / 1000 if match["ms"] else None
        text = f"{match['name']} {match['value']}" + (f" on rank {rank}" if rank is not None else "")
        incident.add_fact("metric", text, f"{name}:{number}", rank, at, data)
        kept += 1
    if dropped:
        incident.lack(f"{name}: {dropped} samples are left out, none of them about a hang")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
