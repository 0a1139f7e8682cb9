"""What a Megatron command asks for: world, degrees, stages, batch, precision, model."""

from __future__ import annotations

import pytest

from meshwright.engines.megatron import ENGINE
from meshwright.engines.megatron.arguments import frequency
from meshwright.engines.megatron.parallel import parts_of
from meshwright.errors import InputError
from meshwright.specs.cluster import parse_cluster
from meshwright.specs.layout import Fsdp
from meshwright.specs.model import Moe
from meshwright.specs.workload import Train
from tests.engines.megatron.commands import LLAMA_8B, parse, replaced

ONE = f"torchrun --nproc-per-node 8 pretrain_gpt.py {LLAMA_8B}"


@pytest.mark.parametrize(
    ("start", "devices", "dp"),
    [
        ("torchrun --nproc_per_node=8 --nnodes=4 --node_rank=0 --master-addr=h", 32, 16),
        ("python -m torch.distributed.launch --nproc-per-node 4", 4, 2),
        ("python3 -u -m torch.distributed.run --nproc-per-node=8 --standalone", 8, 4),
        ("srun -N 2 --ntasks-per-node 8 python", 16, 8),
        ("srun --nodes=2 --ntasks=16 python -u", 16, 8),
        ("torchrun", None, 1),
        ("torchrun --nproc-per-node gpu", None, 1),
    ],
)
def test_world(start: str, devices: int | None, dp: int) -> None:
    found = parse(replaced(f"{start} /opt/Megatron-LM/pretrain_gpt.py {LLAMA_8B}", tensor_model_parallel_size=2))
    assert (found.devices, found.layout.dp) == (devices, dp)
    if devices is None:
        spec = ENGINE.model_spec(found)
        assert spec is not None
        done = ENGINE.complete(found, spec, parse_cluster("4x8xH100-SXM"))
        assert (done.devices, done.layout.dp) == (32, 16)


def test_world_from_the_environment() -> None:
    assert parse(f"python pretrain_gpt.py {LLAMA_8B}", {"WORLD_SIZE": "16"}).devices == 16


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_layers_per_virtual_pipeline_stage": 4}, "pp=4,dp=2,schedule=interleaved,virtual=2"),
        ({"num_virtual_stages_per_pipeline_rank": 4}, "pp=4,dp=2,schedule=interleaved,virtual=4"),
        ({"num_virtual_stages_per_pipeline_rank": 1}, "pp=4,dp=2"),
        ({"decoder_first_pipeline_num_layers": 7, "decoder_last_pipeline_num_layers": 9},
         "pp=4,dp=2,stage_layers=7+8+8+9"),
        ({"decoder_last_pipeline_num_layers": 5}, "pp=4,dp=2,stage_layers=9+9+9+5"),
        ({"num_layers": 30, "account_for_embedding_in_pipeline_split": True,
          "account_for_loss_in_pipeline_split": True}, "pp=4,dp=2,stage_layers=7+8+8+7"),
        ({"pipeline_model_parallel_layout": "Et*7|(t*9|)*2,t*7L"}, "pp=4,dp=2,stage_layers=7+9+9+7"),
        ({"pipeline_model_parallel_layout": "Ettt|(tttt|)*6tttttL"},
         "pp=4,dp=2,schedule=interleaved,virtual=2,stage_layers=7+8+8+9"),
        ({"use_distributed_optimizer": True}, "pp=4,dp=2,zero=1"),
        ({"use_megatron_fsdp": True}, "pp=4,dp=2,zero=3"),
        ({"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads"}, "pp=4,dp=2,zero=2"),
        ({"use_megatron_fsdp": True, "num_distributed_optimizer_instances": 2}, "pp=4,dp=2,zero=3,replicas=2"),
        ({"context_parallel_size": 2}, "pp=4,cp=2"),
        ({"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, "pp=4,dp=2,ep=2,etp=1"),
    ],
)  # fmt: skip
def test_layouts(changes: dict[str, object], text: str) -> None:
    assert str(parse(replaced(ONE, pipeline_model_parallel_size=4, **changes)).layout) == text


def test_torch_fsdp2() -> None:
    found = parse(replaced(ONE, use_torch_fsdp2=True, torch_fsdp2_no_reshard_after_forward=True))
    assert found.layout.zero == 3
    assert found.layout.fsdp == Fsdp(reshard_after_forward=False)


def test_training_options() -> None:
    found = parse(
        replaced(
            ONE,
            recompute_granularity="full",
            recompute_method="block",
            recompute_num_layers=4,
            grad_reduce_in_bf16=True,
            optimizer="sgd",
            cross_entropy_loss_fusion=True,
            attention_backend="fused",
            make_vocab_size_divisible_by=64,
            fp8_format="hybrid",
            no_create_attention_mask_in_dataloader=True,
        )
    )
    work = found.workload
    assert isinstance(work, Train)
    assert (work.seq, work.global_batch, work.recompute, work.recompute_layers) == (8192, 128, "full", 4)
    assert (work.grad_dtype, work.optimizer, work.fused_cross_entropy, work.dropout) == ("bf16", "sgd", True, 0.0)
    options = found.train_options
    assert options["preset"] == "megatron-core"
    assert (options["attention"], options["vocab_multiple"], options["fp8"]) == ("cudnn", 64, True)
    assert options["attention_mask"] is False
    assert options["recompute_method"] == "block"


def test_without_a_precision_everything_is_fp32() -> None:
    found = parse(replaced(ONE, bf16=None))
    assert isinstance(found.workload, Train)
    assert (found.workload.param_dtype, found.workload.master_weights) == ("f32", False)
    assert [r.code for r in found.findings] == ["full_precision"]


def test_the_batch_defaults_to_one_micro_batch_a_rank() -> None:
    found = parse(replaced(ONE, global_batch_size=None, micro_batch_size=3))
    assert isinstance(found.workload, Train)
    assert found.workload.global_batch == 24


def test_the_model_of_the_arguments() -> None:
    spec = ENGINE.model_spec(parse(ONE))
    assert spec is not None
    assert (len(spec.layers), spec.hidden, spec.vocab, spec.tied) == (32, 4096, 128256, False)
    assert spec.parameters() == 8_030_261_248


def test_a_mixture_with_dense_layers_in_front() -> None:
    spec = ENGINE.model_spec(
        parse(replaced(ONE, num_experts=16, moe_layer_freq="([0]*3+[1]*29)", moe_ffn_hidden_size=1024))
    )
    assert spec is not None
    mixed = [any(isinstance(f, Moe) for f in layer.ffns) for layer in spec.layers]
    assert mixed == [False] * 3 + [True] * 29


def test_default_sizes_follow_megatron() -> None:
    spec = ENGINE.model_spec(
        parse(
            "torchrun --nproc-per-node 1 pretrain_gpt.py --num-layers 2 --hidden-size 1024 --num-attention-heads 16 "
            "--seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --tokenizer-type GPT2BPETokenizer"
        )
    )
    assert spec is not None
    assert spec.vocab == 50257
    assert (spec.tied, spec.learned_positions) == (True, 64)
    assert {f.dims[0][0].units for f in spec.families if f.op == "up" and f.part == "weight"} == {4096}


def test_other_engines_flags_and_spellings_are_named() -> None:
    found = parse(ONE + " --gpu-memory-utilization 0.9 --tensor_model_parallel_size 2 --loss-scaleing 3")
    assert found.unknown == ("--gpu-memory-utilization", "--tensor_model_parallel_size", "--loss-scaleing")
    said = {r.numbers or r.message: r for r in found.findings}
    texts = [f"{r.message} {r.way_out}" for r in said.values()]
    assert any("vllm" in t for t in texts)
    assert any("write --tensor-model-parallel-size" in t for t in texts)
    assert found.layout.tp == 1


@pytest.mark.parametrize(
    "value", ["$TP", "$(nproc)", "`id`", "2;rm -rf x", "0", "-1", "9" * 1_000_000, "1e3", "'", "0x4"]
)
def test_hostile_degrees_end_in_one_line(value: str) -> None:
    words = ["torchrun", "--nproc-per-node", "8", "pretrain_gpt.py", f"--tensor-model-parallel-size={value}"]
    with pytest.raises(InputError) as caught:
        ENGINE.parse(words, {}, lambda name: None)
    assert "--tensor-model-parallel-size" in str(caught.value)
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["(" * 5000, "[1]*999999*999999", "[1]*9999999999", "__import__('os')", "[1", "[1]+", "([0]*3+[1]*58", "[1]]"],
)
def test_list_expressions_are_read_not_run(text: str) -> None:
    with pytest.raises(InputError, match="moe-layer-freq"):
        frequency(text, 61)


def test_list_expressions() -> None:
    assert frequency("([0]*3+[1]*58)", 61) == tuple(range(3, 61))
    assert frequency("([1]*3+[0]*1)*3", 12) == (0, 1, 2, 4, 5, 6, 8, 9, 10)
    assert frequency("[1, 0, 0]*2", 6) == (0, 3)
    assert frequency("2", 6) == (0, 2, 4)
    assert frequency("1", 6) is None


def test_layout_strings() -> None:
    assert parts_of("Et*3|(tt|)*2mL") == ["Ettt", "tt", "tt", "mL"]
    for text in ("E(t*9999|)*9999L", "Exyz|L", "Et*9999999|L"):
        with pytest.raises(InputError, match="pipeline-model-parallel-layout"):
            parts_of(text)


def test_recognised_commands() -> None:
    for text in (
        "torchrun pretrain_gpt.py",
        "torchrun my_train.py --tensor-model-parallel-size 2",
        "srun python a/pretrain_mamba.py",
    ):
        assert ENGINE.recognises(text.split()), text
    for text in ("vllm serve x", "torchrun train.py --model x", "python -m torchtitan.train --module llama3", "ls"):
        assert not ENGINE.recognises(text.split()), text
