"""Cases about the key-value cache: bytes a token, what fits, what the engine prints; and the cases not decided."""

from __future__ import annotations

import csv
import re
from fractions import Fraction
from pathlib import Path

import pytest

from meshwright.plan.kv import CacheRules, cache_plan
from meshwright.plan.loading import mxfp4_factors
from meshwright.specs.atlas.devices import find_device
from meshwright.specs.hf.read import model_from_config, read_model
from meshwright.specs.model import Attention, Indexer, Layer, Moe
from tests.cases.serving import CONFIGS, GIB, dense, ledger, model, serve
from tests.kv_layers import gqa, hybrid, mla, spec
from tests.shared import shared_dir

EVERY = range(1000)
KIB = 1024

#: Cases that no prediction here decides, with the reason.
UNDECIDED = {
    "C020": "a version without an MLA kernel on unchunked prompts: its profile run is not described",
    "C035": "the layout over 16 cards and which matrices stayed in 16 bits are not stated",
    "C135": "a version without an MLA kernel; device not stated",
    "C138": "TensorRT-LLM: its workspace is not modelled",
    "C139": "vLLM 0.2.7: the peak of its first fused-expert path is not modelled",
    "C226": "log-probabilities of a whole prompt lie outside every budget; sequence lengths are not stated",
}


def bytes_a_token(layers: int, kv_heads: int, width: int, tp: int = 1, dtype: str = "bf16") -> float:
    """Cache bytes of one token on one rank of a uniform decoder."""
    plan = cache_plan(spec([gqa(64, kv_heads, width)] * layers), tp, rules=CacheRules(kv_dtype=dtype))
    return plan.growth_bytes(EVERY, 1)


def test_c013_every_rank_allocates_the_same_blocks() -> None:
    """507 blocks on each of two cards are 507 x 16 tokens, not twice as many."""
    plan = cache_plan(spec([gqa(32, 32, 128)] * 32), 2)
    pools = [(EVERY, 507 * plan.block_bytes(EVERY))] * 2
    assert plan.blocks(pools) == 507
    assert plan.tokens(pools, 16384) == 507 * 16
    memory = serve("deepseek-coder-6.7b", "tp=2", "1x2xT4", version="0.2.7", utilization=0.9, dtype="float16")
    assert len(memory.ranks) == 1
    assert memory.ranks[0].ranks == 2


def test_c015_same_bytes_a_token_on_both_engines() -> None:
    """48,128 bytes: 8.11 GiB are 178,880 tokens, 16.46 GB on the other engine 367,404."""
    assert bytes_a_token(94, 4, 128, tp=4) == 48128
    assert pytest.approx(178_880, rel=0.02) == 8.11 * GIB / 48128
    assert pytest.approx(8.23 * 2, rel=0.01) == 367_404 * 48128 / GIB


def test_c017_one_million_tokens() -> None:
    """48 layers of 8 KV heads on TP 8 without windows need 24.00 GiB; 9.97 GiB reach less, found by search."""
    order = [gqa(40, 8, 128) if i % 4 == 3 else gqa(40, 8, 128, chunk=8192) for i in range(48)]
    flat = cache_plan(spec(order), 8, rules=CacheRules(windows=False))
    assert flat.request_bytes(EVERY, 1_048_576) / GIB == pytest.approx(24.0, abs=0.005)
    local = cache_plan(spec(order), 8)
    reached = local.longest([(EVERY, int(9.97 * GIB))], 10_485_760)
    assert local.request_bytes(EVERY, reached) <= 9.97 * GIB < local.request_bytes(EVERY, reached + 16)
    naive = local.blocks([(EVERY, int(9.97 * GIB))]) * local.block_size
    assert abs(reached / naive - 1) > 0.02


def v4_flash() -> list[Layer]:
    """The 43 layers of DeepSeek-V4-Flash: windows everywhere, compressed by 4 and 128 in turn."""
    base = {"window": 128, "rope_head_dim": 64}
    plain = Attention("gqa", 64, 1, 512, 0, **base)  # type: ignore[arg-type]
    four = Attention("gqa", 64, 1, 512, 0, compress_ratio=4, indexer=Indexer(64, 128, 512), **base)  # type: ignore[arg-type]
    many = Attention("gqa", 64, 1, 512, 0, compress_ratio=128, **base)  # type: ignore[arg-type]
    return [Layer((a,), ()) for a in (plain, plain, *[four, many] * 20, four)]


def test_c024_c136_tokens_of_a_compressed_cache_depend_on_the_context() -> None:
    """A fixed part a request: 24.5 GiB are 398K tokens at 50K and 2.45M at 500K; 7.7 GiB 150K somewhere between."""
    plan = cache_plan(spec(v4_flash(), model_type="deepseek_v4"), 2, rules=CacheRules(block_size=256))
    pool = [(EVERY, int(24.5 * GIB))]
    assert plan.tokens(pool, 50_000) == pytest.approx(398_000, rel=0.15)
    assert plan.tokens(pool, 500_000) == pytest.approx(2_450_000, rel=0.05)
    fixed, slope = plan.request_bytes(EVERY, 100_000), plan.growth_bytes(EVERY, 100_000)
    assert slope == pytest.approx(3300, rel=0.2)
    assert fixed - 100_000 * slope == pytest.approx(3.2e9, rel=0.15)
    small = [(EVERY, int(7.7 * GIB))]
    assert plan.tokens(small, 20_000) < 150_000 < plan.tokens(small, 200_000)
    ratios = [plan.request_bytes(EVERY, n) / n / KIB for n in (32_768, 1_048_576)]
    assert all(4.05 < r < 110 for r in ratios)


def test_c026_gemma_4_26b() -> None:
    path = shared_dir("configs", "google--gemma-4-26B-A4B_config.json")
    got = serve(read_model(str(path)), "tp=1", "1x1xA100-80G", context=131072, utilization=0.9, enforce_eager=True)
    assert ledger(got)["weights"] == pytest.approx(48.5, rel=0.01)
    assert ledger(got)["pool"] == pytest.approx(21.5, rel=0.02)


def early_405b() -> dict[str, object]:
    """The first release of the fp8 405B: 16 KV heads (each stored twice); only the MLPs of the inner layers in fp8."""
    kept = [f"model.layers.{i}.self_attn.{p}_proj" for i in range(126) for p in "qkvo"]
    kept += [f"model.layers.{i}.mlp.{p}_proj" for i in (0, 125) for p in ("gate", "up", "down")]
    quantization = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": [*kept, "lm_head"]}
    return dense(
        "LlamaForCausalLM", 16384, 126, 128, 16, 53248, 128256, 131072, model_type="llama",
        quantization_config=quantization,
    )  # fmt: skip


def test_c030_c143_405b_does_not_hold_its_full_context() -> None:
    memory = serve(
        model_from_config(early_405b(), "405b", "405b"), "tp=8", version="0.5.3", context=131072, utilization=0.9
    )
    assert ledger(memory)["weights"] == pytest.approx(57.752, rel=0.01)
    assert not memory.fits
    assert memory.longest_context < 131072
    assert memory.kv_bytes_per_token == 126 * 2 * 256 * 2


@pytest.mark.parametrize(
    ("layers", "gib"),
    [(32, (0.125, 1.95, 15.62)), (80, (0.313, 4.88, 39.06)), (126, (0.984 / 2, 15.38 / 2, 123.05 / 2))],
)
def test_c032_published_cache_sizes(layers: int, gib: tuple[float, ...]) -> None:
    """Of Llama 3.1 in fp16 at 1k, 16k and 128k (thousands of 1000). The 405B figures are of the early 16 KV heads."""
    for tokens, size in zip((1000, 16000, 128000), gib, strict=True):
        assert bytes_a_token(layers, 8, 128) * tokens / GIB == pytest.approx(size, rel=0.03)


def test_c036_tokens_on_two_small_machines() -> None:
    """62 layers, 8 KV heads on TP 2: 23.25 GiB for 196,608 tokens; 22.5 GiB reach 190,272."""
    plan = cache_plan(spec([gqa(48, 8, 128)] * 62), 2)
    assert plan.request_bytes(EVERY, 196_608) / GIB == pytest.approx(23.25, abs=0.005)
    assert plan.longest([(EVERY, int(22.5 * GIB))], 196_608) == pytest.approx(190_272, rel=0.001)
    assert plan.tokens([(EVERY, int(28.74 * GIB))], 196_608) == pytest.approx(240_816, rel=0.02)


def test_c036_graphs_are_counted_since_0_21() -> None:
    """The same share is worth less from 0.21 on; on the machine of the report by more than is modelled."""
    before, after = (serve("llama-3.1-8b", version=v, utilization=0.8) for v in ("0.20.0", "0.29.1"))
    assert before.kv_pool_bytes > after.kv_pool_bytes
    eager = serve("llama-3.1-8b", version="0.29.1", utilization=0.8, enforce_eager=True)
    assert eager.kv_pool_bytes == before.kv_pool_bytes


def test_c076_a_stage_needs_only_its_own_layers() -> None:
    """92 layers of 8 KV heads: 71.16 GiB for 202,752 tokens over all; PP 8 needs at most 12 layers of it a stage."""
    plan = cache_plan(spec([gqa(96, 8, 128)] * 92))
    whole = plan.request_bytes(EVERY, 202_752)
    assert whole / GIB == pytest.approx(71.16, abs=0.1)
    assert plan.request_bytes(range(12), 202_752) == whole * 12 // 92
    assert plan.longest([(range(12), int(28.57 * GIB))], 202_752) == 202_752
    assert plan.longest([(EVERY, int(28.57 * GIB))], 202_752) == pytest.approx(81_392, rel=0.01)


def test_c077_unbalanced_stages_waste_memory() -> None:
    plan = cache_plan(spec([gqa(32, 4, 128)] * 64))  # 2 KiB a token and layer, which the wasted 4.3 GiB imply
    first, last = range(56), range(56, 64)
    pools = [(first, 46_800 // 16 * plan.block_bytes(first)), (last, 327_680 // 16 * plan.block_bytes(last))]
    assert plan.tokens(pools, 16) == 46_800
    wasted = pools[1][1] - 46_800 // 16 * plan.block_bytes(last)
    assert wasted / GIB == pytest.approx(4.3, rel=0.01)
    memory = serve("qwen3-32b", "pp=2,stage_layers=56+8", version="0.17.0", utilization=0.9)
    assert any("stage 0 decides" in note for note in memory.notes)


def test_c078_the_fuller_device_decides() -> None:
    """One share for all; a device with 2 GiB less leaves its blocks to everyone."""
    plan = cache_plan(spec([gqa(32, 8, 128)] * 32), 2)
    assert plan.blocks([(EVERY, 10 * GIB), (EVERY, 8 * GIB)]) == plan.blocks([(EVERY, 8 * GIB)])


def test_c125_forty_kib_a_token() -> None:
    assert bytes_a_token(40, 2, 128) == 40 * KIB
    assert pytest.approx(2.04, abs=0.01) == 53_376 * 40 * KIB / GIB
    plan = cache_plan(spec([gqa(32, 2, 128)] * 40))
    assert plan.longest([(EVERY, 53_376 * 40 * KIB)], 131_072) == 53_376


def drafted(drafter: Layer, *, speculative: int, tp: int = 2, kv_dtype: str = "auto", count: int = 5):  # type: ignore[no-untyped-def]
    """Cache of the 27B hybrid with ``count`` draft layers and prefix caching, which these recipes switch on."""
    layers = spec(hybrid(64, 48, 24, 4), drafts=count, draft=drafter)
    return cache_plan(layers, tp, rules=CacheRules(speculative=speculative, kv_dtype=kv_dtype, state_pages=2))


def test_c127_hybrid_with_a_drafter_of_five_layers() -> None:
    """9.74 GiB: 67,728 tokens (this version prints blocks of one group) and 1.06 requests of 180,000."""
    plan = drafted(gqa(32, 8, 128), speculative=5)
    pool = [(EVERY, int(9.74 * GIB))]
    assert plan.block_size == 816
    assert plan.blocks(pool) // len(plan.groups) * plan.block_size == 67_728
    assert plan.concurrency(pool, 180_000) == pytest.approx(1.06, abs=0.005)


def test_c128_hybrid_with_a_windowed_drafter() -> None:
    """11.15 GiB: 214,135 tokens, 3.27 requests of 65,536."""
    plan = drafted(gqa(32, 8, 128, window=2048), speculative=8)
    pool = [(EVERY, int(11.15 * GIB))]
    assert plan.concurrency(pool, 65_536) == Fraction(1405, 430)
    assert plan.tokens(pool, 65_536) == 214_135


def test_c129_hybrid_with_its_own_draft_layer() -> None:
    """622,408 tokens at 262,144 with three draft tokens and an fp8 cache: 425 blocks, 179 a request."""
    plan = drafted(gqa(24, 4, 256), speculative=3, kv_dtype="fp8_e5m2", count=1)
    assert plan.request_blocks(262_144) == 179
    assert plan.tokens([(EVERY, 425 * plan.block_bytes(EVERY))], 262_144) == 622_408


def test_c130_hybrid_experts() -> None:
    plan = cache_plan(spec(hybrid(40, 32, 16, 2)), rules=CacheRules(kv_dtype="fp8", state_pages=2))
    pool = [(EVERY, int(5.98 * GIB))]
    assert plan.tokens(pool, 131_072) == 567_978
    assert float(plan.concurrency(pool, 131_072)) == pytest.approx(4.33, abs=0.005)


def test_c131_block_of_1568_and_the_weights() -> None:
    plan = cache_plan(spec(hybrid(64, 48, 24, 4)), rules=CacheRules(kv_dtype="fp8"))
    assert plan.block_size == 1568
    path = shared_dir("configs", "nvidia--Qwen3.6-27B-NVFP4_config.json")
    got = serve(read_model(str(path)), "tp=1", "1x1xRTX-A6000", version="0.29.0", utilization=0.9)
    assert ledger(got)["weights"] == pytest.approx(19.75, rel=0.01)


def test_c134_indexer_counts() -> None:
    """40,016 bytes a token of packed latents, 48,068 with the indexer; 975,424 tokens are 43.67 GiB."""
    rules = CacheRules(kv_dtype="fp8", block_size=64)
    with_indexer = cache_plan(spec([mla(indexer=True)] * 61), 8, rules=rules)
    assert with_indexer.growth_bytes(EVERY, 1) == 48_068
    assert with_indexer.growth_bytes(EVERY, 1) - 132 * 61 == 40_016
    assert with_indexer.tokens([(EVERY, int(43.67 * GIB))], 131_072) == pytest.approx(975_424, rel=0.001)
    assert pytest.approx(65.49, abs=0.01) == 1_462_784 * 48_068 / GIB


def test_c137_half_a_mebibyte_a_token() -> None:
    assert bytes_a_token(32, 32, 128) == 524_288
    assert 69_524_783_104 // 524_288 == 132_608


def test_c152_padded_experts_set_a_floor() -> None:
    """Experts of Kimi K3: 180.8 GB a rank on TP 8, 120.5 on 16 and more; expert parallelism avoids it."""
    path = shared_dir("configs", "moonshotai--Kimi-K3_config.json")
    k3 = read_model(str(path))
    moe, device = k3.moe, find_device("H100-SXM")
    assert moe is not None
    experts = sum(f.total_bytes for f in k3.families if f.role == "expert")
    for tp, size in ((8, 180.8), (16, 120.5), (32, 120.5)):
        factor, _ = mxfp4_factors(k3, moe, moe.intermediate // tp, device)
        assert float(experts * factor / tp) / 1e9 == pytest.approx(size, rel=0.01)
    for layout in ("tp=8", "tp=16", "tp=32"):
        assert not serve(k3, layout, "4x8xH100-SXM", version="0.26.0", utilization=0.95).fits
    assert serve(k3, "tp=32,ep=32", "4x8xH100-SXM", version="0.26.0", utilization=0.95).fits


def test_c152_padding_by_hand() -> None:
    wide = Moe(8, 2, 3072)
    device = find_device("H100-SXM")
    k3, other = spec([gqa(8, 8, 64)], model_type="kimi_linear"), spec([gqa(8, 8, 64)])
    assert [mxfp4_factors(k3, wide, n, device)[0] for n in (384, 192, 96)] == [1, Fraction(4, 3), Fraction(8, 3)]
    assert mxfp4_factors(other, wide, 96, device)[0] == Fraction(4, 3)


def test_c205_heads_are_dealt_over_the_ranks() -> None:
    """Sizing with all 16 heads on every chip gives a quarter of the tokens."""
    layers = [gqa(32, 4, 512) if i % 6 == 5 else gqa(32, 16, 256, window=1024) for i in range(60)]
    dealt, whole = (cache_plan(spec(layers), tp) for tp in (4, 1))
    pool = [(EVERY, GIB)]
    assert dealt.tokens(pool, 8192) == pytest.approx(4 * whole.tokens(pool, 8192), rel=0.02)


def test_c212_397b_in_four_bits_does_not_fit_old_cards() -> None:
    """About 200 GB of weights on eight 32 GB cards leave no useful cache; on 16 GB cards nothing starts."""
    path = shared_dir("configs", "Qwen--Qwen3.5-397B-A17B_config.json")
    big = read_model(str(path))
    experts = sum(f.total_bytes for f in big.families if f.role == "expert" and f.section == "decoder")
    rest = big.weight_bytes("decoder") - experts
    packed = experts / 4 * (1 + 16 / 4 / 128)
    assert (packed + rest) / 1e9 == pytest.approx(200, rel=0.1)
    share = find_device("V100-32G").memory_bytes * 0.9
    assert share - (packed + rest) / 8 < 0.2 * share
    assert (packed + rest) / 8 > find_device("V100-16G").memory_bytes


def test_c289_latents_are_copied_on_every_rank() -> None:
    per_rank = [cache_plan(spec([mla()] * 61), tp).growth_bytes(EVERY, 1) for tp in (1, 8)]
    assert per_rank[0] == per_rank[1] == 61 * 576 * 2
    sharded = cache_plan(spec([mla()] * 61), 8, 8).growth_bytes(EVERY, 1)
    assert sharded * 8 == per_rank[0]


def test_configurations_are_complete() -> None:
    assert all(model(name).weight_bytes() > 0 for name in CONFIGS)


def test_every_case_is_decided_or_listed() -> None:
    """At least 50 of the 60 cases have a test; the others are listed with a reason."""
    path = shared_dir("cases", "cases.csv")
    with path.open(newline="", encoding="utf-8") as f:
        wanted = {row["id"] for row in csv.DictReader(f) if row["kind"] == "plan-memory"}
    here = Path(__file__).parent
    text = "".join(p.read_text(encoding="utf-8") for p in here.glob("test_plan_memory*.py"))
    named = {n.upper() for line in re.findall(r"def (test_\w+)", text) for n in re.findall(r"c\d{3}", line)}
    named |= set(re.findall(r'^    "(C\d{3})": \(', text, re.MULTILINE))
    assert wanted <= named | set(UNDECIDED)
    assert not named & set(UNDECIDED)
    assert len(wanted & named) >= 50
