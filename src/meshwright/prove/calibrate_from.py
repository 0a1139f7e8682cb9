"""A cluster calibrated from what was measured before: nccl-tests output, ledgers, profiler traces, boot logs.

Their transfers become the curves of the link inside a node or between nodes, by where their ranks lie. A ledger with
products and memory traffic (``calibrate --ledger``) gives rates and efficiencies as well. Of an engine's boot log the
machine's own part counts: the memory of a device as the driver reports it, and what lies outside torch (context and
communicators) for the degrees of that start. Weights, activations and graphs belong to the model (``check --save``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from meshwright import engines
from meshwright.engines.base import BootLog
from meshwright.errors import InputError
from meshwright.judge.boot import MAX_LINE, printed_bytes
from meshwright.ledger import nccl_tests
from meshwright.ledger.calibrate import COPY, Calibration, Transfer, fit, transfers_of
from meshwright.ledger.schema import Entry, Ledger
from meshwright.ledger.store import read as read_ledger
from meshwright.plan.machine_file import measured_cluster
from meshwright.prove.calibrate import Measured
from meshwright.specs.atlas.devices import match_device
from meshwright.specs.cluster import Cluster, MeasuredBoot, make_cluster, parse_cluster
from meshwright.specs.layout import Layout
from meshwright.specs.units import GIB

#: Largest text that is read, and most files of a folder.
MAX_BYTES, MAX_FILES = 64 << 20, 4096


def calibrate_from(sources: Sequence[Path], on: str | None = None) -> Measured:
    """Read measurements and make the cluster that they are of.

    Args:
        sources: files or folders. on: the cluster; None: as the headers of nccl-tests tell it.

    Raises:
        InputError: nothing measured in them, or a cluster that neither ``on`` nor a header tells.
    """
    found = [item for source in sources for item in _read(source)]
    ledgers, logs = [x for x in found if isinstance(x, Ledger)], [x for x in found if isinstance(x, BootLog)]
    entries = [e for ledger in ledgers for e in ledger.entries]
    cluster = parse_cluster(on) if on else _told(ledgers, sources)
    inside, across = _transfers(ledgers, cluster)
    cluster = _booted(cluster, logs)
    if not inside and not across and not any(e.op == COPY for e in entries) and not cluster.device.booted:
        raise InputError(f"{sources[0]}: no collective with bytes and a time in it; nothing to calibrate with")
    whole = Ledger(entries, meta={k: v for ledger in ledgers for k, v in ledger.meta.items()})
    if any(e.op == COPY for e in entries):
        c = replace(fit(whole), transfers=inside)
    else:
        machine = whole.meta.get("machine") or ", ".join(sorted({f"boot log of {log.engine}" for log in logs}))
        c = Calibration(machine, cluster.devices, {}, 1.0, transfers=inside)
    remark = f"made by `meshwright calibrate --from`: {', '.join(p.name[:60] for p in sources)}"
    return Measured(measured_cluster(cluster, c, across), c, whole, (remark,))


def _read(source: Path) -> Iterator[Ledger | BootLog]:
    """What a file or a folder holds: nccl-tests output, our own ledgers, boot logs, else profiler traces."""
    if source.suffix == ".jsonl" or (source.is_dir() and any(source.glob("entries.parquet"))):
        yield read_ledger(source)
        return
    files = sorted(p for p in source.iterdir() if p.is_file())[:MAX_FILES] if source.is_dir() else [source]
    texts = [(file, _text(file)) for file in files]
    known = [(file, text) for file, text in texts if text is not None and nccl_tests.looks_so(text)]
    for file, text in known:
        yield nccl_tests.read(text, file.name)
    logs = [log for file, text in texts if (file, text) not in known and (log := _boot_log(text)) is not None]
    yield from logs
    if not known and not logs:
        yield of_traces(source)


def _boot_log(text: str | None) -> BootLog | None:
    """The boot log of an engine that serves, if a text is one that tells of memory."""
    for name in ("vllm", "sglang") if text is not None and not text.lstrip().startswith(("{", "[{")) else ():
        log = engines.load(name).read_log(line[:MAX_LINE] for line in (text or "").splitlines())
        if log is not None and log.holdings:
            return log
    return None


def _booted(cluster: Cluster, logs: Sequence[BootLog]) -> Cluster:
    """The cluster with what boot logs tell of its devices; of equal starts the one with most."""
    device, rows = cluster.device, dict[tuple[str, int, int], int]()
    for log in logs:
        layout, outside = log.layout or Layout(), printed_bytes(log, "non_torch")
        if log.device_bytes is not None:
            if not 0.5 < log.device_bytes / device.memory_bytes < 2:
                raise InputError(
                    f"the boot log of {log.engine} is of a device with {log.device_bytes / GIB:.1f} GiB, a "
                    f"{device.name} has {device.memory_bytes / GIB:.1f} GiB; name the cluster that it ran on with --on"
                )
            device = replace(device, memory_bytes=log.device_bytes, memory_basis="driver", memory_source="a boot log")
        if outside:
            key = log.engine, layout.tp, layout.pp
            rows[key] = max(rows.get(key, 0), outside)
    booted = tuple(MeasuredBoot(*key, size) for key, size in sorted(rows.items()))
    return replace(cluster, device=replace(device, booted=booted or device.booted))


def _text(file: Path) -> str | None:
    """The text of a file; None where it is none or too large.

    Raises:
        InputError: it cannot be read.
    """
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from None
    if len(data) > MAX_BYTES or b"\0" in data[:4096]:
        return None
    return data.decode("utf-8", errors="replace")


def of_traces(source: Path) -> Ledger:
    """The true transfers of profiler traces: what the last rank to arrive spends in each collective.

    Raises:
        InputError: no trace of two ranks or more.
    """
    from meshwright.doctor.readers.walk import read_incident
    from meshwright.doctor.slow_view import view_of

    view = view_of(read_incident(source))
    times: dict[tuple[str, tuple[int, ...], int], list[int]] = {}
    for meeting in view.meetings:
        if meeting.payload_bytes and meeting.transfer_ns > 0:
            times.setdefault((meeting.op, meeting.ranks, meeting.payload_bytes), []).append(meeting.transfer_ns)
    if not times:
        raise InputError(
            f"{source}: neither nccl-tests output nor a ledger nor traces with collectives and their bytes"
        )
    hosts = {t.rank: t.host for t in view.tracks}
    nodes = len({host for host in hosts.values() if host})
    entries, meta = [], {"machine": f"traces of {len(view.ranks)} ranks", "ranks": str(view.world)}
    meta |= {"nodes": str(max(1, nodes)), "device": next((t.device for t in view.tracks if t.device), "")}
    for (op, ranks, payload), took in times.items():
        spread = max(1, len({hosts[r] for r in ranks if hosts[r]}))
        group = f"{len(ranks)}x{spread}"
        meta[f"group.{group}"] = str(len(ranks))
        entry = Entry("", op, stream=group, group=group, payload_bytes=payload, source="import", state="completed")
        entry.started_ns, entry.ended_ns = 0, round(median(took))
        entries.append(entry)
    return Ledger(entries, meta=meta)


def _told(ledgers: Sequence[Ledger], sources: Sequence[Path]) -> Cluster:
    """The cluster of the largest run whose header names its devices."""
    best = max(ledgers, key=lambda ledger: int(ledger.meta.get("ranks", "1") or 1), default=Ledger())
    name = best.meta.get("device", "")
    device = match_device(name) or match_device(name.removeprefix("NVIDIA "))
    if device is None:
        known = f"{name[:60]!r} is not in the atlas" if name else "no line names the devices"
        raise InputError(f"{sources[0]}: {known}; name the cluster: --on 4x8xH100@ib-400g, or a cluster file")
    ranks, nodes = int(best.meta["ranks"]), int(best.meta.get("nodes", "1"))
    return make_cluster(nodes, max(1, ranks // nodes), device)


def _transfers(ledgers: Sequence[Ledger], cluster: Cluster) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
    """Curves inside a node and between nodes: of groups that the header lays over nodes, or larger than a node."""
    meta = {k: v for ledger in ledgers for k, v in ledger.meta.items()}
    groups: dict[bool, list[Entry]] = {False: [], True: []}
    for e in (e for ledger in ledgers for e in ledger.entries):
        if e.group is not None and e.payload_bytes:
            ranks = int(meta.get(f"group.{e.group}", "2"))
            spans = e.group.partition("x")[2] not in {"", "1"}
            groups[spans or ranks > cluster.devices_per_node].append(e)
    inside, across = (transfers_of(Ledger(groups[spans], meta=meta)) for spans in (False, True))
    return inside, across
