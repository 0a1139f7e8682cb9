"""``meshwright plan serve`` and ``meshwright plan train``: which layout, what it holds, what to type."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from meshwright.cli.parse import in_range, one_of, seconds
from meshwright.errors import IllegalLayoutError, InputError

if TYPE_CHECKING:
    from meshwright.plan.plan import Plan
    from meshwright.report.page_times import Times

plan_app = typer.Typer(
    help="Which layout, what does it hold, what do I type. Needs no GPU and no torch.",
    invoke_without_command=True,
    no_args_is_help=True,
    rich_markup_mode=None,
)

MAX_TOKENS = 1 << 24
#: Quantizations that vLLM applies to an unquantized checkpoint while loading and whose bytes are counted.
RUNTIME_QUANTIZATION = ("fp8",)
#: Ways a deployment can be started; which of them an engine has, it says itself.
DEPLOYMENTS = ("single", "mp", "ray", "headless", "external", "hybrid", "kuberay", "lws", "slurm")
#: What vLLM takes for ``--dtype``, and our own short names.
COMPUTE_DTYPES = ("auto", "bfloat16", "float16", "float32", "half", "float", "bf16", "f16", "f32")


@plan_app.callback()
def plan(
    ctx: typer.Context,
    models: bool = typer.Option(False, "--models", help="List the models that are known by name."),
    devices: bool = typer.Option(False, "--devices", help="List the devices and links that are known by name."),
    as_json: bool = typer.Option(False, "--json", help="The same as JSON."),
) -> None:
    """Which layout, what does it hold, what do I type."""
    if ctx.invoked_subcommand is not None:
        return
    from meshwright.report import catalogue

    if models:
        catalogue.show_models(as_json)
    if devices:
        catalogue.show_devices(as_json)


@dataclass(frozen=True)
class _Output:
    """What of the plan is shown, and where it goes."""

    as_json: bool
    html: Path | None
    ledger: bool
    phase: str | None
    strategies: bool
    save_ledger: Path | None
    emit: Path | None = None
    deployment: str | None = None
    options: tuple[str, ...] = ()
    perfetto: Path | None = None


def _emit(result: Plan, out: _Output, prefill: Plan | None = None) -> None:
    """Print or write what was asked for, then leave with the exit code of the verdict."""
    from meshwright.api import fill_ledger, strategies

    needs_ledger = out.ledger or out.save_ledger is not None or out.html is not None
    ledger = fill_ledger(result) if needs_ledger and result.chosen is not None else None
    rows = strategies(result) if out.strategies else None
    if out.save_ledger is not None:
        from meshwright.ledger import store

        if ledger is None:
            raise InputError("--save-ledger: the layout is illegal, so there is no ledger to write")
        store.write(ledger, out.save_ledger)
    if out.html is not None:
        from meshwright.report.page import write_page

        write_page(result, ledger, out.html, _times(result, prefill), prefill)
    if out.perfetto is not None:
        from meshwright.api import timelines
        from meshwright.report.trace import write_trace

        write_trace(result, timelines(result, prefill), out.perfetto, pools=prefill is not None)
    result, written = with_emission(result, prefill, out)
    if out.as_json:
        _emit_json(result, ledger if out.ledger else None, rows, prefill)
    else:
        from meshwright.report import terminal

        if prefill is not None and result.served is not None:
            terminal.show_split(result, prefill)
        elif prefill is not None:
            terminal.show_plan(prefill, title="prefill")
            terminal.show_plan(result, title="decode")
        else:
            terminal.show_plan(result)
        if rows is not None:
            terminal.show_strategies(rows)
        if out.ledger and ledger is not None:
            terminal.show_ledger(ledger, out.phase)
        paths = (("page", out.html), ("trace", out.perfetto), ("ledger", out.save_ledger))
        lines = [f"{flag}: {path}" for flag, path in (*paths, *(("file", p) for p in written)) if path is not None]
        if lines:
            typer.echo("\n".join(["", *lines]))
    raise typer.Exit(0 if result.ok and (prefill is None or prefill.ok) else 1)


def _times(result: Plan, prefill: Plan | None) -> Times | None:
    """What the pictures of the page are drawn from; None where a layout is illegal."""
    from meshwright.api import step_time, timelines, train_engine
    from meshwright.report.page_times import Times

    if result.chosen is None or (prefill is not None and prefill.chosen is None):
        return None
    if result.kind == "serve":
        return Times(timelines(result, prefill))
    return Times(timelines(result), step_time(result), train_engine(result))


def with_emission(result: Plan, prefill: Plan | None, out: _Output) -> tuple[Plan, list[Path]]:
    """The plan with the commands of the asked deployment, and the files that ``--emit`` wrote.

    Raises:
        InputError: the engine cannot be started that way, or a file cannot be written.
        IllegalLayoutError: files are asked for and the plan does not work.
    """
    if not (out.emit or out.deployment or out.options or prefill):
        return result, []
    from meshwright.api import emit
    from meshwright.report.scripts import write_emission

    one_of(out.deployment, "--deployment", DEPLOYMENTS)
    pairs = [option.partition("=") for option in out.options]
    if not all(sep and value for _, sep, value in pairs):
        raise InputError("--option is key=value, as in --option connector=mooncake")
    if not result.ok or (prefill is not None and not prefill.ok):
        if out.emit is not None:
            side, failed = ("prefill side: ", prefill) if prefill is not None and not prefill.ok else ("", result)
            raise IllegalLayoutError(f"--emit: nothing is written, because {side}{failed.verdict}")
        return result, []
    options = {key: value for key, _, value in pairs}
    emission = emit(result, prefill=prefill, deployment=out.deployment, options=options)  # type: ignore[arg-type]
    written = write_emission(emission, out.emit) if out.emit is not None else []
    return replace(result, commands=emission.commands, notes=(*result.notes, *emission.notes)), written


def _emit_json(result: Plan, ledger: Any, rows: Any, prefill: Plan | None = None) -> None:
    from meshwright.report.as_json import plain, plan_json

    data = plan_json(result)
    if prefill is not None:
        data["prefill"] = plan_json(prefill)
    if ledger is not None:
        data["ledger"] = plain(ledger)
    if rows is not None:
        data["strategies"] = plain(rows)
    typer.echo(json.dumps(data, indent=2))


_MODEL = typer.Argument(help="Atlas name, hub id, config.json, or a folder with one.", metavar="MODEL")
_ON = typer.Option("here", "--on", help="NODESxDEVICESxKIND@LINK, a TOML file, or 'here' (this machine).")
_LAYOUT = typer.Option(None, "--layout", help="Judge this layout: tp=8,pp=4,dp=2,zero=1. Without it: choose one.")
_JSON = typer.Option(False, "--json", help="Everything, as JSON with stable keys.")
_HTML = typer.Option(None, "--html", help="Write one self-contained page.")
_PERFETTO = typer.Option(None, "--perfetto", help="Write the predicted timeline as a trace that Perfetto opens.")
_LEDGER = typer.Option(False, "--ledger", help="Print the counted ledger by layer.")
_PHASE = typer.Option(
    None, "--phase", help="Of the ledger only this phase: prefill, decode, forward, backward, optimizer."
)
_STRATEGIES = typer.Option(False, "--strategies", help="What each strategy cuts, moves and where it belongs.")
_CALIBRATION = typer.Option(None, "--calibration", help="What check --save wrote of an earlier boot log.")
_EMIT = typer.Option(None, "--emit", help="Write one script a node and step, and the files that go with them.")
_OPTIONS = typer.Option(None, "--option", help="Engine-specific: connector=nixl, image=..., name=...; repeatable.")
_SAVE = typer.Option(None, "--save-ledger", help="Write the ledger: a folder (parquet) or a file ending in .jsonl.")


@plan_app.command()
def serve(
    model: str = _MODEL,
    on: str = _ON,
    isl: int = typer.Option(1024, "--isl", help="Input tokens of a request."),
    osl: int = typer.Option(256, "--osl", help="Output tokens of a request."),
    concurrency: int | None = typer.Option(None, "--concurrency", help="Requests in flight."),
    rate: float | None = typer.Option(None, "--rate", help="Requests a second."),
    ttft: str | None = typer.Option(None, "--ttft", help="Target of the time to first token: 2s."),
    tpot: str | None = typer.Option(None, "--tpot", help="Target of the time per output token: 40ms."),
    max_model_len: int | None = typer.Option(None, "--max-model-len", help="Context limit; default isl + osl."),
    layout: str | None = _LAYOUT,
    prefill: str | None = typer.Option(None, "--prefill", help="Layout of a prefill pool; goes with --decode."),
    decode: str | None = typer.Option(None, "--decode", help="Layout of a decode pool; goes with --prefill."),
    split: bool = typer.Option(False, "--split", help="Choose prefill and decode pools: layouts, workers, ratio."),
    engine: str = typer.Option("vllm", "--engine", help="vllm (newest), vllm-0.32, vllm-0.26, sglang, meshwright."),
    deployment: str | None = typer.Option(None, "--deployment", help="How it is started: mp, ray, lws, slurm, ..."),
    option: list[str] | None = _OPTIONS,
    utilization: float | None = typer.Option(None, "--gpu-memory-utilization", help="Share the engine may take."),
    max_num_batched_tokens: int | None = typer.Option(None, "--max-num-batched-tokens", help="Tokens of a step."),
    max_num_seqs: int | None = typer.Option(None, "--max-num-seqs", help="Sequences of a step."),
    kv_dtype: str = typer.Option("auto", "--kv-cache-dtype", help="auto, bf16, fp8."),
    block_size: int | None = typer.Option(None, "--block-size", help="Tokens of a cache block."),
    enforce_eager: bool = typer.Option(False, "--enforce-eager", help="No CUDA graphs."),
    quantization: str | None = typer.Option(None, "--quantization", help="Quantize while loading: fp8."),
    dtype: str | None = typer.Option(None, "--dtype", help="Compute dtype instead of the configuration's."),
    speculative: bool = typer.Option(False, "--speculative", help="Load the multi-token-prediction layers."),
    text_only: bool = typer.Option(False, "--text-only", help="Do not load the vision encoder."),
    calibration: Path | None = _CALIBRATION,
    as_json: bool = _JSON,
    html: Path | None = _HTML,
    perfetto: Path | None = _PERFETTO,
    ledger: bool = _LEDGER,
    phase: str | None = _PHASE,
    strategies: bool = _STRATEGIES,
    save_ledger: Path | None = _SAVE,
    emit: Path | None = _EMIT,
) -> None:
    """A layout for inference: does the model not fit (split it) or is it too slow (replicate it)?"""
    from meshwright.api import plan_serve
    from meshwright.specs.profile import ServeSettings
    from meshwright.specs.workload import Serve

    lengths = ((isl, "--isl"), (osl, "--osl"), (max_model_len, "--max-model-len"), (block_size, "--block-size"))
    for value, flag in (*lengths, (max_num_batched_tokens, "--max-num-batched-tokens")):
        if value is not None:
            in_range(value, flag, 1, MAX_TOKENS)
    for value, flag in ((concurrency, "--concurrency"), (max_num_seqs, "--max-num-seqs")):
        if value is not None:
            in_range(value, flag, 1, 1 << 20)
    if max_model_len is not None and max_model_len < isl + osl:
        raise InputError(f"--max-model-len {max_model_len} is below isl + osl = {isl + osl}; raise it or shorten them")
    if rate is not None:
        in_range(rate, "--rate", 1e-6, 1e9)
    one_of(quantization, "--quantization", RUNTIME_QUANTIZATION)
    one_of(dtype, "--dtype", COMPUTE_DTYPES)
    one_of(phase, "--phase", ("prefill", "decode"))
    if utilization is not None:
        in_range(utilization, "--gpu-memory-utilization", 0.01, 1.0)
    workload = Serve(
        isl=isl,
        osl=osl,
        concurrency=concurrency,
        rate=rate,
        ttft_s=seconds(ttft, "--ttft") if ttft else None,
        tpot_s=seconds(tpot, "--tpot") if tpot else None,
        max_model_len=max_model_len,
    )
    settings = ServeSettings(
        utilization=utilization,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        kv_dtype=kv_dtype,
        block_size=block_size,
        enforce_eager=enforce_eager,
        quantization=quantization,
        dtype=None if dtype == "auto" else dtype,
        speculative=speculative,
        text_only=text_only,
    )
    out = _Output(
        as_json, html, ledger, phase, strategies, save_ledger, emit, deployment, tuple(option or ()), perfetto
    )
    if split:
        from meshwright.api import plan_split

        if prefill is not None or decode is not None or layout is not None or calibration is not None:
            raise InputError("--split chooses both layouts: leave out --layout, --prefill, --decode, --calibration")
        both, first = plan_split(model, on, workload, engine=engine, settings=settings)
        _emit(both, out, first)
        return
    if prefill is None and decode is None:
        known = {"layout": layout, "engine": engine, "settings": settings, "calibration": calibration}
        _emit(plan_serve(model, on, workload, **known), out)  # type: ignore[arg-type]
        return
    from meshwright.api import plan_pools

    if prefill is None or decode is None or layout is not None:
        raise InputError("--prefill and --decode go together and replace --layout")
    first, second = plan_pools(model, on, workload, prefill=prefill, decode=decode, engine=engine, settings=settings)
    _emit(second, out, first)


@plan_app.command()
def train(
    model: str = _MODEL,
    on: str = _ON,
    seq: int = typer.Option(4096, "--seq", help="Tokens of a sequence."),
    global_batch: int = typer.Option(256, "--global-batch", help="Sequences of an optimizer step."),
    layout: str | None = _LAYOUT,
    engine: str = typer.Option("meshwright", "--engine", help="meshwright (torch), megatron, torchtitan, deepspeed."),
    optimizer: str = typer.Option("adamw", "--optimizer", help="adamw, sgd, muon."),
    recompute: str | None = typer.Option(
        None, "--recompute", help="none, selective, full; default: none, or the least that fits."
    ),
    param_dtype: str = typer.Option("bf16", "--param-dtype", help="Working parameters."),
    grad_dtype: str = typer.Option("f32", "--grad-dtype", help="Accumulated gradients."),
    attention: str = typer.Option("flash", "--attention", help="flash, unfused."),
    offload: str = typer.Option("none", "--offload", help="none, optimizer, activations."),
    as_json: bool = _JSON,
    html: Path | None = _HTML,
    perfetto: Path | None = _PERFETTO,
    ledger: bool = _LEDGER,
    phase: str | None = _PHASE,
    strategies: bool = _STRATEGIES,
    save_ledger: Path | None = _SAVE,
    emit: Path | None = _EMIT,
) -> None:
    """A layout for training: parameters, gradients, optimizer state and activations on every rank."""
    from meshwright.api import plan_train, train_workload

    in_range(seq, "--seq", 1, MAX_TOKENS)
    in_range(global_batch, "--global-batch", 1, 1 << 24)
    one_of(phase, "--phase", ("forward", "backward", "optimizer"))
    workload = train_workload(
        seq=seq,
        global_batch=global_batch,
        optimizer=optimizer,
        recompute=recompute or "none",
        param_dtype=param_dtype,
        grad_dtype=grad_dtype,
        attention=attention,
        offload=offload,
    )
    result = plan_train(model, on, workload, layout=layout, engine=engine, recompute_fixed=recompute is not None)
    _emit(result, _Output(as_json, html, ledger, phase, strategies, save_ledger, emit, perfetto=perfetto))
