"""Serving memory of every rank: what follows from the parts, and how settings, layouts and versions change it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.engines import profile
from meshwright.plan.constants.serving import engine_memory, step_defaults, version_key
from meshwright.plan.engine_memory import captured_graphs
from meshwright.plan.memory import ServeMemory
from meshwright.plan.serve_memory import resolve_settings, serve_memory
from meshwright.specs.atlas.devices import find_device
from meshwright.specs.build import decoder
from meshwright.specs.cluster import parse_cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import place
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve

GIB = 1 << 30
CLUSTER = "2x8xH100-SXM@ib-400g"


def small(layers: int = 8, vocab: int = 32000) -> ModelSpec:
    """A dense decoder with 8 KV heads."""
    return decoder(name="small", hidden=1024, layers=layers, heads=16, kv_heads=8, ffn=4096, vocab=vocab)


def experts() -> ModelSpec:
    """A mixture of 16 experts."""
    return decoder(
        name="moe", hidden=1024, layers=4, heads=16, kv_heads=8, ffn=4096, vocab=32000, experts=16, topk=2, moe_ffn=512
    )


def run(
    spec: ModelSpec, layout: Layout, *, engine: str = "vllm", workload: Serve | None = None, **more: object
) -> ServeMemory:
    """Memory on two nodes of H100."""
    placed = place(spec, layout, profile(engine))
    given_settings = ServeSettings(**more)  # type: ignore[arg-type]
    return serve_memory(placed, parse_cluster(CLUSTER), workload or Serve(1000, 24), given_settings)


def test_defaults_follow_the_device() -> None:
    sizes = {n: step_defaults("vllm", "0.33.0", find_device(n)) for n in ("H100-SXM", "A100-80G", "B200", "RTX-4090")}
    assert [(d.batched_tokens, d.sequences) for d in sizes.values()] == [
        (8192, 1024),
        (2048, 256),
        (16384, 1024),
        (2048, 256),
    ]
    assert sizes["H100-SXM"].utilization == 0.92
    assert step_defaults("vllm", "0.19.0", find_device("H100-SXM")).utilization == 0.9
    own = resolve_settings(ServeSettings(utilization=0.5), profile("vllm"), parse_cluster(CLUSTER))
    assert own.utilization == 0.5
    assert None not in (own.max_num_batched_tokens, own.max_num_seqs, own.block_size)


def test_versions_are_ordered_by_number() -> None:
    assert version_key("0.20.1rc1") == (0, 20, 1)
    assert version_key("0.9.2") < version_key("0.17") < version_key("0.17.0") < version_key("0.33.0")
    assert engine_memory("vllm", "0.16.9").sampler_bytes > engine_memory("vllm", "0.17.0").sampler_bytes
    assert not engine_memory("vllm", "0.20.2").graphs_counted
    assert engine_memory("vllm", "0.21.0").graphs_counted


def test_captured_graphs() -> None:
    assert captured_graphs(256) == 51 + 35
    assert captured_graphs(1024) == 51 + 51
    assert captured_graphs(2) == 3 + 2


def test_parts_add_up_and_say_where_they_come_from() -> None:
    memory = run(small(), Layout(tp=2), workload=Serve(1000, 24, concurrency=100))
    for rank in memory.ranks:
        parts = rank.weights_bytes + rank.kv_cache_bytes + rank.activations_bytes + rank.runtime_bytes
        assert rank.total_bytes == parts
        assert {h.source for h in rank.holdings} <= {"exact", "calibrated", "modelled"}
        assert rank.capacity_bytes - rank.total_bytes == memory.kv_pool_bytes - memory.needed_bytes


def test_weights_of_all_ranks_are_the_model() -> None:
    spec = small()
    memory = run(spec, Layout(tp=4, pp=2))
    held = sum(
        r.ranks * sum(h.bytes for h in r.holdings if h.source == "exact" and h.term == "weights") for r in memory.ranks
    )
    copied = sum(f.total_bytes for f in spec.families if f.role == "norm") * 3  # norms are on every rank of a group
    assert held == pytest.approx(spec.weight_bytes() + copied, rel=1e-3)


def test_dtype_and_quantization_change_the_weights() -> None:
    base = run(small(), Layout()).worst
    wide = run(small(), Layout(), dtype="float32").worst
    thin = run(small(), Layout(), quantization="fp8").worst
    assert wide.weights_bytes == 2 * base.weights_bytes
    linear = sum(f.total_bytes for f in small().families if f.role in {"attention", "mlp"} and f.op)
    scales = 4 * sum(f.count for f in small().families if f.role in {"attention", "mlp"} and f.op)
    assert base.weights_bytes - thin.weights_bytes == linear // 2 - scales


def test_replicas_add_requests_and_not_context() -> None:
    one, two = run(small(), Layout(tp=4)), run(small(), Layout(tp=4, dp=2))
    assert two.max_requests == 2 * one.max_requests
    assert two.kv_cache_tokens == one.kv_cache_tokens
    asked = Serve(1000, 24, concurrency=101)
    halves = run(small(), Layout(tp=4, dp=2), workload=asked).needed_bytes
    assert halves < run(small(), Layout(tp=4), workload=asked).needed_bytes < 2 * halves


def test_more_requests_than_fit_are_refused() -> None:
    free = run(small(), Layout())
    assert run(small(), Layout(), workload=Serve(1000, 24, concurrency=free.max_requests)).fits
    assert not run(small(), Layout(), workload=Serve(1000, 24, concurrency=free.max_requests + 1)).fits


def test_expert_parallelism_keeps_experts_whole() -> None:
    cut, whole = run(experts(), Layout(tp=4)), run(experts(), Layout(tp=4, ep=4))
    assert cut.worst.weights_bytes == pytest.approx(whole.worst.weights_bytes, rel=0.01)
    assert whole.worst.activations_bytes > cut.worst.activations_bytes


def test_eager_execution_gives_the_graphs_back() -> None:
    graphs, eager = run(small(), Layout()), run(small(), Layout(), enforce_eager=True)
    taken = next(h.bytes for h in graphs.worst.holdings if h.tensor == "cuda_graphs")
    assert eager.kv_pool_bytes - graphs.kv_pool_bytes == taken > 0


def test_a_model_that_leaves_no_room_is_told() -> None:
    memory = run(small(), Layout(), utilization=0.01)
    assert not memory.fits
    assert memory.kv_cache_tokens == memory.max_requests == memory.longest_context == 0
    assert any("no room for a cache" in note for note in memory.notes)


def test_notes_name_copied_heads_and_the_deciding_stage() -> None:
    latent = decoder(
        name="mla", hidden=1024, layers=4, heads=16, head_dim=192, v_head_dim=128, kv_lora_rank=512, rope_head_dim=64,
        ffn=4096, vocab=32000,
    )  # fmt: skip
    assert any("8 copies" in note for note in run(latent, Layout(tp=8)).notes)
    assert not any("copies" in note for note in run(latent, Layout(tp=8, dcp=8)).notes)
    assert any("more than once" in note for note in run(small(), Layout(tp=16)).notes)
    uneven = run(small(), Layout(pp=2, stage_layers=(7, 1)))
    assert any("stage 0 decides" in note for note in uneven.notes)


def test_notes_name_requests_that_wait() -> None:
    asked = Serve(100, 28, concurrency=40)
    assert any("at most 16 at once" in n for n in run(small(), Layout(dp=2), workload=asked, max_num_seqs=16).notes)
    assert not any("at once" in n for n in run(small(), Layout(dp=2), workload=asked, max_num_seqs=20).notes)


def test_our_own_runtime_has_no_gpu_terms() -> None:
    memory = run(small(), Layout(tp=2), engine="meshwright")
    assert not any(h.tensor == "cuda_graphs" for h in memory.worst.holdings)
    assert memory.kv_cache_tokens > 0
    assert memory.kv_bytes_per_token == 8 * 4 * 2 * 64 * 2  # layers x heads of the rank x (K and V) x width x bf16


def test_planted_mistake_in_the_logits_is_seen() -> None:
    """Half of the sampler's bytes move the pool of a model with a large vocabulary by more than 2 %."""
    placed = place(small(vocab=256000), Layout(), profile("vllm"))
    right = engine_memory("vllm", "0.33.0")
    wrong = replace(right, sampler_bytes=right.sampler_bytes / 2)
    pools = [
        serve_memory(placed, parse_cluster(CLUSTER), Serve(1000, 24), constants=c).kv_pool_bytes for c in (right, wrong)
    ]
    assert pools[1] - pools[0] > 0.02 * pools[0]


@settings(max_examples=40, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4]),
    context=st.integers(16, 100_000),
    utilization=st.floats(0.2, 1.0),
)
def test_more_memory_and_shorter_requests_never_hurt(tp: int, pp: int, context: int, utilization: float) -> None:
    if tp * pp > 16:
        return
    layout = Layout(tp=tp, pp=pp)
    base = run(small(), layout, workload=Serve(max_model_len=context), utilization=utilization)
    more = run(small(), layout, workload=Serve(max_model_len=context), utilization=min(1.0, utilization + 0.1))
    shorter = run(small(), layout, workload=Serve(max_model_len=max(1, context // 2)), utilization=utilization)
    assert more.max_requests >= base.max_requests
    assert shorter.max_requests >= base.max_requests
    assert base.longest_context <= more.longest_context
    ranks = sum(r.ranks for r in base.ranks)
    assert ranks == layout.world


def test_the_own_engine_keeps_a_checkpoint_in_f32_as_it_is() -> None:
    """Others convert it to 16 bits unless told otherwise."""
    spec = small()
    spec = replace(spec, dtype="f32", families=tuple(replace(f, dtype="f32") for f in spec.families))
    load, on = Serve(128, 32, concurrency=2), parse_cluster("1xH100-SXM")
    own, other = (
        serve_memory(place(spec, Layout(), profile(engine)), on, load, ServeSettings(dtype=dtype))
        for engine, dtype in (("meshwright", None), ("vllm", None))
    )
    asked = serve_memory(place(spec, Layout(), profile("vllm")), on, load, ServeSettings(dtype="f32"))
    held = [max(r.weights_bytes for r in m.ranks) for m in (own, other, asked)]
    assert held[0] == held[2] == pytest.approx(2 * held[1], rel=0.02)
