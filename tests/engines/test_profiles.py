"""Engines are found by the names people type, split layers as they do, and pull in nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

from meshwright.engines import FOLDERS, profile, profiles
from meshwright.errors import InputError
from meshwright.specs.layout import Layout
from meshwright.specs.nearest import explain
from tests.specs import builders


@pytest.mark.parametrize(
    ("name", "engine", "version"),
    [
        ("vllm", "vllm", "0.33.0"),
        ("vllm-0.33", "vllm", "0.33.0"),
        ("vLLM-0.32.0", "vllm", "0.32.0"),
        ("vllm==0.26.0", "vllm", "0.26.0"),
        ("meshwright", "meshwright", "0.1"),
    ],
)
def test_names(name: str, engine: str, version: str) -> None:
    found = profile(name)
    assert (found.engine, found.version) == (engine, version)


def test_unknown_engine_names_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"unknown engine 'tgi'; known: vllm, "):
        profile("tgi")


@pytest.mark.parametrize(
    ("layers", "stages", "vllm", "own"),
    [
        (80, 3, (27, 27, 26), (27, 27, 26)),
        (61, 2, (31, 30), (31, 30)),
        (61, 4, (15, 15, 16, 15), (16, 15, 15, 15)),
        (94, 4, (23, 24, 24, 23), (24, 24, 23, 23)),
        (62, 8, (7, 8, 8, 8, 8, 8, 8, 7), (8, 8, 8, 8, 8, 8, 7, 7)),
        (40, 3, (13, 14, 13), (14, 13, 13)),
        (5, 1, (5,), (5,)),
        (7, 4, (2, 2, 2, 1), (2, 2, 2, 1)),
    ],
)
def test_layer_split(layers: int, stages: int, vllm: tuple[int, ...], own: tuple[int, ...]) -> None:
    for name in ("vllm", "vllm-0.32", "vllm-0.26"):
        assert profile(name).split_layers(layers, stages) == vllm
    assert profile("meshwright").split_layers(layers, stages) == own


@pytest.mark.parametrize("name", [f"{e}-{v}" for e in FOLDERS for v in profiles(e)])
def test_splits_hold_every_layer_once_and_leave_no_stage_empty(name: str) -> None:
    split = profile(name).split_layers
    for layers in range(1, 130, 7):
        for stages in range(1, layers + 1):
            counts = split(layers, stages)
            assert (len(counts), sum(counts)) == (stages, layers)
            # torchtitan counts embedding and head as a layer each: the last stage may hold two layers less
            assert max(counts) - min(counts) <= (2 if name.startswith("torchtitan") else 1)


@pytest.mark.parametrize("name", ["vllm", "vllm-0.32", "vllm-0.26"])
def test_versions_agree_on_what_a_layout_needs(name: str) -> None:
    spec = builders.gqa(heads=40, kv_heads=40)
    codes = {r.code for r in explain(spec, Layout(tp=3), profile(name))}
    assert "heads_divide_tp" in codes
    assert explain(spec, Layout(tp=4), profile(name)) == []


def test_engines_import_nothing_heavy() -> None:
    code = (
        "import sys, meshwright.engines, meshwright.specs.nearest, meshwright.specs.placement;"
        "bad = {'torch', 'numpy', 'polars', 'plotly', 'pydantic'} & set(sys.modules); print(sorted(bad))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_unknown_version_names_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"no profile for 'vllm-0\.11'; known: vllm-0\.33, vllm-0\.32, vllm-0\.26"):
        profile("vllm-0.11")
