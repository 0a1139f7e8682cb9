"""Requests in flight that the user adds to a command: they wait, and the engine starts all the same."""

from __future__ import annotations

import pytest

from tests.judge.asked import check

COMMAND = "vllm serve Qwen/Qwen3-32B -tp 2 -dp 4"


@pytest.mark.parametrize(("requests", "wait"), [(64, False), (400, True)])
def test_requests_in_flight_do_not_decide_whether_it_starts(requests: int, wait: bool) -> None:
    plain = check(COMMAND, "8xH100-SXM")
    asked = check(COMMAND, "8xH100-SXM", isl=4000, osl=500, concurrency=requests)
    assert asked.starts
    assert asked.verdict == plain.verdict
    found = [r for r in asked.plan.rules if r.code == "requests_wait"]
    assert bool(found) is wait
    if wait:
        numbers = dict(found[0].numbers)
        assert numbers["asked"] == 400
        assert 250 < numbers["held"] < 270
        assert any("400 requests of 4,000 + 500 tokens" in text for text in asked.unwise)
