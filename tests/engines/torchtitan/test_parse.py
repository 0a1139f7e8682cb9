"""What a torchtitan command or file asks for."""

from __future__ import annotations

import pytest

from meshwright.engines.torchtitan import ENGINE
from meshwright.engines.torchtitan.stages import split_parts
from meshwright.errors import InputError
from meshwright.specs.cluster import parse_cluster
from meshwright.specs.hf.read import read_model
from meshwright.specs.layout import Fsdp
from meshwright.specs.workload import Train
from tests.engines.torchtitan.commands import LLAMA_8B, p, parse, t

TOML = b"""
[job]
description = "Llama 3 8B"
[model]
name = "llama3"
flavor = "8B"
converters = ["quantize.linear.float8"]
[training]
local_batch_size = 4
seq_len = 4096
steps = 10
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
expert_tensor_parallel_degree = 2
[activation_checkpoint]
mode = "full"
selective_ac_option = "op"
[compile]
enable = true
components = ["model", "loss"]
"""


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("", "dp=8,zero=3"),
        (p(tensor_parallel_degree=2), "tp=2,dp=4,sp=on,zero=3"),
        (p(tensor_parallel_degree=2) + " --parallelism.no_enable_sequence_parallel", "tp=2,dp=4,zero=3"),
        (p(data_parallel_replicate_degree=2), "dp=8,zero=3,replicas=2"),
        (p(data_parallel_replicate_degree=8), "dp=8"),
        (p(data_parallel_shard_degree=2, context_parallel_degree=4), "dp=2,cp=4,zero=3"),
        (p(fsdp_reshard_after_forward="never"), "dp=8,zero=3,reshard_after_forward=off"),
        (p(pipeline_parallel_degree=2), "pp=2,dp=4,zero=3"),
        (p(pipeline_parallel_degree=2, data_parallel_replicate_degree=2),
         "pp=2,dp=4,zero=3,reshard_after_forward=off,replicas=2"),
        (p(pipeline_parallel_degree=2, pipeline_parallel_schedule="interleaved1f1b"),
         "pp=2,dp=4,zero=3,schedule=interleaved,virtual=2"),
        (p(pipeline_parallel_degree=2, pipeline_parallel_schedule="ZBVZeroBubble"),
         "pp=2,dp=4,zero=3,schedule=zbv"),
        (p(pipeline_parallel_degree=2, pipeline_parallel_microbatch_size=2) + t(local_batch_size=8),
         "pp=2,dp=4,zero=3,micro_batch=2"),
        (p(pipeline_parallel_degree=2, module_fqns_per_model_part="tok_embeddings,layers.0,layers.1 layers.2,norm"),
         "pp=2,dp=4,zero=3,stage_layers=2+1"),
        (t(local_batch_size=4), "dp=8,zero=3,micro_batch=4"),
    ],
)  # fmt: skip
def test_layouts(flags: str, text: str) -> None:
    assert str(parse(LLAMA_8B + flags).layout) == text


def test_the_configuration_gives_what_the_command_does_not() -> None:
    found = parse("torchrun --nproc-per-node 8 -m torchtitan.train --module=llama3 --config=llama3_70b")
    work = found.workload
    assert isinstance(work, Train)
    assert (found.model, str(found.layout)) == ("llama-3.1-70b", "tp=8,sp=on,micro_batch=8")
    assert (work.seq, work.global_batch, work.recompute, work.grad_dtype) == (8192, 8, "full", "f32")
    assert found.train_options["preset"] == "torchtitan 0.3"
    assert found.train_options["logit_bytes"] == 1.5


def test_the_word_behind_the_flags_decides_checkpointing() -> None:
    for word, policy in (("full", "full"), ("none", "none"), ("selective", "selective")):
        found = parse(f"{LLAMA_8B} activation-checkpoint:{word}")
        assert isinstance(found.workload, Train)
        assert found.workload.recompute == policy
    with pytest.raises(InputError, match="policy is one of"):
        parse(f"{LLAMA_8B} activation_checkpoint:some")


def test_parameters_stay_gathered_under_a_pipeline_unless_told() -> None:
    for policy, knobs, unsharded in (("default", None, True), ("always", Fsdp(), False), ("never", None, True)):
        found = parse(LLAMA_8B + p(pipeline_parallel_degree=2, fsdp_reshard_after_forward=policy))
        assert (found.layout.fsdp, found.train_options["fsdp_unsharded"]) == (knobs, unsharded)


def test_precision() -> None:
    work = parse(LLAMA_8B + t(dtype="bfloat16")).workload
    assert isinstance(work, Train)
    assert (work.param_dtype, work.grad_dtype, work.master_weights, work.state_dtype) == ("bf16", "bf16", False, "bf16")
    work = parse(LLAMA_8B + t(mixed_precision_param="float32")).workload
    assert isinstance(work, Train)
    assert work.param_dtype == "f32"


@pytest.mark.parametrize(
    ("command", "env", "devices"),
    [
        ("./run_train.sh", {"NGPU": "4", "MODULE": "llama3", "CONFIG": "llama3_8b"}, 4),
        ("bash run_train.sh --module llama3 --config llama3_8b", {}, 8),
        ("torchrun --nproc_per_node=8 --nnodes=2 --node-rank=0 --master-addr=a -m torchtitan.train --module llama3 "
         "--config llama3_8b", {}, 16),
        ("srun -N 2 torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint a:1 torchtitan/train.py "
         "--module llama3 --config llama3_8b", {}, 16),
        ("torchrun -m torchtitan.train --module llama3 --config llama3_8b", {}, None),
    ],
)  # fmt: skip
def test_world(command: str, env: dict[str, str], devices: int | None) -> None:
    assert ENGINE.recognises(command.split())
    found = parse(command, env)
    assert (found.devices, found.model) == (devices, "llama-3.1-8b")
    done = ENGINE.complete(found, read_model("llama-3.1-8b", allow_online=False), parse_cluster("2x8xH100-SXM"))
    assert done.layout.dp == (devices or 16)
    assert isinstance(done.workload, Train)
    assert done.workload.global_batch == (devices or 16)


def test_parts_that_depend_on_the_layers() -> None:
    command = LLAMA_8B + t(disable_cuda_graphs=True, local_batch_size=8)
    command += p(
        pipeline_parallel_degree=2, pipeline_parallel_schedule="Interleaved1F1B", pipeline_parallel_layers_per_stage=6
    )
    found = ENGINE.complete(
        parse(command), read_model("llama-3.1-8b", allow_online=False), parse_cluster("1x8xH100-SXM")
    )
    assert (found.layout.virtual, found.layout.stage_layers) == (3, ())


def test_files_of_earlier_versions() -> None:
    found = ENGINE.parse_file("train.toml", TOML)
    assert found is not None
    assert found.model == "llama-3.1-8b"
    assert str(found.layout.with_(dp=1)) == "tp=2,sp=on,micro_batch=4"
    assert isinstance(found.workload, Train)
    assert (found.workload.seq, found.workload.recompute, found.train_options["fp8"]) == (4096, "full", True)
    said = {r.code: r for r in found.findings}
    assert "--module llama3 --config llama3_8b" in said["no_config_files"].way_out
    assert said["flag_removed"].message.startswith("parallelism.expert_tensor_parallel_degree")
    done = ENGINE.complete(found, read_model("llama-3.1-8b", allow_online=False), parse_cluster("1x8xH100-SXM"))
    assert str(done.layout) == "tp=2,dp=4,sp=on,zero=3,micro_batch=4,replicas=2"
    assert done.train_options["fp8"] is True
    command = "torchrun --nproc-per-node 8 torchtitan/train.py --job.config_file=my/train.toml --training.seq_len 2048"
    both = parse(command, files={"my/train.toml": TOML})
    assert isinstance(both.workload, Train)
    assert (both.workload.seq, both.layout.tp, both.model) == (2048, 2, "llama-3.1-8b")
    assert {r.code for r in both.findings if r.severity == "illegal"} == {"flag_removed", "no_config_files"}
    with pytest.raises(InputError, match="no such file"):
        parse(command)


@pytest.mark.parametrize(
    "data",
    [b"\xff\xfe", b"[training", b"a = " + b"[" * 200_000, b"[parallelism]\ntensor_parallel_degree = 'two'",
     b"[parallelism]\ntensor_parallel_degree = 0", b"[training]\nseq_len = 1e999",
     b"[parallelism]\ntensor_parallel_degree = 1\n[activation_checkpoint]\nmode = 'x'", b"\x00" * 100,
     b"x" * 2_000_000],
)  # fmt: skip
def test_broken_files_end_in_one_line(data: bytes) -> None:
    with pytest.raises(InputError) as caught:
        ENGINE.parse_file("a.toml", data)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_files_of_others_are_left_alone() -> None:
    assert ENGINE.parse_file("pyproject.toml", b"[project]\nname = 'x'\n[training]\nrate = 1") is None
    assert ENGINE.parse_file("ds_config.json", b"{}") is None


@pytest.mark.parametrize("value", ["$TP", "$(id)", "`id`", "1;ls", "0", "-2", "9" * 1_000_000, "1.5", "'"])
def test_hostile_degrees_end_in_one_line(value: str) -> None:
    words = [*LLAMA_8B.split(), f"--parallelism.tensor_parallel_degree={value}"]
    with pytest.raises(InputError) as caught:
        ENGINE.parse(words, {}, lambda name: None)
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


def test_layers_are_dealt_as_torchtitan_does() -> None:
    assert split_parts(32, 2) == (16, 16)
    assert split_parts(126, 8) == (15, 16, 16, 16, 16, 16, 16, 15)
    assert split_parts(80, 8) == (10, 11, 10, 10, 10, 10, 10, 9)
    assert split_parts(126, 16) == (7, *(8,) * 14, 7)
    assert split_parts(3, 2, 2, 2) == (2, 1)


def test_recognised_commands() -> None:
    for text in ("python -m torchtitan.train", "torchrun train.py --job.config_file x.toml"):
        assert ENGINE.recognises(text.split()), text
    for text in ("vllm serve x", "torchrun train.py --model x", "torchrun pretrain_gpt.py", "ls torchtitan"):
        assert not ENGINE.recognises(text.split()), text
