"""``run train``: what it leaves, what a stuck step leaves, who goes on after a loss, and one line for what is wrong."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from meshwright import engines
from meshwright.cli.main import app
from meshwright.doctor.judge import judge
from meshwright.doctor.readers.walk import read_incident
from meshwright.errors import IllegalLayoutError, InputError, MeshwrightError
from meshwright.ledger import store
from meshwright.runtime.checkpoint import own
from meshwright.runtime.folder import read_folder
from meshwright.runtime.launch.local import RankError
from meshwright.runtime.train import launch
from meshwright.runtime.train.folders import folder_name
from meshwright.runtime.train.init import random_weights
from meshwright.runtime.train.job import TrainJob, fewer
from meshwright.runtime.train.launch import fitted, on_this_machine, with_restarts
from meshwright.runtime.train.loop import LEDGER_FOLDER
from meshwright.runtime.train.progress import METRICS, Progress, Row, token_flops
from meshwright.runtime.train.source import from_scratch
from meshwright.runtime.train.watch import stuck_folder
from meshwright.specs.build import decoder
from meshwright.specs.layout import parse_layout
from meshwright.specs.placement import place
from tests.runtime import tiny
from tests.runtime.train import runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write(tmp_path_factory.mktemp("train"))


def _run(*words: object) -> str:
    result = CliRunner().invoke(app, ["run", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def _refused(*words: object) -> str:
    with pytest.raises(MeshwrightError) as caught:
        _run("train", *words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_run_leaves_checkpoint_metrics_ledger_and_export(folder: Path, tmp_path: Path) -> None:
    """From drawn weights, on bytes of a text, on two ranks; the export is a model again."""
    config = tiny.config("qwen3", vocab_size=260, num_hidden_layers=2)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 20)
    run, out = tmp_path / "run", tmp_path / "out"
    words = ("--layout", "dp=2,zero=2", "--data", tmp_path / "text.txt", "--tokenizer", "bytes", "--seq", 16)
    more = ("--steps", 3, "--global-batch", 2, "--checkpoint", run, "--ledger", 2, "--export", out, "--json")
    said = json.loads(_run("train", "--from-scratch", tmp_path / "config.json", *words, *more))
    assert (said["step"], said["tokens"], said["export"]) == (3, 3 * 2 * 16, str(out))
    assert said["checkpoint"] == str(run / folder_name(3))
    rows = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["tokens"] == 32 and row["tokens_s"] > 0 and row["mfu"] is None for row in rows)
    assert set(rows[0]["seconds"]) >= {"forward", "backward", "optimizer"}
    assert rows[-1]["loss"] == said["loss"]
    for rank in range(2):
        ledger = store.read_jsonl(run / f"{LEDGER_FOLDER}2" / f"rank{rank}.jsonl")
        assert {"forward", "backward", "optimizer"} <= {entry.phase for entry in ledger.entries}
        assert "reduce_scatter" in {entry.op for entry in ledger.entries}
    model = read_folder(out)
    assert model.spec.vocab == 260
    assert not list(run.glob(".*"))


def _stuck(rank: int, job: TrainJob) -> Any:
    """Rank 1 stays in its second step, before anything is sent; that step may take 3 s, the first one any time."""
    from meshwright.runtime.train import loop

    step, watched = loop.train_step, loop.Watch.step
    loop.Watch.step = lambda self, n: setattr(self, "timeout_s", 3.0 if n == 2 else 600.0) or watched(self, n)

    def wait_for_ever(state: Any, batch: Any) -> Any:
        if rank == 1 and state.step == 1:
            time.sleep(1000)
        return step(state, batch)

    loop.train_step = wait_for_ever
    return loop.run_train(rank, job)


def test_a_stuck_rank_is_named_by_what_all_ranks_leave(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "body", _stuck)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000")
    job = runs.job(runs.asked(folder, "dp=2", tmp_path / "run"), timeout_s=3.0)
    with pytest.raises(RankError) as error:
        on_this_machine(job)
    left = stuck_folder(tmp_path / "run", 2)
    assert str(error.value) == (f"step 2 took longer than 3 s; 2 ranks left calls and stacks: meshwright doctor {left}")
    assert sorted(file.name for file in left.iterdir()) == [
        f"{kind}_{rank}{end}" for kind, end in (("nccl_trace_rank", ""), ("stack_rank", ".txt")) for rank in (0, 1)
    ]
    first = judge(read_incident(left))[0]
    assert (first.kind, first.guilty_ranks) == ("host_stuck", (1,)), first


def test_a_lost_rank_is_made_good_from_the_last_checkpoint(folder: Path, tmp_path: Path) -> None:
    """Twice at one place: it goes on with fewer replicas. A mistake of the user is no reason to try again."""
    job = runs.job(runs.asked(folder, "dp=4,zero=1", tmp_path / "run"))
    tried: list[str] = []
    said: list[str] = []

    def fails(job: TrainJob) -> Any:
        tried.append(str(job.placement.layout))
        if len(tried) < 4:
            raise RankError("rank 3 of 4 was ended by signal 9")
        return []

    assert with_restarts(job, fails, 3, said.append) == []
    assert tried == ["dp=4,zero=1", "dp=4,zero=1", "dp=2,zero=1", "dp=2,zero=1"]
    assert "going on from step 0 under dp=2,zero=1, 1 restarts left" in said[1]
    tried.clear()
    with pytest.raises(RankError, match="signal 9"):
        with_restarts(job, fails, 1, said.append)
    assert len(tried) == 2

    def wrong(job: TrainJob) -> Any:
        tried.append("wrong")
        raise InputError("no such thing")

    with pytest.raises(InputError):
        with_restarts(job, wrong, 3, said.append)
    assert tried[-1] == "wrong"
    assert tried.count("wrong") == 1


def test_the_layout_for_fewer_ranks_has_a_smaller_dp(folder: Path) -> None:
    def job(layout: str) -> TrainJob:
        return runs.job(runs.asked(folder, layout, None, global_batch=8))

    def found(layout: str, ranks: int) -> str:
        return str(fewer(job(layout), ranks))

    assert found("dp=8,zero=2", 7) == "dp=4,zero=2"
    assert found("tp=2,dp=4,zero=1", 5) == "tp=2,dp=2,zero=1"
    assert found("tp=2,pp=2", 3) == "None"
    assert str(fitted(job("dp=4"), 4).placement.layout) == "dp=4"
    assert str(fitted(job("dp=4"), 2).placement.layout) == "dp=2"
    with pytest.raises(
        IllegalLayoutError, match="needs 4 ranks, 3 were started; with fewer, dp is reduced: a multiple"
    ):
        fitted(job("dp=4"), 3)


def test_drawn_weights_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny.config("gemma3")))
    model = from_scratch(tmp_path).model
    alone = place(model.spec, parse_layout("tp=1"), engines.profile("meshwright"))
    whole = random_weights(model, alone, alone.coordinate(0), seed=7)
    assert 0.015 < float(whole["model.layers.0.mlp.up_proj.weight"].std()) < 0.025
    assert not whole["model.norm.weight"].any(), "Gemma adds one to the weight of a norm"
    for layout in ("tp=3", "pp=3"):
        placement = place(model.spec, parse_layout(layout), engines.profile("meshwright"))
        for rank in range(placement.layout.world):
            at = placement.coordinate(rank)
            held = random_weights(model, placement, at, seed=7)
            for name, shard in own(placement, at):
                cuts = [whole[name][tuple(slice(*c) for c in cut)] for cut in product(*shard.intervals)]
                assert torch.equal(held[name], torch.cat(cuts).view(held[name].shape)), name
    other = random_weights(model, alone, alone.coordinate(0), seed=8)
    assert not torch.equal(other["model.embed_tokens.weight"], whole["model.embed_tokens.weight"])


def test_flops_of_a_token_are_those_of_its_products() -> None:
    """By hand: 2 layers of width 8, 2 heads of 4 over 1 KV head, MLP 16, vocabulary 32, sequence 10."""
    spec = decoder(hidden=8, layers=2, heads=2, kv_heads=1, vocab=32, ffn=16, tied=False)
    layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16
    norms = 5 * 8
    products = 2 * layer + 32 * 8
    attention = 2 * 10 * 2 * 4 * 2
    assert token_flops(spec, 10) == 6 * (products + norms) + 3 * attention


def test_a_file_of_metrics_goes_on_behind_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row(n, 2.0, 1.0, 1e-3, 64, 0.5, 128.0, 0.25, {"forward": 0.3}) for n in (1, 2, 3)]
    before = Progress(3, 0, tmp_path)
    for row in rows:
        before.tell(row)
    before.close()
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 4, "lo')
    again = Progress(3, 1, tmp_path)
    again.tell(rows[1])
    again.close()
    assert [json.loads(line)["step"] for line in (tmp_path / METRICS).read_text().splitlines()] == [1, 2]
    line = capsys.readouterr().err.splitlines()[0]
    assert line == "step 1/3  loss 2.0000  norm 1  lr 1.00e-03  128 tokens/s  MFU 25.0 %  0.50 s: forward 0.30"


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step on one rank."""
    run = tmp_path_factory.mktemp("trained") / "run"
    runs.train(folder, "tp=1", run, steps=1, warmup=0)
    return run


def _edited(**changes: Any) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        state = run / folder_name(1) / "state.json"
        state.write_text(json.dumps(json.loads(state.read_text()) | changes))

    return edit


def _nothing(run: Path) -> None:
    return None


DATA = ("--data", "{folder}/ids.npy")
#: (what is done to a copy of the run, words, what is said)
MISUSES: dict[str, tuple[Callable[[Path], None], tuple[object, ...], str]] = {
    "nothing": (_nothing, (), "a model is needed"),
    "two models": (_nothing, ("{folder}/model", "--from-scratch", "{folder}/model", *DATA), "leave one of the two out"),
    "no model": (_nothing, ("{folder}/none", *DATA), "cannot be read"),
    "no data": (_nothing, ("{folder}/model",), "data is needed: --data"),
    "lost data": (_nothing, ("{folder}/model", "--data", "{folder}/none.txt"), "no such file or folder"),
    "text without tokenizer": (_nothing, ("{folder}/model", "--data", "{folder}/a.txt"), "no tokenizer.json"),
    "bytes beyond": (
        _nothing,
        ("{folder}/model", "--data", "{folder}/a.txt", "--tokenizer", "bytes"),
        "at least 257, the model has 131",
    ),
    "short": (_nothing, ("{folder}/model", "--data", "{folder}/short.npy", "--seq", 64), "9 tokens of data; .* 65"),
    "long sequence": (_nothing, ("{folder}/model", *DATA, "--seq", 4096), "the model has 256 positions"),
    "batch": (
        _nothing,
        ("{folder}/model", *DATA, "--layout", "dp=3"),
        "batch of 8 sequences is not a multiple of dp 3",
    ),
    "layout": (_nothing, ("{folder}/model", *DATA, "--layout", "tp=99"), "9 attention heads for tensor parallel 99"),
    "word": (_nothing, ("{folder}/model", *DATA, "--layout", "xp=2"), "unknown key 'xp'"),
    "schedule": (_nothing, ("{folder}/model", *DATA, "--schedule", "fast"), "schedule='fast' is not one of"),
    "folded": (_nothing, ("{folder}/model", *DATA, "--schedule", "zbv"), "interleaves pipeline stages, pp is 1"),
    "dcp": (_nothing, ("{folder}/model", *DATA, "--layout", "tp=2,dcp=2"), "dcp cuts the cache of decoding"),
    "optimizer": (_nothing, ("{folder}/model", *DATA, "--optimizer", "lion"), "not one of adamw, sgd"),
    "warmup": (_nothing, ("{folder}/model", *DATA, "--warmup", 200), "longer than the run of 100 steps"),
    "steps": (_nothing, ("{folder}/model", *DATA, "--steps", 0), "--steps 0 is out of range"),
    "ledger": (_nothing, ("{folder}/model", *DATA, "--ledger", 1), "need a folder for the run"),
    "restarts": (_nothing, ("{folder}/model", *DATA, "--restarts", 1), "name a folder with --checkpoint"),
    "address": (_nothing, ("{folder}/model", *DATA, "--address", "x:1"), "--address: ranks are started here"),
    "not empty": (_nothing, ("{folder}/model", *DATA, "--checkpoint", "{run}"), "go on with --resume"),
    "two runs": (
        lambda run: shutil.copytree(run, run.parent / "second"),
        ("--resume", "{run}", "--checkpoint", "{run}/../second"),
        "holds step-00000001 of a run",
    ),
    "no run": (_nothing, ("--resume", "{folder}"), "no checkpoint there"),
    "over": (_edited(step=7), ("--resume", "{run}", "--steps", 5), "the checkpoint is of step 7 already"),
    "foreign": (_nothing, ("{folder}/other", "--resume", "{run}"), "made of another model than .*other"),
    "other data": (_nothing, ("--resume", "{run}", "--data", "{folder}/short.npy"), "not what .* was trained on"),
    "other seq": (_nothing, ("--resume", "{run}", "--seq", 8), "--seq 8: the run has 16"),
    "gone data": (
        _edited(data={"file": "/none", "width": 2, "tokens": 1, "documents": 1, "fingerprint": "x", "largest": 1}),
        ("--resume", "{run}"),
        "give --data again",
    ),
    "no state": (
        lambda run: (run / folder_name(1) / "state.json").write_text("{}"),
        ("--resume", "{run}"),
        "no state of a run",
    ),
    "wild settings": (_edited(settings={"steps": "many"}), ("--resume", "{run}"), "settings of a run are malformed"),
    "wild step": (_edited(step=-1), ("--resume", "{run}"), "no state of a run"),
    "wild config": (_edited(config={"model_type": "llama"}), ("--resume", "{run}"), "state.json"),
    "wild layout": (_edited(layout="rm -rf"), ("--resume", "{run}"), "is not key=value"),
}


@pytest.mark.parametrize("case", MISUSES)
def test_what_is_wrong_is_said_in_one_line_before_any_rank_starts(
    folder: Path, trained: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, words, says = MISUSES[case]
    monkeypatch.setattr(launch, "on_this_machine", lambda job: pytest.fail("ranks were started"))
    (folder / "a.txt").write_text("text")
    np.save(folder / "short.npy", np.arange(9))
    if case == "foreign":
        tiny.write(folder / "other", "qwen3")
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    change(run)
    said = _refused(*(str(word).format(folder=folder, run=run) for word in words))
    assert re.search(says, said), said


def test_the_same_model_may_be_named_again(folder: Path, trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    words = (
        folder / "model",
        "--resume",
        run,
        *("--data", folder / "ids.npy"),
        "--layout",
        "dp=2",
        "--export",
        tmp_path / "x",
    )
    assert "step 1 of 1 under dp=2" in _run("train", *words)
    assert read_folder(tmp_path / "x").spec.vocab == 131
