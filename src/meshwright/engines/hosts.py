"""Host lists of launchers: DeepSpeed's host file with its filters, and ``mpirun -H``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwright.engines.base import FileReader
from meshwright.engines.flagwords import Words, shown, whole_number
from meshwright.errors import InputError
from meshwright.specs.checks import broken
from meshwright.specs.rules import Rule

_LINE = re.compile(r"^(\S+)\s+slots=(\d+)")
_WHERE = "DeepSpeed launcher/runner.py"
#: Where the launcher looks without ``--hostfile``.
DEFAULT_FILE = "/job/hostfile"
MAX_HOSTS = 1 << 17


@dataclass(frozen=True, slots=True)
class Hosts:
    """What a launcher's flags say about machines.

    Attributes:
        nodes, per_node, devices: as far as known; ``per_node`` of the first node where they differ.
        findings, notes: what is wrong, what was assumed.
    """

    nodes: int | None = None
    per_node: int | None = None
    devices: int | None = None
    findings: tuple[Rule, ...] = ()
    notes: tuple[str, ...] = ()

    @staticmethod
    def of_list(text: str | None) -> Hosts:
        """``a:8,b:8`` of ``mpirun -H``; slots default to 1."""
        if not text:
            return Hosts()
        slots = [
            int(s) if s.isdecimal() and len(s) < 9 else 1 for _, _, s in (h.partition(":") for h in text.split(","))
        ]
        return Hosts(len(slots), slots[0], sum(slots))


def read_hosts(data: bytes, name: str) -> dict[str, int]:
    """Slots of every host of a host file (``worker-0 slots=8``).

    Raises:
        InputError: a host twice, a line of another form, no host, or too many of them.
    """
    hosts: dict[str, int] = {}
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _LINE.match(text)
        if match is None or len(match[2]) > 6:
            raise InputError(f"{name[:80]} line {number}: {shown(text)} is not 'HOST slots=N'")
        if match[1] in hosts:
            raise InputError(f"{name[:80]} line {number}: host {shown(match[1])} is named twice")
        hosts[match[1]] = int(match[2])
        if len(hosts) > MAX_HOSTS:
            raise InputError(f"{name[:80]} names over {MAX_HOSTS} hosts")
    if not hosts:
        raise InputError(f"{name[:80]} names no host; write one 'HOST slots=N' a line")
    return hosts


def hosts_of(own: Words, read: FileReader | None) -> Hosts:
    """Machines of a ``deepspeed`` command.

    Raises:
        InputError: a host file that cannot be read, or a filter that names what is not there.
    """
    path = own.text("--hostfile")
    data = read(path) if read is not None and path and path != DEFAULT_FILE else None
    slots = read_hosts(data, path or "") if data is not None else None
    notes: tuple[str, ...] = ()
    if path and data is None:
        notes = (f"host file {shown(path)} is not here; nodes and devices are taken from the flags",)
    limits = own.whole("--num_nodes"), own.whole("--num_gpus")
    nodes, devices = (n if n is not None and n > 0 else None for n in limits)
    include, exclude = own.text("--include"), own.text("--exclude")
    findings = _exclusive(include, exclude, nodes, devices)
    if findings:
        return Hosts(nodes, devices, findings=findings, notes=notes)
    if slots is None and path is None and not include:
        return _alone(nodes, devices)
    if slots is None:
        return replace(_from_flags(include, nodes, devices), notes=notes)
    if include or exclude:
        slots = filtered(slots, include or "", exclude or "")
    if nodes is not None and nodes > len(slots):
        findings += (
            broken(
                "more_nodes_than_hosts",
                "illegal",
                f"--num_nodes {nodes}, the host file names {len(slots)} hosts",
                f"use at most {len(slots)}, or add hosts",
                _WHERE,
                nodes=nodes,
                hosts=len(slots),
            ),
        )
    counts = list(slots.values())[: nodes or len(slots)]
    findings += _too_many(counts, devices)
    counts = [devices or c for c in counts]
    return Hosts(len(counts), counts[0], sum(counts), findings, notes)


def _alone(nodes: int | None, devices: int | None) -> Hosts:
    """No host file: the launcher starts on the node it is typed on (unless ``/job/hostfile`` exists)."""
    note = f"no host file: only this node starts, unless {DEFAULT_FILE} names others"
    if nodes is None or nodes == 1:
        return Hosts(1, devices, notes=(note,))
    rule = broken(
        "nodes_without_hosts",
        "unwise",
        f"--num_nodes {nodes} without --hostfile: there are no other nodes unless {DEFAULT_FILE} names them",
        "name a host file, one 'HOST slots=N' a line",
        f"{_WHERE} main",
        nodes=nodes,
    )
    return Hosts(nodes, devices, findings=(rule,))


def _exclusive(include: str | None, exclude: str | None, nodes: int | None, devices: int | None) -> tuple[Rule, ...]:
    found = []
    if include and exclude:
        found.append(("--include and --exclude exclude each other", "keep one"))
    if (include or exclude) and (nodes is not None or devices is not None):
        found.append(("--num_nodes and --num_gpus exclude --include and --exclude", "name the devices one way"))
    return tuple(broken("launcher_flags_exclude", "illegal", what, way, _WHERE) for what, way in found)


def _too_many(counts: list[int], devices: int | None) -> tuple[Rule, ...]:
    least = min(counts)
    if devices is None or devices <= least:
        return ()
    return (
        broken(
            "more_devices_than_slots",
            "illegal",
            f"--num_gpus {devices}, the host file states {least} slots on a host",
            f"use --num_gpus {least}",
            _WHERE,
            devices=devices,
            slots=least,
        ),
    )


def _from_flags(include: str | None, nodes: int | None, devices: int | None) -> Hosts:
    if not include:
        return Hosts(nodes, devices)
    named = _filter(include)
    counts = [len(slots) for slots in named.values()]
    if not all(counts):
        return Hosts(len(named))
    return Hosts(len(named), counts[0], sum(counts))


def _filter(text: str) -> Mapping[str, tuple[int, ...]]:
    """``worker-0@worker-1:0,2`` -> slots by host, empty for all of it."""
    named: dict[str, tuple[int, ...]] = {}
    for part in text.split("@")[:MAX_HOSTS]:
        host, _, slots = part.partition(":")
        numbers = [whole_number(s) for s in slots.split(",")] if slots else []
        if not host or any(n is None for n in numbers):
            raise InputError(f"{shown(part)} is not HOST or HOST:SLOT,SLOT (DeepSpeed --include, --exclude)")
        named[host] = named.get(host, ()) + tuple(n for n in numbers if n is not None)
    return named


def filtered(slots: Mapping[str, int], include: str, exclude: str) -> dict[str, int]:
    """Slots left by host, in the order of the host file.

    Raises:
        InputError: a host or slot that the host file does not name, or nothing is left.
    """
    named = _filter(include or exclude)
    for host, wanted in named.items():
        if host not in slots:
            raise InputError(f"host {shown(host)} is not in the host file")
        beyond = [s for s in wanted if not 0 <= s < slots[host]]
        if beyond:
            raise InputError(f"slot {beyond[0]} of host {shown(host)}: the host file states {slots[host]} slots")
    if include:
        left = {h: len(set(named[h])) or slots[h] for h in slots if h in named}
    else:
        left = {h: n - (len(set(named[h])) or n if h in named else 0) for h, n in slots.items()}
    left = {h: n for h, n in left.items() if n}
    if not left:
        raise InputError("the filter leaves no device of the host file")
    return left
