"""Key-value cache: bytes a token, pages, groups and blocks, against hand counts and engine logs."""

from __future__ import annotations

from fractions import Fraction

import pytest

from meshwright.errors import InputError
from meshwright.plan.kv import CacheRules, attention_token_bytes, cache_dtype, cache_plan, state_bytes
from meshwright.specs.model import Attention, Indexer, Layer
from tests.kv_layers import delta_net, gqa, hybrid, mla, spec

GIB = 1 << 30
EVERY = range(1000)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "dtype", "expected"),
    [
        (32, 8, 1, "bf16", 4096),  # 8 x 2 x 128 x 2
        (32, 8, 8, "bf16", 512),  # one head a rank
        (32, 8, 16, "bf16", 512),  # replicated, not halved again
        (32, 8, 1, "fp8", 2048),
        (32, 32, 4, "f32", 8192),
        (48, 6, 4, "bf16", 1024),  # uneven: the fullest rank has two heads
        (32, 8, 1, "nvfp4", 1152),  # half a byte a value and one scale a 16
    ],
)
def test_gqa_token_bytes(heads: int, kv_heads: int, tp: int, dtype: str, expected: int) -> None:
    assert attention_token_bytes(Attention("gqa", heads, kv_heads, 128, 128), tp, dtype) == expected


@pytest.mark.parametrize(("kv_dtype", "expected"), [("auto", 1152), ("fp8", 576)])
def test_mla_latent_is_the_same_on_every_rank(kv_dtype: str, expected: int) -> None:
    for tp in (1, 8, 64):
        plan = cache_plan(spec([mla()]), tp, rules=CacheRules(kv_dtype=kv_dtype))
        assert plan.growth_bytes(EVERY, 1) == expected


def test_sparse_mla_packs_656_bytes_and_its_indexer_132() -> None:
    one = cache_plan(spec([mla(indexer=True)]), rules=CacheRules(kv_dtype="fp8", block_size=64))
    assert one.growth_bytes(EVERY, 1) == 656 + 132
    assert len(one.groups) == 1
    assert one.block_bytes(EVERY) == 64 * (656 + 132)


def test_shared_caches_cost_nothing() -> None:
    own, shared = gqa(8, 2, 64), gqa(8, 2, 64, shares_kv_with=0)
    assert cache_plan(spec([own, shared])).block_bytes(EVERY) == cache_plan(spec([own])).block_bytes(EVERY)


def test_auto_dtype_follows_the_checkpoint() -> None:
    assert cache_dtype(spec([mla()], kv_dtype="f8_e4m3"), "auto", "bf16") == "fp8"
    assert cache_dtype(spec([mla()]), "auto", "f16") == "f16"
    with pytest.raises(InputError, match="KV cache dtype 'int3'"):
        cache_dtype(spec([mla()]), "int3", "bf16")


def test_requests_hold_whole_blocks() -> None:
    plan = cache_plan(spec([gqa(32, 8, 128)] * 32))
    assert [plan.request_blocks(n) for n in (1, 16, 17, 8192)] == [1, 1, 2, 512]
    pool = [(EVERY, 1000 * plan.block_bytes(EVERY) + 5)]
    assert plan.blocks(pool) == 1000
    assert plan.tokens(pool, 8192) == 16000  # 1000 / 512 requests of 8192
    assert plan.whole_requests(pool, 8000) == 1  # 999 blocks, one is held back
    assert plan.longest(pool, 131072) == 16000


def test_decode_context_parallelism_shards_the_sequence() -> None:
    whole, split = cache_plan(spec([mla()] * 4), 8), cache_plan(spec([mla()] * 4), 8, 8)
    assert split.request_blocks(8192) * 8 == whole.request_blocks(8192)
    assert split.growth_bytes(EVERY, 1) * 8 == whole.growth_bytes(EVERY, 1)


def test_stages_hold_their_own_layers_and_the_minimum_decides() -> None:
    plan = cache_plan(spec([gqa(32, 8, 128)] * 64))
    first, last = range(56), range(56, 64)
    assert plan.block_bytes(first) == 7 * plan.block_bytes(last)
    pools = [(first, 46800 // 16 * plan.block_bytes(first)), (last, 327680 // 16 * plan.block_bytes(last))]
    assert plan.blocks(pools) == 46800 // 16


def test_windows_and_chunks_stop_growing() -> None:
    rules = CacheRules(in_flight=2048)
    window = cache_plan(spec([gqa(8, 8, 64, window=1024)]), rules=rules)
    chunk = cache_plan(spec([gqa(8, 8, 64, chunk=8192)]), rules=rules)
    assert window.request_blocks(1 << 20) == -(-(1024 - 1 + 2048) // 16) + 1
    assert chunk.request_blocks(1 << 20) == (8192 + 2048) // 16
    assert window.request_blocks(64) == 64 // 16 + 1
    kept = cache_plan(spec([gqa(8, 8, 64, window=1024)]), rules=CacheRules(windows=False))
    assert kept.request_blocks(1 << 20) == (1 << 20) // 16


def test_groups_take_the_smallest_kind_unless_the_kinds_are_close() -> None:
    near, far = gqa(8, 2, 64, window=128), gqa(8, 2, 64)
    five_to_one = cache_plan(spec([far if i % 6 == 5 else near for i in range(24)]))
    assert [len(g.pages) for g in five_to_one.groups] == [4] * 6
    uneven = cache_plan(spec([near] * 12 + [far] * 13))
    assert [len(g.pages) for g in uneven.groups] == [12, 13]
    assert uneven.block_bytes(EVERY) == 13 * 16 * 2 * 2 * 64 * 2


def test_smaller_pages_get_longer_blocks() -> None:
    near, far = gqa(16, 8, 256, window=1024), gqa(16, 2, 512)  # 8192 and 4096 bytes a token
    plan = cache_plan(spec([near, far]))
    assert {g.kind: g.block_size for g in plan.groups} == {"window": 16, "full": 32}


def test_state_bytes_shrink_with_tp_and_grow_with_drafts() -> None:
    r = delta_net(48, 16).recurrent
    assert r is not None
    assert state_bytes(r, 1, "bf16") == 48 * 128 * 128 * 4 + 3 * 10240 * 2
    assert state_bytes(r, 2, "bf16", 3) == 24 * 128 * 128 * 4 + 6 * 5120 * 2


def test_block_is_raised_to_the_recurrent_page() -> None:
    """An engine log of a 27B hybrid on one device with an fp8 cache: 1568 tokens, padding 0.13 %."""
    plan = cache_plan(spec(hybrid(64, 48, 24, 4)), rules=CacheRules(kv_dtype="fp8"))
    assert plan.block_size == 1568
    r = delta_net(48, 16).recurrent
    assert r is not None
    assert 100 * (1568 * 2048 / state_bytes(r, 1, "bf16") - 1) == pytest.approx(0.13, abs=0.005)


def test_printed_tokens_of_a_hybrid() -> None:
    """A 35B-A3B hybrid with prefix caching: 5.98 GiB are 567,978 tokens at 131,072, 4.33 requests."""
    plan = cache_plan(spec(hybrid(40, 32, 16, 2)), rules=CacheRules(kv_dtype="fp8", state_pages=2))
    pool = [(EVERY, int(5.98 * GIB))]
    assert plan.tokens(pool, 131072) == 567978
    assert plan.concurrency(pool, 131072) == Fraction(299, 69)


def test_snapshots_need_a_second_page() -> None:
    layers = hybrid(40, 32, 16, 2)
    two = cache_plan(spec(layers), rules=CacheRules(state_pages=2)).request_blocks(131072)
    one = cache_plan(spec(layers)).request_blocks(131072)
    assert two - one == 3  # three recurrent groups


def test_packed_caches_count_bytes_and_a_fixed_part() -> None:
    """DeepSeek-V4-Flash in vLLM 0.22: 6.66 GiB for 30,000 tokens; 5.44 GiB reach 13,528."""
    plain = Attention("gqa", 64, 1, 512, 0, window=128, rope_head_dim=64)
    four = Attention(
        "gqa", 64, 1, 512, 0, window=128, rope_head_dim=64, compress_ratio=4, indexer=Indexer(64, 128, 512)
    )
    many = Attention("gqa", 64, 1, 512, 0, window=128, rope_head_dim=64, compress_ratio=128)
    order = [plain, plain, *[four, many] * 20, four]
    v4 = spec([Layer((a,), ()) for a in order], model_type="deepseek_v4")
    plan = cache_plan(v4, 2, rules=CacheRules(in_flight=16384, block_size=256))
    assert not plan.grouped
    assert plan.request_bytes(EVERY, 30000) / GIB == pytest.approx(6.66, rel=0.03)
    assert plan.longest([(EVERY, int(5.44 * GIB))], 30000) == pytest.approx(13528, rel=0.02)
    shares = [plan.request_bytes(EVERY, n) / n for n in (50_000, 500_000)]
    assert shares[0] > 3 * shares[1]


def test_longest_context_of_a_hybrid_without_prefix_caching() -> None:
    """A 27B hybrid in an engine's refusal: 8.18 GiB for 131,072 tokens, 7.04 GiB reach 112,896."""
    plan = cache_plan(spec(hybrid(64, 48, 24, 4)))
    assert plan.request_bytes(EVERY, 131072) / GIB == pytest.approx(8.18, abs=0.005)
    assert plan.longest([(EVERY, int(7.04 * GIB))], 131072) == 112896
