"""A step of training is proven; its ledger counts what the hand counts; every planted mistake is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

from meshwright.ledger.store import read
from meshwright.prove.train import TrainProof
from tests.proving import Case
from tests.proving_train import train_proofs
from tests.runtime import moe_models, tiny

LOSS, GRADIENTS, WEIGHTS, NORM, MOVES, PRODUCTS = (
    "loss",
    "gradients",
    "weights after a step",
    "gradient norm",
    "collectives, hand-offs",
    "matrix products",
)
STATES = ("bytes of weights", "bytes of gradients", "bytes of optimizer state")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small random models, dense and sparse."""
    base = tmp_path_factory.mktemp("models")
    for name in ("tied", "even", "qwen3", "deepseek_v3"):
        tiny.write(base / name, name)
    for name in ("qwen2_moe", "deepseek_v2"):
        moe_models.write(base / name, name)
    return base


def refused(proof: TrainProof) -> set[str]:
    """Names of the checks that failed."""
    return {check.what for check in proof.checks if not check.ok}


def assert_proven(found: list[TrainProof]) -> None:
    wrong = [f"{p.layout}: {p.first}" for p in found if not p.proven]
    assert not wrong, wrong
    for proof in found:
        assert {c.what for c in proof.checks} == {LOSS, GRADIENTS, WEIGHTS, NORM, MOVES, PRODUCTS, *STATES}


def command(*words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    code = "from meshwright.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "prove", "--train", *words], capture_output=True, text=True, timeout=110, env=env
    )


def test_the_command_proves_a_step_and_its_ledger_is_what_the_hand_counts(models: Path, tmp_path: Path) -> None:
    """tp=2 on 2 sequences, each a micro-batch: sums over tp, the norm, the loss; nothing else is sent."""
    done = command(str(models / "even"), "--layout", "tp=2", "--seq", "8", "--out", str(tmp_path), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert said["proven"]
    assert said["predicted_without_torch"] == "could not be imported"
    assert [c["differs"] for c in said["checks"]] == [0] * 9
    rows = [e for e in read(tmp_path / "recorded.jsonl").entries if e.rank_class == "rank1"]
    assert Counter((e.phase, e.op) for e in rows if e.group) == {
        ("forward", "all_reduce"): 2 * (1 + 2 * 5 + 3),
        ("backward", "all_reduce"): 2 * (1 + 2 * 5),
        ("optimizer", "all_reduce"): 2,
    }
    assert sum(e.op == "matmul" for e in rows) == 2 * 3 * (5 * 7 + 1)
    # Norms whole, half of everything else: 4 of 8 heads, 1 of 2 KV heads of 8, 48 columns, 64 rows.
    numel = 5 * (2 * 64 + 64 * 8 * (4 + 1 + 1 + 4) + 3 * 64 * 48) + 2 * 64 * 64 + 64
    held = {h.term: h.bytes for h in read(tmp_path / "recorded.jsonl").holdings if h.rank_class == "rank1"}
    assert held == {"weights": 4 * numel, "gradients": 4 * numel, "optimizer": 8 * numel}


#: Layouts whose activation peaks are known to be predicted wrong, and how far each rank's is: with several chunks a
#: rank the walk does not know all that is alive at the highest moment.
KNOWN = {
    "pp=2,dp=2,zero=1,schedule=interleaved,virtual=2": (-0.215, -0.215, -0.170, -0.170),
    "pp=2,dp=2,zero=2,schedule=zbv": (-0.001, -0.001, 0.102, 0.102),
}


def assert_peaks(found: list[TrainProof]) -> None:
    """Activation peaks are where they were predicted, within 5 %, and the known ones as far away as they were."""
    apart = {str(p.layout): [round(peak.apart, 3) for peak in p.peaks] for p in found if p.layout.zero < 3}
    off = {name: np.subtract(row, KNOWN.get(name, 0.0)) for name, row in apart.items()}
    assert all((np.abs(row) < 0.05).all() for row in off.values()), apart


@pytest.mark.timeout(400)
def test_two_ranks_of_every_kind(models: Path, tmp_path: Path) -> None:
    cases = [
        Case("tp=2,sp=on", options={"recompute": "full"}),
        Case("cp=2,zero=1", options={"recompute": "selective"}),
        Case("pp=2,schedule=zbv"),
        Case("dp=2,zero=2"),
        Case("dp=2,zero=3"),
    ]
    found = train_proofs(models / "tied", cases, numbers=tmp_path / "numbers")
    assert_proven(found)
    assert_peaks(found)


def test_bad_input_is_one_line(models: Path) -> None:
    for code, words, line in [
        (2, ["--layout", "tp=2", "--seq", "0"], "each at least 1"),
        (1, ["--layout", "dp=2", "--global-batch", "3"], "3 sequences"),
        (2, ["--layout", "tp=2", "--dry"], "--dry with --train"),
        (2, ["--layout", "tp=2", "--mutate", "nothing"], "--mutate 'nothing' is not known"),
    ]:
        done = command(str(models / "tied"), *words)
        assert done.returncode == code, (words, done.stderr)
        assert line in done.stderr, done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        assert len(done.stderr.strip().splitlines()) <= 3, done.stderr


FOUR = [
    "tp=4",
    "tp=2,dp=2",
    "tp=2,sp=on,pp=2,schedule=1f1b",
    "tp=2,pp=2,schedule=zb-h1,zero=0",
    "cp=2,tp=2,sp=on",
    "cp=2,dp=2,cp_kind=ulysses,zero=2",
    "cp=4",
    "pp=4,schedule=gpipe",
    "pp=2,virtual=2,schedule=interleaved,dp=2,zero=1",
    "pp=2,dp=2,schedule=zbv,zero=2",
    "pp=2,dp=2,schedule=dualpipev,zero=3",
    "dp=4,zero=3,replicas=2",
    "dp=4,zero=3,wrap=model",
    "dp=4,zero=3,prefetch=2,reshard_after_forward=off",
    "dp=2,tp=2,sp=on,zero=3",
    "dp=2,cp=2,zero=1",
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(2))
def test_four_ranks(models: Path, tmp_path: Path, part: int) -> None:
    cases = [Case(layout) for layout in FOUR[part::2]]
    found = train_proofs(models / "even", cases, numbers=tmp_path / "numbers", global_batch=16, timeout_s=300)
    assert_proven(found)
    assert_peaks(found)


EXPERTS = ["tp=2", "tp=2,ep=2", "dp=2,ep=2", "cp=2,ep=2", "dp=2,ep=2,zero=3", "pp=2,schedule=zb-h1"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v2"])
def test_experts_on_two_ranks(models: Path, tmp_path: Path, name: str) -> None:
    cases = [Case(layout) for layout in EXPERTS] + [Case("dp=2,ep=2", options={"recompute": "full"})]
    assert_proven(train_proofs(models / name, cases, numbers=tmp_path / "numbers", timeout_s=300))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_families_on_two_ranks(models: Path, tmp_path: Path, name: str) -> None:
    cases = [Case("tp=2"), Case("tp=2,sp=on"), Case("cp=2"), Case("pp=2,schedule=zb-h1"), Case("dp=2,zero=3")]
    assert_proven(train_proofs(models / name, cases, numbers=tmp_path / "numbers", timeout_s=300))
