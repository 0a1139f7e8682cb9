"""``meshwright``: the entry point. Errors of the user end in one or two lines and an exit code, never a traceback."""

from __future__ import annotations

import os
import sys

import typer

from meshwright.cli.calibrate import calibrate
from meshwright.cli.check import check
from meshwright.cli.doctor import doctor
from meshwright.cli.load import load
from meshwright.cli.plan import plan_app
from meshwright.cli.prove import prove
from meshwright.cli.run import run_app
from meshwright.cli.serve import serve
from meshwright.cli.train import export_checkpoint, train
from meshwright.errors import MeshwrightError
from meshwright.version import VERSION

app = typer.Typer(
    name="meshwright",
    help="Plans, proves, runs and diagnoses parallel layouts of large language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(plan_app, name="plan")
app.add_typer(run_app, name="run")
run_app.command("serve")(serve)
run_app.command("load")(load)
run_app.command("train")(train)
run_app.command("export")(export_checkpoint)
app.command("check")(check)
app.command("prove")(prove)
app.command("doctor")(doctor)
app.command("calibrate")(calibrate)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"meshwright {VERSION}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Plans, proves, runs and diagnoses parallel layouts of large language models."""


def main() -> None:
    """Run the command line. Exit 0 yes, 1 no (illegal, does not fit), 2 bad input."""
    try:
        app()
    except MeshwrightError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except RecursionError:
        sys.stderr.write("error: the input is nested too deeply to be a configuration\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
