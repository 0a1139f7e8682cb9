"""Every planted mistake of training is found, by the checks that should notice it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

from meshwright.runtime.mutate_train import TRAIN_MUTATIONS
from tests.proving import Case
from tests.proving_train import train_proofs
from tests.runtime import moe_models, tiny

LOSS, GRADIENTS, WEIGHTS, NORM, MOVES, PRODUCTS, STATES = (
    "loss",
    "gradients",
    "weights after a step",
    "gradient norm",
    "collectives, hand-offs",
    "matrix products",
    "bytes of gradients",
)

#: Model and layout in which each mistake is planted, and what must notice it; other checks may notice it too.
NOTICED: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "unsummed-input-gradient": ("tied", "tp=2", (GRADIENTS, MOVES)),
    "summed-output-gradient": ("tied", "tp=2", (GRADIENTS,)),
    "unsummed-kv-copies": ("even", "tp=4", (GRADIENTS, MOVES)),
    "unsummed-norms": ("tied", "tp=2,sp=on", (GRADIENTS, MOVES)),
    "unsummed-head-norms": ("qwen3", "tp=2", (GRADIENTS, MOVES)),
    "bias-on-every-rank": ("biased", "tp=2", (LOSS, GRADIENTS)),
    "own-vocabulary-loss": ("tied", "tp=2", (LOSS, GRADIENTS)),
    "ignored-labels-count": ("tied", "tp=2", (LOSS, GRADIENTS)),
    "labels-shifted-late": ("tied", "cp=2", (LOSS, GRADIENTS)),
    "ring-gradients-stay": ("tied", "cp=2", (GRADIENTS,)),
    "ring-one-short": ("tied", "cp=2", (GRADIENTS,)),
    "contiguous-positions": ("tied", "cp=2", (LOSS, GRADIENTS)),
    "detached-router": ("qwen2_moe", "dp=2,ep=2", (GRADIENTS,)),
    "one-way-dispatch": ("qwen2_moe", "dp=2,ep=2", (GRADIENTS, MOVES)),
    "idle-experts-left-out": ("qwen2_moe", "dp=2,ep=2", (PRODUCTS,)),
    "doubled-expert-gradients": ("qwen2_moe", "dp=2,ep=2", (GRADIENTS,)),
    "own-balance": ("qwen2_moe", "dp=2,ep=2", (GRADIENTS, MOVES)),
    "balance-of-every-copy": ("qwen2_moe", "tp=2", (GRADIENTS,)),
    "own-slice-gradient": ("qwen2_moe", "dp=2,tp=2,ep=4", (GRADIENTS,)),
    "times-micro-batches": ("tied", "pp=2", (GRADIENTS, NORM)),
    "own-token-count": ("tied", "dp=2", (LOSS, GRADIENTS)),
    "only-last-micro-batch": ("tied", "dp=2", (GRADIENTS,)),
    "late-weight-gradients": ("tied", "pp=2,schedule=zb-h1", (GRADIENTS, WEIGHTS)),
    "unreduced-gradients": ("tied", "dp=2", (GRADIENTS, MOVES)),
    "gradients-in-bf16": ("tied", "dp=2", (GRADIENTS,)),
    "unsummed-router": ("qwen2_moe", "tp=2", (GRADIENTS, MOVES)),
    "tied-embedding-missed": ("tied", "pp=2", (GRADIENTS, MOVES)),
    "tied-embedding-doubled": ("tied", "pp=2", (GRADIENTS, NORM)),
    "clip-norm-per-rank": ("tied", "tp=2", (NORM, WEIGHTS)),
    "clip-norm-counts-copies": ("tied", "tp=2", (NORM,)),
    "decayed-norms": ("tied", "tp=2", (WEIGHTS,)),
    "wrong-zero-shard": ("tied", "dp=2,zero=1", (GRADIENTS, WEIGHTS)),
    "whole-gradients-kept": ("tied", "dp=2,zero=2", (STATES,)),
    "extra-sum": ("tied", "tp=2", (MOVES,)),
    "weights-drawn-by-rank": ("tied", "tp=2", (LOSS, WEIGHTS)),
}
#: Those of ``make test``: silent ones, each found by another check.
SAMPLE = ("times-micro-batches", "clip-norm-counts-copies", "decayed-norms", "whole-gradients-kept", "extra-sum")
#: Model and number of ranks of one launch.
LAUNCHES = [("tied", 2), ("qwen2_moe", 2), ("even", 4), ("qwen3", 2), ("biased", 2), ("qwen2_moe", 4)]


def find(base: Path, model: str, names: list[str]) -> None:
    """Plant some mistakes of one model and number of ranks; each must be found by what should notice it."""
    folder = base / model
    (moe_models if model in moe_models.MIXTURES else tiny).write(folder, model)
    cases = [Case(NOTICED[name][1], name) for name in names]
    for name, proof in zip(names, train_proofs(folder, cases, numbers=base / "numbers", timeout_s=300), strict=True):
        failed = {check.what for check in proof.checks if not check.ok}
        assert not proof.proven, name
        assert failed >= set(NOTICED[name][2]), (name, failed, proof.first)


def test_every_mistake_has_a_case() -> None:
    assert NOTICED.keys() == TRAIN_MUTATIONS.keys()
    assert {(m, _ranks(layout)) for m, layout, _ in NOTICED.values()} == set(LAUNCHES)


def _ranks(layout: str) -> int:
    from meshwright.specs.layout import parse_layout

    return parse_layout(layout).world


@pytest.mark.timeout(400)
def test_a_sample_is_found(tmp_path: Path) -> None:
    find(tmp_path, "tied", list(SAMPLE))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("model", "ranks"), LAUNCHES)
def test_all_are_found(tmp_path: Path, model: str, ranks: int) -> None:
    names = [n for n, (m, layout, _) in NOTICED.items() if (m, _ranks(layout)) == (model, ranks) and n not in SAMPLE]
    find(tmp_path, model, names)
