"""Lists of module names: what they stand for, and that hostile ones end in bounded time."""

from __future__ import annotations

import time

import pytest

from meshwright.errors import InputError
from meshwright.specs.hf.patterns import NameList
from meshwright.specs.tensors import expand
from tests.specs.hf.test_quant import BASE, PLAIN, read


@pytest.mark.parametrize(
    ("ignore", "kept"),
    [
        (["model.layers.1"], {1}),
        (["model.layers.1.mlp.down_proj"], {1}),
        (["down_proj"], {0, 1, 2}),
        (["mlp"], {0, 1, 2}),
        (["down"], set()),
        (["model.layers.0*"], {0}),
        (["*.mlp.*"], {0, 1, 2}),
        (["layers.*.mlp.down_proj"], {0, 1, 2}),
        (["model.layers.?.mlp"], {0, 1, 2}),
        (["model.layers.*.self_attn"], set()),
        ([r"re:.*layers\.(0|2)\..*down_proj"], {0, 2}),
        (["re:.*self_attn.*"], set()),
        (["re:down_proj"], set()),
        (["re:model.layers.[01].mlp.*"], {0, 1}),
    ],
)
def test_ignored_modules_stay_and_families_split(ignore: list[str], kept: set[int]) -> None:
    quant = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ignore}
    spec = read(BASE, quant)
    table = expand(spec.families)
    for layer in range(3):
        dtype = table[f"model.layers.{layer}.mlp.down_proj.weight"][1]
        assert (dtype == "bf16") == (layer in kept)
        assert (f"model.layers.{layer}.mlp.down_proj.weight_scale_inv" in table) == (layer not in kept)
    assert spec.parameters() == PLAIN.parameters()


def test_expressions_that_could_explode_are_not_applied_and_said() -> None:
    evil = r"re:(a+)+$"
    quant = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": [evil]}
    start = time.monotonic()
    spec = read(BASE, quant)
    assert time.monotonic() - start < 1
    assert any("too complex" in sentence for sentence in spec.assumptions)


@pytest.mark.parametrize("text", [r"re:.*.*.*.*.*.*x", r"re:(.*)*y", r"re:(x|x){1,99}", r"re:(a)\1+"])
def test_matching_is_bounded(text: str) -> None:
    names = NameList([text], "m")
    start = time.monotonic()
    names.match("model.layers.0." + "a" * 120)
    assert time.monotonic() - start < 1


def test_slow_lists_end_with_one_line() -> None:
    names = NameList([f"re:.*a.*a.*a.*{n}" for n in range(300)], "m")
    start = time.monotonic()
    with pytest.raises(InputError, match="regular expressions"):
        [names.match("a" * 200 + str(n)) for n in range(10_000)]
    assert time.monotonic() - start < 10


def test_many_patterns_over_many_layers_end_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.specs.hf.quant.BUDGET_S", 0.5)
    layers = {f"*layers.*{n}*q": {"quant_algo": "NVFP4"} for n in range(20_000)}
    start = time.monotonic()
    with pytest.raises(InputError, match="module lists"):
        read(BASE | {"num_hidden_layers": 2048}, {"quant_method": "modelopt", "quantized_layers": layers})
    assert time.monotonic() - start < 6


def test_as_many_schemes_as_layers_are_refused() -> None:
    layers = {f"layers.{n}": {"quant_algo": "NVFP4", "group_size": 16 + n} for n in range(1000)}
    with pytest.raises(InputError, match="64 different schemes"):
        read(BASE, {"quant_method": "modelopt", "quantized_layers": layers})
