"""Requests in flight that the user adds to a command: they wait, and the engine starts all the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.judge.check import check_config
from meshwright.specs.cluster import parse_cluster
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


def test_lengths_are_added_to_a_configuration_file_too(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("model: Qwen/Qwen3-32B\ntensor-parallel-size: 2\ndata-parallel-size: 4\n")
    for requests, wait in ((64, False), (400, True)):
        verdict = check_config(path, parse_cluster("8xH100-SXM"), isl=4000, osl=500, concurrency=requests)
        assert verdict is not None
        assert verdict.starts
        assert any("400 requests of 4,000 + 500 tokens" in text for text in verdict.unwise) is wait


@pytest.mark.parametrize("value", ["[1]", "3", '"x"'])
def test_a_json_flag_that_is_no_object_is_one_clear_line(value: str) -> None:
    with pytest.raises(InputError, match=r"--kv-transfer-config .* is no JSON object"):
        check(f"vllm serve qwen3-8b --kv-transfer-config '{value}'", "H100-SXM")


def test_a_shorter_context_is_the_way_out_where_the_weights_fit() -> None:
    verdict = check("vllm serve qwen3-8b", "RTX-4090")
    assert not verdict.starts
    said = re.search(r"state a context of at most ([\d,]+) tokens$", verdict.way_out)
    assert said is not None
    longest = int(said[1].replace(",", ""))
    assert check(f"vllm serve qwen3-8b --max-model-len {longest}", "RTX-4090").starts
    assert not check(f"vllm serve qwen3-8b --max-model-len {longest + 32}", "RTX-4090").starts
