"""The paged cache: block boundaries, chunked prefill, unequal batches, blocks handed out and given back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.runtime.serve.cache import BlockTables, CacheShape, PagedCache
from tests.runtime import tiny

Folder = Callable[[str], Path]
LONG = tuple((7 * i + 3) % 131 for i in range(33))


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_lengths_around_block_boundaries(checkpoint: Folder, block_size: int) -> None:
    folder = checkpoint("llama")
    prompts = tuple(LONG[:n] for n in (1, 3, 4, 5, 15, 16, 17, 31, 32, 33))
    result = tiny.alone(tiny.job(folder, "tp=1", prompts, 3, block_size=block_size))
    tiny.assert_same((result.tokens, result.logits), tiny.oracle(folder, prompts, 3))


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 100])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_chunked_prefill_equals_whole(checkpoint: Folder, name: str, chunk: int) -> None:
    folder = checkpoint(name)
    result = tiny.alone(tiny.job(folder, "tp=1", chunk=chunk))
    tiny.assert_same((result.tokens, result.logits), tiny.oracle(folder))


def test_chunks_in_flight_through_stages(checkpoint: Folder) -> None:
    folder = checkpoint("llama")
    tiny.assert_same(tiny.on_ranks(tiny.job(folder, "tp=2,pp=2", chunk=2)), tiny.oracle(folder))


def test_a_batch_equals_each_prompt_alone(checkpoint: Folder) -> None:
    folder = checkpoint("qwen3")
    together = tiny.alone(tiny.job(folder, "tp=1"))
    for i, prompt in enumerate(tiny.PROMPTS):
        single = tiny.alone(tiny.job(folder, "tp=1", [prompt]))
        assert single.tokens[0] == together.tokens[i]
        assert (single.logits[0] - together.logits[i]).abs().max() < 1e-5


def test_pool_is_as_large_as_the_tokens_it_holds(checkpoint: Folder) -> None:
    # 7, 4, 1 and 9 tokens with 5 new ones behind them: 3 + 3 + 2 + 4 blocks of 4; the last new token is not cached.
    result = tiny.alone(tiny.job(checkpoint("llama"), "tp=1"))
    assert result.kv_cache_bytes == 12 * 4 * 3 * 8 * 2 * 5 * 4


def test_texts_end_at_an_end_token_and_give_their_blocks_back(checkpoint: Folder) -> None:
    folder = checkpoint("llama")
    want = tiny.oracle(folder)[0]
    stop = want[0][2]
    result = tiny.alone(tiny.job(folder, "tp=1", eos=(stop,)))
    cut = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in want]
    assert list(result.tokens.values()) == cut
    assert len(cut[0]) <= 3


def test_blocks_run_out_with_a_sentence_and_nothing_is_taken() -> None:
    tables = BlockTables(2, 4)
    tables.extend(0, 5)
    with pytest.raises(InputError, match="1 blocks of 4 tokens are needed, 0 are free"):
        tables.extend(1, 1)
    tables.release(0)
    assert sorted(tables.free) == [0, 1]


@given(
    size=st.integers(1, 5),
    moves=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=40),
)
@settings(max_examples=60, deadline=None)
def test_no_slot_belongs_to_two_sequences(size: int, moves: list[tuple[int, int]]) -> None:
    """``(sequence, n)``: n more tokens, or with 0 the end of the sequence."""
    tables, slots = BlockTables(200, size), dict[int, list[int]]()
    for sequence, tokens in moves:
        if tokens:
            slots.setdefault(sequence, []).extend(tables.extend(sequence, tokens))
        else:
            tables.release(sequence)
            slots.pop(sequence, None)
        held = [slot for of in slots.values() for slot in of]
        assert len(held) == len(set(held))
        assert len(tables.free) + sum(map(len, tables.tables.values())) == 200
        assert all(len(of) == tables.lengths[s] for s, of in slots.items())


def test_what_is_written_is_read_in_order() -> None:
    cache = PagedCache({0: CacheShape(2, 3, 3)}, 8, 4, torch.float32, torch.device("cpu"))
    cache.tables.extend(9, 6)  # another sequence comes first
    rows = torch.arange(10 * 6).float().view(10, 2, 3)
    batch = cache.batch([(1, list(range(10)))], [True], "prefill")
    cache.write(0, batch.slots_T, rows, -rows)
    k, v = cache.read(0, batch.table_BM[0], 10)
    assert torch.equal(k, rows)
    assert torch.equal(v, -rows)
    assert batch.positions_T.tolist() == list(range(10))


def test_a_cache_that_does_not_fit_is_refused_before_it_is_made(tmp_path: Path) -> None:
    """2 layers of 1 head of 4 + 4 values: 64 bytes a token in fp32."""
    from meshwright.runtime.memory import check_fits
    from meshwright.specs.detect_host import free_memory_bytes
    from meshwright.specs.probe import Probe

    shapes = {0: CacheShape(1, 4, 4), 1: CacheShape(1, 4, 4)}
    with pytest.raises(
        InputError, match=r"^KV cache takes 68,719,476,736,000 bytes, [\d,]+ are free on this machine; "
    ):
        PagedCache(shapes, 1 << 30, 1000, torch.float32, torch.device("cpu"))
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4 kB\n")
    probe = Probe(tmp_path)
    assert free_memory_bytes(probe) == 4096
    check_fits("cache", 4096, torch.device("cpu"), "", probe)
    with pytest.raises(InputError, match="cache takes 4,097 bytes, 4,096 are free on this machine; fewer"):
        check_fits("cache", 4097, torch.device("cpu"), "fewer", probe)
    assert free_memory_bytes(Probe(tmp_path / "none")) is None
