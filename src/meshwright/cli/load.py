"""``meshwright run load``: offer requests to a server and measure what its clients wait for."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from meshwright.cli.parse import in_range, one_of, seconds
from meshwright.errors import InputError

MAX_TOKENS, MAX_RATE = 1 << 20, 1e5

_TRACE = typer.Option(None, "--trace", help="File with a request a line: at_s, input_tokens, output_tokens as JSON.")
_AGAINST = typer.Option(None, "--against", help="JSON of a plan serve, to compare with.")
_HTML = typer.Option(None, "--html", help="Write a page with the distributions.")


def load(
    url: str = typer.Argument(help="Address of an OpenAI-compatible server: http://127.0.0.1:8000."),
    rate: float | None = typer.Option(None, "--rate", help="Requests a second (open loop)."),
    concurrency: int | None = typer.Option(None, "--concurrency", help="Requests kept under way (closed loop)."),
    trace: Path | None = _TRACE,
    arrivals: str = typer.Option("poisson", "--arrivals", help="With --rate: poisson or fixed."),
    requests: int = typer.Option(100, "--requests", help="How many; a trace says it itself."),
    isl: int = typer.Option(128, "--isl", help="Tokens of a prompt."),
    osl: int = typer.Option(64, "--osl", help="Tokens asked for."),
    ttft: str | None = typer.Option(None, "--ttft", help="Target of goodput: 2s."),
    tpot: str | None = typer.Option(None, "--tpot", help="Target of goodput: 40ms."),
    against: Path | None = _AGAINST,
    model: str | None = typer.Option(None, "--model", help="Name in the API; default: the only one served."),
    prompts: str = typer.Option("ids", "--prompts", help="ids (random token ids) or text (random words)."),
    vocabulary: int = typer.Option(1000, "--vocabulary", help="Token ids of prompts are drawn below it."),
    warmup: int = typer.Option(2, "--warmup", help="Requests sent first and not counted."),
    seed: int = typer.Option(0, "--seed", help="Of arrivals and prompts."),
    api_key: str | None = typer.Option(None, "--api-key", help="Key of the server; env:NAME reads a variable."),
    timeout: str = typer.Option("600s", "--timeout", help="Longest wait for the next piece of an answer."),
    html: Path | None = _HTML,
    as_json: bool = typer.Option(False, "--json", help="Everything as JSON, every request included."),
) -> None:
    """Measure TTFT, TPOT, throughput and goodput of a server under load."""
    if (rate is not None) + (concurrency is not None) + (trace is not None) != 1:
        raise InputError("give one of --rate, --concurrency or --trace")
    in_range(1.0 if rate is None else rate, "--rate", 1e-3, MAX_RATE)
    in_range(1 if concurrency is None else concurrency, "--concurrency", 1, 1024)
    for flag, value, high in (("--isl", isl, MAX_TOKENS), ("--osl", osl, MAX_TOKENS), ("--requests", requests, 10**6)):
        in_range(value, flag, 1, high)
    in_range(vocabulary, "--vocabulary", 2, 1 << 24)
    in_range(warmup, "--warmup", 0, 1000)
    one_of(arrivals, "--arrivals", ("poisson", "fixed"))
    one_of(prompts, "--prompts", ("ids", "text"))
    from meshwright.runtime.load import arrivals as coming
    from meshwright.runtime.load.client import target_of
    from meshwright.runtime.load.outcome import outcome, read_plan
    from meshwright.runtime.load.run import Prompts, drive
    from meshwright.runtime.serve.api.key import key_from

    predicted = read_plan(against) if against is not None else None
    if trace is not None:
        due = coming.read_trace(trace)
    elif rate is None:
        due = coming.together(requests, isl, osl)
    elif arrivals == "fixed":
        due = coming.fixed(rate, requests, isl, osl)
    else:
        due = coming.poisson(rate, requests, isl, osl, seed)
    target = target_of(url, model, key_from(api_key), seconds(timeout, "--timeout"))
    said = Prompts(vocabulary if prompts == "ids" else None, seed)
    if warmup:
        drive(target, coming.together(warmup, due[0].input_tokens, due[0].output_tokens), said, warmup)

    def progress(ended: int, failed: int) -> None:
        typer.echo(f"{ended} of {len(due)} ended" + (f", {failed} failed" if failed else ""), err=True)

    timed = drive(target, due, Prompts(said.vocabulary, seed + 1), concurrency, None if as_json else progress)
    targets = (seconds(text, flag) if text else None for text, flag in ((ttft, "--ttft"), (tpot, "--tpot")))
    result = outcome(timed, *targets)
    result.predicted = predicted
    _show(result, html, as_json)
    if result.failed:
        raise typer.Exit(1)


def _show(result: object, html: Path | None, as_json: bool) -> None:
    from meshwright.report.load import as_plain, show, write_page
    from meshwright.report.terminal import console
    from meshwright.runtime.load.outcome import Outcome

    assert isinstance(result, Outcome)
    if as_json:
        typer.echo(json.dumps(as_plain(result)))
    else:
        show(result, console())
    if html is not None:
        write_page(result, html)
        typer.echo(f"page: {html}", err=True)
