"""Entries of a training step: counts of the papers, FLOPs against torch's own counter, schedules, ZeRO volumes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from meshwright.engines.own.profile import OWN
from meshwright.errors import InputError
from meshwright.ledger.schema import Entry
from meshwright.moves.pipeline import hand_offs, schedule
from meshwright.plan.entries import model_flops_per_token
from meshwright.plan.training_step import chunk_places, microbatches, training_entries
from meshwright.specs.build import decoder
from meshwright.specs.layout import Layout, parse_layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import place
from meshwright.specs.profile import EngineProfile
from meshwright.specs.workload import Train

DENSE = decoder(hidden=256, layers=8, heads=8, kv_heads=4, vocab=512, ffn=512)
TIED = decoder(hidden=256, layers=8, heads=8, kv_heads=4, vocab=512, ffn=512, tied=True)
MOE = decoder(hidden=256, layers=4, heads=8, kv_heads=4, vocab=512, ffn=128, experts=8, topk=2)
TRAIN = Train(seq=64, global_batch=16)


def step(
    spec: ModelSpec, layout: str, train: Train = TRAIN, profile: EngineProfile = OWN, *, each: bool = False
) -> list[Entry]:
    return training_entries(place(spec, parse_layout(layout), profile), train, each=each)


def collectives(entries: list[Entry], **where: object) -> Counter[tuple[str | None, str, str | None]]:
    """(phase, op, group) -> how often, of the first rank class."""
    counts: Counter[tuple[str | None, str, str | None]] = Counter()
    for e in entries:
        if e.group and e.rank_class == entries[0].rank_class and all(getattr(e, k) == v for k, v in where.items()):
            counts[(e.phase, e.op, e.group)] += e.count
    return counts


def total(entries: list[Entry], field: str, **where: object) -> int:
    rows = [e for e in entries if all(getattr(e, k) == v for k, v in where.items())]
    return sum((getattr(e, field) or 0) * e.count for e in rows)


def parameters(spec: ModelSpec) -> int:
    return spec.parameters("decoder")


def test_tensor_parallel_sums_of_a_layer() -> None:
    """Megatron-LM: 2 all_reduces forward, 2 backward; Korthikanti et al.: 4 all_gathers and 4 reduce_scatters."""
    assert collectives(step(DENSE, "tp=2,micro_batch=16"), layer=3) == {
        ("forward", "all_reduce", "tp"): 2,
        ("backward", "all_reduce", "tp"): 2,
    }
    assert collectives(step(DENSE, "tp=2,sp=on,micro_batch=16"), layer=3) == {
        ("forward", "all_gather", "tp"): 2,
        ("forward", "reduce_scatter", "tp"): 2,
        ("backward", "all_gather", "tp"): 2,
        ("backward", "reduce_scatter", "tp"): 2,
    }
    again = replace(OWN, constants={"wire_sp_gathers_again": True})
    assert (
        collectives(step(DENSE, "tp=2,sp=on,micro_batch=16", profile=again), layer=3)[("backward", "all_gather", "tp")]
        == 4
    )


def test_sequence_parallelism_sends_the_same_bytes() -> None:
    """An all_reduce is a reduce_scatter and an all_gather, so the layers send equally many bytes."""
    plain, sp = (step(DENSE, f"tp=4,{extra}") for extra in ("sp=off", "sp=on"))
    for layer in (0, 7):
        assert total(plain, "wire_bytes", group="tp", layer=layer) == total(sp, "wire_bytes", group="tp", layer=layer)
    norms = next(e for e in sp if e.name == "norm gradients")
    assert norms.shapes == (((2 * 8 + 1) * 256,),)


@pytest.mark.parametrize(
    "layout",
    ["tp=1", "tp=2", "tp=2,sp=on", "pp=4", "tp=2,pp=2,dp=2", "dp=4,zero=3", "pp=2,virtual=2,schedule=interleaved"],
)
def test_products_are_six_flops_a_parameter_and_token(layout: str) -> None:
    """Forward and backward of all ranks: 6 N + attention, with the backward of unfused attention twice its forward."""
    train = replace(TRAIN, attention="unfused")
    placement = place(DENSE, parse_layout(layout), OWN)
    entries = training_entries(placement, train)
    ranks = {c.name: c.ranks for c in placement.classes}
    done = sum(ranks[e.rank_class] * (e.flops or 0) * e.count for e in entries)
    assert done == TRAIN.global_batch * TRAIN.seq * model_flops_per_token(DENSE, TRAIN.seq)


def test_recompute() -> None:
    """Full recompute runs every layer's forward once more, selective the attention core."""
    none, selective, full = (step(DENSE, "tp=2", replace(TRAIN, recompute=r)) for r in ("none", "selective", "full"))
    forward = sum((e.flops or 0) * e.count for e in none if e.phase == "forward" and e.layer is not None)
    core = total(none, "flops", phase="forward", op="attention")
    assert total(full, "flops") == total(none, "flops") + forward
    assert total(selective, "flops") == total(none, "flops") + core
    assert collectives(full, layer=0)[("backward", "all_reduce", "tp")] == 4 * 16
    half = step(DENSE, "tp=2", replace(TRAIN, recompute="full", recompute_layers=4))
    assert total(half, "flops") == total(none, "flops") + forward // 2


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_flops_equal_those_that_torch_counts(kind: str) -> None:
    """Outside oracle: torch's FlopCounterMode over transformers' own model, forward and backward of one sequence.

    Eager attention multiplies the whole square, so its products (bmm) are compared with the square. transformers
    multiplies routed tokens expert by expert; which experts are chosen does not change the sum.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    sizes = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 128, "head_dim": 16, "tie_word_embeddings": False, "attn_implementation": "eager",
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "dense":
        config = transformers.LlamaConfig(intermediate_size=96, **sizes)
        spec = decoder(hidden=64, layers=2, heads=4, kv_heads=2, vocab=128, ffn=96, head_dim=16)
    else:
        config = transformers.Qwen3MoeConfig(
            moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, experts_implementation="eager", **sizes
        )
        spec = decoder(hidden=64, layers=2, heads=4, kv_heads=2, vocab=128, ffn=32, head_dim=16, experts=8, topk=2)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    tokens = torch.randint(0, 128, (1, 24))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens).loss.backward()
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    scores = sum(n for op, n in counts.items() if "bmm" in op)
    train = Train(seq=24, global_batch=1, attention="unfused", param_dtype="f32")
    entries = step(spec, "tp=1", train)
    square = 3 * 2 * (2 * 2 * 4 * 16 * 24 * 24)
    # rotary angles are a product of 8 x 1 and 1 x 24, counted by torch and not by us
    angles = 2 * 8 * 24
    assert scores in {square, square + angles}
    counted = total(entries, "flops", op="matmul")
    assert counted == sum(counts.values()) - scores


def test_zero_stages_by_hand() -> None:
    """P parameters on 4 ranks, 4 micro-batches of one sequence; gradients fp32, parameters bf16."""
    p = parameters(DENSE)
    assert p % 4 == 0
    zero0 = step(DENSE, "dp=4")
    assert collectives(zero0, group="dp") == {("backward", "all_reduce", "dp"): 1}
    assert total(zero0, "payload_bytes", group="dp") == 4 * p
    zero1 = step(DENSE, "dp=4,zero=1")
    assert collectives(zero1, group="dp") == {
        ("backward", "reduce_scatter", "dp"): 1,
        ("optimizer", "all_gather", "dp"): 1,
    }
    assert total(zero1, "wire_bytes", group="dp") == 3 * 4 * p // 4 + 3 * 2 * p // 4
    zero2 = step(DENSE, "dp=4,zero=2")
    assert collectives(zero2, group="dp")[("backward", "reduce_scatter", "dp")] == 4
    zero3 = step(DENSE, "dp=4,zero=3")
    assert collectives(zero3, group="dp") == {
        ("forward", "all_gather", "dp"): 4 * 9,
        ("backward", "all_gather", "dp"): 4 * 8,
        ("backward", "reduce_scatter", "dp"): 4 * 9,
    }
    root = 2 * 512 * 256 + 256
    gathered = 4 * (2 * p - root) * 2 // 4
    assert total(zero3, "payload_bytes", op="all_gather") == gathered
    assert total(zero3, "payload_bytes", op="reduce_scatter") == 4 * p * 4


def test_fsdp_knobs() -> None:
    kept = step(DENSE, "dp=4,zero=3,reshard_after_forward=off")
    assert ("backward", "all_gather", "dp") not in collectives(kept)
    whole = step(DENSE, "dp=4,zero=3,wrap=model")
    assert collectives(whole, group="dp") == {
        ("forward", "all_gather", "dp"): 4,
        ("backward", "reduce_scatter", "dp"): 4,
    }
    hybrid = step(DENSE, "dp=4,zero=3,replicas=2,reduce_dtype=bf16")
    assert collectives(hybrid, layer=0) == {
        ("forward", "all_gather", "dp_shard"): 4,
        ("backward", "all_gather", "dp_shard"): 4,
        ("backward", "reduce_scatter", "dp_shard"): 4,
        ("backward", "all_reduce", "dp_replicate"): 4,
    }
    layer = next(e for e in hybrid if e.op == "reduce_scatter" and e.layer == 0)
    piece = next(e for e in hybrid if e.op == "all_reduce" and e.layer == 0)
    assert layer.dtype == "bf16"
    assert piece.payload_bytes == (layer.payload_bytes or 0) // 2
    staged = step(DENSE, "pp=2,dp=4,zero=3")
    assert collectives(staged, group="dp") == {
        ("forward", "all_gather", "dp"): 5,
        ("backward", "reduce_scatter", "dp"): 1,
    }


def test_experts_have_their_own_replicas() -> None:
    """dp=4, ep=2: experts have 2 replicas, the rest 4; tokens cross twice forward and twice backward a layer."""
    entries = step(MOE, "dp=4,ep=2")
    assert collectives(entries, layer=0) == {("forward", "all_to_all", "ep"): 8, ("backward", "all_to_all", "ep"): 8}
    experts = 4 * 8 * 3 * 256 * 128
    assert total(entries, "payload_bytes", group="edp") == 4 * experts // 2
    assert total(entries, "payload_bytes", group="dp") == 4 * (parameters(MOE) - experts)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gpipe", "pp=4,schedule=gpipe"),
        ("1f1b", "pp=4"),
        ("interleaved", "pp=4,virtual=2,schedule=interleaved"),
        ("zb-h1", "pp=4,schedule=zb-h1"),
        ("zbv", "pp=4,virtual=2,schedule=zbv"),
        ("dualpipev", "pp=4,virtual=2,schedule=dualpipev"),
    ],
)
def test_each_microbatch_in_the_order_of_the_schedule(name: str, layout: str) -> None:
    entries = step(DENSE, layout, each=True)
    table = schedule(name, 4, 16, 2 if name == "interleaved" else 1)
    for rank in range(4):
        moves = [e for e in entries if e.rank_class == f"pp{rank}" and e.stream == "pp"]
        wanted = [
            (m.op, "forward" if m.kind == "F" else "backward", m.peer, m.microbatch) for m in hand_offs(table, rank)
        ]
        assert [(e.op, e.phase, e.peer, e.microbatch) for e in moves] == wanted
        assert [e.seq for e in moves] == list(range(len(moves)))


@pytest.mark.parametrize(
    "layout",
    [
        "pp=2",
        "tp=2,sp=on,pp=2,virtual=2,schedule=interleaved",
        "dp=4,zero=2",
        "dp=2,zero=3",
        "pp=2,schedule=zbv,virtual=2",
    ],
)
def test_folded_and_unfolded_steps_hold_the_same(layout: str) -> None:
    def sums(entries: list[Entry]) -> Counter[tuple[object, ...]]:
        counts: Counter[tuple[object, ...]] = Counter()
        for e in entries:
            counts[(e.rank_class, e.phase, e.layer, e.op, e.name, e.group, e.shapes, e.payload_bytes, e.flops)] += (
                e.count
            )
        return counts

    assert sums(step(DENSE, layout)) == sums(step(DENSE, layout, each=True))


@pytest.mark.parametrize(
    "layout", ["pp=4", "pp=4,virtual=2,schedule=interleaved", "pp=4,virtual=2,schedule=zbv", "tp=2,pp=2"]
)
def test_every_send_has_its_receive_and_every_layer_its_stage(layout: str) -> None:
    entries = step(DENSE, layout)
    stage = {name: int(name[2:]) for name in {e.rank_class for e in entries}}
    sends = Counter((e.phase, stage[e.rank_class], e.peer) for e in entries if e.op == "send")
    recvs = Counter((e.phase, e.peer, stage[e.rank_class]) for e in entries if e.op == "recv")
    assert sends == recvs
    boundaries = {"pp=4": 3, "tp=2,pp=2": 1, "pp=4,virtual=2,schedule=interleaved": 7}.get(layout, 6)
    assert sum(n for (phase, *_), n in sends.items() if phase == "forward") == boundaries
    owners = Counter(e.layer for e in entries if e.name == "attention.q" and e.phase == "forward")
    assert owners == dict.fromkeys(range(8), 1)
    assert sum(e.name == "embedding" and e.op == "embedding" for e in entries) == 1
    assert sum(e.op == "loss" and e.phase == "forward" for e in entries) == 1


def test_folded_placement_has_first_and_last_chunk_on_one_rank() -> None:
    assert chunk_places(Layout(pp=3, virtual=2, schedule="zbv")) == [(0, 5), (1, 4), (2, 3)]
    entries = step(DENSE, "pp=4,virtual=2,schedule=zbv")
    assert {e.rank_class for e in entries if e.op in {"embedding", "loss"}} == {"pp0"}
    params = [e for e in entries if e.op == "optimizer"]
    assert sum(e.shapes[0][0] for e in params if e.shapes) == parameters(DENSE)


def test_tied_embeddings_are_summed_over_the_ends() -> None:
    entries = step(TIED, "pp=4,tp=2")
    tied = [(e.rank_class, e.op, e.group, e.shapes) for e in entries if e.name == "tied embedding"]
    assert tied == [(f"pp{i}", "all_reduce", "pp", ((256, 256),)) for i in (0, 3)]
    assert not [e for e in step(TIED, "tp=2") if e.name == "tied embedding"]
    copies = [e.shapes[0][0] for e in entries if e.op == "optimizer" and e.shapes]
    assert sum(copies) * 2 == parameters(TIED) + 512 * 256 + (8 * 2 + 1) * 256


def test_context_parallel_backward_sends_blocks_and_their_gradients() -> None:
    entries = step(DENSE, "cp=4")
    assert collectives(entries, layer=0) == {
        ("forward", "send", "cp"): 16 * 3,
        ("forward", "recv", "cp"): 16 * 3,
        ("backward", "send", "cp"): 16 * (3 + 4),
        ("backward", "recv", "cp"): 16 * (3 + 4),
    }
    assert collectives(entries, group="dp+cp") == {("backward", "all_reduce", "dp+cp"): 1}


def test_a_vocabulary_that_is_cut_sums_three_numbers_a_token() -> None:
    loss = [e for e in step(DENSE, "tp=2,micro_batch=2") if (e.name or "").startswith("loss")]
    assert [(e.op, e.shapes, e.dtype, e.count) for e in loss] == [("all_reduce", ((128,),), "f32", 8)] * 3


def test_the_optimizer_touches_its_shard() -> None:
    """AdamW: gradient 4, two moments and a master weight read and written 24, parameter written 2: 30 bytes."""
    p = parameters(DENSE)
    whole, shard = (next(e for e in step(DENSE, layout) if e.op == "optimizer") for layout in ("dp=4", "dp=4,zero=1"))
    assert (whole.payload_bytes, shard.payload_bytes) == (30 * p, 30 * p // 4)


def test_the_batch_must_divide() -> None:
    assert microbatches(Layout(dp=2, micro_batch=4), TRAIN) == 2
    with pytest.raises(InputError, match="16 is not divisible by dp 3"):
        microbatches(Layout(dp=3), TRAIN)
    with pytest.raises(InputError, match="needs 64 micro-batches"):
        step(decoder(hidden=64, layers=64, heads=4, vocab=64), "pp=32,virtual=2,schedule=dualpipev", each=True)


def test_experts_cut_over_tensor_parallel_ranks() -> None:
    """dp=4, ep=4, tp=2: an expert is cut over tp. Its partial results join the layer's sum, or with sequence
    parallelism the routed tokens are gathered before and reduce_scattered behind it (Megatron's dispatcher)."""
    plain = [e for e in step(MOE, "dp=4,ep=4,tp=2", Train(seq=64, global_batch=4)) if e.layer == 0 and e.group]
    assert [(e.op, e.group, e.shapes) for e in plain if e.phase == "forward"] == [
        ("all_reduce", "tp", ((64, 256),)),
        ("all_to_all", "ep", ((128, 256),)),
        ("all_to_all", "ep", ((128, 256),)),
        ("all_reduce", "tp", ((64, 256),)),
    ]
    assert [(e.op, e.group) for e in plain if e.phase == "backward"] == [
        ("all_to_all", "ep"),
        ("all_to_all", "ep"),
        ("all_reduce", "tp"),
        ("all_reduce", "tp"),
    ]
    wide = replace(OWN, constants={"wire_moe_sp_slices": True})
    entries = step(MOE, "dp=4,ep=4,tp=2,sp=on", Train(seq=64, global_batch=4), wide)
    sp = [e for e in entries if e.layer == 0 and e.group]
    assert [(e.op, e.group, e.shapes) for e in sp if e.phase == "forward"] == [
        ("all_gather", "tp", ((32, 256),)),
        ("reduce_scatter", "tp", ((64, 256),)),
        ("all_to_all", "ep", ((64, 256),)),
        ("all_gather", "etp", ((64, 256),)),
        ("reduce_scatter", "etp", ((128, 256),)),
        ("all_to_all", "ep", ((64, 256),)),
    ]
    mirrored = [(e.op, e.group, e.shapes) for e in sp if e.phase == "backward"]
    swap = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
    forward = [(swap.get(e.op, e.op), e.group) for e in sp if e.phase == "forward"]
    assert [(op, group) for op, group, _ in mirrored] == forward[::-1]
    assert total(sp, "wire_bytes", phase="forward") == total(sp, "wire_bytes", phase="backward")
