"""``meshwright prove``: does a layout compute what one process computes, and send what was predicted?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from meshwright.cli.parse import in_range, need_torch, one_of, seconds
from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.prove.proof import Proof

MAX_TOKENS = 1 << 16

_MODEL = typer.Argument(None, help="Folder with config.json and safetensors weights; with --dry also a name.")
_PROMPT_IDS = typer.Option([], "--prompt-ids", help="Token ids: 1,15,7. May be given several times.")
_OUT = typer.Option(None, "--out", help="Folder for both ledgers, as JSON lines.")


def prove(
    model: Path | None = _MODEL,
    layout: str | None = typer.Option(
        None, "--layout", help="Degrees: tp=2,pp=2; uneven stages: pp=2,stage_layers=20+10."
    ),
    prompt_ids: list[str] = _PROMPT_IDS,
    tokens: int = typer.Option(12, "--tokens", help="Length of the random prompts, where none are given."),
    seed: int = typer.Option(0, "--seed", help="Of the random prompts."),
    new_tokens: int | None = typer.Option(None, "--new-tokens", help="Greedy tokens a prompt; default: 4, --dry: 2."),
    micro_batches: int | None = typer.Option(
        None, "--micro-batches", help="Groups in flight; default: as many as stages, --dry: at most 2."
    ),
    chunk: int | None = typer.Option(None, "--chunk", help="Prompt tokens of a sequence in a pass; default: all."),
    dry: bool = typer.Option(False, "--dry", help="No weights, no numbers: only the ledger, for any number of ranks."),
    mutate: str | None = typer.Option(
        None, "--mutate", help="Plant a mistake; the proof must fail. 'list' shows them."
    ),
    ranks: str | None = typer.Option(None, "--ranks", help="With --dry: ranks to run, 0,5,517; default: every kind."),
    timing: bool = typer.Option(True, "--time/--no-time", help="Also measure the steps of what is proven."),
    train: bool = typer.Option(False, "--train", help="Prove an optimizer step instead of a generation."),
    seq: int | None = typer.Option(None, "--seq", help="With --train: tokens of a sequence; default: 24."),
    global_batch: int | None = typer.Option(
        None, "--global-batch", help="With --train: sequences of a step; default: 2 micro-batches a stage and replica."
    ),
    steps: int | None = typer.Option(None, "--steps", help="With --train: optimizer steps; default: 1."),
    recompute: str | None = typer.Option(None, "--recompute", help="With --train: none, selective or full."),
    optimizer: str | None = typer.Option(None, "--optimizer", help="With --train: adamw or sgd."),
    schedule: str | None = typer.Option(None, "--schedule", help="With --train: as schedule= of the layout."),
    out: Path | None = _OUT,
    timeout: str = typer.Option("300s", "--timeout", help="Bound on each run."),
    as_json: bool = typer.Option(False, "--json", help="Everything, as JSON."),
) -> None:
    """Run a checkpoint under a layout; compare it with one process and with its prediction. Exit 1: not proven."""
    from meshwright.cli.run import _ids

    if mutate == "list":
        _list(train)
        return
    if model is None or layout is None:
        raise InputError("prove needs a folder and a layout: meshwright prove FOLDER --layout tp=2,pp=2")
    in_range(tokens, "--tokens", 1, MAX_TOKENS)
    if new_tokens is not None:
        in_range(new_tokens, "--new-tokens", 1, MAX_TOKENS)
    limit_s = seconds(timeout, "--timeout")
    need_torch()
    asked: dict[str, object] = {
        "seq": seq,
        "global_batch": global_batch,
        "steps": steps,
        "recompute": recompute,
        "optimizer": optimizer,
        "schedule": schedule,
    }
    if train:
        given = {
            "--dry": dry,
            "--prompt-ids": prompt_ids,
            "--chunk": chunk,
            "--ranks": ranks,
            "--new-tokens": new_tokens,
        }
        _refuse(given, "with --train: a step of training has whole sequences (--seq) on every rank; leave it out")
        _train(model, layout, asked, seed, mutate, out, limit_s, as_json)
    _refuse({f"--{name.replace('_', '-')}": value for name, value in asked.items()}, "without --train")
    if dry:
        if prompt_ids:
            raise InputError("--prompt-ids with --dry: a dry-run has no numbers, so ids do not matter; give --tokens")
        if chunk is not None:
            raise InputError("--chunk with --dry: a dry-run takes prompts in at once; leave it out")
        which = _ranks(ranks) if ranks is not None else None
        _dry(str(model), layout, tokens, new_tokens, micro_batches, which, mutate, out, limit_s, as_json)
    if ranks is not None:
        raise InputError("--ranks without --dry: a proof runs every rank")
    from meshwright.prove import proof as proofs

    prompts = [_ids(text) for text in prompt_ids] or None
    proof = proofs.prove(
        model,
        layout,
        prompts=prompts,
        tokens=tokens,
        seed=seed,
        new_tokens=new_tokens or proofs.NEW_TOKENS,
        micro_batches=micro_batches,
        chunk=chunk,
        mutate=mutate,
        timing=timing,
        timeout_s=limit_s,
        say=_say,
    )
    if out is not None:
        proofs.write_ledgers(proof, out)
    if as_json:
        typer.echo(json.dumps(proofs.as_json(proof), indent=2))
    else:
        _show(proof)
    raise typer.Exit(0 if proof.proven else 1)


def _refuse(given: dict[str, object], why: str) -> None:
    """Say that an option that was given has no meaning here."""
    for flag, value in given.items():
        if value:
            raise InputError(f"{flag} {why}")


def _train(
    model: Path,
    layout: str,
    asked: dict[str, object],
    seed: int,
    mutate: str | None,
    out: Path | None,
    limit_s: float,
    as_json: bool,
) -> NoReturn:
    """The proof of training, and the exit code."""
    from meshwright.prove import train
    from meshwright.prove.proof import write_ledgers
    from meshwright.specs.layout import parse_layout

    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    for name, allowed in (("recompute", train.RECOMPUTE), ("optimizer", train.OPTIMIZERS)):
        one_of(given.get(name), f"--{name}", allowed)
    schedule = given.pop("schedule", None)
    wanted = parse_layout(f"{layout},schedule={schedule}" if schedule else layout)
    proof = train.prove_training(model, wanted, seed=seed, mutate=mutate, timeout_s=limit_s, say=_say, **given)
    if out is not None:
        write_ledgers(proof, out)
    if as_json:
        typer.echo(json.dumps(train.as_json(proof), indent=2))
    else:
        _show(proof, more=proof.line)
    raise typer.Exit(0 if proof.proven else 1)


def _dry(
    model: str,
    layout: str,
    tokens: int,
    new_tokens: int | None,
    micro_batches: int | None,
    ranks: list[int] | None,
    mutate: str | None,
    out: Path | None,
    limit_s: float,
    as_json: bool,
) -> NoReturn:
    """The proof without weights, and the exit code."""
    from meshwright.prove import dry
    from meshwright.prove.proof import write_ledgers

    proof = dry.dry_run(
        model,
        layout,
        tokens=tokens,
        new_tokens=new_tokens or dry.NEW_TOKENS,
        micro_batches=micro_batches,
        ranks=ranks,
        mutate=mutate,
        timeout_s=limit_s,
        say=_say,
    )
    if out is not None:
        write_ledgers(proof, out)
    if as_json:
        typer.echo(json.dumps(dry.as_json(proof), indent=2))
    else:
        _show(proof, proof.note)
    raise typer.Exit(0 if proof.proven else 1)


def _ranks(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not words or not all(w.isascii() and w.isdecimal() and len(w) < 10 for w in words):
        raise InputError(f"--ranks {text[:30]!r}: global ranks are needed, as 0,5,517")
    return [int(w) for w in words]


def _say(text: str) -> None:
    typer.echo(f"... {text}", err=True)


def _list(train: bool) -> None:
    from meshwright.runtime.mutate import MUTATIONS
    from meshwright.runtime.mutate_train import TRAIN_MUTATIONS

    for name, mutation in (TRAIN_MUTATIONS if train else MUTATIONS).items():
        typer.echo(f"{name:28}{mutation.says}")


def _show(proof: Proof, note: str | None = None, more: str = "") -> None:
    """Verdict, first difference, table, and a line more."""
    from rich.markup import escape

    from meshwright.report.terminal import console, table
    from meshwright.runtime.loads import summary

    out = console()
    out.print(escape(proof.verdict), style="bold green" if proof.proven else "bold red", soft_wrap=True)
    if proof.mutation:
        out.print(f"planted: {escape(proof.mutation)}" + (f"; {escape(note)}" if note else ""), soft_wrap=True)
    if proof.first:
        out.print(f"first difference: {escape(proof.first)}", soft_wrap=True)
    rows = table("what", "compared", "differs", "worst")
    for c in proof.checks:
        rows.add_row(c.what, c.compared, "nothing" if c.ok else f"{c.differs:,}", c.worst)
    out.print(rows)
    if more:
        out.print(escape(more), soft_wrap=True)
    if proof.timing is not None:
        line = proof.timing if isinstance(proof.timing, str) else proof.timing.line
        out.print(escape(line), soft_wrap=True)
    if proof.experts:
        out.print(escape(summary(proof.experts)), soft_wrap=True)
    took = ", ".join(f"{part} {value:.1f} s" for part, value in proof.seconds.items())
    out.print(escape(f"took: {took}"))
