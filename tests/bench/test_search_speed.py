"""The bench of the search measures what it says, on a small question."""

from __future__ import annotations

import pytest

from bench import search_speed


def test_a_question_is_measured_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    question = ("llama-3.1-8b", "2x8xH100-SXM@ib-400g", "meshwright", 4096, 64)
    monkeypatch.setitem(search_speed.QUESTIONS, "small", question)
    row = search_speed.ask("small", 5)
    assert row["devices"] == 16
    assert row["space"] == row["illegal"] + row["unfit"] + row["tight"] + row["costed"]
    assert row["costed_a_second"] < row["costed_a_second_tabulated"]
    assert row["compared"] == 5
    assert row["largest_difference"] < 1e-9
