"""A cluster calibrated from what was measured before: nccl-tests output, ledgers, profiler traces.

Their transfers become the curves of the link inside a node or between nodes, by where their ranks lie. A ledger with
products and memory traffic (``calibrate --ledger``) gives rates and efficiencies as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from meshwright.errors import InputError
from meshwright.ledger import nccl_tests
from meshwright.ledger.calibrate import COPY, Calibration, Transfer, fit, transfers_of
from meshwright.ledger.schema import Entry, Ledger
from meshwright.ledger.store import read as read_ledger
from meshwright.plan.machine_file import measured_cluster
from meshwright.prove.calibrate import Measured
from meshwright.specs.atlas.devices import match_device
from meshwright.specs.cluster import Cluster, make_cluster, parse_cluster

#: Largest text that is read, and most files of a folder.
MAX_BYTES, MAX_FILES = 64 << 20, 4096


def calibrate_from(sources: Sequence[Path], on: str | None = None) -> Measured:
    """Read measurements and make the cluster that they are of.

    Args:
        sources: files or folders. on: the cluster; None: as the headers of nccl-tests tell it.

    Raises:
        InputError: nothing measured in them, or a cluster that neither ``on`` nor a header tells.
    """
    ledgers = [ledger for source in sources for ledger in _read(source)]
    entries = [e for ledger in ledgers for e in ledger.entries]
    cluster = parse_cluster(on) if on else _told(ledgers, sources)
    inside, across = _transfers(ledgers, cluster)
    if not inside and not across and not any(e.op == COPY for e in entries):
        raise InputError(f"{sources[0]}: no collective with bytes and a time in it; nothing to calibrate with")
    whole = Ledger(entries, meta={k: v for ledger in ledgers for k, v in ledger.meta.items()})
    if any(e.op == COPY for e in entries):
        c = replace(fit(whole), transfers=inside)
    else:
        c = Calibration(whole.meta.get("machine") or "traces", cluster.devices, {}, 1.0, transfers=inside)
    remark = f"made by `meshwright calibrate --from`: {', '.join(p.name[:60] for p in sources)}"
    return Measured(measured_cluster(cluster, c, across), c, whole, (remark,))


def _read(source: Path) -> Iterator[Ledger]:
    """The ledgers of a file or a folder: nccl-tests output, our own ledgers, else profiler traces."""
    if source.suffix == ".jsonl" or (source.is_dir() and any(source.glob("entries.parquet"))):
        yield read_ledger(source)
        return
    files = sorted(p for p in source.iterdir() if p.is_file())[:MAX_FILES] if source.is_dir() else [source]
    texts = [(file, _text(file)) for file in files]
    known = [(file, text) for file, text in texts if text is not None and nccl_tests.looks_so(text)]
    for file, text in known:
        yield nccl_tests.read(text, file.name)
    if not known:
        yield of_traces(source)


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
    entries, meta = [], {"machine": f"traces of {len(view.ranks)} ranks", "ranks": str(view.world), "nodes": "1"}
    for (op, ranks, payload), took in times.items():
        group = f"{len(ranks)}x1"
        meta[f"group.{group}"] = str(len(ranks))
        entry = Entry("", op, stream=group, group=group, payload_bytes=payload, source="import", state="completed")
        entry.started_ns, entry.ended_ns = 0, round(median(took))
        entries.append(entry)
    return Ledger(entries, meta=meta)


def _told(ledgers: Sequence[Ledger], sources: Sequence[Path]) -> Cluster:
    """The cluster of the largest run whose header names its devices."""
    best = max(ledgers, key=lambda ledger: int(ledger.meta.get("ranks", "1") or 1))
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
