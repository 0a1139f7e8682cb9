"""SGLang's headroom by hand, and what engines make of a share: of the device, of what is free."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.engines import profile
from meshwright.plan.constants.serving import engine_memory, headroom
from meshwright.plan.headroom import graph_sequences, prefill_sizes, reserved_mib, static_share
from meshwright.plan.serve_memory import resolve_settings, serve_memory
from meshwright.specs.cluster import parse_cluster
from meshwright.specs.hf.read import read_model
from meshwright.specs.layout import Layout
from meshwright.specs.placement import place
from meshwright.specs.profile import ServeSettings
from meshwright.specs.units import GIB
from meshwright.specs.workload import Serve

SGLANG = profile("sglang")


def test_reserve_of_eight_ranks_on_h100_by_hand() -> None:
    """512 + 8192 x 1.5 + 8/8 x 1024 + 512 x 2 + 66 sizes x 8 MiB."""
    constants, device = headroom("sglang"), parse_cluster("1x8xH100-SXM").device
    assert constants is not None
    assert prefill_sizes(8192) == 8 + 14 + 8 + 8 + 12 + 8
    assert prefill_sizes(100) == 8 + 4
    by_hand = 512 + 12288 + 1024 + 1024 + 58 * 8
    assert reserved_mib(constants, device, 8192, Layout(tp=8), mla=False) == by_hand
    assert reserved_mib(constants, device, 8192, Layout(tp=8), mla=True) == by_hand - 58 * 8 + 1536
    assert reserved_mib(constants, device, 1024, Layout(tp=1), mla=False) == 10240  # the floor above 60 GiB
    few = reserved_mib(constants, device, 8192, Layout(tp=8), mla=False, requests=16)
    assert few == by_hand - (512 - 16) * 2
    small = parse_cluster("1x1xRTX-4090").device
    assert reserved_mib(constants, small, 100, Layout(), mla=True) == 512 + 2048 * 1.5 + 128 + 48 * 2 + 1536


@pytest.mark.parametrize(
    ("name", "ranks", "sequences"),
    [
        ("H100-SXM", 1, 256),
        ("H100-SXM", 4, 512),
        ("RTX-4090", 1, 48),
        ("RTX-4090", 4, 160),
        ("A100-40G", 2, 32),
        ("B200", 8, 512),
        ("H200-SXM", 2, 256),
    ],
)
def test_decode_graphs_by_device(name: str, ranks: int, sequences: int) -> None:
    constants = headroom("sglang")
    assert constants is not None
    assert graph_sequences(constants["graph_sequences"], parse_cluster(f"1x8x{name}").device, ranks) == sequences


def test_attention_replicas_reserve_more_where_a_command_is_judged_as_typed() -> None:
    spec, where, layout = read_model("deepseek-v3"), parse_cluster("4x8xH100-SXM@ib-400g"), Layout(dp=32, ep=32)
    planned = static_share(SGLANG, where, ServeSettings(), layout, spec)
    typed = static_share(SGLANG, where, ServeSettings(as_typed=True), layout, spec)
    assert planned is not None
    assert typed is not None
    assert typed < 0.1 < 0.7 < planned
    dense = static_share(SGLANG, where, ServeSettings(as_typed=True), Layout(tp=4, dp=8), read_model("qwen3-8b"))
    assert dense is not None
    assert dense > 0.7


def test_other_engines_have_no_such_formula() -> None:
    where = parse_cluster("1x8xH100-SXM")
    assert static_share(profile("vllm"), where, ServeSettings()) is None
    assert resolve_settings(ServeSettings(), profile("trtllm"), where).utilization == 0.9
    assert resolve_settings(ServeSettings(utilization=0.5), SGLANG, where).utilization == 0.5


def test_no_peak_is_taken_out_of_a_static_share() -> None:
    """The pool is share x (device - contexts) - weights, whatever a step takes; a note warns where it takes more."""
    spec, where = read_model("qwen3-8b"), parse_cluster("1x1xH100-SXM")
    placed = place(spec, Layout(), SGLANG)
    small = serve_memory(placed, where, Serve(), ServeSettings(utilization=0.9, max_num_batched_tokens=1024))
    large = serve_memory(placed, where, Serve(), ServeSettings(utilization=0.9, max_num_batched_tokens=524288))
    assert small.kv_pool_bytes == large.kv_pool_bytes
    outside = engine_memory("sglang", "0.5.23").non_torch.one_bytes
    expected = 0.9 * (where.device.memory_bytes - outside) - small.worst.weights_bytes
    assert small.kv_pool_bytes == pytest.approx(expected, abs=4)
    assert not small.notes
    assert any("sizes its cache without a trial step" in note for note in large.notes)


def test_windowed_layers_have_fewer_slots() -> None:
    """gpt-oss: half of 36 layers see a window; they get 0.8 slots for every slot of the others."""
    spec, where = read_model("gpt-oss-120b"), parse_cluster("1x8xH100-SXM")
    memory = serve_memory(place(spec, Layout(tp=8), SGLANG), where, Serve(isl=100_000, osl=1000), ServeSettings())
    one = 1 * (64 + 64) * 2  # one of 8 KV heads a rank, keys and values of 64, bf16
    assert memory.kv_bytes_per_token == pytest.approx(18 * one + 0.8 * 18 * one)
    dense = serve_memory(place(read_model("qwen3-8b"), Layout(), SGLANG), where, Serve(), ServeSettings())
    assert dense.kv_bytes_per_token == 36 * 8 * 256 * 2


def test_a_share_of_what_is_free_scales_the_pool_alone() -> None:
    trtllm, where = profile("trtllm"), parse_cluster("1x1xH100-SXM")
    placed = place(read_model("qwen3-8b"), Layout(), trtllm)
    full = serve_memory(placed, where, Serve(), ServeSettings(utilization=1.0))
    held = full.worst.total_bytes - full.worst.kv_cache_bytes
    assert full.kv_pool_bytes == where.device.memory_bytes - held
    for share in (0.2, 0.5, 0.9):
        part = serve_memory(placed, where, Serve(), ServeSettings(utilization=share))
        assert part.kv_pool_bytes == pytest.approx(share * full.kv_pool_bytes, abs=2)


def test_dense_blocks_spread_over_attention_replicas_until_experts_are_dealt_whole() -> None:
    spec = read_model("deepseek-v3")

    def held(layout: Layout, role: str) -> float:
        placed = place(spec, layout, SGLANG)
        return placed.weight_bytes_by_role(placed.classes[0].coordinate)[role] / GIB

    assert held(Layout(dp=8), "mlp") == pytest.approx(held(Layout(tp=8), "mlp"))
    assert held(Layout(dp=8), "shared_expert") == pytest.approx(held(Layout(tp=8), "shared_expert"))
    whole = held(Layout(), "mlp")
    assert held(Layout(dp=8, ep=8), "mlp") == pytest.approx(whole)
    assert held(Layout(tp=2, dp=4, ep=8), "mlp") == pytest.approx(whole / 8)
    assert held(Layout(tp=2, dp=4, ep=8), "shared_expert") == pytest.approx(8 * held(Layout(tp=8), "shared_expert"))
    for layout in (Layout(dp=8), Layout(tp=8), Layout(tp=8, ep=2), Layout(tp=4, dp=2, ep=4)):
        assert held(layout, "expert") == pytest.approx(held(Layout(tp=8), "expert"))
    assert held(Layout(tp=4, dp=2, etp=4), "expert") == pytest.approx(held(Layout(tp=4), "expert"))
    plain = place(spec, Layout(dp=8), replace(SGLANG, wide_labels=frozenset()))
    assert plain.weight_bytes_by_role(plain.classes[0].coordinate)["mlp"] / GIB == pytest.approx(whole)
