"""``meshwright doctor``: why does it hang?"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import typer

from meshwright.errors import InputError

_PATH = typer.Argument(None, help="A folder, file or archive of anything: dumps, logs, stacks, NCCL output.")
_HTML = typer.Option(None, "--html", help="Write one offline page with the calls of all ranks as a picture.")
_PERFETTO = typer.Option(None, "--perfetto", help="Write the recorded calls as a trace that Perfetto opens.")


def doctor(
    path: Path | None = _PATH,
    as_json: bool = typer.Option(False, "--json", help="Everything, as JSON."),
    html: Path | None = _HTML,
    perfetto: Path | None = _PERFETTO,
    redact: bool = typer.Option(False, "--redact", help="Take tokens, keys, hosts and paths out of what is written."),
    how: bool = typer.Option(False, "--how", help="What to set before the next run."),
) -> None:
    """Read what a hanging job left and say who is to blame, and where. Exit 0: healthy, 1: a finding, 2: bad input."""
    if how:
        from meshwright.doctor.how import as_text

        typer.echo(as_text())
        return
    if path is None:
        raise InputError("doctor needs what the job left: meshwright doctor FOLDER (or --how: what to set beforehand)")
    from meshwright.doctor.hang import diagnose
    from meshwright.doctor.readers.walk import read_incident

    incident = read_incident(path, _Progress())
    findings = diagnose(incident)
    if redact:
        from meshwright.doctor import redact as redaction

        findings = [redaction.redacted(f) for f in findings]
        incident.lacks = [redaction.redact(line) for line in incident.lacks]
    if html is not None:
        from meshwright.report.doctor_page import page

        _write(html, page(findings, incident))
    if perfetto is not None:
        from meshwright.report.doctor_trace import trace

        _write(perfetto, json.dumps(trace(incident, findings)))
    if as_json:
        from meshwright.report.doctor import as_json as plain

        typer.echo(json.dumps(plain(findings, incident), indent=2))
    else:
        from meshwright.report.doctor import as_text as text
        from meshwright.report.terminal import console

        console().print(text(findings, incident))
    raise typer.Exit(0 if findings[0].kind == "healthy" else 1)


def _write(path: Path, content: str) -> None:
    try:
        path.write_text(content)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None


class _Progress:
    """A line on the standard error while reading takes long, on a terminal only."""

    EVERY_S = 0.5

    def __init__(self) -> None:
        self.last = time.monotonic()

    def __call__(self, read: int, files: int, name: str) -> None:
        now = time.monotonic()
        if sys.stderr.isatty() and now - self.last > self.EVERY_S:
            self.last = now
            sys.stderr.write(f"\r{files:,} files, {read / 1e6:,.0f} MB read: {name[-60:]:60}")
            sys.stderr.flush()
