"""Prefill and decode on ranks of their own: the same tokens, the planned bytes, and no fault that costs a token."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from meshwright import engines
from meshwright.doctor import slow_cache
from meshwright.doctor.readers.walk import read_incident
from meshwright.ledger.store import write_jsonl
from meshwright.moves.kv import head_widths
from meshwright.runtime.folder import read_folder
from meshwright.runtime.launch.local import run_local
from meshwright.runtime.serve.engine import EngineConfig, Ticket
from meshwright.runtime.serve.handoff import Planner
from meshwright.runtime.serve.scheduler import Limits
from meshwright.runtime.serve.split import SplitEngine
from meshwright.specs.layout import parse_layout
from meshwright.specs.placement import place
from tests.runtime import moe_models, tiny
from tests.runtime.serve.faulty import serve_faulty
from tests.runtime.serve.test_engine import PROMPTS, all_said, run

NEW = 6
#: tp and pp different, uneven tp (9 heads as 6 + 3) and stages, fewer KV heads than tp, latent attention, replicas.
PAIRS = [
    ("llama", "tp=1", "tp=3"),
    ("llama", "pp=2,stage_layers=4+1", "tp=2"),
    ("deepseek_v3", "tp=2", "pp=2"),
    ("llama", "tp=1", "tp=1"),
    ("llama", "tp=2", "tp=1"),
    ("llama", "tp=3", "tp=2"),
    ("llama", "tp=2", "pp=2"),
    ("llama", "pp=2", "pp=3"),
    ("llama", "tp=1", "dp=2"),
    ("llama", "dp=2", "tp=1"),
    ("even", "tp=4", "tp=1"),
    ("even", "tp=1", "tp=4"),
    ("even", "tp=2,pp=2", "tp=4"),
    ("deepseek_v3", "pp=3", "tp=3"),
    ("qwen3_moe", "tp=1", "dp=2,ep=2"),
]


def split(
    folder: Path, prefill: str, decode: str, blocks: int = 64, transfer_s: float = 60.0, **more: Any
) -> SplitEngine:
    model = read_folder(folder)
    a, b = (place(model.spec, parse_layout(x), engines.profile("meshwright")) for x in (prefill, decode))
    limits = Limits(8, 16, 64, 64, max(a.layout.pp, b.layout.pp))
    return SplitEngine(EngineConfig(model, a, blocks=blocks, block_size=4, limits=limits, decode=b, **more), transfer_s)


def sent_bytes(served: SplitEngine) -> Counter[tuple[int, int]]:
    """Bytes of keys and values that left, by rank (-1: any replica) and layer, as recorded."""
    sent: Counter[tuple[int, int]] = Counter()
    assert served.ranks.results is not None
    for rank, ledger in enumerate(served.ranks.results):
        for entry in ledger.entries:
            if entry.op == "send" and entry.name == "KV blocks":
                sent[rank if served.config.placement.layout.dp == 1 else -1, entry.layer] += entry.payload_bytes
    return sent


def planned_bytes(served: SplitEngine) -> Counter[tuple[int, int]]:
    """The same as planned for ``PROMPTS``."""
    a, b = served.config.placement, served.config.decode
    assert b is not None
    planner, planned = Planner(a, b), Counter[tuple[int, int]]()
    for p in PROMPTS:
        for m in planner.plan(len(p), 0, 0, 0):
            width = sum(head_widths(a, m.layer))
            planned[m.source if a.layout.dp == 1 else -1, m.layer] += m.nbytes(width, 4)
    return planned


@pytest.mark.parametrize(
    ("model", "prefill", "decode"), [*PAIRS[:3], *(pytest.param(*p, marks=pytest.mark.slow) for p in PAIRS[3:])]
)
def test_tokens_are_those_of_the_undivided_run_and_bytes_those_of_the_plan(
    tmp_path: Path, checkpoint: Callable[[str], Path], model: str, prefill: str, decode: str
) -> None:
    folder = moe_models.write(tmp_path, model) if model in moe_models.MIXTURES and model != "deepseek_v3" else None
    folder = folder or checkpoint(model)
    size = 4 if decode == "tp=3" else 3  # of blocks of the decode pool
    served = split(folder, prefill, decode, record=True, prefix=False, decode_block_size=size)
    assert run(served, partial(all_said, prompts=PROMPTS)) == tiny.oracle(folder, PROMPTS, NEW)[0]
    assert all(s.pool.owned == 0 for s in served.schedulers)
    assert sent_bytes(served) == planned_bytes(served)


def test_a_prefix_that_the_decode_pool_has_is_not_sent_again(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("llama")
    served = split(folder, "tp=1", "tp=1", record=True)

    async def twice(served: SplitEngine) -> list[list[int]]:
        first = await all_said(served, PROMPTS[3:4])
        return [*first, *await all_said(served, PROMPTS[3:5])]

    want = tiny.oracle(folder, PROMPTS, NEW)[0]
    assert run(served, twice) == [want[3], want[3], want[4]]
    assert served.ranks.results is not None
    sent = sum(e.payload_bytes for e in served.ranks.results[0].entries if e.name == "KV blocks")
    assert sent == (9 + 1 + 1) * 5 * 3 * 16 * 4
    for rank, ledger in enumerate(served.ranks.results):
        write_jsonl(ledger, tmp_path / f"{rank}.jsonl")
    (moved,) = slow_cache.moved(read_incident(tmp_path))
    assert (moved.ranks, moved.size_bytes) == ((0, 1), sent)
    assert 0 < moved.busy_s < 60


def test_where_the_decode_pool_runs_out_of_blocks_requests_wait_or_are_computed_again(
    checkpoint: Callable[[str], Path],
) -> None:
    folder = checkpoint("llama")
    served = split(folder, "tp=1", "tp=1", blocks=8)
    assert run(served, partial(all_said, prompts=PROMPTS, new=14)) == tiny.oracle(folder, PROMPTS, 14)[0]
    assert served.schedulers[1].counts.preemptions > 0
    assert all(s.pool.owned == 0 for s in served.schedulers)


async def trial(served: SplitEngine, rng: random.Random, kills: int) -> tuple[list[tuple[int, list[int]]], int]:
    """Requests that come and go while ranks are killed; what those who stayed heard, and how many faults there were."""
    faults = 0

    async def client(number: int, ticket: Ticket, leaves_after: int | None) -> tuple[int, list[int]] | None:
        got: list[int] = []
        async for token in ticket:
            got.append(token.token)
            if leaves_after is not None and len(got) > leaves_after:
                served.drop(ticket)
                return None
        return number, got

    tasks = []
    for _ in range(12):
        number = rng.randrange(len(PROMPTS))
        ticket = served.submit(PROMPTS[number], 12, eos=())
        leaves = rng.choice([None, None, rng.randrange(4), -1])
        faults += leaves is not None
        if leaves != -1:
            tasks.append(asyncio.create_task(client(number, ticket, leaves)))
        await asyncio.sleep(rng.random() * 0.05)
        if leaves == -1:
            served.drop(ticket)
    for _ in range(kills):
        await asyncio.sleep(0.05 + 0.2 * rng.random())
        if served.healthy:
            with suppress(ProcessLookupError):
                os.kill(rng.choice(served.ranks.pids), signal.SIGKILL)
                faults += 1
    return [heard for heard in await asyncio.gather(*tasks) if heard is not None], faults


def faulted(folder: Path, seed: int, kills: int) -> int:
    """One run with every kind of fault; how many there were."""
    rng = random.Random(seed)
    lost, late = rng.choice([(0, 3), (25, 0), (40, 4)])

    def launch(target: Any, world: int, args: Sequence[Any], timeout_s: float, **more: Any) -> list[Any]:
        return run_local(serve_faulty, world, (lost, late, seed, *args), timeout_s, **more)

    prefill, decode = rng.choice([("tp=1", "tp=2"), ("tp=2", "tp=1"), ("tp=1", "pp=2")])
    served = split(folder, prefill, decode, transfer_s=1.0, launch=launch, restarts=100, decode_block_size=6)
    heard, faults = run(served, partial(trial, rng=rng, kills=kills))
    want = tiny.oracle(folder, PROMPTS, 12)[0]
    for number, got in heard:
        assert got == want[number], f"seed {seed}: a wrong or lost token"
    assert served.waiting == 0
    assert all(s.pool.owned == 0 and not s.running for s in served.schedulers), f"seed {seed}: a block leaked"
    return faults + served.given_up


@pytest.mark.timeout(240)
def test_faults_cost_no_token_and_no_block(checkpoint: Callable[[str], Path]) -> None:
    assert faulted(checkpoint("llama"), seed=1, kills=1) >= 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_faults_cost_no_token_and_no_block(checkpoint: Callable[[str], Path]) -> None:
    faults, seed = 0, 100
    while faults < 200:
        faults += faulted(checkpoint("llama"), seed, kills=2)
        seed += 1


def test_pages_written_where_the_plan_does_not_say_are_seen(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("llama")

    def launch(target: Any, world: int, args: Sequence[Any], timeout_s: float, **more: Any) -> list[Any]:
        return run_local(_one_head_off, world, args, timeout_s, **more)

    served = split(folder, "tp=1", "tp=3", launch=launch)
    assert run(served, partial(all_said, prompts=PROMPTS)) != tiny.oracle(folder, PROMPTS, NEW)[0]


def _one_head_off(rank: int, job: Any) -> Any:
    from meshwright.runtime.serve import handoff
    from meshwright.runtime.serve.job import serve_rank

    honest = handoff._heads
    handoff._heads = lambda message, side: [  # type: ignore[assignment]
        (at + 1) % 3 if side == "source" else at for at in honest(message, side)
    ]
    return serve_rank(rank, job)
