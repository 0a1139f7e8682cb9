"""accelerate: what its YAML and its command line are understood as, and hostile ones."""

from __future__ import annotations

import json

import pytest

from meshwright.engines.accelerate import ENGINE
from meshwright.engines.plainyaml import dump
from meshwright.errors import InputError
from meshwright.specs.layout import Fsdp
from meshwright.specs.workload import Train
from tests.specs.builders import gqa
from tests.specs.clusters import cluster

RUN = ["accelerate", "launch", "--config_file", "f.yaml", "train.py"]
FSDP = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}


def config(fsdp: dict[str, object] | None = None, **more: object) -> dict[str, object]:
    """A configuration of eight processes."""
    made: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": 8,
        "fsdp_config": {**FSDP, **(fsdp or {})},
    }
    return made | more


def codes(made: dict[str, object], *words: str) -> set[tuple[str, str]]:
    """Findings of a command with this configuration."""
    found = ENGINE.parse([*RUN, *words], {}, {"f.yaml": dump(made).encode()}.get)
    return {(r.code, r.severity) for r in found.findings}


MESH = "parallelism_config"


@pytest.mark.parametrize(
    ("made", "code", "severity"),
    [
        (config(foo=1), "unknown_key", "illegal"),
        (config({"fsdp_foo": 1}), "unknown_key", "unwise"),
        (config(parallelism_config={"tp_size": 2}), "unknown_key", "unwise"),
        (config({"fsdp_reshard_after_forward": "FULL_SHARD"}), "reshard_value", "illegal"),
        (config({"fsdp_state_dict_type": "LOCAL_STATE_DICT"}), "local_state_dict", "illegal"),
        (config({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}), "strategy_ignored", "unwise"),
        (config({"fsdp_version": 1, "fsdp_reshard_after_forward": False}), "reshard_ignored", "unwise"),
        (config({"fsdp_version": 3}), "fsdp_version", "illegal"),
        (config({"fsdp_auto_wrap_policy": "LAYER"}), "wrong_value", "illegal"),
        (config(num_processes=8, num_machines=3), "processes_over_machines", "illegal"),
        (config(num_machines=2, machine_rank=2), "machine_rank_range", "illegal"),
        (config(use_cpu=True), "fsdp_on_cpu", "unwise"),
        (config(distributed_type="FSDB"), "unknown_kind", "illegal"),
        (
            config(parallelism_config={f"{MESH}_dp_shard_size": 2, f"{MESH}_tp_size": 2}),
            "degrees_over_processes",
            "illegal",
        ),
        (config(parallelism_config={f"{MESH}_tp_size": 8}), "nothing_to_shard", "illegal"),
        (
            config({"fsdp_version": 1}, parallelism_config={f"{MESH}_dp_shard_size": 4, f"{MESH}_tp_size": 2}),
            "parallelism_needs_fsdp2",
            "illegal",
        ),
        (config(parallelism_config={f"{MESH}_cp_size": 2, f"{MESH}_sp_size": 4}), "cp_and_sp", "illegal"),
    ],
)
def test_findings(made: dict[str, object], code: str, severity: str) -> None:
    assert (code, severity) in codes(made)


def test_a_plain_configuration_has_no_findings() -> None:
    assert codes(config()) == set()
    mesh = {f"{MESH}_dp_replicate_size": 2, f"{MESH}_dp_shard_size": 2, f"{MESH}_tp_size": 2}
    assert codes(config(parallelism_config=mesh)) == set()


@pytest.mark.parametrize(
    ("made", "knobs"),
    [
        (config(), Fsdp()),
        (config({"fsdp_reshard_after_forward": False}), Fsdp(reshard_after_forward=False)),
        (config({"fsdp_version": 1, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}), Fsdp(reshard_after_forward=False)),
        (config({"fsdp_version": 1, "fsdp_sharding_strategy": 1}), Fsdp()),
        (config({"fsdp_auto_wrap_policy": "NO_WRAP"}), Fsdp(wrap="model")),
        (config(mixed_precision="fp16"), Fsdp(param_dtype="f16")),
        (
            config({"fsdp_version": 1, "fsdp_sharding_strategy": "HYBRID_SHARD"}, num_machines=2),
            Fsdp(replicas=2),
        ),
    ],
)
def test_strategies(made: dict[str, object], knobs: Fsdp) -> None:
    found = ENGINE.parse(RUN, {}, {"f.yaml": dump(made).encode()}.get)
    assert (found.layout.zero, found.layout.dp, found.layout.fsdp) == (3, 8, knobs)


def test_flags_win_over_the_file() -> None:
    words = ["accelerate", "launch", "--config_file", "f.yaml", "--num-processes", "4", "--mixed_precision=no", "t.py"]
    found = ENGINE.parse([*words, "--bf16"], {}, {"f.yaml": dump(config()).encode()}.get)
    assert (found.devices, found.layout.dp) == (4, 4)
    assert found.layout.fsdp is not None
    assert found.layout.fsdp.param_dtype == "bf16"
    alone = ENGINE.parse(
        ["accelerate", "launch", "--use_fsdp", "--fsdp_version", "2", "--num_processes", "2", "t.py"],
        {},
        lambda _: None,
    )
    assert (alone.layout.zero, alone.layout.dp) == (3, 2)


def test_no_shard_and_multi_gpu_are_copies() -> None:
    for made in (
        config({"fsdp_version": 1, "fsdp_sharding_strategy": "NO_SHARD"}),
        config(distributed_type="MULTI_GPU"),
        config(use_cpu=True),
    ):
        found = ENGINE.parse(RUN, {}, {"f.yaml": dump(made).encode()}.get)
        assert (found.layout.zero, found.layout.dp) == (0, 8)
        assert isinstance(found.workload, Train)
        assert found.workload.param_dtype == "f32"


def test_deepspeed_under_accelerate() -> None:
    made = config(distributed_type="DEEPSPEED", deepspeed_config={"zero_stage": 3, "offload_optimizer_device": "cpu"})
    found = ENGINE.parse([*RUN, "--per_device_train_batch_size", "2"], {}, {"f.yaml": dump(made).encode()}.get)
    assert (found.layout.zero, found.layout.dp, found.layout.micro_batch) == (3, 8, 2)
    assert found.train_options["on_host"] == ("optimizer", "gradients")
    done = ENGINE.complete(found, gqa(), cluster(1, 8))
    assert done.layout.fsdp is not None
    file = config(distributed_type="DEEPSPEED", deepspeed_config={"deepspeed_config_file": "ds.json"})
    inner = {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 4}
    files = {"f.yaml": dump(file).encode(), "ds.json": json.dumps(inner).encode()}
    found = ENGINE.parse(RUN, {}, files.get)
    assert (found.layout.zero, found.layout.micro_batch) == (1, 4)
    with pytest.raises(InputError, match="is not here"):
        ENGINE.parse(RUN, {}, {"f.yaml": files["f.yaml"]}.get)


def test_a_file_alone_is_completed_by_model_and_machine() -> None:
    made = config({"fsdp_auto_wrap_policy": "NO_WRAP", "fsdp_state_dict_type": "FULL_STATE_DICT"})
    del made["num_processes"]
    found = ENGINE.parse_file("f.yaml", dump(made).encode())
    assert found is not None
    done = ENGINE.complete(found, gqa(), cluster(2, 8))
    assert done.layout.dp == 16
    assert {r.code for r in done.findings} == {"no_wrap", "full_state_dict"}
    as_json = ENGINE.parse_file("f.json", json.dumps(made).encode())
    assert as_json is not None
    assert as_json.layout == found.layout


def test_ulysses_heads_are_checked_with_the_model() -> None:
    mesh = {f"{MESH}_dp_shard_size": 1, f"{MESH}_sp_size": 8}
    found = ENGINE.parse(RUN, {}, {"f.yaml": dump(config(parallelism_config=mesh)).encode()}.get)
    done = ENGINE.complete(found, gqa(heads=12, kv_heads=4), cluster(1, 8))
    assert "heads_over_ulysses" in {r.code for r in done.findings}


def test_recognised() -> None:
    assert ENGINE.recognises(RUN)
    assert ENGINE.recognises(["python", "-m", "accelerate.commands.launch", "t.py"])
    assert ENGINE.recognises(["srun", "-N", "2", "accelerate", "launch", "t.py"])
    assert not ENGINE.recognises(["accelerate", "config"])
    assert not ENGINE.recognises(["torchrun", "t.py"])


@pytest.mark.parametrize("data", [b"", b"a: 1", b"[1]", b"\xff\xfe", b"model: x\ntensor-parallel-size: 2\n"])
def test_other_files_are_not_accelerates(data: bytes) -> None:
    assert ENGINE.parse_file("x.yaml", data) is None


@pytest.mark.parametrize(
    "data",
    [
        b"distributed_type: FSDP\nnum_processes: eight\n",
        b"distributed_type: FSDP\nnum_processes: -3\n",
        b"distributed_type: &a FSDP\n",
        b"distributed_type: FSDP\n\tnum_processes: 8\n",
        b"distributed_type: FSDP\nfsdp_config: {fsdp_version: two}\n",
        b"distributed_type: FSDP\nnum_processes: 99999999999999999999999\n",
    ],
)
def test_malformed_configurations_are_one_line(data: bytes) -> None:
    with pytest.raises(InputError) as error:
        ENGINE.parse_file("f.yaml", data)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    "data",
    [
        b"distributed_type: FSDP\nfsdp_config: 3\nparallelism_config: []\n",
        b"distributed_type: [1, 2]\nfsdp_config: {fsdp_sharding_strategy: [1]}\n",
        b"distributed_type: $(rm -rf /)\nmixed_precision: '`ls`'\n",
        b"distributed_type: FSDP\nfsdp_config:\n  fsdp_offload_params: {a: 1}\n",
    ],
)
def test_odd_values_do_not_break_the_reader(data: bytes) -> None:
    found = ENGINE.parse_file("f.yaml", data)
    assert found is not None
    done = ENGINE.complete(found, gqa(), cluster(1, 8))
    assert all("\n" not in r.message for r in done.findings)


def test_missing_files_and_scripts() -> None:
    with pytest.raises(InputError, match="is not here"):
        ENGINE.parse(RUN, {}, lambda _: None)
    with pytest.raises(InputError, match="no configuration of accelerate's"):
        ENGINE.parse(RUN, {}, {"f.yaml": b"a: 1"}.get)
    with pytest.raises(InputError, match="names no script"):
        ENGINE.parse(RUN[:-1], {}, {"f.yaml": dump(config()).encode()}.get)


def test_checkpointing_of_both_is_refused() -> None:
    """transformers trainer.py: FSDP's and the Trainer's activation checkpointing exclude each other."""
    made = config({"fsdp_activation_checkpointing": True})
    assert codes(made, "--gradient_checkpointing") == {("checkpointing_twice", "illegal")}
    for words in ([], ["--gradient_checkpointing", "False"]):
        found = ENGINE.parse([*RUN, *words], {}, {"f.yaml": dump(made).encode()}.get)
        assert isinstance(found.workload, Train)
        assert (found.workload.recompute, found.findings) == ("full", ())
