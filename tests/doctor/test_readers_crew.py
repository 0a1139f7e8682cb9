"""Forked readers: what they send comes whole, and one that dies loses its file alone."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from meshwright.doctor.readers import crew


def done(items: list[int]) -> tuple[dict[int, bytes], dict[int, str]]:
    took: dict[int, bytes] = {}
    lost: dict[int, str] = {}

    def work(item: int) -> bytes:
        if item == 13:
            os._exit(7)
        if item == 14:
            os.kill(os.getpid(), 9)
        return bytes([item]) * 100_000

    crew.run(items, work, lambda _, item, message: took.__setitem__(item, message), lost.__setitem__, lambda _: 60.0)
    return took, lost


def test_every_message_comes_whole_and_the_lost_say_how() -> None:
    took, lost = done([1, 13, 2, 3, 14, 4])
    assert took == {n: bytes([n]) * 100_000 for n in (1, 2, 3, 4)}
    assert lost == {13: "its process ended with exit status 7", 14: "its process was ended by signal 9"}


@pytest.fixture
def many_open_files() -> Iterator[int]:
    """All descriptors below 1,024 but one are in use, as in a server or a long test run; the highest of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip(f"this system allows {hard} open files, 1,200 needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    with ExitStack() as files:
        taken = [files.enter_context(open(os.devnull, "rb")) for _ in range(1100)]
        files.push(lambda *_: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)))
        taken[0].close()
        yield max(file.fileno() for file in taken[1:])


def test_descriptors_beyond_those_of_select(many_open_files: int) -> None:
    assert many_open_files > 1023
    took, lost = done([1, 2, 3])
    assert sorted(took) == [1, 2, 3]
    assert not lost
