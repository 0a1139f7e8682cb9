"""Shards tile every tensor exactly once per replica group; ranks, coordinates, groups and classes agree."""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from meshwright.engines import profile
from meshwright.errors import IllegalLayoutError
from meshwright.specs import shares
from meshwright.specs.hf.read import model_from_config
from meshwright.specs.layout import Layout, parse_layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import Coordinate, Placement, Shard, place
from meshwright.specs.profile import EngineProfile
from tests.specs import builders

VLLM, OWN = profile("vllm"), profile("meshwright")
BOUNDED = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))


def elements(shard: Shard) -> Counter[tuple[int, ...]]:
    """Every element that a shard holds of one tensor."""
    ranges = [[i for start, stop in dim for i in range(start, stop)] for dim in shard.intervals]
    return Counter(itertools.product(*ranges))


def copies_expected(p: Placement, shard: Shard) -> int:
    """By hand: how many ranks of one replica hold each element of a tensor."""
    family, tp = shard.family, p.layout.tp
    labels = {s.label for dim in family.dims for s in dim}
    if family.role == "expert":
        return 1 if "expert_mlp" in labels else p.cuts.grid.etp
    if labels <= {"model", "fixed", "experts"}:
        return tp
    for few in ("kv_heads", "ssm_groups"):
        units = [s.units for dim in family.dims for s in dim if s.label == few]
        if units and labels & {"heads", "ssm_heads"}:
            return 0  # fused: the segments differ; checked segment by segment elsewhere
        if units and units[0] < tp:
            return tp // units[0]
    if labels & {"shared_mlp"} and p.profile.shared_whole_under_ep and min(p.layout.ep, tp, p.layout.dp) > 1:
        return tp
    return 1


def check_tiling(p: Placement) -> None:
    """Every element of every tensor is held equally often, exactly as often as the hand rule says."""
    held: dict[tuple[object, ...], Counter[tuple[int, ...]]] = defaultdict(Counter)
    shard_of: dict[tuple[object, ...], Shard] = {}
    for rank in range(p.layout.world):
        c = p.coordinate(rank)
        replica = p.cuts.grid.place(p.flat(c))[2]
        for shard in p.shards(c):
            where: tuple[object, ...] = (replica,) if shard.family.role == "expert" else (c.dp, c.cp)
            end = (c.pp,) if not shard.family.layers else ()
            for layer, expert in itertools.product(shard.layers or (None,), shard.experts or (None,)):
                key = (shard.family.template, layer, expert, where, end)
                held[key] += elements(shard)
                shard_of[key] = shard
    for key, counter in held.items():
        shard = shard_of[key]
        every = set(itertools.product(*(range(n) for n in shard.family.shape)))
        assert set(counter) == every, f"{key}: {len(every) - len(counter)} elements are held by nobody"
        want = copies_expected(p, shard)
        if want:
            assert set(counter.values()) == {want}, f"{key}: held {set(counter.values())}, not {want} times"
    check_all_present(p, held)


def check_all_present(p: Placement, held: dict[tuple[object, ...], Counter[tuple[int, ...]]]) -> None:
    """Every tensor of the table is held in every replica."""
    present = {(key[0], key[1], key[2], key[3]) for key in held}
    for family in p.spec.families:
        replicas: list[tuple[object, ...]]
        if family.role == "expert":
            replicas = [(r,) for r in range(p.cuts.grid.replicas)]
        else:
            replicas = list(itertools.product(range(p.layout.dp), range(p.layout.cp)))
        for _, layer, expert in family.names():
            for replica in replicas:
                assert (family.template, layer, expert, replica) in present


def legal(spec: ModelSpec, layout: Layout, by: EngineProfile) -> Placement:
    try:
        return place(spec, layout, by)
    except IllegalLayoutError:
        assume(False)
        raise


degrees = st.sampled_from([1, 1, 2, 3, 4, 5, 6, 8])
small = st.sampled_from([1, 1, 2, 3])


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    kind = draw(st.sampled_from(["gqa", "moe", "packed", "mla", "ssm", "fp8", "int4"]))
    kv = draw(st.sampled_from([1, 2, 3, 4]))
    heads = kv * draw(st.sampled_from([1, 2, 3, 4]))
    layers = draw(st.integers(2, 5))
    if kind == "ssm":
        return builders.state_space(heads=heads, groups=kv, layers=layers)
    if kind in {"moe", "packed", "mla"}:
        experts, width = draw(st.sampled_from([3, 4, 8])), draw(st.sampled_from([6, 8, 12]))
        return builders.moe(
            heads, kv, experts, width, draw(st.sampled_from([0, 12])), layers, draw(st.integers(0, 1)),
            packed=kind == "packed", mla=kind == "mla", vocab=draw(st.sampled_from([50, 64, 101])),
        )  # fmt: skip
    dense = builders.gqa(
        heads, kv, 8, 16, draw(st.sampled_from([32, 48])) if kind != "gqa" else draw(st.sampled_from([7, 24])),
        draw(st.sampled_from([50, 64, 101])), layers, draw(st.booleans()), draw(st.booleans()),
    )  # fmt: skip
    if kind == "fp8":
        return builders.block_fp8(dense, 8)
    return builders.int4(dense, 8) if kind == "int4" else dense


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tp, pp, dp, cp = draw(degrees), draw(small), draw(small), draw(st.sampled_from([1, 1, 1, 2]))
    ep = draw(st.sampled_from([1, 1, 2, 4, tp * dp * cp]))
    return Layout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep)


@BOUNDED
@given(models(), layouts(), st.sampled_from([VLLM, OWN, profile("vllm-0.26")]))
def test_shards_tile_every_tensor_once_per_replica(spec: ModelSpec, layout: Layout, by: EngineProfile) -> None:
    p = legal(spec, layout, by)
    check_tiling(p)
    check_ranks(p)


def check_ranks(p: Placement) -> None:
    """Rank and coordinate are inverse; classes partition the ranks and hold what their first member holds."""
    counts: Counter[str] = Counter()
    for rank in range(p.layout.world):
        c = p.coordinate(rank)
        assert p.rank(c) == rank
        assert c == p.at(c.pp, p.flat(c))
        own = p.class_of(rank)
        assert p.weight_bytes(c) == p.weight_bytes(own.coordinate)
        assert own.first_rank <= rank
        counts[own.name] += 1
        for axis in ("tp", "pp", "dp", "cp", "ep", "etp", "edp", "dp+cp"):
            group = p.group(axis, c)
            assert rank in group
            assert all(p.group(axis, p.coordinate(member)) == group for member in group)
    assert counts == {c.name: c.ranks for c in p.classes}
    assert all(p.class_of(c.first_rank) is c and p.rank(c.coordinate) == c.first_rank for c in p.classes)


@BOUNDED
@given(models(), layouts(), st.sampled_from([VLLM, OWN]))
def test_bytes_add_up(spec: ModelSpec, layout: Layout, by: EngineProfile) -> None:
    p = legal(spec, layout, by)
    for c in p.classes:
        assert sum(p.weight_bytes_by_role(c.coordinate).values()) == p.weight_bytes(c.coordinate)
    if layout.world == 1:
        padding = sum(s.nbytes - s.family.total_bytes for s in p.shards(Coordinate()))
        assert p.weight_bytes(Coordinate()) == spec.weight_bytes() + padding
        assert padding == 0 or by.vocab_multiple > 1


@BOUNDED
@given(models(), degrees)
def test_query_heads_lie_with_their_kv_heads(spec: ModelSpec, tp: int) -> None:
    assume(spec.kv_heads > 1)
    p = legal(spec, Layout(tp=tp), OWN)
    per_group = spec.heads // spec.kv_heads
    for index in range(tp):
        q = shares.members_of(spec.heads, spec.kv_heads, tp, index)
        kv = shares.groups_of(spec.kv_heads, tp, index)
        assert kv.start <= q.start // per_group
        assert (q.stop - 1) // per_group < kv.stop
    assert len(p.classes) <= tp


def test_a_share_that_is_off_by_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = builders.gqa(intermediate=7)
    check_tiling(place(spec, Layout(tp=2), OWN))
    true_part = shares.part

    def wrong(units: int, parts: int, index: int) -> tuple[int, int]:
        start, stop = true_part(units, parts, index)
        return start, stop - (1 if index == 0 and units == 7 else 0)

    shares.plain.cache_clear()
    monkeypatch.setattr(shares, "part", wrong)
    with pytest.raises(AssertionError, match="held by nobody"):
        check_tiling(place(spec, Layout(tp=2), OWN))
    shares.plain.cache_clear()


def test_nine_heads_over_two_ranks_go_by_kv_group() -> None:
    p = place(builders.gqa(heads=9, kv_heads=3), Layout(tp=2), OWN)
    shapes = [{s.family.template: s.shape for s in p.shards(p.coordinate(r))} for r in (0, 1)]
    name = "model.layers.{layer}.attn.%s.weight"
    assert [s[name % "q"][0] for s in shapes] == [6 * 4, 3 * 4]
    assert [s[name % "k"][0] for s in shapes] == [2 * 4, 1 * 4]
    assert [s["model.embed_tokens.weight"][0] for s in shapes] == [50, 50]


def test_vocabulary_is_padded_in_vllm_and_uneven_in_our_runtime() -> None:
    spec = builders.gqa(vocab=101)
    rows = {}
    for by in (VLLM, OWN):
        p = place(spec, Layout(tp=2), by)
        embed = [next(s for s in p.shards(p.coordinate(r)) if s.family.role == "embedding") for r in (0, 1)]
        rows[by.engine] = [(s.shape[0], s.padding) for s in embed]
    assert rows == {"vllm": [(64, 0), (64, 27)], "meshwright": [(51, 0), (50, 0)]}


def test_kv_heads_fewer_than_ranks_are_replicated_in_blocks() -> None:
    p = place(builders.gqa(heads=8, kv_heads=2), Layout(tp=4), VLLM)
    keys = [next(s for s in p.shards(p.coordinate(r)) if s.family.op == "k") for r in range(4)]
    assert [s.intervals[0] for s in keys] == [((0, 4),), ((0, 4),), ((4, 8),), ((4, 8),)]


def test_experts_are_cut_over_all_ranks_or_dealt_whole() -> None:
    spec = builders.moe(experts=8, width=16, shared=12, heads=4)
    flat = place(spec, Layout(tp=2, dp=2), VLLM)
    whole = place(spec, Layout(tp=2, dp=2, ep=4), VLLM)
    up = [next(s for s in p.shards(p.coordinate(3)) if s.family.template.endswith("experts.{expert}.up.weight"))
          for p in (flat, whole)]  # fmt: skip
    assert (up[0].shape[0], len(up[0].experts)) == (4, 8)
    assert (up[1].shape[0], up[1].experts) == (16, (6, 7))
    shared = [next(s for s in p.shards(p.coordinate(3)) if s.family.role == "shared_expert") for p in (flat, whole)]
    assert [s.shape[0] for s in shared] == [6, 12]


def test_training_lays_experts_beside_tp_and_serving_over_it() -> None:
    spec = builders.moe(experts=8, width=16, heads=4)
    train = place(spec, Layout(tp=2, dp=4, ep=4), OWN)
    serve = place(spec, Layout(tp=4, dp=1, ep=4), OWN)
    assert (train.cuts.grid.etp, train.cuts.grid.ep) == (2, 4)
    assert (serve.cuts.grid.etp, serve.cuts.grid.ep) == (1, 4)
    assert train.group("ep", Coordinate()) == (0, 2, 4, 6)
    assert serve.group("ep", Coordinate()) == (0, 1, 2, 3)


def test_ends_of_the_pipeline_and_a_tied_head() -> None:
    for tied in (False, True):
        p = place(builders.gqa(layers=5, tied=tied), Layout(pp=3), VLLM)
        roles = [set(p.weight_bytes_by_role(Coordinate(pp=i))) for i in range(3)]
        assert "embedding" in roles[0]
        assert not roles[1] & {"embedding", "head"}
        assert ("embedding" if tied else "head") in roles[2]
        assert [len(s.layers) for s in p.stages] == [1, 2, 2] or [len(s.layers) for s in p.stages] == [2, 2, 1]


def test_rank_order_differs_by_engine() -> None:
    layout = Layout(tp=2, pp=2, dp=2)
    spec = builders.gqa()
    assert place(spec, layout, VLLM).coordinate(4) == Coordinate(dp=1, pp=0, tp=0)
    assert place(spec, layout, OWN).coordinate(4).pp == 1
    assert place(spec, layout, OWN).group("dp", Coordinate()) == (0, 2)
    with pytest.raises(IndexError, match="rank 8"):
        place(spec, layout, VLLM).coordinate(8)


def test_many_ranks_cost_what_few_cost() -> None:
    spec = builders.moe(experts=256, width=64, heads=64, kv_heads=8, layers=32, dense=2, hidden=64)
    started = time.perf_counter()
    p = place(spec, Layout(tp=8, pp=16, dp=1024, ep=64), OWN)
    taken = time.perf_counter() - started
    assert sum(c.ranks for c in p.classes) == 131_072
    assert len(p.classes) == 16
    assert {len(s.experts) for s in p.shards(p.coordinate(99_999)) if s.family.role == "expert"} == {4}
    assert taken < 0.25, f"{taken:.3f} s"
    assert p.rank(p.coordinate(131_071)) == 131_071


def test_draft_layers_lie_on_the_last_stage_and_only_when_asked_for() -> None:
    spec = builders.with_draft(builders.moe(layers=4))
    plain = place(spec, Layout(pp=2), VLLM)
    assert "mtp" not in plain.weight_bytes_by_role(Coordinate(pp=1))
    drafting = place(spec, Layout(pp=2), VLLM, sections=("decoder", "mtp"))
    roles = [drafting.weight_bytes_by_role(Coordinate(pp=stage)) for stage in (0, 1)]
    assert "mtp" not in roles[0]
    assert roles[1]["mtp"] == sum(f.total_bytes for f in spec.select("mtp") if f.role not in {"embedding", "head"})
    assert roles[1]["embedding"] == roles[0]["embedding"]
    assert place(spec, Layout(pp=2), OWN, sections=("decoder", "mtp")).weight_bytes_by_role(Coordinate(pp=1))[
        "mtp"
    ] == spec.weight_bytes("mtp")


def test_an_encoder_is_cut_by_tp_and_loaded_by_every_stage_of_vllm() -> None:
    spec = builders.with_vision(builders.gqa())
    for by, stages in ((VLLM, (0, 1)), (OWN, (0,))):
        p = place(spec, Layout(tp=2, pp=2), by)
        held = [p.weight_bytes_by_role(Coordinate(pp=stage)).get("vision", 0) for stage in (0, 1)]
        assert [n > 0 for n in held] == [stage in stages for stage in (0, 1)]
        assert held[0] == spec.weight_bytes("vision") // 2
    assert "vision" not in place(spec, Layout(), VLLM, sections=("decoder",)).weight_bytes_by_role(Coordinate())


def test_a_mixture_of_the_largest_kind_is_placed_quickly() -> None:
    big = builders.moe(128, 1, 256, 2048, 2048, 61, 3, hidden=7168, vocab=129280, mla=True)
    spec = builders.with_draft(builders.block_fp8(big, 1))
    for text in ("tp=8,ep=8", "tp=8,pp=16", "dp=64,ep=64", "tp=3,pp=7"):
        layout = parse_layout(text)
        by = OWN if layout.tp == 3 else VLLM
        taken = []
        for _ in range(5):
            started = time.perf_counter()
            p = place(spec, layout, by)
            taken.append(time.perf_counter() - started)
        assert min(taken) < 0.02, f"{text}: {min(taken) * 1e3:.1f} ms"
        assert sum(c.ranks for c in p.classes) == layout.world


def test_chunks_of_interleaved_and_folded_pipelines() -> None:
    spec = builders.gqa(layers=10)
    dealt = place(spec, parse_layout("pp=2,schedule=interleaved,virtual=2"), OWN)
    assert [s.chunks for s in dealt.stages] == [((0, 1, 2), (6, 7)), ((3, 4, 5), (8, 9))]
    folded = place(spec, parse_layout("pp=2,schedule=zbv"), OWN)
    assert [s.layers for s in folded.stages] == [(0, 1, 2, 8, 9), (3, 4, 5, 6, 7)]
    assert [(s.embedding, s.head) for s in folded.stages] == [(True, True), (False, False)]
    stated = place(spec, parse_layout("pp=2,schedule=interleaved,virtual=2,stage_layers=6+4"), OWN)
    assert [s.chunks for s in stated.stages] == [((0, 1, 2), (5, 6, 7)), ((3, 4), (8, 9))]
    for p in (dealt, folded, stated):
        check_tiling(p)


def test_scales_that_no_exact_cut_divides_make_classes_of_their_own() -> None:
    """90 blocks of scales over 32 ranks: some ranks touch 3, others 4; every rank finds its class."""
    from meshwright import engines
    from meshwright.specs.hf.read import read_model

    placement = place(read_model("gpt-oss-120b"), Layout(dp=32), engines.profile("vllm"))
    counts: dict[str, int] = {}
    for rank in range(32):
        name = placement.class_of(rank).name
        counts[name] = counts.get(name, 0) + 1
    assert counts == {c.name: c.ranks for c in placement.classes}
    assert len(counts) == 2


@pytest.mark.parametrize(("layout", "rows"), [("tp=4", 672), ("tp=4,ep=4", 2688), ("tp=2", 1344)])
def test_experts_stacked_in_one_dimension_are_cut_inside_each(layout: str, rows: int) -> None:
    """DBRX lays its experts one under the other: 4 of 2,688 rows here; each is cut, or each rank has whole ones."""
    spec = model_from_config(
        {
            "architectures": ["DbrxForCausalLM"],
            "model_type": "dbrx",
            "d_model": 64,
            "n_heads": 8,
            "n_layers": 2,
            "vocab_size": 256,
            "attn_config": {"kv_n_heads": 4},
            "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 2688},
        },
        "dbrx",
        "a test",
    )
    wanted = parse_layout(layout)
    placement = place(spec, wanted, profile("vllm"))
    seen: list[int] = []
    for rank in range(wanted.world):
        for shard in placement.shards(placement.coordinate(rank)):
            if shard.family.role == "expert" and shard.family.op == "gate":
                (held, _) = shard.intervals
                assert len(held) == (1 if wanted.ep > 1 else 4)
                assert {high - low for low, high in held} == {rows}
                seen += [row for low, high in held for row in range(low, high)]
    assert sorted(seen) == list(range(4 * 2688))
