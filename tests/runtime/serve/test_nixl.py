"""Keys and values over NIXL where it is installed: the same tokens, the planned bytes, nothing kept; said where not."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.errors import InputError
from meshwright.runtime.serve import nixl
from tests.runtime import tiny
from tests.runtime.serve.test_engine import PROMPTS, all_said, run
from tests.runtime.serve.test_split import NEW, planned_bytes, sent_bytes, split, trial

#: Layouts of the live runs: heads cut and put together, stages on one side only, latent attention.
PAIRS = [("llama", "tp=1", "tp=3"), ("even", "tp=2", "pp=2"), ("deepseek_v3", "tp=2", "tp=1")]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("model", "prefill", "decode"), PAIRS)
def test_tokens_are_those_of_one_process_and_bytes_those_of_the_plan(
    checkpoint: Callable[[str], Path], model: str, prefill: str, decode: str
) -> None:
    if nixl.installed() is None:
        pytest.skip(f"none of {', '.join(nixl.PACKAGES)} is installed")
    folder = checkpoint(model)
    served = split(folder, prefill, decode, record=True, prefix=False, decode_block_size=3, kv_transport="nixl")
    assert run(served, partial(all_said, prompts=PROMPTS)) == tiny.oracle(folder, PROMPTS, NEW)[0]
    assert served.ranks.restarts == served.given_up == 0
    assert all(s.pool.owned == 0 for s in served.schedulers)
    assert sent_bytes(served) == planned_bytes(served)
    assert served.ranks.results is not None
    entries = [e for ledger in served.ranks.results for e in ledger.entries if e.name == "KV blocks"]
    assert {(e.op, e.state) for e in entries} == {("send", "completed"), ("recv", "completed")}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_dead_ranks_and_clients_that_leave_cost_no_token_and_no_block(checkpoint: Callable[[str], Path]) -> None:
    if nixl.installed() is None:
        pytest.skip(f"none of {', '.join(nixl.PACKAGES)} is installed")
    folder = checkpoint("llama")
    served = split(folder, "tp=2", "tp=1", restarts=10, decode_block_size=6, kv_transport="nixl")
    heard, faults = run(served, partial(trial, rng=random.Random(5), kills=2))
    want = tiny.oracle(folder, PROMPTS, 12)[0]
    assert faults > 2
    assert all(got == want[number] for number, got in heard)
    assert all(s.pool.owned == 0 and not s.running for s in served.schedulers)


def test_where_it_is_not_installed_that_is_said(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "nixl" in name else found(name))
    words = ["run", "serve", str(checkpoint("llama")), "--kv-transport", "nixl"]
    got = CliRunner().invoke(app, [*words, "--prefill", "tp=1", "--decode", "tp=1"])
    assert isinstance(got.exception, InputError)
    assert "is installed: pip install nixl" in str(got.exception)
    alone = CliRunner().invoke(app, words)
    assert "--kv-transport belongs to --decode" in str(alone.exception)
