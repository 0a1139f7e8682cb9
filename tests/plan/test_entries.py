"""Entries of a serving forward: counts derived by hand, figures of the literature, invariants under splitting."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.engines.own.profile import OWN
from meshwright.errors import InputError
from meshwright.ledger.schema import Entry
from meshwright.plan import forward, layer_ops, wire
from meshwright.plan.cores import Batch
from meshwright.plan.entries import active_matmul_parameters, fill_ledger, model_flops_per_token
from meshwright.plan.forward import forward_entries, serve_batch
from meshwright.plan.wire import Ways, ways
from meshwright.specs.build import decoder
from meshwright.specs.hf.read import read_model
from meshwright.specs.layout import Layout, parse_layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import place
from meshwright.specs.profile import EngineProfile
from meshwright.specs.workload import Serve, Train
from tests.shared import shared_dir

LLAMA2_7B = decoder(hidden=4096, layers=32, heads=32, vocab=32000, ffn=11008)
MOE = decoder(hidden=512, layers=3, heads=8, kv_heads=4, vocab=1000, ffn=256, experts=16, topk=2, shared_ffn=128)
MLA = decoder(
    hidden=512, layers=2, heads=8, vocab=1000, ffn=256, q_lora_rank=96, kv_lora_rank=64, rope_head_dim=16,
    head_dim=48, v_head_dim=32,
)  # fmt: skip


def with_ways(**constants: object) -> EngineProfile:
    """The own profile with other ways to communicate."""
    from dataclasses import replace

    return replace(OWN, constants={f"wire_{k}": v for k, v in constants.items()})  # type: ignore[arg-type]


def run(spec: ModelSpec, layout: str, batch: Batch, profile: EngineProfile = OWN) -> list[Entry]:
    return forward_entries(place(spec, parse_layout(layout), profile), batch)


def of_rank(entries: list[Entry], rank_class: str) -> list[Entry]:
    return [e for e in entries if e.rank_class == rank_class]


def flops(entries: list[Entry], *ops: str) -> int:
    return sum((e.flops or 0) * e.count for e in entries if not ops or e.op in ops)


def world_flops(spec: ModelSpec, layout: str, batch: Batch, *ops: str) -> int:
    """FLOPs of all ranks of one replica."""
    placement = place(spec, parse_layout(layout), OWN)
    entries = forward_entries(placement, batch)
    return sum(c.ranks * flops(of_rank(entries, c.name), *ops) for c in placement.classes)


@pytest.mark.parametrize(("hidden", "layers", "kib"), [(3584, 28, 392), (8192, 80, 2560), (16384, 126, 8064)])
def test_all_reduce_payload_of_one_token(hidden: int, layers: int, kib: int) -> None:
    """Two all_reduces a layer of hidden x 2 bytes: 392, 2560 and 8064 KiB for 7B, 70B and 405B models."""
    spec = decoder(hidden=hidden, layers=layers, heads=hidden // 128, vocab=32000, kv_heads=4 if hidden < 8192 else 8)
    found = [e for e in run(spec, "tp=4", Batch("decode", 1, 1, 100)) if e.op == "all_reduce" and e.layer is not None]
    assert len(found) == 2 * layers
    assert sum(e.payload_bytes or 0 for e in found) == kib * 1024
    assert Counter(e.layer for e in found) == dict.fromkeys(range(layers), 2)
    assert all(e.wire_bytes == 2 * 3 * (e.payload_bytes or 0) // 4 for e in found)


def check_llama2_by_hand() -> None:
    """Every count of one decode step of 3 sequences with 100 cached tokens, derived by hand.

    tp=2 halves: q, k, v, o 4096 x 2048; gate, up, down 4096 x 5504; head 4096 x 16000. A stage has 16 layers.
    """
    entries = run(LLAMA2_7B, "tp=2,pp=2", Batch("decode", 3, 1, 100))
    first, second = of_rank(entries, "pp0"), of_rank(entries, "pp1")
    assert len(first) + len(second) == len(entries)
    layer = 2 * 3 * (4 * 4096 * 2048 + 3 * 4096 * 5504)
    assert flops(first, "matmul") == 16 * layer
    assert flops(second, "matmul") == 16 * layer + 2 * 3 * 4096 * 16000
    assert flops(first, "attention") == 16 * (3 * 101) * 16 * (2 * 128 + 2 * 128)
    assert Counter((e.op, e.name, e.group) for e in first if e.group) == {
        ("all_reduce", "embedding", "tp"): 1,
        ("all_reduce", "mixer output", "tp"): 16,
        ("all_reduce", "mlp output", "tp"): 16,
        ("send", "hidden states", "pp"): 1,
    }
    assert Counter((e.op, e.name, e.group) for e in second if e.group) == {
        ("recv", "hidden states", "pp"): 1,
        ("all_reduce", "mixer output", "tp"): 16,
        ("all_reduce", "mlp output", "tp"): 16,
        ("gather", "logits", "tp"): 1,
    }
    hidden = 3 * 4096 * 2
    assert {e.payload_bytes for e in entries if e.op in {"all_reduce", "send", "recv"}} == {hidden}
    send = next(e for e in first if e.op == "send")
    recv = next(e for e in second if e.op == "recv")
    assert (send.peer, send.wire_bytes, recv.peer, recv.wire_bytes) == (1, hidden, 0, 0)
    logits = next(e for e in second if e.op == "gather")
    assert logits.shapes == ((3, 16000),)
    assert logits.payload_bytes == logits.wire_bytes == 3 * 16000 * 2
    q = next(e for e in first if e.name == "attention.q")
    assert q.shapes == ((3, 4096), (4096, 2048))
    assert q.payload_bytes == 2 * (4096 * 2048 + 3 * 4096 + 3 * 2048)
    core = next(e for e in first if e.op == "attention")
    cache = (3 * 101 + 3) * 16 * 256 * 2
    assert core.payload_bytes == cache + 3 * 16 * 256 * 2
    assert {e.layer for e in second} == {None, *range(16, 32)}


def test_llama2_7b_by_hand_tp2_pp2() -> None:
    check_llama2_by_hand()


@pytest.mark.parametrize(
    "mistake", ["a sum is forgotten", "half the FLOPs", "a cut too many", "wire is payload", "no send"]
)
def test_the_hand_count_finds_planted_mistakes(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    product = layer_ops.Context.product
    if mistake == "sum forgotten":
        monkeypatch.setattr(layer_ops.Context, "leave", lambda *_: [])
    elif mistake == "half the FLOPs":
        halved = lambda *a: (op := product(*a))._replace(flops=op.flops // 2)  # noqa: E731
        monkeypatch.setattr(layer_ops.Context, "product", halved)
    elif mistake == "a cut too many":
        monkeypatch.setattr(layer_ops.Context, "product", lambda c, p, t: product(c, p._replace(n=p.n // 2), t))
    elif mistake == "wire is payload":
        monkeypatch.setattr(wire, "wire_bytes", lambda op, n, payload: payload)
    else:
        monkeypatch.setattr(forward, "stage_hand_off", lambda *_: [])
    with pytest.raises((AssertionError, StopIteration)):
        check_llama2_by_hand()


def test_order_and_sequence_numbers() -> None:
    entries = run(LLAMA2_7B, "tp=2,pp=2", Batch("decode", 1, 1, 7))
    for name in ("pp0", "pp1"):
        for stream in ("compute", "tp", "pp"):
            numbers = [e.seq for e in of_rank(entries, name) if e.stream == stream]
            assert numbers == list(range(len(numbers)))
    layer = [e.name for e in of_rank(entries, "pp0") if e.layer == 3]
    assert layer == [
        "norm", "attention.q", "attention.k", "attention.v", "attention core", "attention.o", "mixer output",
        "norm", "mlp.gate", "mlp.up", "mlp.down", "mlp output",
    ]  # fmt: skip
    assert {(e.state, e.source, e.step) for e in entries} == {("predicted", "predict", 0)}


@pytest.mark.parametrize("spec", [LLAMA2_7B, MOE, MLA], ids=["dense", "moe", "mla"])
def test_dense_flops_are_two_a_parameter_and_token(spec: ModelSpec) -> None:
    """Matrix products of a decode step: 2 x active parameters x tokens; prefill differs by the head alone."""
    head = spec.hidden * spec.vocab
    assert world_flops(spec, "tp=1", Batch("decode", 8, 1, 50), "matmul") == 2 * 8 * active_matmul_parameters(spec)
    body = active_matmul_parameters(spec) - head
    assert world_flops(spec, "tp=1", Batch("prefill", 1, 64), "matmul") == 2 * 64 * body + 2 * head


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from(["decode", "prefill"]), st.booleans(),
    st.integers(1, 40),
)  # fmt: skip
def test_splitting_keeps_the_flops(tp: int, pp: int, phase: str, sp: bool, n: int) -> None:
    """Tensor and pipeline parallelism divide the products of a dense model without a rest, with and without sp."""
    spec = decoder(hidden=256, layers=4, heads=8, kv_heads=4, vocab=512, ffn=512)
    batch = Batch("decode", n, 1, 9) if phase == "decode" else Batch("prefill", 1, n)
    whole = world_flops(spec, "tp=1", batch)
    assert world_flops(spec, f"tp={tp},pp={pp},sp={'on' if sp else 'off'}", batch) == whole


def test_uneven_heads_keep_the_flops() -> None:
    """9 heads and 3 KV heads at tp=2 are dealt 6 + 3; the sum over both classes of ranks is the whole."""
    spec = decoder(hidden=576, layers=2, heads=9, kv_heads=3, vocab=1001, ffn=1537, head_dim=64)
    batch = Batch("decode", 4, 1, 20)
    placement = place(spec, Layout(tp=2), OWN)
    assert len(placement.classes) == 2
    assert world_flops(spec, "tp=2", batch) == world_flops(spec, "tp=1", batch)


def test_fewer_kv_heads_than_ranks_are_computed_by_each() -> None:
    spec = decoder(hidden=256, layers=1, heads=8, kv_heads=2, vocab=512, ffn=512)
    one, eight = (run(spec, f"tp={n}", Batch("decode", 1, 1, 3)) for n in (1, 8))
    whole, part = (next(e for e in es if e.name == "attention.k") for es in (one, eight))
    assert (whole.flops, part.flops) == (2 * 256 * 64, 2 * 256 * 32)


def test_experts_within_the_tensor_parallel_group() -> None:
    """tp=2, ep=2 on one replica: every rank has all tokens and half of the experts; one all_reduce, no dispatch."""
    entries = run(MOE, "tp=2,ep=2", Batch("decode", 4, 1, 9))
    layer = [e for e in entries if e.layer == 1]
    assert [e.name for e in layer if e.group] == ["mixer output", "experts output"]
    gate = next(e for e in layer if e.name == "expert.gate")
    assert gate.shapes is not None
    assert gate.shapes[0] == (4 * 2 * 8 // 16, 512)
    assert next(e for e in layer if e.name == "shared_expert.gate").shapes == ((4, 512), (512, 64))


def test_experts_over_data_parallel_ranks() -> None:
    """dp=4, ep=4, 6 tokens a rank: 6 x 2 tokens of 512 leave; 24 tokens x 2 / 4 ranks arrive."""
    layer = [e for e in run(MOE, "dp=4,ep=4", Batch("decode", 6, 1, 9)) if e.layer == 0]
    moves = [e for e in layer if e.group]
    assert [(e.op, e.name, e.group, e.shapes) for e in moves] == [
        ("all_to_all", "tokens dispatch", "ep", ((12, 512),)),
        ("all_to_all", "tokens combine", "ep", ((12, 512),)),
    ]
    assert moves[0].payload_bytes == 12 * 512 * 2
    assert moves[0].wire_bytes == 12 * 512 * 2 * 3 // 4
    down = next(e for e in layer if e.name == "expert.down")
    assert down.shapes == ((12, 256), (4, 256, 512))
    names = [e.name for e in layer]
    assert names.index("router") < names.index("tokens dispatch") < names.index("expert.gate")
    assert names.index("expert.down") < names.index("tokens combine") < names.index("shared_expert.gate")


def test_experts_over_tensor_and_data_parallel_ranks() -> None:
    """dp=2, tp=2, ep=4: each tp rank dispatches half of the tokens and the halves are gathered at the end."""
    layer = [e for e in run(MOE, "dp=2,tp=2,ep=4", Batch("decode", 6, 1, 9)) if e.layer == 0]
    assert [(e.op, e.group, e.shapes) for e in layer if e.group] == [
        ("all_reduce", "tp", ((6, 512),)),
        ("all_to_all", "ep", ((6, 512),)),
        ("all_to_all", "ep", ((6, 512),)),
        ("all_reduce", "tp", ((6, 512),)),
        ("all_gather", "tp", ((3, 512),)),
    ]


def test_vllm_gathers_all_tokens_by_default() -> None:
    """allgather_reducescatter: the tokens of all replicas visit every rank."""
    profile = with_ways(experts="allgather_reducescatter")
    layer = [e for e in run(MOE, "dp=4,ep=4", Batch("decode", 6, 1, 9), profile) if e.layer == 0 and e.group]
    assert [(e.op, e.group, e.shapes, e.wire_bytes) for e in layer] == [
        ("all_gather", "dp", ((6, 512),), 3 * 6 * 512 * 2),
        ("reduce_scatter", "dp", ((24, 512),), 24 * 512 * 2 * 3 // 4),
    ]


def test_expert_weights_read_are_those_that_are_touched() -> None:
    """One token touches 2 of 16 experts, 10,000 tokens touch all."""
    few = next(e for e in run(MOE, "tp=1", Batch("decode", 1, 1, 9)) if e.name == "expert.gate")
    many = next(e for e in run(MOE, "tp=1", Batch("prefill", 1, 10_000)) if e.name == "expert.gate")
    assert few.shapes is not None
    assert many.shapes is not None
    assert (few.shapes[1][0], many.shapes[1][0]) == (2, 16)
    assert few.payload_bytes == 2 * (2 * (512 + 256) + 2 * 512 * 256)


def test_ways_of_a_pipeline_hand_off() -> None:
    """Two tensors, each cut over tp and gathered behind (vLLM)."""
    profile = with_ways(pp_tensors=2, pp_slices=True, logits="all_gather")
    entries = run(LLAMA2_7B, "tp=2,pp=2", Batch("decode", 1, 1, 9), profile)
    ends = [(e.rank_class, e.op, e.name, e.shapes) for e in entries if e.layer is None and e.group]
    assert ends[1:7] == [
        ("pp0", "send", "hidden states", ((2048,),)),
        ("pp0", "send", "residual", ((2048,),)),
        ("pp1", "recv", "hidden states", ((2048,),)),
        ("pp1", "all_gather", "hidden states pieces", ((2048,),)),
        ("pp1", "recv", "residual", ((2048,),)),
        ("pp1", "all_gather", "residual pieces", ((2048,),)),
    ]
    assert ends[7][1:3] == ("all_gather", "logits")
    assert ways(OWN) == Ways(context_dealt=True, moe_sp_slices=False, router_dtype="f32")


def test_sequence_parallel_replaces_every_all_reduce() -> None:
    entries = run(LLAMA2_7B, "tp=4,sp=on", Batch("prefill", 1, 64))
    counts = Counter(e.op for e in entries if e.layer is not None and e.group)
    assert counts == {"reduce_scatter": 64, "all_gather": 64}
    assert not [e for e in entries if e.op == "all_reduce"]
    norm = next(e for e in entries if e.op == "norm" and e.layer == 5)
    assert norm.shapes == ((16, 4096),)
    assert next(e for e in entries if e.name == "attention.q").shapes == ((64, 4096), (4096, 1024))


def test_context_parallel_prefill() -> None:
    ring = [e for e in run(LLAMA2_7B, "cp=4", Batch("prefill", 1, 64), with_ways(context="ring")) if e.layer == 0]
    assert [(e.op, e.count, e.shapes) for e in ring if e.group] == [
        ("send", 3, ((16, 32, 256),)),
        ("recv", 3, ((16, 32, 256),)),
    ]
    ulysses = run(LLAMA2_7B, "cp=4", Batch("prefill", 1, 64), with_ways(context="ulysses"))
    assert [e.op for e in ulysses if e.layer == 0 and e.group] == ["all_to_all"] * 4
    whole = next(e for e in run(LLAMA2_7B, "tp=1", Batch("prefill", 1, 64)) if e.op == "attention")
    assert next(e for e in ring if e.op == "attention").flops == (whole.flops or 0) // 4


def test_decode_context_parallel() -> None:
    spec = decoder(hidden=256, layers=1, heads=8, kv_heads=2, vocab=512, ffn=512)
    layer = [e for e in run(spec, "tp=4,dcp=2", Batch("decode", 2, 1, 99)) if e.layer == 0]
    assert [(e.op, e.name, e.shapes) for e in layer if e.group == "dcp"] == [
        ("all_gather", "queries", ((2, 2, 32),)),
        ("all_gather", "log sums", ((2, 4),)),
        ("reduce_scatter", "outputs", ((2, 4, 32),)),
    ]
    core = next(e for e in layer if e.op == "attention")
    assert core.flops == 2 * 100 * 4 * (32 + 32)


def test_quantized_weights_are_read_as_stored() -> None:
    from dataclasses import replace

    from meshwright.specs.tensors import Segment

    spec = decoder(hidden=256, layers=1, heads=8, vocab=512, ffn=512)
    families = []
    for f in spec.families:
        if f.op == "q":
            out, into = f.dims
            packed = (Segment("model", into[0].units // 2),)
            families.append(replace(f, dims=(out, packed), dtype="u8", elements=2))
            scale = (Segment("model", into[0].units // 16),)
            name = f.template.replace("weight", "weight_scale")
            families.append(replace(f, template=name, dims=(out, scale), dtype="f8_e4m3", part="scale", elements=0))
        else:
            families.append(f)
    q = next(
        e
        for e in run(replace(spec, families=tuple(families)), "tp=2", Batch("decode", 1, 1))
        if e.layer == 0 and e.name == "attention.q"
    )
    assert q.shapes == ((1, 256), (256, 128))
    assert q.flops == 2 * 256 * 128
    assert q.payload_bytes == 128 * 128 + 128 * 16 + 2 * (256 + 128)


def test_the_serving_batch() -> None:
    work = Serve(1000, 200, concurrency=30)
    assert serve_batch(work, "prefill", Layout(dp=4)) == Batch("prefill", 1, 1000)
    assert serve_batch(work, "decode", Layout(dp=4)) == Batch("decode", 8, 1, 1100)
    with pytest.raises(InputError):
        serve_batch(work, "train", Layout())


def test_a_ledger_of_many_ranks_is_small_and_fast() -> None:
    """126 layers: under 60 ms a layout on a quiet machine (bound loosened for shared cores); classes, not ranks."""
    spec = decoder(hidden=16384, layers=126, heads=128, kv_heads=8, vocab=128256, ffn=53248)
    best = 1.0
    for _ in range(5):
        start = time.perf_counter()
        small = fill_ledger(place(spec, parse_layout("tp=8,pp=2"), OWN), Serve(1000, 100, concurrency=8))
        best = min(best, time.perf_counter() - start)
    assert best < 0.3
    large = fill_ledger(place(spec, parse_layout("tp=8,pp=2,dp=8192"), OWN), Serve(1000, 100, concurrency=8))
    assert len(large.entries) == len(small.entries)
    assert sum(r.ranks for r in large.ranks) == 131_072
    assert [r.coordinate["pp"] for r in large.ranks] == [0, 1]
    assert large.meta["layout"] == "tp=8,pp=2,dp=8192"
    assert {h.term for h in large.holdings} == {"weights"}


def test_model_flops_of_llama2_7b() -> None:
    """N = 32 x (4 x 4096^2 + 3 x 4096 x 11008) + 4096 x 32000; attention 12 x L x h x (s+1)/2 a token."""
    n = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    assert active_matmul_parameters(LLAMA2_7B) == n
    assert model_flops_per_token(LLAMA2_7B, 4096) == 6 * n + 12 * 32 * 4096 * 4097 // 2


def test_no_heavy_import_on_the_plan_path() -> None:
    code = (
        "import sys; import meshwright.plan.entries, meshwright.plan.strategies, meshwright.ledger.store,"
        "meshwright.ledger.views; print(sorted({'torch','numpy','polars','plotly','pydantic'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"


def test_training_ledgers_have_their_own_phases() -> None:
    ledger = fill_ledger(place(MOE, parse_layout("dp=2"), OWN), Train(seq=64, global_batch=4))
    assert {e.phase for e in ledger.entries} == {"forward", "backward", "optimizer"}
    assert ledger.meta["microbatches"].startswith("2 of 1 sequences")


@pytest.mark.parametrize(
    "name",
    [
        "meta-llama--Meta-Llama-3.1-405B", "deepseek-ai--DeepSeek-V3", "deepseek-ai--DeepSeek-V4-Flash",
        "openai--gpt-oss-120b", "Qwen--Qwen3.5-397B-A17B", "google--gemma-4-26B-A4B", "moonshotai--Kimi-K2.5-NVFP4",
        "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", "meta-llama--Llama-4-Scout-17B-16E-Instruct",
        "nvidia--Llama-3_3-Nemotron-Super-49B-v1",
    ],
)  # fmt: skip
def test_real_models(name: str) -> None:
    """However a checkpoint packs its weights: 2 FLOPs an active parameter, and one sum over tp a block at tp=4."""
    path = shared_dir("configs") / f"{name}_config.json"
    if not path.exists():
        path = shared_dir("configs") / f"nvidia--{name.partition('--')[2]}_config.json"
    spec = read_model(str(path), allow_online=False)
    decode = Batch("decode", 4, 1, 100)
    assert flops(run(spec, "tp=1", decode), "matmul") == 2 * 4 * active_matmul_parameters(spec)
    split = run(spec, "tp=4", decode)
    first = of_rank(split, split[0].rank_class)
    sums = [e for e in first if e.op == "all_reduce" and e.layer is not None]
    assert len(sums) == sum(len(layer.mixers) + len(layer.ffns) for layer in spec.layers)
    widths = {e.shapes for e in sums}
    assert widths == {((4, spec.hidden),)}
