"""Servers as users start them: the command line on a free port."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def serving() -> Iterator[Callable[..., str]]:
    """Start ``meshwright run serve``; the address of its API. All servers end with the test."""
    running: list[subprocess.Popen[str]] = []

    def start(folder: Path, layout: str, *more: str) -> str:
        words = [sys.executable, "-m", "meshwright", "run", "serve", str(folder), "--layout", layout, "--port", "0"]
        process = subprocess.Popen([*words, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"serving at (http://\S+)", line):
                return found[1]
        assert process.stderr is not None
        raise AssertionError(process.stderr.read()[-2000:])

    yield start
    for process in running:
        process.send_signal(signal.SIGINT)
    for process in running:
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
