"""Questions that users of Megatron asked, as commands."""

from __future__ import annotations

import shlex

from meshwright.engines.megatron import ENGINE
from meshwright.plan.train_engine import engine_preset
from meshwright.plan.train_memory import train_memory
from meshwright.specs.cluster import parse_cluster
from meshwright.specs.workload import Train
from tests.engines.megatron.commands import LLAMA_8B, judged, parse, replaced

RUN = f"torchrun --nproc-per-node 8 --nnodes 8 --node-rank 0 --master-addr a pretrain_gpt.py {LLAMA_8B}"
#: Dimensions of Qwen3-235B-A22B.
QWEN_235B = replaced(
    RUN, num_layers=94, hidden_size=4096, ffn_hidden_size=12288, num_attention_heads=64, num_query_groups=4,
    kv_channels=128, num_experts=128, moe_ffn_hidden_size=1536, moe_router_topk=8, vocab_size=151936,
    moe_token_dispatcher_type="alltoall", tensor_model_parallel_size=2, sequence_parallel=True,
    pipeline_model_parallel_size=2, expert_model_parallel_size=32, expert_tensor_parallel_size=1,
    use_distributed_optimizer=True,
)  # fmt: skip


def test_expert_and_context_parallelism_go_together() -> None:
    """C252: experts have a grid of their own, so ep and cp may both be above 1."""
    command = replaced(
        RUN, num_experts=8, moe_ffn_hidden_size=14336, expert_model_parallel_size=4, context_parallel_size=2
    )
    found, _, rules = judged(command, "8x8xH100-SXM@ib-400g")
    assert (found.layout.ep, found.layout.cp) == (4, 2)
    assert [r for r in rules if r.severity == "illegal"] == []


def test_a_235b_mixture_needs_multiples_of_64_devices() -> None:
    """C253: tp 2, pp 2, ep 32, etp 1: stages of 47 layers, 4 experts a rank, a world of 64 or multiples of it."""
    found, spec, rules = judged(QWEN_235B, "8x8xH100-SXM@ib-400g")
    assert [r for r in rules if r.severity == "illegal"] == []
    assert str(found.layout) == "tp=2,pp=2,dp=16,ep=32,etp=1,sp=on,zero=1"
    assert ENGINE.profile().split_layers(len(spec.layers), 2) == (47, 47)
    half = QWEN_235B.replace("--nnodes 8", "--nnodes 4")
    _, _, rules = judged(half, "4x8xH100-SXM@ib-400g")
    assert "expert_grid" in {r.code for r in rules if r.severity == "illegal"}
    for nodes in (16, 24):
        larger = replaced(QWEN_235B, global_batch_size=192).replace("--nnodes 8", f"--nnodes {nodes}")
        _, _, rules = judged(larger, f"{nodes}x8xH100-SXM@ib-400g")
        assert [r.code for r in rules if r.severity == "illegal"] == [], nodes


def test_devices_of_stages_and_experts() -> None:
    """C254: tp 2, ep 8, pp 2 with whole experts need max(2, 8) x 2 = 16 devices; 8 do not hold the expert groups."""
    sizes = {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1}
    mixture = replaced(
        RUN, num_experts=128, moe_ffn_hidden_size=1536, tensor_model_parallel_size=2, sequence_parallel=True, **sizes
    )
    for nodes, starts in ((1, False), (2, True)):
        command = mixture.replace("--nnodes 8", f"--nnodes {nodes}")
        _, _, rules = judged(command, f"{nodes}x8xH100-SXM@ib-400g" if nodes > 1 else "1x8xH100-SXM")
        refused = [r for r in rules if r.severity == "illegal"]
        assert (refused == []) is starts, refused
        if not starts:
            assert refused[0].code == "expert_grid"
            assert "ep 8 x etp 1 = 8 does not divide the 4 ranks" in refused[0].message


def test_ulysses_degrees_that_do_not_divide_the_heads() -> None:
    """C261: 48 heads over 64 ranks do not start, over 16 they do."""
    many = replaced(RUN, num_attention_heads=48, hidden_size=6144, group_query_attention=None, num_query_groups=None,
                    cp_comm_type="a2a", seq_length=65536, max_position_embeddings=65536)  # fmt: skip
    for degree, starts in ((64, False), (16, True)):
        _, _, rules = judged(replaced(many, context_parallel_size=degree), "8x8xH100-SXM@ib-400g")
        broken = [r for r in rules if r.code == "heads_over_ulysses"]
        assert bool(broken) != starts
        if broken:
            assert "48 attention heads" in broken[0].message
            assert "64" in broken[0].message
            assert "16" in broken[0].way_out
    ring = replaced(many, context_parallel_size=64, cp_comm_type="p2p")
    _, _, rules = judged(ring, "8x8xH100-SXM@ib-400g")
    assert [r for r in rules if r.severity == "illegal"] == []


def test_options_reach_the_memory_count() -> None:
    """What a command changes of the training engine is a field of it, and changes bytes."""
    cluster = parse_cluster("8x8xH100-SXM@ib-400g")
    sizes = {}
    for name, changes in {
        "plain": {},
        "sharded": {"use_distributed_optimizer": True},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        "fused": {"cross_entropy_loss_fusion": True},
        "unfused attention": {"attention_backend": "unfused"},
    }.items():
        found = parse(replaced(RUN, **changes))
        spec = ENGINE.model_spec(found)
        assert spec is not None
        assert isinstance(found.workload, Train)
        options = dict(found.train_options)
        engine = engine_preset(str(options.pop("preset")), **options)
        sizes[name] = train_memory(spec, found.layout, cluster, found.workload, engine).worst.total_bytes
    assert sizes["sharded"] < sizes["plain"]
    assert sizes["full"] < sizes["plain"] < sizes["unfused attention"]
    assert sizes["fused"] != sizes["plain"]


def test_a_command_of_a_real_script() -> None:
    """Lines as the examples of Megatron-LM write them, arguments in another order and with data paths."""
    text = (
        "CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc_per_node 8 --nnodes 1 --master_addr localhost "
        "pretrain_gpt.py --num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 "
        "--max-position-embeddings 1024 --attention-backend auto --micro-batch-size 1 --global-batch-size 1536 "
        "--train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 "
        "--clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 "
        "--lr-decay-iters 430000 --tensor-model-parallel-size 8 --data-path my/data_text "
        "--vocab-file vocab.json --merge-file merges.txt --split 949,50,1 --log-interval 100 --save-interval 10000 "
        "--eval-interval 1000 --save out --load out --eval-iters 10 --tensorboard-dir logs"
    )
    found = ENGINE.parse(shlex.split(text)[1:], {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, lambda name: None)
    assert found.unknown == ()
    assert [r.code for r in found.findings if r.severity == "illegal"] == []
    assert str(found.layout) == "tp=8"
    assert isinstance(found.workload, Train)
    assert (found.workload.param_dtype, found.workload.global_batch) == ("f16", 1536)
