"""``meshwright check``: the command, configuration or boot log you already have, judged before it starts."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from meshwright.cli.parse import in_range, need_torch, seconds
from meshwright.errors import InputError

MAX_TOKENS = 1 << 24
MAX_PATH = 4096
#: A single word that ends like this is meant as a file.
SUFFIXES = {".json", ".yaml", ".yml", ".toml", ".log", ".txt", ".out", ".err"}

_WORDS = typer.Argument(
    None, help="A configuration file or boot log; or behind -- the command to judge.", metavar="[FILE] [-- COMMAND]"
)
_PLAN = typer.Option(None, "--plan", help="A plan written by plan --json, to hold a boot log against.")
_SAVE = typer.Option(None, "--save", help="Write what a boot log printed as a calibration.")


def check(
    words: list[str] = _WORDS,
    on: str = typer.Option("here", "--on", help="NODESxDEVICESxKIND@LINK, a TOML file, or 'here' (this machine)."),
    model: str | None = typer.Option(None, "--model", help="The model, where the command does not name it."),
    engine: str | None = typer.Option(None, "--engine", help="Whose command it is, with a version: vllm-0.26."),
    plan: Path | None = _PLAN,
    save: Path | None = _SAVE,
    isl: int | None = typer.Option(None, "--isl", help="Input tokens of a request."),
    osl: int | None = typer.Option(None, "--osl", help="Output tokens of a request."),
    concurrency: int | None = typer.Option(None, "--concurrency", help="Requests in flight."),
    world: int | None = typer.Option(None, "--world", help="Run the script of the command on so many ranks here."),
    steps: int | None = typer.Option(None, "--steps", help="With --world: optimizer steps to run; default: all."),
    timeout: str | None = typer.Option(None, "--timeout", help="With --world: bound on the run; default: 60s."),
    as_json: bool = typer.Option(False, "--json", help="Everything, as JSON with the keys of plan."),
) -> None:
    """Will this command, configuration or script start, fit and be wise? Without --world nothing pasted is run."""
    if not words:
        raise InputError("nothing to check; give a file, or a command behind --: meshwright check -- vllm serve MODEL")
    if world is not None:
        flags = ("--on", "--model", "--engine", "--plan", "--save", "--isl", "--osl", "--concurrency")
        values = (on != "here" or None, model, engine, plan, save, isl, osl, concurrency)
        others = [flag for flag, value in zip(flags, values, strict=True) if value is not None]
        _check_script(words, world, steps, timeout, others, as_json)
        return
    if steps is not None or timeout is not None:
        raise InputError("--steps and --timeout go with --world, which runs the script of the command")
    for value, flag in ((isl, "--isl"), (osl, "--osl"), (concurrency, "--concurrency")):
        if value is not None:
            in_range(value, flag, 1, MAX_TOKENS)
    if len(words) == 1 and _is_file(words[0]):
        lengths = {"isl": isl, "osl": osl, "concurrency": concurrency}
        _check_file(Path(words[0]), on, model, engine, plan, save, lengths, as_json)
        return
    if len(words) == 1:
        _refuse_other_files(words[0])
    if plan is not None or save is not None:
        raise InputError("--plan and --save go with a boot log, not with a command")
    from meshwright.judge.check import check_words
    from meshwright.specs.cluster import parse_cluster

    verdict = check_words(
        words, parse_cluster(on), model=model, engine=engine, isl=isl, osl=osl, concurrency=concurrency
    )
    _finish(verdict, as_json)


def _check_script(
    words: list[str], world: int, steps: int | None, timeout: str | None, others: list[str], as_json: bool
) -> None:
    """Run the script of a command for every rank in lockstep."""
    if others:
        raise InputError(f"{', '.join(others)} judge a command by its text; --world runs its script: give one of both")
    if steps is not None:
        in_range(steps, "--steps", 1, MAX_TOKENS)
    from meshwright.report.lockstep import show_outcome
    from meshwright.runtime.lockstep.outcome import as_json as outcome_json
    from meshwright.runtime.lockstep.run import check as run_script

    need_torch()
    outcome = run_script(words, world, timeout_s=seconds(timeout or "60s", "--timeout"), steps=steps)
    if as_json:
        typer.echo(json.dumps(outcome_json(outcome), indent=2))
    else:
        show_outcome(outcome)
    raise typer.Exit(outcome.code)


def _is_file(word: str) -> bool:
    """Whether a single word names a file; a whole command in quotes may be longer than any file name."""
    try:
        return Path(word).is_file()
    except (OSError, ValueError):
        return False


def _refuse_other_files(word: str) -> None:
    """One word that looks like a file and is none that can be read.

    Raises:
        InputError: a directory, a device, or nothing.
    """
    if len(word) > MAX_PATH or any(c.isspace() or not c.isprintable() for c in word):
        return
    path = Path(word)
    try:
        exists = path.exists()
    except OSError:
        return
    if exists:
        kind = "a directory" if path.is_dir() else "no regular file"
        raise InputError(f"{word} is {kind}; give a configuration file, a boot log, or a command behind --")
    if "/" in word or path.suffix in SUFFIXES:
        raise InputError(f"{word}: no such file")


def _finish(verdict: object, as_json: bool) -> None:
    from meshwright.judge.verdict import Verdict
    from meshwright.report.verdict import show_verdict, verdict_json

    assert isinstance(verdict, Verdict)
    if as_json:
        typer.echo(json.dumps(verdict_json(verdict), indent=2))
    else:
        show_verdict(verdict)
    raise typer.Exit(0 if verdict.ok else 1)


def _check_file(
    path: Path,
    on: str,
    model: str | None,
    engine: str | None,
    plan: Path | None,
    save: Path | None,
    lengths: dict[str, int | None],
    as_json: bool,
) -> None:
    from meshwright.judge import boot
    from meshwright.judge.check import check_config
    from meshwright.report.verdict import log_json, show_log
    from meshwright.specs.cluster import parse_cluster

    if plan is None and save is None:
        verdict = check_config(path, parse_cluster(on), model=model, engine=engine, **lengths)
        if verdict is not None:
            _finish(verdict, as_json)
    log = boot.read_log(path)
    rows = boot.compare(log, boot.read_plan(plan) if plan is not None else {"memory": {}})
    if save is not None:
        boot.save_calibration(log, save)
    if as_json:
        typer.echo(json.dumps(log_json(log, rows), indent=2))
    else:
        show_log(log, rows)
