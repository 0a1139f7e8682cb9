"""A calibration in the terminal and as JSON: verdict, rates, transfers with the goodness of their fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.markup import escape

from meshwright.ledger.calibrate import Calibration, Transfer
from meshwright.ledger.calibration_file import as_dict
from meshwright.plan.machine_file import wire_share
from meshwright.report.terminal import console, table
from meshwright.specs.cluster import Cluster, Link
from meshwright.specs.units import GIB, binary


def verdict(cluster: Cluster, c: Calibration) -> str:
    """One line: what was measured, and how well it fits."""
    links = [link for link in (cluster.intra, cluster.inter) if link.measured]
    rows = sum(len(m.knots) for link in links for m in link.measured)
    parts = []
    if c.flops_s:
        shapes = len(c.work)
        parts.append(f"{shapes} shapes of work" + _off(c.error))
    if links or not cluster.device.booted:
        parts.append(f"{rows} points of {sum(len(link.measured) for link in links)} transfers")
    if cluster.device.booted:
        count = len(cluster.device.booted)
        parts.append(f"memory outside torch of {count} start{'s' * (count > 1)}")
    return f"calibrated: {cluster} ({c.machine}), {', '.join(parts)}"


def _off(error: object) -> str:
    values = dict(error) if isinstance(error, dict) else {}
    said = ", ".join(f"{op} {value:.0%}" for op, value in sorted(values.items()))
    return f" (a shape left out is off by {said} in the median)" if said else ""


def show(cluster: Cluster, c: Calibration, out: Path | None) -> None:
    """Verdict, one table of rates and one of transfers, what to type next."""
    page = console()
    page.print(escape(verdict(cluster, c)), style="bold green", soft_wrap=True)
    if c.flops_s:
        rates = table("rate", "best", "share in the median")
        for dtype, flops in c.flops_s.items():
            for m in cluster.device.measured:
                if m.dtype == dtype and m.work != "passes":
                    what = "products" if m.work == "dense" else m.work
                    share = f"{m.compute:.0%} of it, {m.memory:.0%} of memory"
                    rates.add_row(f"{what} {dtype}", f"{flops / 1e9:,.1f} GFLOP/s", share)
        rates.add_row("memory of one rank", f"{c.bandwidth_bytes_s / 1e9:,.1f} GB/s", "")
        if c.light_bytes_s:
            rates.add_row("between products", f"{c.light_bytes_s / 1e9:,.1f} GB/s", "")
        for what, value in (("launch", c.launch_s), ("layer", c.layer_s), ("pass", c.pass_s), ("message", c.message_s)):
            rates.add_row(f"driver: a {what}", f"{value * 1e6:,.1f} us", "")
        if c.serve_s or c.sequence_s:
            rates.add_row("server: a step", f"{c.serve_s * 1e6:,.1f} us", "")
            rates.add_row("server: a request in it", f"{c.sequence_s * 1e6:,.1f} us", "")
        page.print(rates)
    if cluster.device.booted:
        page.print(_boots(cluster))
    for name, link in (("inside a node", cluster.intra), ("between nodes", cluster.inter)):
        if link.measured:
            page.print(_transfers(name, link))
    if out is not None:
        page.print(escape(f"written: {out}; next: meshwright plan serve MODEL --on {out}"), soft_wrap=True)


def _boots(cluster: Cluster) -> Any:
    rows = table("start", "tp", "pp", "outside torch, a rank", "memory of a device")
    for b in cluster.device.booted:
        sizes = (f"{b.outside_bytes / GIB:.2f} GiB", f"{cluster.device.memory_bytes / GIB:.2f} GiB")
        rows.add_row(b.engine, str(b.tp), str(b.pp), *sizes)
    return rows


def _transfers(name: str, link: Link) -> Any:
    rows = table(f"{name} ({link.name})", "ranks", "sizes", "latency", "bandwidth", "on the wire", "line is off by")
    for m in link.measured:
        t = Transfer(*m)
        share = 1.0 if t.op == "send" else wire_share(t.op, t.ranks)
        sizes = f"{binary(t.knots[0][0])} to {binary(t.knots[-1][0])}"
        rate = t.bandwidth_bytes_s / 1e9
        cells = (f"{t.latency_s * 1e6:,.1f} us", f"{rate:,.2f} GB/s", f"{rate * share:,.2f} GB/s", f"{t.error:.0%}")
        rows.add_row(t.op, str(t.ranks), sizes, *cells)
    return rows


def as_json(cluster: Cluster, c: Calibration) -> dict[str, Any]:
    """Plain values."""
    links = {"intra": cluster.intra, "inter": cluster.inter}
    return {
        "verdict": verdict(cluster, c),
        "cluster": str(cluster),
        "device": {
            "name": cluster.device.name,
            "measured": [m._asdict() for m in cluster.device.measured],
            "memory_bytes": cluster.device.memory_bytes,
            "booted": [b._asdict() for b in cluster.device.booted],
        },
        "links": {name: [m._asdict() for m in link.measured] for name, link in links.items() if link.measured},
        "calibration": as_dict(c),
    }
