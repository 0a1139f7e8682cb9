"""The bench of training holds what it says against what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.training.run import AIMS, CONTENDERS, Found, command, rows


def test_every_aim_names_two_contenders() -> None:
    names = {c.name for c in CONTENDERS}
    assert {name for own, other, _ in AIMS for name in (own, other)} == names


def test_a_ratio_is_of_medians_of_cpu_seconds_and_says_whether_the_numbers_agree() -> None:
    own, other, aim = AIMS[0]
    found = {own: Found([9.0], [2.0, 1.0, 9.0], 5.0, 3.0), other: Found([1.0], [4.0], 5.0, 3.0)}
    assert rows(found) == [{"own": own, "other": other, "ratio": 2.0, "aim": aim, "same_numbers": True}]
    found[other].norm = 3.1
    assert rows(found)[0]["same_numbers"] is False
    assert rows({own: found[own]}) == []


def test_deepspeed_takes_part_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = next(c for c in CONTENDERS if c.kind == "deepspeed")
    monkeypatch.delenv("MESHWRIGHT_DEEPSPEED_PYTHON", raising=False)
    assert command(stage, Path("model"), 1) is None
    monkeypatch.setenv("MESHWRIGHT_DEEPSPEED_PYTHON", "python-of-it")
    words = command(stage, Path("model"), 1)
    assert words is not None
    assert words[0] == "python-of-it"
