"""Expert parallelism on live ranks: proven against one process and the exact prediction; mistakes are found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from safetensors.torch import load_file, save_file

from meshwright.ledger.store import read
from meshwright.prove.proof import Proof
from meshwright.runtime.mutate_experts import EXPERT_MISTAKES
from tests.proving import proofs
from tests.runtime import moe_models, tiny
from tests.test_prove import NOTICED

Mixture = Callable[[str], Path]
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    """Folder of a small mixture of experts by its name."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = moe_models.write(tmp_path_factory.mktemp(name) / name, name)
        return made[name]

    return folder


def assert_proven(proof: Proof) -> None:
    assert proof.proven, [str(check) for check in proof.checks if not check.ok]


PLANTED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "qwen3_moe",
        "dp=2,ep=2",
        (
            "lost-token",
            "wrong-expert",
            "weights-applied-twice",
            "flipped-renormalisation",
            "experts-off-by-one",
            "misread-counts",
            "unsorted-return",
        ),
    ),
    ("deepseek_v3", "tp=2,ep=2", ("uncorrected-choice", "dropped-shared-experts", "unsummed-experts")),
)


def test_every_mistake_of_experts_is_planted() -> None:
    assert {name for _, _, names in PLANTED for name in names} == {mistake.name for mistake in EXPERT_MISTAKES}


@pytest.mark.parametrize(("name", "layout", "mistakes"), PLANTED)
def test_the_proof_holds_and_fails_on_every_mistake(
    mixture: Mixture, tmp_path: Path, name: str, layout: str, mistakes: Sequence[str]
) -> None:
    right, *wrong, again = proofs(mixture(name), layout, [None, *mistakes, None], numbers=tmp_path / "numbers")
    assert_proven(right)
    assert_proven(again)
    for mistake, proof in zip(mistakes, wrong, strict=True):
        failed = {check.what for check in proof.checks if not check.ok}
        assert failed >= set(NOTICED[mistake]), (mistake, failed)
        assert proof.first, mistake


def test_five_experts_on_two_ranks_of_which_one_has_no_prompt(mixture: Mixture, tmp_path: Path) -> None:
    """The second replica has no text: it walks every pass, serves experts 3 and 4 and sends nothing of its own."""
    (proof,) = proofs(mixture("mixtral"), "dp=2,ep=2", [None], numbers=tmp_path / "numbers", lengths=(6,))
    assert_proven(proof)
    assert proof.recorded is not None
    rows = [e for e in proof.recorded.entries if e.rank_class == "rank1" and e.group]
    assert Counter((e.op, e.name) for e in rows) == {
        ("all_to_all", name): 3 * 4 for name in ("expert counts", "tokens dispatch", "tokens combine")
    }
    dispatched = [e for e in rows if e.name == "tokens dispatch"]
    assert all(e.shapes == ((0, 72),) and e.splits == (0, 0) and e.wire_bytes == 0 for e in dispatched)
    assert all(e.splits == (3, 2) for e in rows if e.name == "expert counts")


def test_the_command_proves_experts_over_replicas_and_tp_ranks(mixture: Mixture, tmp_path: Path) -> None:
    """dp=2,ep=4,tp=2, a prefill of 12 tokens and 3 decode steps a replica: each rank of tp sends half of the tokens.

    Two of three layers are sparse. A rank sends 6 x 3 rows in the prefill; of the single token of a decode step place
    0 of tp sends 3 rows and place 1 none. What is sent by all is received by all, layer by layer.
    """
    env = {**os.environ, "COLUMNS": "200"}
    code = "from meshwright.cli.main import main; main()"
    words = [
        "prove",
        str(mixture("qwen3_moe")),
        "--layout",
        "dp=2,ep=4,tp=2",
        "--no-time",
        "--json",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=110, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert said["proven"]
    assert said["predicted_without_torch"] == "could not be imported"
    assert [c["differs"] for c in said["checks"]] == [0] * 7
    recorded = read(tmp_path / "recorded.jsonl")
    for rank in range(4):
        rows = [e for e in recorded.entries if e.rank_class == f"rank{rank}" and e.name == "tokens dispatch"]
        own = 3 if rank % 2 == 0 else 0
        assert [e.shapes for e in rows] == [((18, 72),)] * 2 + [((own, 72),)] * 6
        assert all(e.splits is not None and sum(e.splits) == e.shapes[0][0] * 72 for e in rows if e.shapes)
    sent, returned = ([e for e in recorded.entries if e.name == name] for name in ("tokens dispatch", "tokens combine"))
    for layer in (0, 2):
        there, back = (sum(e.payload_bytes or 0 for e in es if e.layer == layer) for es in (sent, returned))
        assert there == back == (4 * 18 + 2 * 3 * 3) * 72 * 4
    for row in said["experts"]:
        assert sum(row["experts"]) == sum(row["ranks"].values()) == 4 * 18 + 2 * 3 * 3


def test_texts_that_end_keep_replicas_in_step(mixture: Mixture) -> None:
    """Ids that end some texts early, unequal prompts, chunks of 3: tokens are those of transformers up to them."""
    folder = mixture("qwen3_moe")
    whole, _ = tiny.oracle(folder)
    ends = (whole[0][1], whole[2][3])
    tokens, _ = tiny.on_ranks(tiny.job(folder, "dp=2,ep=2", eos=ends, chunk=3))
    for prompt, want in enumerate(whole):
        stop = next((i + 1 for i, token in enumerate(want) if token in ends), len(want))
        assert tokens[prompt] == want[:stop], prompt


def test_one_expert_takes_all(mixture: Mixture, tmp_path: Path) -> None:
    """One choice a token, and a bias that makes it expert 5: the rank of the other half has no row at all."""
    folder = moe_models.write(tmp_path / "m", "deepseek_v3", num_experts_per_tok=1, n_group=1, topk_group=1)
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name, x in weights.items():
        if name.endswith("e_score_correction_bias"):
            weights[name] = torch.where(torch.arange(x.shape[0]) == 5, 100.0, x)
    save_file(weights, file, metadata={"format": "pt"})
    (proof,) = proofs(folder, "dp=2,ep=2", [None], numbers=tmp_path / "numbers")
    assert_proven(proof)
    assert [row.experts for row in proof.experts] == [(0, 0, 0, 0, 0, 18, 0, 0)] * 2
    assert all(row.ranks == {0: 0, 1: 18} for row in proof.experts)


@slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3_moe", "dp=2,ep=2"),
        ("qwen3_moe", "tp=2,ep=2"),
        ("qwen3_moe", "dp=2,ep=4,tp=2"),
        ("qwen3_moe", "pp=2,dp=2,ep=2"),
        ("mixtral", "dp=3,ep=3"),
        ("mixtral", "tp=3"),
        ("qwen2_moe", "dp=2,ep=4,tp=2"),
        ("deepseek_v2", "dp=2,ep=2"),
        ("deepseek_v3", "dp=2,ep=4,tp=2"),
        ("gpt_oss", "dp=2,ep=4,tp=2"),
        ("gpt_oss", "tp=2"),
    ],
)
def test_layouts_equal_transformers(mixture: Mixture, name: str, layout: str) -> None:
    folder = mixture(name)
    tiny.assert_same(tiny.on_ranks(tiny.job(folder, layout), 120), tiny.oracle(folder))


COMPOSITIONS: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen3_moe", "tp=2", {}),
    ("qwen3_moe", "pp=3", {}),
    ("qwen3_moe", "tp=2,ep=2", {}),
    ("qwen3_moe", "tp=3,ep=3", {}),
    ("qwen3_moe", "dp=2,ep=2,tp=2", {}),
    ("qwen3_moe", "dp=2,ep=4,tp=2", {"lengths": (3,)}),
    ("qwen3_moe", "dp=2,ep=4,tp=2,pp=2", {"micro_batches": 3, "lengths": (5, 2, 7, 4)}),
    ("qwen3_moe", "dp=4,ep=2", {}),
    ("qwen3_moe", "dp=4,ep=4", {"lengths": (6, 2, 9, 1, 1)}),
    ("qwen3_moe", "dp=3,ep=3", {"lengths": (6, 2), "chunk": 4}),
    ("qwen3_moe", "dp=2,ep=4,tp=2,sp=on", {}),
    ("qwen3_moe", "dp=2,ep=2,tp=2,sp=on", {}),
    ("qwen3_moe", "tp=2,ep=2,sp=on", {}),
    ("qwen3_moe", "cp=2,ep=2", {}),
    ("qwen3_moe", "cp=2,tp=2,ep=4", {}),
    ("qwen3_moe", "cp=2,dp=2,ep=4", {}),
    ("mixtral", "dp=3,ep=3", {}),
    ("mixtral", "tp=2,ep=2", {}),
    ("mixtral", "dp=3,ep=3", {"lengths": (1,)}),
    ("qwen2_moe", "dp=2,ep=4,tp=2", {}),
    ("qwen2_moe", "dp=2,ep=2,tp=2", {}),
    ("deepseek_v2", "dp=2,ep=2", {}),
    ("deepseek_v3", "dp=2,ep=4,tp=2", {}),
    ("deepseek_v3", "tp=2,ep=2,pp=2", {}),
    ("deepseek_v3", "pp=2,dp=2,ep=2", {"lengths": (5, 9, 3), "chunk": 3}),
    ("gpt_oss", "dp=2,ep=2", {}),
    ("gpt_oss", "dp=2,ep=2,tp=2", {}),
    ("gpt_oss", "tp=2", {}),
]


@slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "layout", "options"), COMPOSITIONS)
def test_compositions_are_proven(
    mixture: Mixture, tmp_path: Path, name: str, layout: str, options: dict[str, Any]
) -> None:
    (proof,) = proofs(mixture(name), layout, [None], numbers=tmp_path / "numbers", timeout_s=250, **options)
    assert_proven(proof)
