"""DeepSpeed: what its JSON and its command line are understood as, and hostile ones."""

from __future__ import annotations

import json

import pytest

from meshwright.engines.deepspeed import ENGINE
from meshwright.engines.deepspeed.batch import resolve
from meshwright.engines.deepspeed.understand import WORKSPACE_BYTES
from meshwright.errors import InputError
from meshwright.specs.workload import Train
from tests.specs.builders import gqa
from tests.specs.clusters import cluster

RUN = ["deepspeed", "--num_gpus", "8", "train.py", "--deepspeed", "ds.json"]


def codes(config: dict[str, object], *words: str) -> set[tuple[str, str]]:
    """Findings of a configuration on eight devices."""
    found = ENGINE.parse([*RUN, *words], {}, {"ds.json": json.dumps(config).encode()}.get)
    return {(r.code, r.severity) for r in found.findings}


BASE = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}}


@pytest.mark.parametrize(
    ("config", "code", "severity"),
    [
        ({**BASE, "elasticity": {}}, "key_removed", "illegal"),
        ({**BASE, "zero_optimization": {"stage": 3, "mics_shard_size": 4}}, "key_removed", "illegal"),
        ({**BASE, "zero_optimization": {"stage": 2, "cpu_offload": True}}, "key_deprecated", "unwise"),
        ({**BASE, "zero_optimization": {"stage": 2, "stage2_foo": 1}}, "unknown_key", "illegal"),
        ({**BASE, "zero_optimisation": {}}, "unknown_key", "unwise"),
        ({**BASE, "zero_optimization": {"stage": 4}}, "wrong_value", "illegal"),
        ({**BASE, "zero_optimization": {"stage": 2, "reduce_bucket_size": 0}}, "wrong_value", "illegal"),
        ({**BASE, "fp16": {"enabled": True}}, "two_precisions", "illegal"),
        (
            {**BASE, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "offload_param_stage",
            "unwise",
        ),
        (
            {**BASE, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
            "offload_ratio_stage",
            "illegal",
        ),
        (
            {**BASE, "zero_optimization": {"stage": 3}, "gradient_allreduce_op": "sum"},
            "sum_with_stage3",
            "illegal",
        ),
        ({**BASE, "train_batch_size": 100}, "batch_triple", "illegal"),
        ({**BASE, "sequence_parallel_size": 3}, "world_over_degrees", "illegal"),
        (
            {"train_batch_size": 8, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            "half_master_stage",
            "illegal",
        ),
    ],
)
def test_findings(config: dict[str, object], code: str, severity: str) -> None:
    assert (code, severity) in codes(config)


def test_a_plain_configuration_has_no_findings() -> None:
    plain = {
        **BASE,
        "train_batch_size": 64,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "steps_per_print": 10,
        "wall_clock_breakdown": False,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    assert codes(plain) == set()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((256, 4, 8), (4, 8, 256)),
        ((256, 4, None), (4, 8, 256)),
        ((256, None, 4), (8, 4, 256)),
        ((None, 4, 2), (4, 2, 64)),
        ((64, None, None), (8, 1, 64)),
        ((None, 3, None), (3, 1, 24)),
    ],
)
def test_batch_triple(given: tuple[int | None, ...], expected: tuple[int, int, int]) -> None:
    """As _set_batch_related_parameters fills in, on eight data parallel ranks."""
    batch = resolve(*given, 8)
    assert (batch.micro, batch.accumulation, batch.total) == expected
    assert batch.findings == ()


@pytest.mark.parametrize("given", [(256, 4, 4), (100, None, None), (100, 3, None), (4, None, None), (256, 300, None)])
def test_batch_triple_that_does_not_multiply(given: tuple[int | None, ...]) -> None:
    batch = resolve(*given, 8)
    assert [r.code for r in batch.findings] == ["batch_triple"]
    assert str(given[0]) in batch.findings[0].message
    assert batch.micro * batch.accumulation * 8 == batch.total > 0


def test_auto_takes_the_scripts_arguments() -> None:
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2},
    }
    words = [
        "--per_device_train_batch_size",
        "4",
        "--gradient_accumulation_steps=2",
        "--fp16",
        "--max-seq-length",
        "999",
    ]
    words += ["--model_name_or_path", "org/m", "--gradient_checkpointing", "--optim", "sgd", "--my_own_flag", "7"]
    found = ENGINE.parse([*RUN, *words], {}, {"ds.json": json.dumps(config).encode()}.get)
    assert isinstance(found.workload, Train)
    assert (found.layout.micro_batch, found.workload.global_batch) == (4, 64)
    assert (found.workload.param_dtype, found.workload.seq, found.workload.recompute) == ("f16", 999, "full")
    assert (found.workload.optimizer, found.model) == ("sgd", "org/m")
    assert found.findings == ()


def test_a_file_alone_is_completed_by_the_machine() -> None:
    config = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
    found = ENGINE.parse_file("ds.json", json.dumps(config).encode())
    assert found is not None
    assert found.layout.dp == 1
    done = ENGINE.complete(found, gqa(), cluster(2, 8))
    assert (done.layout.dp, done.layout.micro_batch, done.findings) == (16, 2, ())
    wrong = ENGINE.complete(found, gqa(), cluster(3, 8))
    assert {r.code for r in wrong.findings} == {"batch_triple"}


def test_completion_keeps_what_the_launcher_found() -> None:
    found = ENGINE.parse(
        ["deepspeed", "--foo", "1", *RUN[1:]],
        {},
        {"ds.json": json.dumps(BASE | {"zero_optimization": {}}).encode()}.get,
    )
    done = ENGINE.complete(found, gqa(), cluster(1, 8))
    assert [r.code for r in done.findings] == ["unknown_flag"]
    assert done.layout.dp == 8


@pytest.mark.parametrize(
    "words",
    [
        ["deepspeed", "t.py"],
        ["torchrun", "--nproc-per-node", "8", "t.py", "--deepspeed", "x.json"],
        ["python", "-m", "deepspeed.launcher.runner", "t.py"],
        ["srun", "-N", "2", "python", "t.py", "--deepspeed_config=x.json"],
    ],
)
def test_recognised(words: list[str]) -> None:
    assert ENGINE.recognises(words)


@pytest.mark.parametrize(
    "words",
    [["torchrun", "t.py"], ["accelerate", "launch", "t.py", "--deepspeed", "x"], ["vllm", "serve"], ["deepspeed"]],
)
def test_not_recognised(words: list[str]) -> None:
    assert not ENGINE.recognises(words)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"zero_optimization",
        b"\xff\xfe\x00",
        b'{"architectures": ["LlamaForCausalLM"]}',
        b"{}",
    ],
)
def test_other_files_are_not_deepspeeds(data: bytes) -> None:
    assert ENGINE.parse_file("x", data) is None


@pytest.mark.parametrize(
    "data",
    [
        b'{"zero_optimization": {"stage": 1}, "zero_optimization": {}}',
        b'{"zero_optimization": {"stage": "x"}}',
        b'{"zero_optimization": {"stage": 1e400}}',
        b'{"train_batch_size": -1}',
        b'{"train_batch_size": true}',
        b'{"train_batch_size": 1.5}',
        b'{"train_batch_size": [1]}',
        b'{"train_batch_size": 1, "zero_optimization": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
        b'{"zero_optimization": {',
        b'{"train_batch_size": 1, "a": ' + b'{"b":' * 40 + b"1" + b"}" * 41,
    ],
)
def test_malformed_configurations_are_one_line(data: bytes) -> None:
    with pytest.raises(InputError) as error:
        ENGINE.parse_file("ds.json", data)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    "config",
    [
        {"zero_optimization": [], "train_batch_size": 1},
        {"zero_optimization": True, "train_batch_size": 8},
        {"zero_optimization": {"offload_optimizer": 3}, "bf16": [], "fp16": "x", "train_batch_size": 8},
        {"train_batch_size": 8, "tensor_parallel": {"autotp_size": 0}, "pipeline": "x", "activation_checkpointing": []},
        {"train_batch_size": 8, "data_types": {"grad_accum_dtype": ["x"]}, "optimizer": {"type": {"a": 1}}},
        {"train_batch_size": 8, "\u0000\u202e": {"\n": ["x" * 100_000]}},
    ],
)
def test_odd_values_do_not_break_the_reader(config: dict[str, object]) -> None:
    found = ENGINE.parse_file("ds.json", json.dumps(config).encode())
    assert found is not None
    done = ENGINE.complete(found, gqa(), cluster(1, 8))
    assert all("\n" not in r.message and len(r.message) < 400 for r in done.findings)


def test_missing_configuration_is_said() -> None:
    with pytest.raises(InputError, match="is not here"):
        ENGINE.parse(RUN, {}, lambda _: None)


def test_a_word_of_a_megabyte() -> None:
    found = ENGINE.parse(
        [*RUN, "--note", "x" * (1 << 20)], {}, {"ds.json": json.dumps(BASE | {"zero_optimization": {}}).encode()}.get
    )
    assert found.layout.dp == 8


def test_log_lines() -> None:
    lines = [
        "[INFO] DeepSpeed info: version=0.19.8, git-hash=unknown",
        "\x00\xff binary",
        "[Rank 0] MA 0.5 GB         Max_MA 1.25 GB         CA 2.0 GB         Max_CA 2 GB",
        "[Rank 0] MA 0.75 GB         Max_MA 3.5 GB         CA 4.0 GB         Max_CA 4 GB",
        "MA x GB Max_MA",
    ]
    log = ENGINE.read_log(lines)
    assert log is not None
    assert [h.bytes for h in log.holdings] == [int(3.5 * 2**30), 4 * 2**30]
    assert log.version == "0.19.8"
    assert ENGINE.read_log(["nothing"]) is None


@pytest.mark.parametrize(
    "words",
    [["--per_device_train_batch_size", "4"], ["--gradient_accumulation_steps=3"], ["--fp16", "True"]],
)
def test_the_trainer_refuses_other_numbers(words: list[str]) -> None:
    """transformers' fill_match: a number that is not auto must be the argument's."""
    made = {**BASE, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}
    assert codes(made, *words) == {("trainer_mismatch", "illegal")}
    same = ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps=2", "--bf16"]
    assert codes(made, *same) == set()


def test_automatic_buckets_follow_the_width() -> None:
    """transformers: reduce_bucket_size auto is hidden size squared."""
    config = {**BASE, "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"}}
    found = ENGINE.parse(RUN, {}, {"ds.json": json.dumps(config).encode()}.get)
    done = ENGINE.complete(found, gqa(hidden=1024), cluster(1, 8))
    assert done.train_options["workspace_bytes"] == WORKSPACE_BYTES + 2 * 1024 * 1024


def test_hybrid_engine_is_said() -> None:
    config = {**BASE, "zero_optimization": {"stage": 3}, "hybrid_engine": {"enabled": True}}
    found = ENGINE.parse(RUN, {}, {"ds.json": json.dumps(config).encode()}.get)
    assert any("hybrid_engine" in note for note in found.notes)
