"""Rotary positions in all kinds against transformers, at positions beyond the original context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.runtime.models.settings import read_settings
from tests.runtime import tiny

PROMPT = tuple((11 * i + 5) % 131 for i in range(90))

KINDS: dict[str, dict[str, Any]] = {
    "theta": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32, "rope_theta": 10000.0,
    },
    "yarn": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", ["rope_parameters", "rope_scaling"])
def test_kind_equals_transformers(tmp_path: Path, kind: str, style: str) -> None:
    values = dict(KINDS[kind])
    changes: dict[str, Any] = {style: values}
    if style == "rope_scaling":  # transformers 4 keeps theta outside
        changes["rope_theta"] = values.pop("rope_theta")
    folder = tiny.write(tmp_path / "m", "even", head_dim=16, num_hidden_layers=2, **changes)
    prompts = (tuple(t % 128 for t in PROMPT),)
    result = tiny.alone(tiny.job(folder, "tp=1", prompts, 2))
    tiny.assert_same((result.tokens, result.logits), tiny.oracle(folder, prompts, 2))


def test_kinds_differ(tmp_path: Path) -> None:
    prompts = (tuple(t % 128 for t in PROMPT),)
    seen = []
    for kind, values in KINDS.items():
        folder = tiny.write(tmp_path / kind, "even", head_dim=16, num_hidden_layers=2, rope_parameters=values)
        seen.append(tiny.alone(tiny.job(folder, "tp=1", prompts, 1)).logits[0])
    assert all((a - b).abs().max() > 1e-3 for i, a in enumerate(seen) for b in seen[:i])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type is 'longrope'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "big"}}, "factor is 'big'"),
        ({"rope_parameters": 7}, "rope_parameters is '7'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"model_type": "granite"}, "cannot run model_type 'granite'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is '-1'"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_settings(tiny.config("llama") | changes, "config.json")
