"""Questions that people asked about DeepSpeed, as commands: verdict out. Case numbers are those of the case list."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.engines.sizes import unit_sizes
from tests.engines.judged import llama, pasted

RUN = "deepspeed --num_gpus {} train.py --deepspeed ds.json --max_seq_length 512 --gradient_checkpointing {}"


def zero(stage: int, **more: object) -> dict[str, object]:
    """A configuration with a stage; keywords go into its section."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, **more},
    }


CPU = {"device": "cpu"}


def test_stage_3_on_one_gpu_shards_nothing(tmp_path: Path) -> None:
    """C079: 7B on one A100-80: 16 to 18 bytes a parameter exceed the device, ZeRO or not."""
    found = pasted(tmp_path, RUN.format(1, "True"), "1x1xA100-80G", "mistral-7b", ds__json=zero(3))
    assert not found.verdict.starts
    assert "zero_on_one_rank" in found.codes
    assert found.size("weights", "gradients", "optimizer") > 7.2 * 16


def test_activations_do_not_shrink_with_ranks(tmp_path: Path) -> None:
    """C080: states are offloaded; activations remain, the same on 8 and on 32 devices, and checkpointing cures."""
    spec = llama(56, 56, 7168, 48, 28672)
    offload = zero(3, offload_optimizer=CPU, offload_param=CPU)
    command = RUN.replace("512", "2048").replace("{}", "8", 1)
    few = pasted(tmp_path, command.format("False"), "1x8xA100-80G", spec, ds__json=offload)
    config = {"h": "a slots=8\nb slots=8\nc slots=8\nd slots=8\n", "ds__json": offload}
    many_command = command.replace("--num_gpus 8", "--hostfile h")
    many = pasted(tmp_path, many_command.format("False"), "4x8xA100-80G", spec, **config)
    assert few.size("activations") == pytest.approx(many.size("activations"), rel=0.01)
    assert many.size("optimizer") == 0
    saved = pasted(tmp_path, many_command.format("True"), "4x8xA100-80G", spec, **config)
    assert saved.size("activations") < 0.5 * many.size("activations")


def test_memory_is_more_than_model_states(tmp_path: Path) -> None:
    """C081, C084: with everything offloaded 0.5 GB of states remain, and several GB that is gathered or buffered."""
    both = pasted(
        tmp_path,
        RUN.format(4, "True"),
        "1x4xA100-40G",
        "llama-2-7b",
        ds__json=zero(3, offload_optimizer=CPU, offload_param=CPU),
    )
    optimizer = pasted(
        tmp_path, RUN.format(4, "True"), "1x4xA100-40G", "llama-2-7b", ds__json=zero(3, offload_optimizer=CPU)
    )
    none = pasted(tmp_path, RUN.format(4, "True"), "1x4xA100-40G", "llama-2-7b", ds__json=zero(3))
    assert both.size("total") > 10 * 0.49
    assert both.size("total") < optimizer.size("total") < none.size("total")
    shard = 2 * 6.74 / 4
    assert optimizer.size("weights") - both.size("weights") == pytest.approx(shard, rel=0.01)
    states = none.size("weights", "gradients", "optimizer")
    assert states == pytest.approx(29.0 + both.size("weights", "gradients"), rel=0.25)


def test_stage_2_keeps_whole_parameters(tmp_path: Path) -> None:
    """C082: 6.7B on two V100-16: 2 bytes a parameter nearly fill them; buckets and activations do not fit."""
    found = pasted(
        tmp_path, RUN.format(2, "False"), "1x2xV100-16G", "llama-2-7b", ds__json=zero(2, offload_optimizer=CPU)
    )
    assert found.size("weights") == pytest.approx(2 * 6.74, rel=0.01)
    assert found.size("optimizer") == 0
    assert not found.verdict.starts


def test_more_ranks_do_not_help_when_states_are_offloaded(tmp_path: Path) -> None:
    """C083: stage 3 with everything offloaded takes the same on 2 and on 4 devices."""
    config = zero(3, offload_optimizer=CPU, offload_param=CPU)
    sizes = [
        pasted(tmp_path, RUN.format(n, "True"), f"1x{n}xA100-40G", "llama-2-7b", ds__json=config).size("total")
        for n in (2, 4)
    ]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.02)
    assert sizes[1] > 5 * 0.77


def test_heads_against_tensor_parallel(tmp_path: Path) -> None:
    """C122: 52 heads over 8: not divisible, 4 or 2 are (AutoTP of 0.19 takes uneven shares, earlier ones refused)."""
    spec = llama(52, 52, 6656, 60, 17920)
    config = {**zero(0), "tensor_parallel": {"autotp_size": 8}}
    found = pasted(tmp_path, RUN.format(8, "True"), "1x8xA100-80G", spec, ds__json=config)
    assert "uneven_units" in found.codes
    assert "2, 4" in found.way_out("uneven_units")


def test_small_modules_under_stage_3(tmp_path: Path) -> None:
    """C232, C236: a model whose stage 2 states fit is slowed down by stage 3's gathers."""
    spec = llama(32, 32, 4096, 24, 11008)
    found = pasted(tmp_path, RUN.format(8, "True"), "1x8xA100-80G", spec, ds__json=zero(3))
    assert "stage2_would_do" in found.codes
    assert "stage3_param_persistence_threshold" in found.way_out("stage2_would_do")
    wise = pasted(tmp_path, RUN.format(8, "True"), "1x8xA100-80G", spec, ds__json=zero(2))
    assert "stage2_would_do" not in wise.codes


def test_one_node_of_two_is_idle(tmp_path: Path) -> None:
    """C237: eight of sixteen devices work unless a host file names both nodes."""
    for command in (RUN.format(8, "True"), RUN.replace("--num_gpus {}", "").format("True")):
        found = pasted(tmp_path, command, "2x8xA100-80G", "llama-2-7b", ds__json=zero(2))
        assert "devices_idle" in found.codes
        assert found.verdict.invocation.layout.dp == 8
    command = RUN.replace("--num_gpus {}", "--hostfile h").format("True")
    both = pasted(tmp_path, command, "2x8xA100-80G", "llama-2-7b", ds__json=zero(2), h="a slots=8\nb slots=8\n")
    assert "devices_idle" not in both.codes


def test_buckets_outweigh_what_stage_2_saves(tmp_path: Path) -> None:
    """C238: a small model takes more with stage 2 than with stage 1: the buckets exceed the gradients saved."""
    spec = llama(16, 16, 1024, 24, 4096)
    assert unit_sizes(spec).total < 600_000_000
    two = pasted(tmp_path, RUN.format(2, "False"), "1x2xA100-40G", spec, ds__json=zero(2, overlap_comm=True))
    assert "buckets_exceed_saving" in two.codes
    assert "reduce_bucket_size" in two.way_out("buckets_exceed_saving")
    small = zero(2, overlap_comm=True, reduce_bucket_size=5_000_000)
    cured = pasted(tmp_path, RUN.format(2, "False"), "1x2xA100-40G", spec, ds__json=small)
    assert "buckets_exceed_saving" not in cured.codes
    assert cured.size("total") < two.size("total")


@pytest.mark.parametrize(
    ("heads", "kv", "sp", "devices", "legal"),
    [(28, 4, 8, 8, "4"), (48, 48, 64, 64, "48")],
    ids=["C260 and C263", "C261"],
)
def test_ulysses_cuts_heads(tmp_path: Path, heads: int, kv: int, sp: int, devices: int, legal: str) -> None:
    """28 heads over 8, 48 heads over 64: the degree must divide the heads (a run without this check hangs: C263)."""
    spec = llama(heads, kv, heads * 128)
    config = {**zero(3), "sequence_parallel_size": sp}
    on = f"{devices // 8}x8xA100-80G"
    hosts = "".join(f"n{i} slots=8\n" for i in range(devices // 8))
    found = pasted(
        tmp_path, RUN.replace("--num_gpus {}", "--hostfile h").format("True"), on, spec, ds__json=config, h=hosts
    )
    assert found.illegal == {"heads_over_ulysses"}
    assert legal in found.way_out("heads_over_ulysses")
    assert "ring attention" in found.way_out("heads_over_ulysses")


def test_ulysses_that_divides_is_legal(tmp_path: Path) -> None:
    """C261: 16 divides 48 heads, 64 does not."""
    config = {**zero(3), "sequence_parallel_size": 16}
    command = RUN.replace("--num_gpus {}", "--hostfile h").format("True")
    spec = llama(48, 48, 6144)
    found = pasted(tmp_path, command, "2x8xA100-80G", spec, ds__json=config, h="a slots=8\nb slots=8\n")
    assert found.illegal == set()


def test_ulysses_cuts_the_sequence(tmp_path: Path) -> None:
    """C264: pad the sequence to a multiple of the degree."""
    config = {**zero(3), "sequence_parallel_size": 8}
    command = RUN.format(8, "True").replace("512", "1001")
    found = pasted(tmp_path, command, "1x8xA100-80G", llama(32, 8), ds__json=config)
    assert found.illegal == {"sequence_over_ulysses"}
    assert "1008" in found.way_out("sequence_over_ulysses")
