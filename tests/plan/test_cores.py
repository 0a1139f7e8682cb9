"""What lies between the projections: masks in closed form, caches, latents, states."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.engines.own.profile import OWN
from meshwright.ledger.schema import Entry
from meshwright.plan.cores import Batch, cache_read, chunk_sum, pairs, reach_sum
from meshwright.plan.forward import forward_entries
from meshwright.specs.build import Mamba, decoder
from meshwright.specs.layout import parse_layout
from meshwright.specs.model import Attention, Indexer, ModelSpec
from meshwright.specs.placement import place

MLA = decoder(
    hidden=512, layers=2, heads=8, vocab=1000, ffn=256, q_lora_rank=96, kv_lora_rank=64, rope_head_dim=16,
    head_dim=48, v_head_dim=32,
)  # fmt: skip


def run(spec: ModelSpec, layout: str, batch: Batch) -> list[Entry]:
    return forward_entries(place(spec, parse_layout(layout), OWN), batch)


@given(st.integers(1, 60), st.integers(0, 60), st.integers(1, 50))
def test_closed_forms_of_masks(new: int, past: int, width: int) -> None:
    """Sums over masks against counting pair by pair."""
    places = range(past, past + new)
    assert reach_sum(new, past, None) == sum(i + 1 for i in places)
    assert reach_sum(new, past, width) == sum(min(i + 1, width) for i in places)
    assert chunk_sum(new, past, width) == sum(i % width + 1 for i in places)


def test_sparse_and_compressed_attention_see_less() -> None:
    """1,001 tokens: top-k of 64 selects; one entry a 4 tokens is compressed beside a window of 128."""
    sparse = Attention("mla", 8, 1, 48, 32, kv_lora_rank=64, rope_head_dim=16, indexer=Indexer(4, 16, 64))
    assert (pairs(sparse, 1, 1000), cache_read(sparse, 1, 1000)) == (64, 64)
    folded = Attention("gqa", 8, 1, 64, 0, window=128, compress_ratio=4)
    assert (pairs(folded, 1, 1000), cache_read(folded, 1, 1000)) == (128 + 250, 128 + 250)
    chunked = Attention("gqa", 8, 1, 64, 64, chunk=300)
    assert (pairs(chunked, 1, 1000), cache_read(chunked, 1, 1000)) == (101, 101)
    assert pairs(Attention("gqa", 8, 1, 64, 64, causal=False), 10, 0) == 100


@pytest.mark.parametrize(("window", "seen"), [(None, 1001), (128, 128)])
def test_windows_bound_what_is_read(window: int | None, seen: int) -> None:
    spec = decoder(hidden=256, layers=1, heads=8, kv_heads=2, vocab=512, ffn=512, window=window)
    core = next(e for e in run(spec, "tp=1", Batch("decode", 1, 1, 1000)) if e.op == "attention")
    assert core.shapes is not None
    assert core.shapes[1][0] == seen
    assert core.flops == 2 * seen * 8 * 64


def test_mla_is_absorbed_in_decode_and_unfolded_in_prefill() -> None:
    """Decode attends to the latent (64 + 16) with 8 heads; prefill to unfolded heads of 48 and 32."""
    decode = next(e for e in run(MLA, "tp=1", Batch("decode", 2, 1, 99)) if e.op == "attention")
    assert decode.flops == 2 * (2 * 100) * 8 * (80 + 64)
    assert decode.payload_bytes == 2 * (2 * 100 * 80 + 2 * 8 * (80 + 64) + 2 * 80)
    prefill = next(e for e in run(MLA, "tp=2", Batch("prefill", 1, 64)) if e.op == "attention")
    assert prefill.flops == 2 * (64 * 65 // 2) * 4 * (48 + 32)
    up = [e for e in run(MLA, "tp=1", Batch("prefill", 1, 16, past=48)) if e.name == "attention.kv_b"]
    assert {e.shapes[0] for e in up if e.shapes} == {(64, 64)}


def test_hybrid_layers() -> None:
    spec = decoder(
        hidden=256, layers=4, heads=8, kv_heads=2, vocab=512, ffn=512, pattern="M*-M", mamba=Mamba(8, 32, 16, 2)
    )
    entries = run(spec, "tp=2", Batch("decode", 2, 1, 5))
    cores = [(e.layer, e.op) for e in entries if e.op in {"attention", "recurrent"}]
    assert cores == [(0, "recurrent"), (1, "attention"), (3, "recurrent")]
    assert [e.layer for e in entries if e.op == "all_reduce"] == [None, 0, 1, 2, 3]
    state = next(e for e in entries if e.op == "recurrent")
    assert state.shapes == ((2, 4, 32), (2, 4, 32, 16))
