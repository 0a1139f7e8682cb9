"""``meshwright run generate``: text or ids in, tokens out; every mistake is one line and an exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.errors import MeshwrightError
from tests.runtime import tiny
from tests.shared import ROOT

IDS = ",".join(map(str, tiny.PROMPTS[0]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("run") / "tiny", "llama")


def _run(*words: object) -> str:
    result = CliRunner().invoke(app, ["run", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def _refused(*words: object) -> str:
    with pytest.raises(MeshwrightError) as caught:
        _run(*words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("layout", ["tp=1", "tp=2", "pp=2,stage_layers=4+1"])
def test_tokens_are_those_of_transformers(folder: Path, layout: str) -> None:
    second = ",".join(map(str, tiny.PROMPTS[1]))
    words = ("--prompt-ids", IDS, "--prompt-ids", second, "--max-new-tokens", 6, "--json")
    out = json.loads(_run("generate", folder, "--layout", layout, *words))
    assert out["tokens"] == tiny.oracle(folder)[0][:2]
    assert 0 < out["first_token_s"] <= out["total_s"]


def test_a_tokenizer_turns_text_into_ids_and_back(folder: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    words = {f"w{i}": i for i in range(131)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = " ".join(f"w{i}" for i in tiny.PROMPTS[0])
    out = _run("generate", tmp_path, "--prompt", text, "--max-new-tokens", 6)
    assert " ".join(f"w{i}" for i in tiny.oracle(folder)[0][0]) in out
    (tmp_path / "tokenizer.json").write_text('{"model": 7}')
    assert "not a tokenizer" in _refused("generate", tmp_path, "--prompt", text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "0 prompts; give 1 to"),
        (("--prompt", "hello"), "no tokenizer.json"),
        (("--prompt-ids", "1,x"), "token ids are needed"),
        (("--prompt-ids", ""), "prompt 0 is empty"),
        (("--prompt-ids", "131"), "token id 131 is outside the vocabulary of 131"),
        (("--prompt-ids", "1", "--max-new-tokens", "256"), "exceed the 256 positions"),
        (("--prompt-ids", "1", "--max-new-tokens", "0"), "--max-new-tokens 0 is out of range"),
        (("--prompt-ids", "1", "--chunk", "0"), "chunk is 0; at least 1"),
        (("--prompt-ids", "1", "--layout", "tp=2,dcp=2"), "does not execute dcp yet"),
        (("--prompt-ids", "1", "--layout", "tp=4"), "3 KV heads can neither be divided nor replicated"),
        (("--prompt-ids", "1", "--layout", "pp=6"), "5 layers"),
        (("--prompt-ids", "1", "--layout", "tp=x"), "not a whole number"),
        (("--prompt-ids", "1", "--layout", "dp=80"), "80 local ranks"),
        (("--prompt-ids", "1", "--dtype", "f8"), "--dtype 'f8' is not one of"),
        (("--prompt-ids", "1", "--temperature", "-1"), "needed: temperature 0 to 100"),
        (("--prompt-ids", "1", "--timeout", "soon"), "is not a duration"),
        (("--prompt-ids", "1", "--device", "tpu"), "--device 'tpu' is not one of"),
    ],
)
def test_mistakes_end_in_one_line(folder: Path, words: tuple[str, ...], said: str) -> None:
    assert said in _refused("generate", folder, *words)


def test_mistakes_with_the_folder(tmp_path: Path) -> None:
    assert "config.json: cannot be read" in _refused("generate", tmp_path / "none", "--prompt-ids", "1")
    (tmp_path / "config.json").write_text(json.dumps(tiny.BASE | {"model_type": "granite"}))
    assert "runtime cannot run model_type 'granite'" in _refused("generate", tmp_path, "--prompt-ids", "1")


def test_the_launcher_needs_no_torch(folder: Path) -> None:
    """The ranks import it; a refusal comes without waiting for it."""
    program = (
        "import sys\n"
        "from meshwright.cli.main import app\n"
        "try:\n"
        f"    app(['run', 'generate', {str(folder)!r}, '--prompt-ids', '1', '--layout', 'dp=80'])\n"
        "except Exception as error:\n"
        "    assert '80 local ranks' in str(error), error\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=ROOT)


@pytest.mark.slow
def test_the_same_under_torchrun(folder: Path) -> None:
    words = ["run", "generate", str(folder), "--layout", "tp=2", "--prompt-ids", IDS, "--max-new-tokens", "6", "--json"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    main = ["-m", "meshwright.cli.main"]
    done = subprocess.run(
        [*launcher, "2", *main, *words], capture_output=True, text=True, timeout=110, cwd=ROOT, env=env, check=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert [json.loads(line)["tokens"] for line in lines] == [tiny.oracle(folder)[0][:1]]
    wrong = subprocess.run(
        [*launcher, "1", *main, *words], capture_output=True, text=True, timeout=110, cwd=ROOT, env=env, check=False
    )
    assert wrong.returncode != 0
    assert "the layout needs 2 ranks, torchrun started 1; use --nproc-per-node 2" in wrong.stderr
