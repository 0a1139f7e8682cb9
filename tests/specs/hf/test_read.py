"""What a name stands for: file, directory, atlas, hub cache, hub; and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.specs.hf import resolve
from meshwright.specs.hf.read import model_from_config, read_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "torch_dtype": "float16",
}
#: embedding and head, two layers of attention, MLP and norms, last norm
PARAMETERS = 2 * 64 * 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48 + 2 * 32) + 32


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "hub-cache"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    def no_network(*_: object, **__: object) -> object:
        raise urllib.error.URLError("no network in tests")

    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    return cache


def put(folder: Path, config: dict[str, Any] = CONFIG) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_file_and_directory(tmp_path: Path) -> None:
    folder = put(tmp_path / "model")
    for ref in (str(folder), str(folder / "config.json"), f"{folder}/"):
        spec = read_model(ref)
        assert spec.parameters() == PARAMETERS
        assert spec.weight_bytes() == 2 * PARAMETERS
        assert spec.dtype == "f16"
        assert spec.source.endswith("config.json")
        assert not spec.assumptions


def test_modelopt_file_beside_the_config_is_read(tmp_path: Path) -> None:
    folder = put(tmp_path / "model")
    quant = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(quant))
    spec = read_model(str(folder))
    assert spec.quantization is not None
    assert (spec.quantization.weight_bits, spec.quantization.kv_dtype) == (8, "f8_e4m3")
    assert spec.parameters() == PARAMETERS


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json"):
        read_model(str(tmp_path))


def test_an_empty_folder_does_not_hide_a_model_of_the_atlas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-32b").mkdir()
    assert read_model("qwen3-32b").hidden == 5120
    put(tmp_path / "qwen3-32b")
    assert read_model("qwen3-32b").hidden == 32


@pytest.mark.parametrize("ref", ["./nothing", "/nothing/at/all", "~/nothing-here", "nothing.json"])
def test_missing_path(ref: str) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_model(ref)


@pytest.mark.parametrize(
    ("ref", "hidden"),
    [
        ("qwen3-32b", 5120),
        ("Qwen3-32B", 5120),
        ("Qwen/Qwen3-235B-A22B-FP8", 4096),
        ("meta-llama/Llama-2-13b-hf", 5120),
        ("llama-3.1-70b", 8192),
        ("deepseek-v3", 7168),
        ("DEEPSEEK-AI/DEEPSEEK-V3", 7168),
    ],
)
def test_atlas_names_in_any_case(ref: str, hidden: int) -> None:
    spec = read_model(ref)
    assert (spec.hidden, spec.name) == (hidden, ref)
    assert spec.source.startswith("atlas ")


@pytest.mark.parametrize(
    ("ref", "entry"),
    [
        ("Qwen3_30B_a3B", "qwen3-30b-a3b"),
        ("LLAMA3.1_405B", "llama-3.1-405b"),
        ("GPT OSS 120B", "gpt-oss-120b"),
        ("DeepSeekV3", "deepseek-v3"),
        ("Nemotron_3_Super", "nemotron-3-super-120b-a12b"),
    ],
)
def test_other_spellings(ref: str, entry: str) -> None:
    assert read_model(ref).families == read_model(entry).families
    assert read_model(ref).assumptions == read_model(entry).assumptions


@pytest.mark.parametrize("ref", ["unsloth/Llama-3.1-8B", "someone/llama-3.1-8b-instruct-hf", "llama-3.1-8b-hf"])
def test_repositories_of_others_are_taken_for_what_their_name_says_and_that_is_said(ref: str) -> None:
    spec = read_model(ref)
    assert spec.families == read_model("llama-3.1-8b").families
    assert spec.assumptions == (f"{ref} is taken to have the tensors of the atlas entry llama-3.1-8b",)


def test_the_hub_cache_wins_over_a_similar_name(empty_cache: Path) -> None:
    repo = empty_cache / "models--acme--llama-3.1-8b"
    put(repo / "snapshots" / "abc")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    assert read_model("acme/llama-3.1-8b").parameters() == PARAMETERS


@pytest.mark.parametrize(
    "ref",
    [
        "Llama-3.2-70B-Instruct",
        "meta-llama/Llama-3.2-70B-Instruct",
        "llama-3.2-70b",
        "Llama-3.2-70B",
        "qwen3-33b",
        "gpt5",
    ],
)
def test_unknown_names_are_refused(ref: str) -> None:
    with pytest.raises(InputError) as error:
        read_model(ref)
    assert "meshwright plan --models" in str(error.value)
    assert "\n" not in str(error.value)


def test_near_names_are_offered() -> None:
    with pytest.raises(InputError, match=r"llama-3\.1-70b"):
        read_model("llama-3.1-70bb")
    with pytest.raises(InputError, match=r"Qwen3-32B|qwen3-32b"):
        read_model("Qwen/Qwen3-32BB", allow_online=False)


@pytest.mark.parametrize("ref", ["", "  ", "a\nb", "a\x00b", "x" * 5000])
def test_hostile_references(ref: str) -> None:
    with pytest.raises(InputError) as error:
        read_model(ref)
    assert len(str(error.value)) < 600


def test_hub_cache(empty_cache: Path) -> None:
    repo = empty_cache / "models--acme--small"
    put(repo / "snapshots" / ("a" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    assert read_model("acme/small").parameters() == PARAMETERS


@pytest.mark.parametrize("home", ["HF_HOME", "XDG_CACHE_HOME"])
def test_hub_cache_by_other_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv(home, str(tmp_path / "home"))
    inner = "hub" if home == "HF_HOME" else "huggingface/hub"
    repo = tmp_path / "home" / inner / "models--acme--small"
    put(repo / "snapshots" / "abc")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc\n")
    assert read_model("acme/small").parameters() == PARAMETERS


@pytest.mark.parametrize("revision", ["../../../../outside", "..", "/etc", "", "a/b"])
def test_a_cache_reference_cannot_leave_the_cache(tmp_path: Path, empty_cache: Path, revision: str) -> None:
    put(tmp_path / "outside")
    repo = empty_cache / "models--acme--small"
    (repo / "refs").mkdir(parents=True)
    (repo / "snapshots").mkdir()
    (repo / "refs" / "main").write_text(revision)
    with pytest.raises(InputError):
        read_model("acme/small", allow_online=False)


@pytest.mark.parametrize("ref", ["../evil", "a/../b", "acme/..", "a/b/c", "acme/x?y", "acme/x#y", "-a/b"])
def test_what_is_no_hub_id_never_goes_online(ref: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(resolve, "_fetch", lambda ref, file, deadline: asked.append(ref))
    with pytest.raises(InputError):
        read_model(ref)
    assert asked == []


class Answer:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def read(self, size: int) -> bytes:
        chunk, self.data = self.data[:size], self.data[size:]
        return chunk

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def serve(monkeypatch: pytest.MonkeyPatch, data: bytes) -> list[urllib.request.Request]:
    requests: list[urllib.request.Request] = []

    def urlopen(request: urllib.request.Request, timeout: float) -> Answer:
        requests.append(request)
        assert 0 < timeout <= resolve.TIMEOUT_S
        if request.full_url.endswith("hf_quant_config.json"):
            raise urllib.error.HTTPError(request.full_url, 404, "not found", {}, None)  # type: ignore[arg-type]
        return Answer(data)

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return requests


def test_online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    requests = serve(monkeypatch, json.dumps(CONFIG).encode())
    assert read_model("acme/unheard-of").parameters() == PARAMETERS
    assert requests[0].full_url == "https://huggingface.co/acme/unheard-of/resolve/main/config.json"
    # The token is a header that a redirect to another host does not repeat.
    assert requests[0].unredirected_hdrs == {"Authorization": "Bearer secret"}
    assert "Authorization" not in requests[0].headers


def test_online_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, b" " * (resolve.MAX_FILE_BYTES + 10))
    with pytest.raises(InputError, match="too large"):
        read_model("acme/unheard-of")


@pytest.mark.parametrize("code", [401, 403, 404, 500])
def test_online_refusals_are_one_line(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def urlopen(request: urllib.request.Request, timeout: float) -> Answer:
        raise urllib.error.HTTPError(request.full_url, code, "no", {}, None)  # type: ignore[arg-type]

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    with pytest.raises(InputError) as error:
        read_model("acme/unheard-of")
    assert "\n" not in str(error.value)


def test_offline_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "_fetch", lambda *_: pytest.fail("went online"))
    with pytest.raises(InputError, match="unknown model"):
        read_model("acme/unheard-of", allow_online=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match="unknown model"):
        read_model("acme/unheard-of")


def test_no_network_is_one_line() -> None:
    with pytest.raises(InputError, match="cannot be reached"):
        read_model("acme/unheard-of")


def test_keys_of_transformers_4_and_5_mean_the_same() -> None:
    new = {k: v for k, v in CONFIG.items() if k != "torch_dtype"} | {"dtype": "float16"}
    assert model_from_config(new, "m", "m") == model_from_config(CONFIG, "m", "m")


def test_unknown_architecture_is_read_with_a_sentence() -> None:
    spec = model_from_config({**CONFIG, "architectures": ["FooForCausalLM"], "model_type": "foo"}, "m", "m")
    assert spec.parameters() == PARAMETERS
    assert len(spec.assumptions) == 1
    assert "FooForCausalLM" in spec.assumptions[0]
    assert "2 KV heads of 8" in spec.assumptions[0]


def test_unknown_class_of_a_known_model_type_is_said() -> None:
    spec = model_from_config({**CONFIG, "architectures": ["FooForCausalLM"]}, "m", "m")
    assert spec.parameters() == PARAMETERS
    assert spec.assumptions == ("the class FooForCausalLM is unknown; read as model type llama",)


def test_unknown_mixture_of_experts_is_read_as_one() -> None:
    foo = {
        "architectures": None,
        "model_type": "foo",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    spec = model_from_config({**CONFIG, **foo, "first_k_dense_replace": 1}, "m", "m")
    moe = 8 * 32 + 8 * 3 * 16 * 32
    assert spec.parameters() == PARAMETERS - 3 * 32 * 48 + moe
    assert spec.moe is not None
    assert (spec.layers[0].mlp is not None, spec.layers[1].moe) == (True, spec.moe)
    assert "8 experts, 2 a token" in spec.assumptions[0]


def test_unknown_wrapper_reads_its_text_part() -> None:
    wrapper = {"architectures": ["FooForConditionalGeneration"], "text_config": CONFIG, "vision_config": {}}
    spec = model_from_config(wrapper, "m", "m")
    assert (spec.parameters(), spec.model_type) == (PARAMETERS, "llama")
    assert "only its text part" in spec.assumptions[0]


def test_reading_imports_no_heavy_library_and_only_the_reader_it_needs() -> None:
    code = """
import sys
from meshwright.specs.hf.read import read_model
read_model('llama-3.1-70b')
heavy = {'torch', 'numpy', 'polars', 'plotly', 'pydantic', 'transformers', 'urllib.request'}
readers = {'meshwright.specs.hf.' + name for name in ('legacy', 'mla', 'moe', 'mamba', 'vision', 'quant')}
assert 'meshwright.specs.hf.dense' in sys.modules
assert not (heavy | readers) & set(sys.modules), (heavy | readers) & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
