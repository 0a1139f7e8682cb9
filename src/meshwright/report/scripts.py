"""``--emit DIR``: one script a node and step, and the files that go with them. Nothing is run."""

from __future__ import annotations

import re
from pathlib import Path

from meshwright.engines.base import Emission
from meshwright.errors import InputError

_PLAIN = re.compile(r"[^a-z0-9]+")


def script_name(index: int, node: int | None, purpose: str) -> str:
    """``01-node0-serve.sh``; without a node the script is for every one of them."""
    where = "every-node" if node is None else f"node{node}"
    return f"{index:02d}-{where}-{_PLAIN.sub('-', purpose.lower()).strip('-')}.sh"


def write_emission(emission: Emission, folder: Path) -> list[Path]:
    """Write scripts and files, return their paths; existing ones of the same names are replaced.

    Raises:
        InputError: there is nothing to write, or the folder cannot be written.
    """
    if not emission.commands and not emission.files:
        raise InputError("--emit: this engine has nothing to type yet")
    texts: dict[str, str] = {}
    for index, command in enumerate(emission.commands, 1):
        lines = ["#!/bin/sh", *(f"# {note}" for note in command.note.splitlines())]
        lines += [f"export {key}={value}" for key, value in command.env]
        texts[script_name(index, command.node, command.purpose)] = "\n".join([*lines, command.text]) + "\n"
    texts.update({file.path: file.text for file in emission.files})
    written = []
    base = folder.resolve()
    try:
        for name, text in texts.items():
            path = (base / name).resolve()
            if not path.is_relative_to(base):
                raise InputError(f"--emit: {name[:80]} would lie outside {folder}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            written.append(folder / name)
    except OSError as error:
        raise InputError(f"--emit {folder}: {error.strerror or error}") from None
    return written
