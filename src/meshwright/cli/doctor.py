"""``meshwright doctor``: why does it hang, why is it slow?"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from meshwright.cli.parse import need_torch, seconds
from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.doctor.against import Against
    from meshwright.doctor.findings import Finding
    from meshwright.doctor.incident import Incident

_PATH = typer.Argument(
    None, help="A folder, file or archive of anything: dumps, logs, stacks, NCCL output, profiler traces."
)
_HTML = typer.Option(None, "--html", help="Write one offline page with the calls of all ranks as a picture.")
_PERFETTO = typer.Option(None, "--perfetto", help="Write the recorded calls as a trace that Perfetto opens.")
_REPRODUCE = typer.Option(None, "--reproduce", help="Write a program of two ranks that fails alike, and run it once.")
_AGAINST = typer.Option(None, "--against", help="A plan (plan train --json): where the step differs from it.")


def doctor(
    path: Path | None = _PATH,
    as_json: bool = typer.Option(False, "--json", help="Everything, as JSON."),
    html: Path | None = _HTML,
    perfetto: Path | None = _PERFETTO,
    reproduce: Path | None = _REPRODUCE,
    against: Path | None = _AGAINST,
    redact: bool = typer.Option(False, "--redact", help="Take tokens, keys, hosts and paths out of what is written."),
    how: bool = typer.Option(False, "--how", help="What to set before the next run."),
    ladder: bool = typer.Option(
        False, "--ladder", help="Climb from two ranks and one element upwards, on this machine."
    ),
    backend: str = typer.Option("gloo", "--backend", help="Of the ladder: gloo (CPU), nccl (a device a rank)."),
    world: int = typer.Option(2, "--world", help="Ranks of the ladder."),
    timeout: str = typer.Option("120s", "--timeout", help="Bound on the ladder."),
) -> None:
    """Read what a hanging or slow job left and say who is to blame, and where. Exit 0: healthy, 1: a finding."""
    if how:
        from meshwright.doctor.how import as_text

        typer.echo(as_text())
        return
    if ladder:
        _ladder(world, backend, seconds(timeout, "--timeout"), as_json)
    if path is None:
        raise InputError("doctor needs what the job left: meshwright doctor FOLDER (or --how: what to set beforehand)")
    from meshwright.doctor.judge import judge
    from meshwright.doctor.peak import peaks_of
    from meshwright.doctor.readers.walk import read_incident

    if path.is_dir() and not any(name for _, _, names in os.walk(path) for name in names):
        raise InputError(f"{str(path)[:200]}: no file in it; the doctor needs dumps, logs or stacks of the job")
    plan = _plan(against) if against is not None else None
    incident = read_incident(path, _Progress())
    incident.peaks = peaks_of(plan) if plan is not None else None
    findings = judge(incident)
    planned = _planned(plan, incident) if plan is not None else None
    if redact:
        from meshwright.doctor import redact as redaction

        hosts = redaction.hosts_of(incident)
        findings = [redaction.redacted(f, hosts) for f in findings]
        redaction.redact_incident(incident, hosts)
    if html is not None:
        from meshwright.report.doctor_page import page

        _write(html, page(findings, incident, planned))
    if perfetto is not None:
        from meshwright.report.doctor_trace import trace

        _write(perfetto, json.dumps(trace(incident, findings, planned)))
    shown = _reproduced(findings[0], incident, reproduce) if reproduce is not None else None
    if as_json:
        from meshwright.report.doctor import as_json as plain

        typer.echo(json.dumps({**plain(findings, incident, planned), "reproduction": shown}, indent=2))
    else:
        from meshwright.report.doctor import as_text as text
        from meshwright.report.terminal import console

        console().print(text(findings, incident, planned))
        if shown is not None:
            typer.echo(f"\nReproduction: {shown['says']} ({shown['program']})")
    raise typer.Exit(0 if findings[0].kind == "healthy" else 1)


def _plan(path: Path) -> dict[str, Any]:
    from meshwright.doctor.against import read_plan

    return read_plan(path)


def _planned(plan: dict[str, Any], incident: Incident) -> Against:
    from meshwright.doctor.against import compare

    return compare(incident, plan)


def _ladder(world: int, backend: str, limit_s: float, as_json: bool) -> NoReturn:
    """Climb, show, and leave with the exit code."""

    need_torch()
    from meshwright.doctor.climb import climb
    from meshwright.report.ladder import as_json as plain
    from meshwright.report.ladder import as_text as text
    from meshwright.report.terminal import console

    climbed = climb(world, backend, timeout_s=limit_s, say=lambda line: typer.echo(f"... {line}", err=True))
    if as_json:
        typer.echo(json.dumps(plain(climbed), indent=2))
    else:
        console().print(text(climbed))
    raise typer.Exit(0 if climbed.passed else 1)


def _reproduced(finding: Finding, incident: Incident, path: Path) -> dict[str, Any]:
    """Write the program, run it once, say what became of it."""
    from meshwright.doctor.reproduce import build, render
    from meshwright.doctor.rerun import rerun

    program = build(finding, incident)
    _write(path, render(program))
    need_torch()
    outcome = rerun(path, program)
    return {"program": str(path), "same": outcome.same, "stopped": list(outcome.stopped), "says": outcome.says}


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
