"""A boot log beside the prediction, and the calibration that a later plan reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.api import plan_serve
from meshwright.errors import InputError
from meshwright.judge import boot
from meshwright.report.as_json import plan_json
from meshwright.specs.units import GIB
from meshwright.specs.workload import Serve

LOG = """\
INFO 11-20 10:00:00 [core.py:58] Initializing a V1 LLM engine (v0.33.0) with config: \
model='meta-llama/Llama-3.1-8B-Instruct', speculative_config=None, tensor_parallel_size=1, pipeline_parallel_size=1
INFO 11-20 10:00:10 [gpu_model_runner.py:2653] Model loading took 14.9889 GiB memory and 3.1 seconds
INFO 11-20 10:00:20 [gpu_worker.py:298] Available KV cache memory: 55.20 GiB
INFO 11-20 10:00:20 [kv_cache_utils.py:1087] GPU KV cache size: 452,192 tokens, Maximum concurrency for 8,192 tokens \
per request: 55.20x
INFO 11-20 10:00:30 [gpu_model_runner.py:3480] CUDA graph pool memory: 0.55 GiB (actual), 0.50 GiB (estimated)
"""

WORK = Serve(isl=1024, osl=256, max_model_len=8192)


def written(tmp_path: Path, text: str = LOG) -> Path:
    path = tmp_path / "boot.log"
    path.write_text(text)
    return path


def test_terms_are_compared_with_the_plan(tmp_path: Path) -> None:
    log = boot.read_log(written(tmp_path))
    plan = plan_json(plan_serve("llama-3.1-8b", "H100-SXM", WORK, layout="tp=1"))
    rows = {r.term: r for r in boot.compare(log, plan)}
    assert rows["weights"].printed == pytest.approx(14.9889 * GIB, rel=1e-6)
    assert abs(rows["weights"].relative or 1) < 0.001
    assert rows["kv_cache_tokens"].printed == 452192
    assert abs(rows["kv_cache"].relative or 1) < 0.02
    assert rows["activations"].printed is None
    assert rows["activations"].predicted


def test_a_saved_log_replaces_the_model_of_the_same_degrees_only(tmp_path: Path) -> None:
    saved = tmp_path / "cal.json"
    boot.save_calibration(boot.read_log(written(tmp_path)), saved)
    one = plan_serve("llama-3.1-8b", "H100-SXM", WORK, layout="tp=1", calibration=saved)
    assert one.chosen is not None
    graphs = [h for h in one.chosen.memory.ranks[0].holdings if h.tensor == "cuda_graphs"]
    assert [(h.bytes, h.source) for h in graphs] == [(int(0.55 * GIB), "calibrated")]
    two = plan_serve("llama-3.1-8b", "2xH100-SXM", WORK, layout="tp=2", calibration=saved)
    plain = plan_serve("llama-3.1-8b", "2xH100-SXM", WORK, layout="tp=2")
    assert two.chosen is not None
    assert plain.chosen is not None
    assert two.chosen.memory == plain.chosen.memory


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "no engine"),
        ('{"engine": "vllm", "terms_bytes": {"weights": -1}}', "weights"),
        ('{"engine": "vllm", "terms_bytes": {"weights": "many"}}', "weights"),
        ('{"engine": "vllm", "terms_bytes": {}, "layout": "tp=0"}', "tp=0"),
        ('{"engine": "vllm", "terms_bytes": {}, "layout": 3}', "layout"),
    ],
)
def test_a_broken_calibration_is_one_clear_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "cal.json"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        plan_serve("llama-3.1-8b", "H100-SXM", WORK, layout="tp=1", calibration=path)


@pytest.mark.parametrize("text", ["{", "[]", '{"memory": 3}', "\x00\x01"])
def test_a_broken_plan_is_one_clear_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(InputError, match="plan"):
        boot.read_plan(path)


def test_a_plan_with_odd_values_is_compared_as_far_as_it_goes(tmp_path: Path) -> None:
    log = boot.read_log(written(tmp_path))
    odd = {"memory": {"worst": 3, "holdings": "none", "kv_pool_bytes": "much"}, "kv_cache_tokens": True}
    rows = boot.compare(log, json.loads(json.dumps(odd)))
    assert all(r.predicted is None for r in rows)


@given(st.integers(0, len(LOG)), st.binary(max_size=200))
@settings(max_examples=80, deadline=None)
def test_cut_and_noisy_logs_are_read_as_far_as_they_go(
    tmp_path_factory: pytest.TempPathFactory, at: int, noise: bytes
) -> None:
    path = tmp_path_factory.mktemp("log") / "boot.log"
    path.write_bytes(LOG[:at].encode() + noise + b"\n" + LOG[at:].encode())
    said = ""
    try:
        log = boot.read_log(path)
        assert all(h.bytes >= 0 for h in log.holdings)
    except InputError as error:
        said = str(error)
    assert "\n" not in said
