"""The command line: exit codes, stable JSON keys, one clear line for every bad input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli.main import main

Run = tuple[int, str, str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def call(*args: str) -> Run:
        monkeypatch.setattr(sys, "argv", ["meshwright", *args])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "my-model"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 80,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


SERVE_KEYS = {
    "verdict",
    "layout",
    "fits",
    "legal",
    "reasons",
    "memory",
    "kv_cache_tokens",
    "alternatives",
    "rejected",
    "commands",
}
RANK_KEYS = {
    "rank",
    "coordinate",
    "weights_bytes",
    "activations_bytes",
    "runtime_bytes",
    "total_bytes",
    "capacity_bytes",
}


def test_serve_json_has_the_stable_keys_and_one_row_a_rank(run, model: str) -> None:
    code, out, _ = run(
        "plan", "serve", model, "--on", "2x4xA100-80G@ib-200g", "--layout", "tp=4,pp=2", "--engine", "vllm", "--json"
    )
    data = json.loads(out)
    assert code == 0
    assert data.keys() >= SERVE_KEYS
    assert (data["layout"]["tp"], data["layout"]["pp"]) == (4, 2)
    ranks = data["memory"]["ranks"]
    assert [r["rank"] for r in ranks] == list(range(8))
    for row in ranks:
        assert row.keys() >= RANK_KEYS | {"kv_cache_bytes"}
        parts = ("weights_bytes", "kv_cache_bytes", "activations_bytes", "runtime_bytes")
        assert row["total_bytes"] == sum(row[p] for p in parts)
    assert sum(r["weights_bytes"] for r in ranks) >= 70.5e9 * 2
    assert any("--tensor-parallel-size 4" in c["text"] for c in data["commands"])


def test_train_json_has_gradients_and_optimizer(run, model: str) -> None:
    code, out, _ = run(
        *("plan", "train", model, "--on", "8x8xH100-SXM@ib-400g", "--seq", "8192", "--global-batch", "512"),
        *("--layout", "tp=8,pp=4,dp=2,zero=1,sp=on", "--json"),
    )
    data = json.loads(out)
    assert code == (0 if data["ok"] else 1)
    assert len(data["memory"]["ranks"]) == 64
    first, last = data["memory"]["ranks"][0], data["memory"]["ranks"][-1]
    assert first.keys() >= RANK_KEYS | {"gradients_bytes", "optimizer_bytes"}
    assert first["activations_bytes"] != last["activations_bytes"]


def test_the_command_is_the_scored_point(run, model: str) -> None:
    code, out, _ = run(
        *("plan", "serve", model, "--on", "8xH100-SXM", "--isl", "2000", "--osl", "300", "--concurrency", "64"),
        *("--max-num-seqs", "48", "--max-num-batched-tokens", "4096", "--gpu-memory-utilization", "0.9", "--json"),
    )
    assert code == 0
    text = json.loads(out)["commands"][0]["text"]
    for words in (
        "--max-model-len 2300",
        "--max-num-seqs 48",
        "--max-num-batched-tokens 4096",
        "--gpu-memory-utilization 0.9",
    ):
        assert words in text


def test_terminal_output_begins_with_the_verdict(run, model: str) -> None:
    code, out, _ = run("plan", "serve", model, "--on", "2x4xA100-80G@ib-200g")
    assert code == 0
    assert out.startswith("fits: ")
    assert "What to type" in out


def test_exit_code_is_1_for_no(run, model: str) -> None:
    illegal = run("plan", "serve", model, "--on", "8xH100-SXM", "--layout", "tp=3")
    assert illegal[0] == 1
    assert illegal[1].startswith("illegal: 64 ")
    assert run("plan", "serve", model, "--on", "1xRTX-3090")[0] == 1


BAD = [
    (("plan", "serve", "no-such-model", "--on", "8xH100-SXM"), "no-such-model"),
    (("plan", "serve", "MODEL", "--on", "8xH999"), "H999"),
    (("plan", "serve", "MODEL", "--on", "0x8xH100-SXM"), "0"),
    (("plan", "serve", "MODEL", "--on", "8xH100-SXM@carrier-pigeon"), "carrier-pigeon"),
    (("plan", "serve", "MODEL", "--on", "8xH100-SXM", "--layout", "tp=0"), "tp=0"),
    (("plan", "serve", "MODEL", "--on", "8xH100-SXM", "--layout", "tp=two"), "two"),
    (("plan", "serve", "MODEL", "--on", "8xH100-SXM", "--layout", "turbo=2"), "turbo"),
    (("plan", "serve", "MODEL", "--on", "8xH100-SXM", "--engine", "warp"), "warp"),
    (("plan", "serve", "MODEL", "--on", "8xH100-SXM", "--ttft", "soon"), "soon"),
    (("plan", "serve", "MODEL", "--on", "8xH100-SXM", "--isl", "-5"), "-5"),
    (("plan", "serve", "MODEL", "--on", "8xH100-SXM", "--gpu-memory-utilization", "1.5"), "1.5"),
    (("plan", "serve", "MODEL", "--on", "8xH100-SXM", "--max-model-len", "10"), "10"),
    (("plan", "serve", "MODEL", "--on", "8xH100-SXM", "--split", "--layout", "tp=2"), "--split"),
    (("plan", "serve", "MODEL", "--on", "8xH100-SXM", "--kv-cache-dtype", "float7"), "float7"),
    (("plan", "serve", "MODEL", "--on", "8xH100-SXM", "--dtype", "float7"), "float7"),
    (("plan", "serve", "MODEL", "--on", "8xH100-SXM", "--quantization", "magic"), "magic"),
    (("plan", "serve", "MODEL", "--on", "8xH100-SXM", "--ledger", "--phase", "lunch"), "lunch"),
    (("plan", "serve", "MODEL", "--on", "8xH100-SXM", "--html", "/proc/nope/x.html"), "/proc/nope"),
    (("plan", "train", "MODEL", "--on", "8xH100-SXM", "--optimizer", "hope"), "hope"),
    (("plan", "train", "MODEL", "--on", "8xH100-SXM", "--recompute", "maybe"), "maybe"),
    (("plan", "train", "MODEL", "--on", "8xH100-SXM", "--seq", "0"), "0"),
]


@pytest.mark.parametrize(("args", "named"), BAD, ids=[" ".join(a[2:])[:60] for a, _ in BAD])
def test_bad_input_is_one_clear_line_and_exit_2(run, model: str, args: tuple[str, ...], named: str) -> None:
    code, out, err = run(*(model if a == "MODEL" else a for a in args))
    assert code == 2, (out, err)
    assert out == ""
    assert 1 <= len(err.strip().splitlines()) <= 2
    assert named in err
    assert "Traceback" not in err


def test_layout_whose_product_exceeds_the_cluster_names_both_numbers(run, model: str) -> None:
    code, out, _ = run("plan", "serve", model, "--on", "1x4xH100-SXM", "--layout", "tp=4,pp=2")
    assert code == 1
    assert "8" in out.splitlines()[0]
    assert "4" in out.splitlines()[0]


def test_page_is_one_offline_file_and_escapes_what_the_user_wrote(run, model: str, tmp_path: Path) -> None:
    evil_dir = Path(model).rename(tmp_path / "a<img src=x onerror=alert(1)>")
    page = tmp_path / "out" / "plan.html"
    code, out, _ = run("plan", "serve", str(evil_dir), "--on", "2x4xA100-80G@ib-200g", "--html", str(page))
    assert code == 0
    assert str(page) in out
    text = page.read_text()
    assert "<img src=x" not in text
    assert "&lt;img src=x" in text
    assert re.search(r"<script[^>]+src=", text) is None
    assert re.search(r"<link[^>]+href=", text) is None
    assert text.count("<html") == 1


def test_ledger_is_printed_by_layer_and_saved(run, model: str, tmp_path: Path) -> None:
    from meshwright.ledger import store

    folder, lines = tmp_path / "ledger", tmp_path / "ledger.jsonl"
    args = ("plan", "serve", model, "--on", "2x4xA100-80G@ib-200g", "--layout", "tp=4,pp=2")
    code, out, _ = run(*args, "--ledger", "--phase", "decode", "--save-ledger", str(folder))
    assert code == 0
    assert "all_reduce" in out
    assert "layers 0-39 (40x)" in out
    assert "prefill" not in out.split("Ledger")[1]
    assert run(*args, "--save-ledger", str(lines))[0] == 0
    assert store.read(folder) == store.read(lines)


def test_strategies_say_what_each_cuts_and_where_it_belongs(run, model: str) -> None:
    code, out, _ = run("plan", "serve", model, "--on", "2x4xA100-80G@ib-200g", "--strategies", "--json")
    assert code == 0
    rows = {r["strategy"]: r for r in json.loads(out)["strategies"]}
    assert rows.keys() >= {"TP", "PP", "DP", "EP", "SP", "CP", "ZeRO-3"}
    assert rows["TP"]["payload_bytes"] > rows["PP"]["payload_bytes"] > rows["DP"]["payload_bytes"] == 0


def test_models_and_devices_are_listed_with_sources(run) -> None:
    code, out, _ = run("plan", "--models", "--json")
    assert code == 0
    assert len(json.loads(out)["models"]) >= 80
    code, out, _ = run("plan", "--devices", "--json")
    devices = json.loads(out)["devices"]
    assert len(devices) >= 30
    assert all(d["source"] for d in devices)


def test_the_installed_command_leaves_torch_polars_and_plotly_alone(model: str) -> None:
    program = (
        "import sys; sys.argv = ['meshwright', *sys.argv[1:]]\n"
        "from meshwright.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert stop.code == 0, stop.code\n"
        "heavy = {'torch', 'polars', 'plotly', 'numpy', 'pydantic', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "plan", "serve", model, "--on", "8xH100-SXM", "--ledger", "--strategies"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--block-size", "0", "--block-size 0 is out of range"),
        ("--max-num-batched-tokens", "-1", "--max-num-batched-tokens -1 is out of range"),
        ("--dtype", "bool", "--dtype 'bool' is not one of auto, bfloat16"),
    ],
)
def test_values_that_no_engine_takes(run, flag: str, value: str, says: str) -> None:
    code, out, err = run("plan", "serve", "llama-3.1-8b", "--on", "1xH100", flag, value)
    assert (code, out) == (2, "")
    assert says in err


@pytest.mark.parametrize("dtype", ["auto", "half", "bfloat16", "bf16"])
def test_dtypes_of_the_engine_are_taken(run, dtype: str) -> None:
    code, out, _ = run("plan", "serve", "llama-3.1-8b", "--on", "1xH100", "--dtype", dtype, "--json")
    assert code == 0
    assert json.loads(out)["memory"]["worst"]["weights_bytes"] >> 30 == 14


def test_nothing_to_type_where_the_engine_would_not_start(run) -> None:
    code, out, _ = run("plan", "serve", "llama-3.1-70b", "--on", "8xRTX-4090", "--layout", "dp=8", "--json")
    assert code == 1
    assert json.loads(out)["commands"] == []
    part = run("plan", "serve", "llama-3.1-8b", "--on", "1xH100", "--concurrency", "5000", "--json")
    assert part[0] == 1
    assert json.loads(part[1])["commands"], "a layout that holds a part of the requests starts"
