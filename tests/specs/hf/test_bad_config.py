"""Configurations that are damaged, contradictory or hostile: one clear line, bounded time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.specs.atlas import models
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.generic import generic
from meshwright.specs.hf.read import model_from_config, read_model
from meshwright.specs.hf.registry import find_reader
from meshwright.specs.hf.resolve import MAX_FILE_BYTES, parse

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "torch_dtype": "bfloat16",
}
DEEP = b'{"a":' * 200_000


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"hidden_size": 40', "not valid JSON"),
        (b"[1, 2]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"3", "not a JSON object"),
        (b"\x89PNG\r\n\x1a\n\x00\xff", "not UTF-8"),
        (b'{"a": 1, "a": 2}', "given twice"),
        (b'{"a": NaN}', "not a value of JSON"),
        (b'{"a": -Infinity}', "not a value of JSON"),
        (DEEP, "nested too deeply"),
        (b"[" * 500_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "digits"),
        (b"[" + b"[]," * 1_500_000 + b"[]]", "values"),
        (b" " * (MAX_FILE_BYTES + 1), "at most"),
    ],
    ids=range(15),
)
def test_files_that_are_no_configuration(data: bytes, says: str) -> None:
    start = time.monotonic()
    with pytest.raises(InputError, match=says) as error:
        parse(data, "config.json")
    assert str(error.value).startswith("config.json: ")
    assert "\n" not in str(error.value)
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", -32),
        ("hidden_size", 0),
        ("hidden_size", "4096"),
        ("hidden_size", 3.5),
        ("hidden_size", True),
        ("hidden_size", 10**30),
        ("hidden_size", [32]),
        ("hidden_size", None),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", "two"),
        ("num_attention_heads", 0),
        ("num_attention_heads", 10**6),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", 10**7),
        ("vocab_size", -64),
        ("head_dim", -8),
        ("tie_word_embeddings", "yes"),
        ("attention_bias", 1),
        ("torch_dtype", "int4"),
        ("torch_dtype", "int8"),
        ("architectures", "LlamaForCausalLM"),
        ("architectures", [1]),
        ("model_type", 7),
        ("max_position_embeddings", -1),
        ("quantization_config", "fp8"),
        ("text_config", [1]),
    ],
)
def test_one_bad_value_is_one_line_that_names_it(key: str, value: object) -> None:
    with pytest.raises(InputError) as error:
        model_from_config(LLAMA | {key: value}, "m", "some/config.json")
    message = str(error.value)
    assert message.startswith("some/config.json")
    assert "\n" not in message
    assert len(message) < 400


def test_messages_name_the_key_and_the_range() -> None:
    with pytest.raises(InputError, match=r"num_hidden_layers is '1000000000'; it must be 1 to 2048"):
        model_from_config(LLAMA | {"num_hidden_layers": 10**9}, "m", "m")
    with pytest.raises(InputError, match="4 attention heads are not a multiple of 3 KV heads"):
        model_from_config(LLAMA | {"num_key_value_heads": 3}, "m", "m")


def test_missing_sizes() -> None:
    for key in ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        with pytest.raises(InputError, match=key):
            model_from_config({k: v for k, v in LLAMA.items() if k != key}, "m", "m")


@pytest.mark.parametrize("raw", [{}, {"architectures": []}, {"text_config": {}}, {"architectures": ["X"]}])
def test_empty_configurations(raw: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="hidden_size"):
        model_from_config(raw, "m", "m")


def test_endless_wrappers() -> None:
    raw: dict[str, Any] = {}
    for _ in range(20_000):
        raw = {"text_config": raw}
    with pytest.raises(InputError):
        model_from_config(raw, "m", "m")


def test_special_files_are_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "config.json"
    os.symlink("/dev/zero", fifo)
    start = time.monotonic()
    with pytest.raises(InputError):
        read_model(str(tmp_path))
    assert time.monotonic() - start < 2


def test_a_named_pipe_is_refused_at_once(tmp_path: Path) -> None:
    """Opening a pipe that nobody writes to would wait for ever."""
    pipe = tmp_path / "config.json"
    os.mkfifo(pipe)
    for ref in (pipe, tmp_path):
        code = f"from meshwright.specs.hf.read import read_model; read_model({str(ref)!r})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
        assert "not a regular file" in done.stderr


def test_largest_accepted_file_takes_bounded_memory(tmp_path: Path) -> None:
    """Just under the limits on size and on values: under 700 MiB and a few seconds."""
    path = tmp_path / "config.json"
    path.write_bytes(b'{"x": [' + b"{}," * 990_000 + b'{}], "y": "' + b"a" * (24 << 20) + b'"}')
    code = f"""
import resource
from meshwright.errors import InputError
from meshwright.specs.hf.read import read_model
try:
    read_model({str(path)!r})
except InputError:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert 0 < int(out.stdout) * 1024 < 700 << 20


junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.integers(-2, 4096),
    st.floats(allow_nan=True),
    st.text(max_size=12),
    st.lists(st.integers(-1, 5), max_size=5),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)


def attempt(raw: dict[str, Any]) -> None:
    """Reading ends with a spec or with one line, without the net in ``model_from_config`` catching anything."""
    try:
        spec = model_from_config(raw, "m", "m")
    except InputError as error:
        message = str(error)
    else:
        message = ""
        assert spec.weight_bytes() > 0
        assert all(f.numel >= 0 for f in spec.families)
    assert "\n" not in message
    assert "contradicts itself" not in message, message


@settings(max_examples=150, deadline=2000, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from([*LLAMA, "head_dim", "layer_types", "sliding_window", "foo"]), junk, max_size=4))
def test_any_values_in_llama(changes: dict[str, Any]) -> None:
    attempt(LLAMA | changes)


#: One model for each way of reading a dense architecture.
NAMES = [
    "qwen3-8b", "qwen2.5-7b-instruct-awq", "qwen2.5-7b-instruct-gptq-int4", "phi-2", "phi-3-mini-4k", "glm-4-9b",
    "glm-4-9b-0414", "gpt2", "opt-350m", "bloom-560m", "mpt-7b", "falcon-40b", "falcon-rw-1b", "starcoder",
    "starcoder2-7b", "gpt-j-6b", "gpt-neo-2.7b", "pythia-1b", "gemma-2-2b", "command-r-plus", "command-r7b",
    "stablelm-2-12b", "olmo-2-7b", "internlm2-7b", "baichuan2-7b", "qwen-7b", "apertus-8b", "minitron-8b",
    "seed-oss-36b", "exaone-4.0-32b", "smollm3-3b", "mimo-7b-base", "llama-3.3-nemotron-super-49b",
    "qwen3-32b-fp8-static-pertensor", "deepseek-v3.1-nvfp4",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_any_one_value_in_real_configurations(name: str) -> None:
    config, hf_quant, _ = models.entry(name)

    @settings(max_examples=15, deadline=3000, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(sorted(config)), junk)
    def check(key: str, value: object) -> None:
        attempt(config | {key: value})

    check()
    assert hf_quant is None or isinstance(hf_quant, dict)


@settings(max_examples=100, deadline=2000)
@given(
    st.dictionaries(st.sampled_from([*LLAMA, "num_experts", "kv_lora_rank", "n_layer", "dim", "q"]), junk, max_size=9)
)
def test_any_values_in_unknown_architectures(changes: dict[str, Any]) -> None:
    attempt(LLAMA | {"architectures": None, "model_type": "foo"} | changes)


@settings(max_examples=60, deadline=2000)
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    message = ""
    try:
        parse(data, "m")
    except InputError as error:
        message = str(error)
    assert "\n" not in message


def test_the_net_is_needed_for_nothing_above_but_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that trips over a value ends with one line too."""
    reader = find_reader("llama")
    assert reader is not None
    from meshwright.specs.hf import registry

    monkeypatch.setitem(registry.READERS, "LlamaForCausalLM", lambda f, dtype: 1 // 0)
    with pytest.raises(InputError, match="contradicts itself"):
        model_from_config(LLAMA, "m", "m")
    with pytest.raises(InputError):
        generic(Fields(json.loads("{}"), "m"), "bf16")
