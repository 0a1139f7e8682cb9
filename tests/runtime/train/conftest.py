"""Ranks of all tests of this folder are forked from a server that has imported what training needs."""

from __future__ import annotations

from multiprocessing import forkserver

import pytest

from meshwright.runtime.launch.local import start_server
from meshwright.runtime.train.launch import PRELOAD


@pytest.fixture(scope="session", autouse=True)
def preloaded() -> None:
    """A server of tests before these knows less: it would have every rank import two seconds of DTensor."""
    forkserver._forkserver._stop()
    start_server(PRELOAD)
