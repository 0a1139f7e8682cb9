"""Run the commands of the documents and paste their output: ``python docs/render.py [--check] [FILE ...]``.

A block that starts with three backticks and ``console`` holds commands (``$ meshwright ...``), each followed by its
output. Comments directly above a block say how it is run and shown:

    <!-- exit 1 -->            the exit code that every command of the block must have (default 0)
    <!-- show REGEX -->        keep the paragraphs of the output that match; what is left out becomes ``...``
    <!-- file NAME -->         the block is no command but a file: written to the folder that commands run in (or to a
                               folder in it)

A command may end in ``> NAME``: its output is then written to that file of the folder and not shown.

A paragraph is a line with the lines that it was wrapped into, so nothing is cut inside a sentence or a table row.
Commands run in this process, in an empty folder, one after the other. Nothing else is ever run from a document.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "README.zh.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md"))))

_BLOCK = re.compile(
    r"(?P<notes>(?:^<!-- (?:show|exit|file) [^\n]*-->\n)*)^```(?P<kind>\w+)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_NOTE = re.compile(r"<!-- (show|exit|file) (.*?) -->")
#: How a line of prose begins in the terminal output; until the next one or a blank line the rest is its continuation.
_PROSE = re.compile(
    r"- |unwise: |illegal: |way out: |fits: |does not fit(: | in full: )|too slow: |KV cache of |error: "
    r"|will not start: |will start: |will run out of memory: |use |the log will say "
)
_ELLIPSIS = "..."


@dataclass(frozen=True)
class Block:
    """One fenced block: its kind, its text, and what the comments above it say."""

    kind: str
    body: str
    show: str | None = None
    exit_code: int = 0
    file: str | None = None

    def commands(self) -> list[tuple[str, list[str]]]:
        """Every command (without ``$ ``) with the output lines that stand under it."""
        found: list[tuple[str, list[str]]] = []
        for line in self.body.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif found:
                found[-1][1].append(line)
            else:
                raise ValueError(f"a console block must begin with '$ ', not {line[:60]!r}")
        return found


def _block(match: re.Match[str]) -> Block:
    notes = dict(_NOTE.findall(match["notes"]))
    return Block(match["kind"], match["body"], notes.get("show"), int(notes.get("exit", 0)), notes.get("file"))


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a document, in order."""
    return [_block(match) for match in _BLOCK.finditer(text)]


@dataclass
class Runner:
    """Runs commands in one folder and remembers what they printed."""

    folder: Path
    done: dict[str, tuple[int, str]] = field(default_factory=dict)

    def run(self, command: str) -> tuple[int, str]:
        """Exit code and output (standard output, then errors) of ``meshwright ...``.

        Raises:
            ValueError: the command is not meshwright.
        """
        if command not in self.done:
            self.done[command] = self._run(command)
        return self.done[command]

    def _run(self, command: str) -> tuple[int, str]:
        from meshwright.cli.main import main

        words = shlex.split(command)
        if words[0] != "meshwright":
            raise ValueError(f"only meshwright is run from a document, not {command[:60]!r}")
        target = Path(words.pop()).name if words[-2] == ">" else None
        if target is not None:
            words.pop()
        out, code = io.StringIO(), 0
        plain = {"NO_COLOR": "1", "TERM": "dumb", "FORCE_COLOR": ""}
        with (
            mock.patch.object(sys, "argv", words),
            mock.patch.dict(os.environ, plain),
            chdir(self.folder),
            redirect_stdout(out),
            redirect_stderr(out),
        ):
            os.environ.pop("FORCE_COLOR")
            try:
                main()
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if target is None:
            return code, out.getvalue()
        (self.folder / target).write_text(out.getvalue(), encoding="utf-8")
        return code, ""

    def write(self, block: Block) -> None:
        """Write a ``file`` block into the folder."""
        assert block.file is not None
        path = (self.folder / block.file).resolve()
        assert path.is_relative_to(Path(self.folder).resolve()), block.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.body, encoding="utf-8")


def paragraphs(output: str) -> Iterator[list[str]]:
    """Lines of an output with the lines that each was wrapped into; blank lines are paragraphs of their own."""
    current: list[str] = []
    data = output.lstrip().startswith("{")
    for line in (raw.rstrip() for raw in output.rstrip().splitlines()):
        wrapped = bool(current and current[0] and line) and (
            line.startswith(" ") or (_PROSE.match(current[0]) and not _PROSE.match(line))
        )
        if current and (data or not wrapped):
            yield current
            current = []
        current.append(line)
    if current:
        yield current


def alternatives(pattern: str) -> list[str]:
    """The parts of a pattern that stand between bars outside of parentheses: each must match something."""
    parts, depth = [""], 0
    for letter in pattern:
        depth += (letter == "(") - (letter == ")")
        if letter == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def shorten(output: str, show: str | None) -> list[str]:
    """The paragraphs that match, with ``...`` for what is left out between them."""
    if show is None:
        return [line.rstrip() for line in output.rstrip().splitlines()]
    wanted = re.compile(show)
    kept: list[str] = []
    skipped: list[str] = []
    for lines in paragraphs(output):
        if not wanted.search("\n".join(lines)) or lines == [""]:
            skipped += lines
            continue
        if any(skipped):
            kept.append(_ELLIPSIS)
        elif skipped:
            kept.append("")
        skipped = []
        kept += lines
    return [*kept, _ELLIPSIS] if any(skipped) else kept


def render(text: str, runner: Runner) -> str:
    """The document with the output of every command as it is now.

    Raises:
        ValueError: a command ended with another exit code than the one stated, or a part of what is to be shown is
            printed by none of the commands of a block.
    """

    def replace(match: re.Match[str]) -> str:
        block = _block(match)
        if block.file is not None:
            runner.write(block)
        if block.kind != "console":
            return match[0]
        lines: list[str] = []
        missing = set(alternatives(block.show)) if block.show is not None else set()
        for command, _ in block.commands():
            code, output = runner.run(command)
            if code != block.exit_code:
                raise ValueError(f"exit {code} instead of {block.exit_code}: {command}\n{output[:2000]}")
            lines += [f"$ {command}", *shorten(output, block.show)]
            missing -= {part for part in missing if shorten(output, part) != [_ELLIPSIS]}
        if missing:
            raise ValueError(f"nothing matches {', '.join(missing)}: {command}\n{output[:2000]}")
        return match["notes"] + "```console\n" + "\n".join(lines) + "\n```"

    return _BLOCK.sub(replace, text)


def main() -> int:
    """Rewrite the documents; with ``--check`` only say which are out of date."""
    parser = argparse.ArgumentParser(description="Run the commands of the documents and paste their output.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a document is out of date")
    parser.add_argument("files", nargs="*", default=[ROOT / name for name in DOCUMENTS], type=Path)
    arguments = parser.parse_args()
    stale = 0
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(Path(folder))
        for path in arguments.files:
            if not path.exists():
                continue
            before = path.read_text(encoding="utf-8")
            after = render(before, runner)
            if after != before:
                stale += 1
                print(f"{'out of date' if arguments.check else 'written'}: {path}")
                if not arguments.check:
                    path.write_text(after, encoding="utf-8")
    return int(arguments.check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
