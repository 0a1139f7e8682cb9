"""The plain part of YAML: against PyYAML where it is installed, and by hand."""

from __future__ import annotations

import random

import pytest

from meshwright.engines import plainyaml
from meshwright.errors import InputError

TEXT = """\
# engine options
kv_cache_config:
  free_gpu_memory_fraction: 0.85   # of what is free
  enable_block_reuse: False
  dtype: fp8
tensor_parallel_size: 8
names: [a, "b, c", 'd''e', 3]
flow: {x: 1, y: [true, null], url: http://h:80/p}
context_servers:
  num_instances: 2
  urls:
      - "localhost:8001"
      - localhost:8002
jobs:
- name: one
  args:
  - -c
  - |
    set -e
    echo "a: b"
- - 1
  - 2
empty:
last: 'x # y'
"""


def test_reads_what_configurations_use() -> None:
    value = plainyaml.load(TEXT)
    assert value == {
        "kv_cache_config": {"free_gpu_memory_fraction": 0.85, "enable_block_reuse": False, "dtype": "fp8"},
        "tensor_parallel_size": 8,
        "names": ["a", "b, c", "d'e", 3],
        "flow": {"x": 1, "y": [True, None], "url": "http://h:80/p"},
        "context_servers": {"num_instances": 2, "urls": ["localhost:8001", "localhost:8002"]},
        "jobs": [{"name": "one", "args": ["-c", 'set -e\necho "a: b"\n']}, [1, 2]],
        "empty": None,
        "last": "x # y",
    }


def test_agrees_with_pyyaml() -> None:
    yaml = pytest.importorskip("yaml")
    assert plainyaml.load(TEXT) == yaml.safe_load(TEXT)


def _random(rng: random.Random, depth: int) -> object:
    kind = rng.randrange(8 if depth < 4 else 6)
    if kind == 6:
        return {rng.choice(["a", "b c", "yes", "1", "x:y", "-z"]) + str(i): _random(rng, depth + 1) for i in range(3)}
    if kind == 7:
        return [_random(rng, depth + 1) for _ in range(rng.randrange(3))]
    word = rng.choice(
        ["plain", "a: b", "# c", "no", "12", "1e3", "", " lead", "[x", "q\"'", "t\tx", "--flag", "*", "n\nm"]
    )
    return [word, rng.randrange(-9, 9), rng.random(), True, None, word][kind]


def test_written_text_reads_back() -> None:
    yaml = pytest.importorskip("yaml")
    rng = random.Random(3)
    for _ in range(300):
        value = {"root": _random(rng, 0)}
        text = plainyaml.dump(value)
        assert plainyaml.load(text) == _newlines(value)
        assert yaml.safe_load(text) == _newlines(value)


def _newlines(value: object) -> object:
    """Strings of several lines are written as literal blocks, which end with a newline."""
    if isinstance(value, dict):
        return {k: _newlines(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_newlines(v) for v in value]
    return value + "\n" if isinstance(value, str) and "\n" in value else value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &x 1\nb: *x", "line 1"),
        ("a: 1\n\tb: 2", "line 2"),
        ("a: !!python/object/apply:os.system [id]", "line 1"),
        ("a: [1, 2", "line 1"),
        ("a: 'x", "line 1"),
        ("a: 1\na: 2", "twice"),
        ("a: 1\n---\nb: 2", "second document"),
        ("a: 1\n  b: 2", "line 2"),
        ("<<: {a: 1}", "merge key"),
        ("a:\n" + "".join(" " * i + "- \n" for i in range(1, 60)), "deep"),
        ("a: " + "[" * 2000, "deep"),
        ("x" * (5 << 20), "MiB"),
    ],
)
def test_refuses_in_one_line(text: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        plainyaml.load(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


HOSTILE = {
    "spaces": "a" + " " * 2_000_000,
    "backslashes": '"' + "\\" * 2_000_000,
    "quotes": "a: " + "'" * 1_000_001,
    "dashes": "- " * 900_000,
}


@pytest.mark.timeout(5)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_lines_take_bounded_time(name: str) -> None:
    try:
        read = str(plainyaml.load(HOSTILE[name]))[:100]
    except InputError as error:
        read = str(error)
    assert len(read) < 200
