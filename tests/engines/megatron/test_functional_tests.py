"""Arguments of Megatron-LM's functional tests (bench/data): all known, none refused, read as the bench reads them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from bench.megatron_args import UndecidableError, read_case

from meshwright.engines.base import Invocation
from meshwright.engines.flagtable import rejected
from meshwright.engines.megatron import ENGINE
from meshwright.specs.workload import Train

DATA = Path(__file__).parents[3] / "bench" / "data" / "megatron_args.jsonl"
RECORDS = [r for r in map(json.loads, DATA.read_text(encoding="utf-8").splitlines()) if r["args"]]


def words_of(args: dict[str, object]) -> list[str]:
    """Command line words of recorded arguments."""
    words: list[str] = []
    for name, value in args.items():
        if name.startswith("_") or value is False:
            continue
        words.append(f"--{name}")
        if value is True:
            continue
        text = str(value)
        listed = text.startswith("[") and name != "moe-layer-freq"
        words += text.strip("[]").split() if listed else [text]
    return words


def parsed(words: list[str], world: int) -> Invocation:
    line = ["torchrun", "--nproc-per-node", str(world), "pretrain_gpt.py", *words]
    return ENGINE.parse(line, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, lambda name: None)


def test_there_are_enough_of_them() -> None:
    assert len(RECORDS) > 50


@pytest.mark.parametrize("record", RECORDS, ids=[r["test"] for r in RECORDS])
def test_arguments_of_a_functional_test(record: dict[str, dict[str, object]]) -> None:
    words = words_of(record["args"])
    assert rejected(words, ENGINE.flags(), 0) == []
    name = str(record["test"])
    if name.startswith(("bert", "t5")):
        return
    try:
        case = read_case(name, "dev_dgx_h100", record["args"], record["env"], {})
    except UndecidableError:
        return
    found = parsed(words, case.layout.world)
    spec = ENGINE.model_spec(found)
    assert spec is not None
    ours, theirs = found.layout, case.layout
    even = len(set(theirs.stage_layers)) == 1
    assert ours == (theirs.with_(stage_layers=()) if even else theirs)
    assert (len(spec.layers), spec.hidden, spec.tied) == (len(case.spec.layers), case.spec.hidden, case.spec.tied)
    if spec.vocab == case.spec.vocab:
        assert spec.parameters() == case.spec.parameters()
    assert isinstance(found.workload, Train)
    if found.workload.attention != case.work.attention:  # the bench names the kernel in the engine alone
        assert found.train_options["attention"] == case.engine.attention == "unfused"
    assert replace(found.workload, attention=case.work.attention) == case.work
    rules = [*found.findings, *ENGINE.profile().check(spec, ours, None, found.workload)]
    assert [r.code for r in rules if r.severity == "illegal"] == []
