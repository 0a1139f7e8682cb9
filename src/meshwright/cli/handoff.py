"""``meshwright run serve --engine vllm``: the planned point, started for real and held against the plan."""

from __future__ import annotations

import shlex
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from meshwright.cli.parse import in_range, one_of, seconds
from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.plan.plan import Plan

#: Signals that end us as Ctrl-C does: an engine has a session of its own, and would outlive us.
ENDS = (signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user says of an engine that is started.

    Attributes:
        model, on, layout, engine: of the plan. isl, osl, max_len: lengths it is made for.
        deployment: how several nodes are started. program: instead of the engine's own. flags: behind its planned ones.
        host, port: of the server. log: file of what it prints, None: a temporary one. ready: longest wait for health.
        once: end it when it is.
    """

    model: str
    on: str
    layout: str | None
    engine: str
    isl: int
    osl: int
    max_len: int | None
    deployment: str | None
    program: str | None
    flags: tuple[str, ...]
    host: str
    port: int
    log: Path | None
    ready: str
    once: bool


def hand_off(asked: Asked) -> None:
    """Plan, start, wait, compare, and end it with us.

    Raises:
        InputError: the plan or its program cannot be started. EngineFailed: it ended or was not healthy in time.
    """
    from meshwright.judge.handoff import Running, free_port, start_of

    ready_s = seconds(asked.ready, "--ready-timeout")
    in_range(asked.port, "--port", 0, 65535)
    plan = _planned(asked)
    words = shlex.split(asked.program) if asked.program else []
    more = [word for flag in asked.flags for word in shlex.split(flag)]
    start = start_of(plan.commands, words, more, asked.port or free_port(), asked.host)
    for command in start.others:
        where = "every node" if command.node is None else f"node {command.node}"
        typer.echo(f"first, or on {where} ({command.purpose}): {command.text}")
    log = asked.log or Path(tempfile.mkdtemp(prefix="meshwright-serve-")) / "boot.log"
    if asked.host not in {"127.0.0.1", "localhost", "::1"}:
        typer.echo(f"unwise: {asked.host} may be reached from other machines; give a key with --flag", err=True)
    typer.echo(f"starting: {shlex.join(start.words)}\nlog: {log}")
    before = {number: signal.signal(number, signal.default_int_handler) for number in ENDS}
    running = Running(start, log)
    try:
        took = running.wait_healthy(ready_s, lambda line: typer.echo(line, err=True))
        typer.echo(f"healthy after {took:.0f} s: serving at {running.url}/v1 (Ctrl-C ends it)")
        _compare(plan, log)
        if not asked.once:
            code = running.wait()
            raise typer.Exit(1 if code else 0)
    except KeyboardInterrupt:
        typer.echo("ending it", err=True)
    finally:
        running.stop()
        for number, handler in before.items():
            signal.signal(number, handler)


def _planned(asked: Asked) -> Plan:
    """The plan with the commands that were asked for.

    Raises:
        Exit: it does not work; it was shown.
    """
    from dataclasses import replace

    from meshwright.api import emit, plan_serve
    from meshwright.cli.plan import DEPLOYMENTS
    from meshwright.report import terminal
    from meshwright.specs.workload import Serve

    workload = Serve(isl=asked.isl, osl=asked.osl, max_model_len=asked.max_len)
    plan = plan_serve(asked.model, asked.on, workload, layout=asked.layout, engine=asked.engine)
    if not plan.ok:
        terminal.show_plan(plan)
        raise typer.Exit(1)
    if asked.deployment is not None:
        one_of(asked.deployment, "--deployment", DEPLOYMENTS)
        plan = replace(plan, commands=emit(plan, deployment=asked.deployment).commands)  # type: ignore[arg-type]
    typer.echo(plan.verdict)
    return plan


def _compare(plan: Plan, log: Path) -> None:
    """Predicted against printed."""
    from meshwright import engines
    from meshwright.judge.boot import compare, lines_of
    from meshwright.report.as_json import plan_json
    from meshwright.report.verdict import show_log

    found = engines.load(engines.split_name(plan.engine)[0]).read_log(lines_of(log))
    if found is None:
        typer.echo(f"{log}: nothing in it is a boot log of {plan.engine}; it is not compared")
    else:
        show_log(found, compare(found, plan_json(plan)))


def refuse_own(asked: dict[str, object]) -> None:
    """Flags of our own engine beside another one.

    Raises:
        InputError: with those that were given.
    """
    given = [flag for flag, value in asked.items() if value]
    if given:
        raise InputError(f"{', '.join(given)} belong to our own engine; leave them out with --engine, or use --flag")
