"""A dry-run records what a real run records, foretells worlds of any size, and fails where the program is wrong."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")

from meshwright.cli.main import app
from meshwright.errors import IllegalLayoutError, InputError, MeshwrightError
from meshwright.ledger.compare import FIELDS, compare, merged
from meshwright.prove import dry, prove
from meshwright.prove.dry import DryProof, dry_run
from meshwright.runtime.dryrun import DryJob, run_dry
from meshwright.runtime.folder import read_folder
from meshwright.runtime.launch.local import RankError, run_local, start_server
from meshwright.specs.layout import parse_layout
from tests.runtime import tiny


@pytest.fixture(scope="module", autouse=True)
def server() -> None:
    start_server(dry.MODULES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("dry") / "tiny", "llama")


def config_only(base: Path, name: str, **changes: object) -> str:
    """A folder with a configuration and nothing else."""
    base.mkdir()
    (base / "config.json").write_text(json.dumps(tiny.config(name, **changes)))
    return str(base)


def test_every_rank_does_without_weights_what_it_does_with_them(folder: Path) -> None:
    """Odd sizes; the recorded ledger of a real run stands where the prediction stands else, rank by rank."""
    real = prove(folder, "tp=2,pp=2", timeout_s=100)
    assert real.proven, real.first
    assert real.recorded is not None
    count = real.layout.dp * real.layout.pp
    placement = dry.legal(read_folder(folder).spec, real.layout)
    job = DryJob(placement, 0, read_folder(folder).settings, count, 12, 4, "f32")
    ranks = [run_local(run_dry, 1, (replace(job, rank=rank),), 60)[0] for rank in range(real.world)]
    found = compare(real.recorded, merged(rank.ledger for rank in ranks))
    assert found.equal, found.first
    assert found.ranks == real.world
    assert not found.unknown
    kept = {(h.rank_class, h.term): h.bytes for h in real.recorded.holdings}
    assert kept == {(h.rank_class, h.term): h.bytes for rank in ranks for h in rank.ledger.holdings}
    assert {e.source for rank in ranks for e in rank.ledger.entries} == {"dry-run"}
    assert set(FIELDS) <= set(type(ranks[0].ledger.entries[0]).__slots__)


def test_a_world_of_131072_ranks_counts_what_the_hand_counts(tmp_path: Path) -> None:
    """Two passes of 5 layers: two sums a layer and one of the embedding on the first stage, a gather of the logits on
    the last, a hand-off between them; two micro-batches."""
    proof = dry_run(config_only(tmp_path / "m", "even"), "tp=2,pp=2,dp=32768", timeout_s=60)
    assert proof.proven, proof.first
    assert (proof.world, proof.classes) == (131_072, 2)
    assert proof.verdict.startswith(
        "dry-run equals prediction: m under tp=2,pp=2,dp=32768, 131,072 ranks, 2 rank class"
    )
    assert proof.recorded is not None
    done = Counter((e.rank_class, e.op) for e in proof.recorded.entries if e.group)
    first, last = (row.rank_class for row in proof.recorded.ranks)
    passes = 2 * 2
    assert done == {
        (first, "all_reduce"): passes * (2 * 3 + 1),
        (first, "send"): passes,
        (last, "recv"): passes,
        (last, "all_reduce"): passes * 2 * 2,
        (last, "gather"): passes,
    }
    assert proof.peak_bytes < 2 << 30


@pytest.mark.parametrize(
    ("name", "layout", "ran"),
    [
        ("deepseek_v3", "tp=2,pp=2,dp=2,ep=4", (0, 1, 3, 4, 5, 7)),
        ("even", "cp=2,tp=2,dp=2", (0, 2)),
        ("even", "cp=2,tp=2,cp_kind=ulysses", (0,)),
        ("even", "tp=2,sp=true", (0,)),
        ("gemma3", "tp=3", (0, 2)),
    ],
)
def test_every_strategy_and_every_kind_of_rank(tmp_path: Path, name: str, layout: str, ran: tuple[int, ...]) -> None:
    """Vocabularies of 131 are dealt unevenly; tokens that travel to experts reach the last of their group too; a ring
    has other neighbours at every place."""
    sparse = {"first_k_dense_replace": 2} if name == "deepseek_v3" else {}
    proof = dry_run(config_only(tmp_path / "m", name, **sparse), layout, timeout_s=60)
    assert proof.proven, proof.first
    assert proof.ran == ran
    assert proof.recorded is not None
    ops = {e.op for e in proof.recorded.entries}
    if "ep" in layout:
        assert "all_to_all" in ops
    if "sp=" in layout:
        assert "reduce_scatter" in ops


def test_ranks_may_be_named(tmp_path: Path) -> None:
    proof = dry_run(config_only(tmp_path / "m", "even"), "tp=2,pp=2,dp=64", ranks=(255, 6, 6), timeout_s=60)
    assert proof.proven, proof.first
    assert proof.ran == (6, 255)
    assert "2 ranks run" in proof.verdict
    with pytest.raises(InputError, match=r"rank 256; layout .* has ranks 0 to 255"):
        dry_run(tmp_path / "m", "tp=2,pp=2,dp=64", ranks=(256,))


@pytest.mark.parametrize(
    ("mistake", "first"),
    [
        ("skip-all-reduce", "rank 2, layer 3, prefill step 0, tp entry 0, all_reduce (mixer output): missing"),
        ("skipped-layer", "rank 2, layer 4, prefill step 0, tp entry 2, all_reduce (mixer output): missing"),
        ("whole-matrix-kept", "rank 0, weights: bytes held"),
    ],
)
def test_a_planted_mistake_is_found(tmp_path: Path, mistake: str, first: str) -> None:
    proof = dry_run(config_only(tmp_path / "m", "even"), "tp=2,pp=2", mutate=mistake, timeout_s=60)
    assert not proof.proven
    assert proof.verdict.startswith("dry-run does NOT equal prediction: ")
    assert proof.note is None
    assert first in str(proof.first)


def test_a_mistake_of_numbers_is_not_called_found(tmp_path: Path) -> None:
    proof = dry_run(config_only(tmp_path / "m", "even"), "tp=2", mutate="swapped-logits", timeout_s=60)
    assert proof.proven
    assert "only numbers" in str(proof.note)


def test_the_rank_that_fails_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object) -> list[object]:
        raise RankError("rank 0 of 1 failed: RuntimeError: no")

    monkeypatch.setattr(dry, "run_local", late)
    proof = dry_run(folder, "pp=2", timeout_s=60)
    assert not proof.proven
    assert proof.first == "rank 0: failed: RuntimeError: no"


def command(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["prove", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def test_the_command_runs_a_model_of_the_atlas_and_says_so_in_json(tmp_path: Path) -> None:
    code, out = command("llama-3.2-1b", "--layout", "tp=8,dp=2", "--dry", "--json", "--out", tmp_path / "ledgers")
    said = json.loads(out)
    assert code == 0
    assert said["proven"]
    assert (said["classes"], said["world"]) == (1, 16)
    assert said["predicted_without_torch"] == "could not be imported"
    assert {row["what"] for row in said["checks"]} >= {"matrix products", "bytes of KV cache"}
    assert sorted(path.name for path in (tmp_path / "ledgers").iterdir()) == ["predicted.jsonl", "recorded.jsonl"]


def test_the_command_ends_in_1_where_they_differ(tmp_path: Path) -> None:
    code, out = command(
        config_only(tmp_path / "m", "even"), "--layout", "tp=2", "--dry", "--mutate", "doubled-all-reduce"
    )
    assert code == 1
    assert out.splitlines()[0].startswith("dry-run does NOT equal prediction: m under tp=2, 2 ranks, 1 rank class, ")
    assert "first difference: rank 0, layer 0" in out


@pytest.mark.parametrize(
    ("words", "kind", "says"),
    [
        (("nothing-here", "--layout", "tp=2", "--dry"), InputError, "nothing-here"),
        (("llama-3.2-1b", "--layout", "dp=131073", "--dry"), IllegalLayoutError, "131,073"),
        (("llama-3.2-1b", "--layout", "tp=3", "--dry", "--mutate", "lost"), InputError, "lost"),
        (("llama-3.2-1b", "--layout", "tp=2", "--dry", "--prompt-ids", "1,2"), InputError, "--prompt-ids"),
        (("llama-3.2-1b", "--layout", "pp=17", "--dry"), IllegalLayoutError, "17"),
        (("llama-3.2-1b", "--layout", "tp=2", "--dry", "--new-tokens", "0"), InputError, "--new-tokens"),
        (("llama-3.2-1b", "--layout", "tp=2", "--dry", "--ranks", "-1"), InputError, "--ranks"),
        (("llama-3.2-1b", "--layout", "tp=2", "--ranks", "1"), InputError, "--ranks without --dry"),
    ],
)
def test_bad_input_is_one_line(words: tuple[str, ...], kind: type[MeshwrightError], says: str) -> None:
    with pytest.raises(kind) as caught:
        command(*words)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_at_all_is_not_equal() -> None:
    assert not DryProof("m", parse_layout("tp=2"), 2, "scope").proven
