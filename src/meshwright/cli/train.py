"""``meshwright run train`` and ``run export``: train under a layout, go on under another, export the model."""

from __future__ import annotations

import json
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from meshwright.cli.parse import in_range, need_torch, one_of, seconds
from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.runtime.train.job import TrainJob
    from meshwright.runtime.train.loop import Summary

MAX_STEPS = 1 << 32
MAX_BATCH = 1 << 24

_MODEL = typer.Argument(None, help="Folder with config.json and safetensors weights.")
_DATA = typer.Option(
    [], "--data", help="Text, .jsonl, token ids (.npy, .bin), or a folder. May be given several times."
)
_CHECKPOINT = typer.Option(None, "--checkpoint", help="Folder of the run: checkpoints, metrics, tokens.")
_RESUME = typer.Option(None, "--resume", help="Folder of a run, or one of its checkpoints: go on from there.")
_SCRATCH = typer.Option(None, "--from-scratch", help="config.json (or its folder) whose weights are drawn.")
_EXPORT = typer.Option(None, "--export", help="Folder for the trained model, as Hugging Face has it.")
_SAVED = typer.Argument(help="Folder of a run, or one of its checkpoints.")
_FOLDER = typer.Argument(help="Folder to write.")


def train(
    model: Path | None = _MODEL,
    layout: str | None = typer.Option(None, "--layout", help="Degrees: dp=2,zero=2; default: tp=1, or the run's."),
    schedule: str | None = typer.Option(None, "--schedule", help="gpipe, 1f1b, interleaved, zb-h1, zbv, dualpipev."),
    data: list[Path] = _DATA,
    tokenizer: str | None = typer.Option(None, "--tokenizer", help="Folder of another tokenizer, or 'bytes'."),
    eos: int | None = typer.Option(None, "--eos", help="Token that closes a document; default: the model's."),
    steps: int | None = typer.Option(None, "--steps", help="Of the whole run; default: 100."),
    seq: int | None = typer.Option(None, "--seq", help="Tokens of a sequence; default: 512."),
    global_batch: int | None = typer.Option(None, "--global-batch", help="Sequences of a step; default: 8."),
    micro_batch: int | None = typer.Option(
        None, "--micro-batch", help="Sequences a rank works on at once; default: 1."
    ),
    lr: float | None = typer.Option(None, "--lr", help="Highest learning rate; default: 3e-4."),
    warmup: int | None = typer.Option(None, "--warmup", help="Steps up to it; default: 0. A cosine follows."),
    optimizer: str | None = typer.Option(None, "--optimizer", help="adamw or sgd; default: adamw."),
    weight_decay: float | None = typer.Option(None, "--weight-decay", help="Of matrices; default: 0.1."),
    clip: float | None = typer.Option(None, "--clip", help="Largest norm of the gradient, 0: none; default: 1."),
    recompute: str | None = typer.Option(None, "--recompute", help="none, selective or full; default: none."),
    dtype: str | None = typer.Option(None, "--dtype", help="f32 or bf16 (with f32 master weights); default: f32."),
    aux: float | None = typer.Option(None, "--aux", help="Weight of the experts' balancing loss; default: 0."),
    bias_rate: float | None = typer.Option(None, "--bias-rate", help="Step of a router's balancing bias; default: 0."),
    seed: int | None = typer.Option(None, "--seed", help="Of the order of data and of drawn weights; default: 0."),
    checkpoint: Path | None = _CHECKPOINT,
    save_every: int | None = typer.Option(None, "--save-every", help="Steps between checkpoints; default: at the end."),
    keep: int | None = typer.Option(None, "--keep", help="Checkpoints that stay; default: 2."),
    resume: Path | None = _RESUME,
    scratch: Path | None = _SCRATCH,
    export_to: Path | None = _EXPORT,
    ledger: int = typer.Option(0, "--ledger", help="Write the ledger of this step into the run's folder."),
    restarts: int = typer.Option(
        0, "--restarts", help="How often to go on from the last checkpoint when a rank is lost."
    ),
    how: str = typer.Option("local", "--launch", help="local, or ray: on a Ray cluster, tp groups within a node."),
    address: str | None = typer.Option(None, "--address", help="Of the Ray cluster; default: a local one."),
    device: str = typer.Option("cpu", "--device", help="cpu (gloo) or cuda (NCCL, one device a rank)."),
    timeout: str = typer.Option("1800s", "--timeout", help="Longest time of a step; then all ranks leave traces."),
    as_json: bool = typer.Option(False, "--json", help="What came of it, as JSON."),
) -> None:
    """Train a model under a layout, on processes of this machine, under torchrun or on Ray."""
    _check(steps=(steps, 1, MAX_STEPS), seq=(seq, 1, 1 << 24), keep=(keep, 1, 1 << 20), warmup=(warmup, 0, MAX_STEPS))
    _check(
        global_batch=(global_batch, 1, MAX_BATCH),
        micro_batch=(micro_batch, 1, MAX_BATCH),
        ledger=(ledger, 0, MAX_STEPS),
    )
    _check(lr=(lr, 0, 1e6), weight_decay=(weight_decay, 0, 1e6), clip=(clip, 0, 1e12), seed=(seed, 0, (1 << 32) - 1))
    _check(restarts=(restarts, 0, 1 << 20), save_every=(save_every, 0, MAX_STEPS), aux=(aux, 0, 1e6))
    _check(bias_rate=(bias_rate, 0, 1e6))
    one_of(optimizer, "--optimizer", ("adamw", "sgd"))
    one_of(recompute, "--recompute", ("none", "selective", "full"))
    one_of(dtype, "--dtype", ("f32", "bf16"))
    one_of(device, "--device", ("cpu", "cuda"))
    limit_s = seconds(timeout, "--timeout")
    one_of(how, "--launch", ("local", "ray"))
    if address is not None and how != "ray":
        raise InputError("--address: ranks are started here; leave it out or add --launch ray")
    if checkpoint is None and resume is None and (ledger or export_to is not None):
        raise InputError("--ledger and --export need a folder for the run: --checkpoint FOLDER")
    need_torch()
    from meshwright.runtime.launch.local import server_ahead
    from meshwright.runtime.launch.torchrun import started_by_torchrun
    from meshwright.runtime.train.launch import PRELOAD, launch
    from meshwright.runtime.train.prepare import Asked
    from meshwright.runtime.train.watch import keep_calls

    given = {
        "steps": steps,
        "seq": seq,
        "global_batch": global_batch,
        "lr": lr,
        "warmup": warmup,
        "optimizer": optimizer,
        "weight_decay": weight_decay,
        "clip": clip,
        "recompute": recompute,
        "dtype": dtype,
        "aux": aux,
        "bias_rate": bias_rate,
        "seed": seed,
        "save_every": save_every,
        "keep": keep,
    }
    asked = Asked(
        model, scratch, resume, data, tokenizer, eos, layout, schedule, micro_batch, checkpoint, settings=given
    )
    keep_calls()
    with tempfile.TemporaryDirectory(prefix="meshwright-") as room:
        with nullcontext() if started_by_torchrun() or how == "ray" else server_ahead(PRELOAD):
            job = _job(asked, Path(room), device, limit_s, ledger)
        results = launch(job, restarts, _say, {"address": address} if how == "ray" else None)
    if results is not None:
        _show(job, results, export_to, as_json)


def _check(**values: tuple[float | None, float, float]) -> None:
    for name, (value, low, high) in values.items():
        if value is not None:
            in_range(value, f"--{name.replace('_', '-')}", low, high)


def _job(asked: Any, room: Path, device: str, limit_s: float, ledger: int) -> TrainJob:
    from meshwright import engines
    from meshwright.runtime.train.prepare import prepare

    profile = engines.profile("meshwright")
    return prepare(asked, profile, room, device=device, timeout_s=limit_s, ledger=ledger, trouble=Path.cwd())


def _say(text: str) -> None:
    typer.echo(f"... {text}", err=True)


def _show(job: TrainJob, results: list[Summary], export_to: Path | None, as_json: bool) -> None:
    """What came of it."""
    from meshwright.runtime.train.export import export

    first = results[0]
    exported = export(first.checkpoint, export_to) if first.checkpoint is not None and export_to is not None else None
    rate = first.tokens / first.total_s if first.total_s else 0.0
    said = {
        "step": first.step,
        "loss": first.loss,
        "tokens": first.tokens,
        "tokens_s": round(rate, 1),
        "layout": first.layout,
        "checkpoint": str(first.checkpoint) if first.checkpoint else None,
        "export": str(exported) if exported else None,
    }
    if as_json:
        typer.echo(json.dumps(said))
        return
    loss = f"loss {first.loss:.4f}, " if first.loss is not None else ""
    typer.echo(f"step {first.step} of {job.settings.steps} under {first.layout}: {loss}{rate:,.0f} tokens/s")
    if first.checkpoint:
        typer.echo(f"checkpoint: {first.checkpoint}")
    if exported:
        typer.echo(f"exported: {exported}")


def export_checkpoint(
    checkpoint: Path = _SAVED,
    folder: Path = _FOLDER,
    dtype: str | None = typer.Option(
        None, "--dtype", help="Of the stored weights: bf16, f16, f32; default: the model's."
    ),
) -> None:
    """Write a checkpoint, of whatever layout, as a Hugging Face folder."""
    one_of(dtype, "--dtype", ("bf16", "f16", "f32"))
    need_torch()
    from meshwright.runtime.train.export import export

    typer.echo(f"{export(checkpoint, folder, dtype)}")
