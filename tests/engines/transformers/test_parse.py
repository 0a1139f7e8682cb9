"""transformers: what a DistributedConfig and the Trainer's FSDP arguments are understood as, and hostile ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.engines.base import Invocation
from meshwright.engines.transformers import ENGINE
from meshwright.errors import InputError
from meshwright.specs.layout import Fsdp, Layout
from meshwright.specs.workload import Train
from tests.engines.judged import llama, pasted
from tests.specs.builders import gqa, moe
from tests.specs.clusters import cluster

RUN = ["torchrun", "--nproc-per-node", "8", "train.py"]


def parsed(*words: str, **files: bytes) -> Invocation:
    """A command with files (``__`` for the dot)."""
    return ENGINE.parse([*RUN, *words], {}, {k.replace("__", "."): v for k, v in files.items()}.get)


def degrees(found: Invocation) -> tuple[int, ...]:
    """tp, pp, dp, ep, ZeRO stage."""
    layout = found.layout
    return (layout.tp, layout.pp, layout.dp, layout.ep, layout.zero)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"tp_size": 8}, (8, 1, 1, 1, 0)),
        ({"tp_size": 2, "fsdp_size": 4}, (2, 1, 4, 1, 3)),
        ({"tp_size": 2, "fsdp_size": 2, "dp_replicate_size": 2}, (2, 1, 4, 1, 3)),
        ({"tp_plan": "auto"}, (8, 1, 1, 1, 0)),
        ({"tp_plan": "auto", "fsdp_size": 4}, (2, 1, 4, 1, 3)),
        ({"fsdp_size": 4, "tp_size": 2, "ep_size": 8}, (2, 1, 4, 8, 3)),
        ({"tp_size": 8, "enable_expert_parallel": True}, (8, 1, 1, 8, 0)),
        ({"pp_size": 8}, (1, 8, 1, 1, 0)),
        ({"dp_replicate_size": 8}, (1, 1, 8, 1, 0)),
    ],
)
def test_sizes(config: dict[str, object], expected: tuple[int, ...]) -> None:
    """As an argument, as a file, as a word among others: one meaning."""
    text = json.dumps(config)
    for found in (
        parsed("--distributed_config", text),
        parsed("--distributed-config=c.json", c__json=text.encode()),
        parsed("org/model", text),
    ):
        assert degrees(found) == expected
        assert not any(r.severity == "illegal" for r in found.findings)


def test_sizes_one_by_one() -> None:
    assert degrees(parsed("--tp_size", "2", "--fsdp-size=4")) == (2, 1, 4, 1, 3)
    with pytest.raises(InputError, match="not a whole number"):
        parsed("--tp_size", "two")


@pytest.mark.parametrize(
    ("config", "code", "severity"),
    [
        ({"tp_size": 16}, "mesh_over_world", "illegal"),
        ({"tp_size": 4, "fsdp_size": 2, "ep_size": 2}, "ep_over_tp", "illegal"),
        ({"tp_size": 1, "fsdp_size": 8, "ep_size": 3}, "ep_over_ranks", "illegal"),
        ({"tp_size": 2, "fsdp_size": 4, "ep_size": 8, "ep_implementation": "all_reduce"}, "ep_shared_batch", "illegal"),
        ({"tp_size": 8, "enable_sequence_parallel": True}, "sequence_parallel_idle", "unwise"),
        ({"tp_size": 8, "enable_expert_parallel": True}, "expert_parallel_deprecated", "unwise"),
        ({"tp_size": 8, "cp_size": 2}, "unknown_key", "unwise"),
    ],
)
def test_findings(config: dict[str, object], code: str, severity: str) -> None:
    found = parsed("--distributed_config", json.dumps(config))
    assert (code, severity) in {(r.code, r.severity) for r in found.findings}


@pytest.mark.parametrize(
    ("layout", "code"),
    [
        (Layout(tp=3), "heads_divide_tp"),
        (Layout(tp=4), "kv_heads_over_tp"),
        (Layout(pp=2), "pipeline_without_backward"),
        (Layout(pp=2, dp=2, zero=3), "fsdp_with_pipeline"),
        (Layout(cp=2), "not_of_this_engine"),
        (Layout(dp=4, zero=2), "not_of_this_engine"),
        (Layout(ep=4, dp=4), "ep_without_experts"),
    ],
)
def test_rules(layout: Layout, code: str) -> None:
    rules = ENGINE.profile().check(gqa(heads=8, kv_heads=2), layout, None, Train(global_batch=8))
    assert code in {r.code for r in rules if r.severity == "illegal"}
    assert all(r.way_out for r in rules)


def test_rules_of_experts() -> None:
    profile = ENGINE.profile()
    uneven = profile.check(moe(experts=6), Layout(dp=4, ep=4, etp=1, zero=3), None, Train(global_batch=4))
    assert "experts_over_ep" in {r.code for r in uneven}
    over = profile.check(moe(kv_heads=4), Layout(tp=2, dp=4, ep=4, etp=1, zero=3, fsdp=Fsdp(replicas=4)), None, None)
    assert "ep_over_ranks" in {r.code for r in over}
    assert not profile.check(moe(), Layout(dp=8, ep=8, etp=1, zero=3), None, None)


def test_the_trainers_fsdp() -> None:
    found = parsed("--fsdp", "full_shard auto_wrap offload", "--bf16")
    assert (found.layout.zero, found.layout.dp) == (3, 8)
    assert found.train_options["on_host"] == ("parameters", "gradients", "optimizer")
    assert {r.code for r in found.findings} == {"fsdp_words_deprecated"}
    found = parsed("--fsdp", "shard_grad_op auto_wrap", "--bf16")
    assert found.layout.fsdp is not None
    assert not found.layout.fsdp.reshard_after_forward
    config = json.dumps({"fsdp_reshard_after_forward": False, "activation_checkpointing": True})
    for words, files in ((["--fsdp_config", config], {}), (["--fsdp_config", "f.json"], {"f__json": config.encode()})):
        found = parsed("--fsdp", "True", *words, **files)
        assert isinstance(found.workload, Train)
        assert (found.workload.recompute, found.findings) == ("full", ())
    assert {r.code for r in parsed("--fsdp", "hybrid_shard").findings} >= {"fsdp1_strategy"}
    with pytest.raises(InputError, match="is not JSON"):
        parsed("--fsdp", "True", "--fsdp_config", "{")
    with pytest.raises(InputError, match="is not here"):
        parsed("--fsdp", "True", "--fsdp_config", "f.json")


def test_arguments_that_the_trainer_lost() -> None:
    found = parsed("--fsdp", "True", "--evaluation_strategy", "no")
    assert [r.code for r in found.findings] == ["argument_removed"]
    assert "--eval_strategy" in found.findings[0].way_out


def test_a_file_alone_is_completed_by_the_machine() -> None:
    found = ENGINE.parse_file("c.json", b'{"tp_plan": "auto", "fsdp_size": 2}')
    assert found is not None
    assert ENGINE.complete(found, gqa(), cluster(1, 8)).layout.tp == 4
    trainer = ENGINE.parse(["torchrun", "--nproc-per-node", "gpu", "t.py", "--fsdp", "True"], {}, lambda _: None)
    done = ENGINE.complete(trainer, gqa(), cluster(2, 8))
    assert isinstance(done.workload, Train)
    assert (done.layout.dp, done.workload.global_batch) == (8, 8)


def test_whole_checks_say_what_is_needed(tmp_path: Path) -> None:
    found = pasted(tmp_path, "torchrun --nproc-per-node 8 hf.py m '{\"tp_size\": 16}'", "2x8xA100-80G", llama(32, 32))
    assert "mesh_over_world" in found.illegal
    assert "16" in found.verdict.verdict


@pytest.mark.parametrize(
    "words",
    [
        ["torchrun", "t.py", "--tp_size", "2"],
        ["python", "t.py", "--distributed-config", "c.json"],
        ["torchrun", "t.py", "m", '{"tp_size": 2}'],
        ["torchrun", "t.py", "--fsdp", "True"],
    ],
)
def test_recognised(words: list[str]) -> None:
    assert ENGINE.recognises(words)


@pytest.mark.parametrize("words", [["torchrun", "t.py"], ["deepspeed", "t.py", "--tp_size", "2"], ["ls"], ["torchrun"]])
def test_not_recognised(words: list[str]) -> None:
    assert not ENGINE.recognises(words)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe{",
        b"{" * 100_000,
        b'{"tp_size": 2, "architectures": ["X"]}',
        b'{"tp_size": 2, "a": 1, "b": 2, "c": 3}',
        b'{"zero_optimization": {}}',
    ],
)
def test_other_files_are_not_distributed_configurations(data: bytes) -> None:
    assert ENGINE.parse_file("x.json", data) is None


@pytest.mark.parametrize("value", ["0", "-1", "1.5", '"2"', "true", "[2]", "1e400", "99999999999"])
def test_malformed_sizes_are_one_line(value: str) -> None:
    with pytest.raises(InputError, match="tp_size") as error:
        ENGINE.parse_file("c.json", b'{"tp_size": ' + value.encode() + b"}")
    assert "\n" not in str(error.value)


def test_substitutions_are_not_expanded() -> None:
    with pytest.raises(InputError, match="shell variable"):
        ENGINE.parse(["torchrun", "--nproc-per-node", "$(nproc)", "t.py", "--tp_size", "2"], {}, lambda _: None)


def test_checkpointing_of_both_is_refused() -> None:
    config = json.dumps({"activation_checkpointing": True})
    found = parsed("--fsdp", "True", "--fsdp_config", config, "--activation_checkpointing", "True")
    assert [r.code for r in found.findings] == ["checkpointing_twice"]
