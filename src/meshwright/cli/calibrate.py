"""``meshwright calibrate``: what this machine, or a cluster that was measured elsewhere, really takes."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from meshwright.cli.parse import in_range, need_torch, one_of, seconds
from meshwright.errors import InputError

_FROM = typer.Option(
    None, "--from", help="Output of nccl-tests, a ledger, a boot log, or a folder of traces or such files; repeatable."
)
_OUT = typer.Option(None, "--out", help="The cluster file (TOML) that `plan --on FILE` reads.")
_LEDGER = typer.Option(None, "--ledger", help="Also write every measured time: a file ending in .jsonl or a folder.")


def calibrate(
    sources: list[Path] | None = _FROM,
    out: Path | None = _OUT,
    on: str | None = typer.Option(None, "--on", help="With --from: the cluster that was measured, 4x8xH100."),
    ranks: int | None = typer.Option(None, "--ranks", help="Processes that measure at once; default: the devices."),
    device: str = typer.Option("auto", "--device", help="auto, cpu or cuda."),
    dtype: list[str] | None = typer.Option(None, "--dtype", help="f32, bf16, f16; repeatable."),  # noqa: B008
    quick: bool = typer.Option(False, "--quick", help="Few shapes and sizes."),
    timeout: str = typer.Option("600s", "--timeout", help="Bound on the measurement."),
    ledger: Path | None = _LEDGER,
    as_json: bool = typer.Option(False, "--json", help="Everything, as JSON."),
) -> None:
    """Measure products, attention, memory, transfers and launches here, or read them; write a cluster file."""
    from meshwright.prove import calibrate as measure

    one_of(device, "--device", ("auto", "cpu", "cuda"))
    for name in dtype or ():
        one_of(name, "--dtype", ("f32", "bf16", "f16"))
    if ranks is not None:
        in_range(ranks, "--ranks", 1, 1 << 20)
    if out is not None and out.suffix != ".toml":
        raise InputError(f"--out {out}: the cluster file is TOML; name it like here.toml")
    if sources:
        if ranks is not None or dtype or quick or device != "auto":
            raise InputError("--from reads what was measured: leave out --ranks, --device, --dtype, --quick")
        from meshwright.prove.calibrate_from import calibrate_from

        found = calibrate_from(sources, on)
    else:
        if on is not None:
            raise InputError(f"--on {on[:40]}: this machine is measured; --on goes with --from")

        need_torch()
        limit_s = seconds(timeout, "--timeout")
        found = measure.calibrate_here(
            ranks=ranks, dtypes=dtype, device=device, quick=quick, timeout_s=limit_s, say=_say
        )
    if out is not None:
        from meshwright.plan.machine_file import write

        write(found.cluster, found.calibration, out, found.remarks)
    if ledger is not None:
        from meshwright.ledger import store

        store.write(found.ledger, ledger)
    if as_json:
        from meshwright.report.calibrate import as_json as plain

        typer.echo(json.dumps(plain(found.cluster, found.calibration), indent=2))
    else:
        from meshwright.report.calibrate import show

        show(found.cluster, found.calibration, out)


def _say(text: str) -> None:
    typer.echo(f"... {text}", err=True)
