"""``plan --models`` and ``plan --devices``: what is known by name, each with its source."""

from __future__ import annotations

import json

from rich.markup import escape

from meshwright.report.terminal import console, table
from meshwright.specs.atlas import devices, models


def show_models(as_json: bool = False) -> None:
    """List the models of the atlas with the names that find them."""
    rows = [{"name": name, "aliases": list(models.aliases(name))} for name in models.names()]
    if as_json:
        print(json.dumps({"models": rows}, indent=2))
        return
    out = console()
    made = table(f"{len(rows)} models", "also found as")
    made.columns[1].justify = "left"
    made.columns[1].no_wrap = False
    for row in rows:
        made.add_row(escape(str(row["name"])), escape(", ".join(row["aliases"])))
    out.print(made)


def show_devices(as_json: bool = False) -> None:
    """List devices and links."""
    rows, links = devices.device_rows(), devices.link_rows()
    if as_json:
        print(json.dumps({"devices": rows, "links": links}, indent=2))
        return
    out = console()
    made = table(f"{len(rows)} devices", "memory", "bandwidth", "dense TFLOP/s", "node", "between nodes")
    for column in made.columns[3:]:
        column.justify = "left"
        column.no_wrap = False
    for row in rows:
        made.add_row(*(escape(row[key]) for key in ("name", "memory", "bandwidth", "peaks", "node", "inter")))
    out.print(made)
    out.print("memory: as the driver reports it; ~ marks a nominal figure less a typical reserve", style="dim")
    out.print()
    made = table(f"{len(links)} links", "kind", "bandwidth", "latency")
    made.columns[2].justify = "left"
    for row in links:
        made.add_row(*(escape(row[key]) for key in ("name", "kind", "bandwidth", "latency")))
    out.print(made)
    out.print("sources: meshwright plan --devices --json", style="dim")
