"""The engine on live ranks: many requests at once say what each says alone, whatever is shared, lost or restarted."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from meshwright import engines
from meshwright.errors import InputError, MeshwrightError
from meshwright.runtime.folder import read_folder
from meshwright.runtime.job import Sampling
from meshwright.runtime.serve.engine import Engine, EngineConfig, Ticket
from meshwright.runtime.serve.scheduler import Limits
from meshwright.specs.layout import parse_layout
from meshwright.specs.placement import place
from tests.runtime import moe_models, tiny

#: Lengths around the ends of blocks of 4, and two prompts that begin alike.
PROMPTS: tuple[tuple[int, ...], ...] = (
    (5, 99, 17, 3, 64, 120, 7),
    (1, 2, 3, 4),
    (77,),
    (11, 12, 13, 14, 15, 16, 17, 18, 19),
    (11, 12, 13, 14, 15, 16, 17, 18, 20),
    (9, 8, 7),
)
NEW = 6


def engine(folder: Path, layout: str, blocks: int = 64, tokens: int = 16, **more: Any) -> Engine:
    model = read_folder(folder)
    placement = place(model.spec, parse_layout(layout), engines.profile("meshwright"))
    limits = Limits(8, tokens, 64, 64, placement.layout.pp)
    return Engine(EngineConfig(model, placement, blocks=blocks, block_size=4, limits=limits, **more))


async def said(ticket: Ticket) -> list[int]:
    return [token.token async for token in ticket]


async def all_said(served: Engine, prompts: Sequence[Sequence[int]], new: int = NEW) -> list[list[int]]:
    tickets = [served.submit(p, new, eos=()) for p in prompts]
    return list(await asyncio.gather(*map(said, tickets)))


def run(served: Engine, body: Callable[[Engine], Any]) -> Any:
    """Start, run the body, stop; bounded in time."""

    async def whole() -> Any:
        async with asyncio.timeout(90):
            await served.start()
            try:
                return await body(served)
            finally:
                await served.stop()

    return asyncio.run(whole())


@pytest.mark.parametrize(
    ("layout", "blocks", "tokens"),
    [("tp=1", 64, 5), ("tp=2", 64, 16), ("pp=2", 12, 7), ("dp=2", 64, 16)],
    ids=["chunked prefill", "tp=2", "pp=2 with preemption", "two replicas"],
)
def test_together_every_request_says_what_it_says_alone(
    checkpoint: Callable[[str], Path], layout: str, blocks: int, tokens: int
) -> None:
    folder = checkpoint("llama")
    served = engine(folder, layout, blocks, tokens)

    async def twice(served: Engine) -> tuple[list[list[int]], list[list[int]]]:
        return await all_said(served, PROMPTS), await all_said(served, PROMPTS)

    first, again = run(served, twice)
    assert first == again == tiny.oracle(folder, PROMPTS, NEW)[0]
    counts = [s.counts for s in served.schedulers]
    assert sum(c.prefix_tokens for c in counts) >= 8, "the second round found the blocks of the first"
    assert (sum(c.preemptions for c in counts) > 0) == (blocks == 12)
    assert all(s.pool.owned == 0 for s in served.schedulers)


def test_replicas_that_meet_at_experts_walk_in_step(tmp_path: Path) -> None:
    folder = moe_models.write(tmp_path, "qwen3_moe")
    served = engine(folder, "dp=2,ep=2")

    async def uneven(served: Engine) -> list[list[int]]:
        one = served.submit(PROMPTS[0], NEW, eos=())
        got = [await said(one)]
        return [*got, *await all_said(served, PROMPTS[1:4])]

    assert served.pool.in_step
    assert run(served, uneven) == tiny.oracle(folder, PROMPTS[:4], NEW)[0]


@pytest.mark.parametrize(
    ("family", "layout"),
    [("gpt_oss", "tp=2"), ("deepseek_v3", "dp=2,ep=2")],
    ids=["windows and sinks", "latent attention in step"],
)
def test_other_kinds_of_attention_in_passes_that_prefill_and_decode(tmp_path: Path, family: str, layout: str) -> None:
    folder = moe_models.write(tmp_path, family)
    served = engine(folder, layout, tokens=5)

    async def staggered(served: Engine) -> list[list[int]]:
        first = served.submit(PROMPTS[0], NEW, eos=())
        early = asyncio.create_task(said(first))
        while not first.line.new:
            await asyncio.sleep(0.001)
        return [*await all_said(served, PROMPTS[3:5]), await early]

    assert run(served, staggered) == tiny.oracle(folder, (*PROMPTS[3:5], PROMPTS[0]), NEW)[0]


def test_a_killed_rank_costs_time_and_no_token(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("llama")
    served = engine(folder, "tp=2")

    async def interrupted(served: Engine) -> list[list[int]]:
        tickets = [served.submit(p, 40, eos=()) for p in PROMPTS[:3]]
        waiting = [asyncio.create_task(said(t)) for t in tickets]
        while len(tickets[0].line.new) < 5:
            await asyncio.sleep(0.002)
        os.kill(served.ranks.pids[1], signal.SIGKILL)
        return list(await asyncio.gather(*waiting))

    assert run(served, interrupted) == tiny.oracle(folder, PROMPTS[:3], 40)[0]
    assert served.ranks.restarts == 1
    assert "rank 1" in served.ranks.trouble


def test_without_a_restart_left_requests_end_with_the_cause(checkpoint: Callable[[str], Path]) -> None:
    served = engine(checkpoint("llama"), "tp=1", restarts=0)

    async def killed(served: Engine) -> str:
        ticket = served.submit(PROMPTS[0], 40, eos=())
        os.kill(served.ranks.pids[0], signal.SIGKILL)
        with pytest.raises(MeshwrightError, match="rank 0 of 1 was ended by signal 9"):
            await said(ticket)
        with pytest.raises(MeshwrightError, match="signal 9"):
            served.submit(PROMPTS[0], 4)
        return "told"

    assert run(served, killed) == "told"


def test_a_client_that_leaves_frees_its_blocks_and_disturbs_nobody(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("llama")
    served = engine(folder, "tp=1")

    async def leave(served: Engine) -> list[int]:
        leaving, staying = served.submit(PROMPTS[0], 40, eos=()), served.submit(PROMPTS[1], NEW, eos=())
        async for _ in leaving:
            served.drop(leaving)
            break
        got = await said(staying)
        while served.schedulers[0].pool.owned:
            await asyncio.sleep(0.01)
        return got

    assert run(served, leave) == tiny.oracle(folder, PROMPTS, NEW)[0][1]


def test_sampling_is_by_seed_and_place_whatever_else_runs(checkpoint: Callable[[str], Path]) -> None:
    served = engine(checkpoint("llama"), "tp=1")
    hot = Sampling(temperature=1.0, top_k=50, seed=7)

    async def draws(served: Engine) -> list[list[int]]:
        alone = await said(served.submit(PROMPTS[0], NEW, hot, eos=()))
        crowd = [served.submit(p, NEW, hot, eos=(), logprobs=2) for p in PROMPTS[:3]]
        tokens = [[t async for t in ticket] for ticket in crowd]
        assert all(t.logprob is not None and t.logprob <= 0 and len(t.top) == 2 for t in tokens[0])
        greedy = await said(served.submit(PROMPTS[0], 1, eos=(), bias=[(3, 100.0)]))
        return [alone, [t.token for t in tokens[0]], greedy]

    alone, crowd, biased = run(served, draws)
    assert alone == crowd
    assert biased == [3]


def test_what_cannot_be_served_is_refused(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("llama")
    with pytest.raises(InputError, match="context parallel 2"):
        engine(folder, "cp=2")
    with pytest.raises(InputError, match="outside the vocabulary of 131"):
        engine(folder, "tp=1").submit([131], 1)
