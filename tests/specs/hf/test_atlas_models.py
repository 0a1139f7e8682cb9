"""The atlas of models: complete, sourced, exact where counts are published, fast."""

from __future__ import annotations

import json
import time

import pytest

from meshwright.errors import InputError
from meshwright.specs.atlas import models
from meshwright.specs.hf.read import read_model
from meshwright.specs.tensors import expand
from tests.shared import ROOT, shared_dir

GIB = 2**30


def test_index_is_what_the_files_say() -> None:
    assert json.loads((models.DATA / "index.json").read_bytes()) == models.build_index()


def test_enough_models_each_with_its_source() -> None:
    names = models.names()
    assert len(names) >= 200
    for name in names:
        config, hf_quant, source = models.entry(name)
        assert len(source) > 10
        assert config["model_type"]
        assert hf_quant is None or "quantization" in hf_quant
        assert name == name.lower()


def test_data_is_small_and_names_no_machine() -> None:
    files = list(models.DATA.glob("*.json"))
    assert sum(f.stat().st_size for f in files) < 600_000
    assert not any(b"/work/" in f.read_bytes() for f in files)


def test_every_model_reads() -> None:
    for name in models.names():
        spec = read_model(name)
        assert spec.layers
        assert spec.weight_bytes() > 0
        assert spec.families
        config, hf_quant, _ = models.entry(name)
        if hf_quant or "quantization_config" in config:
            assert spec.quantization is not None, name
        assert not any("unknown" in sentence for sentence in spec.assumptions), name


def test_aliases() -> None:
    assert models.find("Meta-Llama/LLAMA-3.1-70b-instruct") == "llama-3.1-70b"
    assert "deepseek-ai/DeepSeek-V3" in models.aliases("deepseek-v3")
    assert models.find("llama-3.2-70b") is None
    with pytest.raises(InputError, match="--models"):
        models.load("llama-3.2-70b")
    assert "qwen3-32b" in models.near("qwen3-32")


def test_entries_of_shared_configurations_read_like_the_originals() -> None:
    """The compact entries (keys dropped, module lists as patterns) give the same table as the full files."""
    folder = shared_dir("configs")
    paths = sorted(p for p in folder.glob("*_config.json") if not p.name.endswith("hf_quant_config.json"))
    assert len(paths) > 80
    for path in paths:
        hub_id = path.name.removesuffix("_config.json").replace("--", "/", 1)
        ours = read_model(hub_id, allow_online=False)
        original = read_model(str(path))
        assert ours.families == original.families, hub_id
        assert (ours.layers, ours.mtp_layers) == (original.layers, original.mtp_layers), hub_id
        assert (ours.quantization, ours.dtype) == (original.quantization, original.dtype), hub_id
        assert (ours.max_positions, ours.tied) == (original.max_positions, original.tied), hub_id


@pytest.mark.parametrize(
    ("name", "gib"), [("qwen2.5-7b", 14), ("llama-3.1-70b", 131), ("llama-3.1-405b", 756), ("llama-2-70b", 128)]
)
def test_half_precision_weights(name: str, gib: int) -> None:
    assert round(read_model(name).weight_bytes() / GIB) == gib


def test_round_parameter_counts_of_the_issue() -> None:
    """7.6, 70 and 405 billion parameters at 2 bytes: 14, 130 and 754 GiB."""
    for billions, gib in ((7.6, 14), (70, 130), (405, 754)):
        assert round(billions * 1e9 * 2 / GIB) == gib
    for name, billions in (("qwen2.5-7b", 7.6), ("llama-3.1-70b", 70), ("llama-3.1-405b", 405)):
        assert read_model(name).parameters() == pytest.approx(billions * 1e9, rel=0.01)


#: Parameters as the hub counts the safetensors files of the repository, or as the paper's code counts them.
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma-2b": 2_506_172_416,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-27b": 27_432_406_640,
    "phi-2": 2_779_683_840,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "opt-125m": 125_239_296,
    "bloom-176b": 176_247_271_424,
    "falcon-7b": 6_921_720_704,
    "gpt-j-6b": 6_050_882_784,
    "gpt-neox-20b": 20_554_567_680,
    "starcoder2-15b": 15_957_889_024,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "dbrx": 131_596_523_520,
    "jamba-v0.1": 51_570_323_328,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(name: str) -> None:
    assert read_model(name).parameters() == PUBLISHED[name]


#: Totals that papers and cards give rounded, in billions.
ROUNDED = {
    "deepseek-v3": (671.0, "decoder"),
    "gpt3-175b": (174.6, "decoder"),
    "megatron-530b": (529.6, "decoder"),
    "megatron-1t": (1008.0, "decoder"),
    "megatron-22b": (22.0, "decoder"),
    "gpt-oss-120b": (116.8, "decoder"),
    "gpt-oss-20b": (20.9, "decoder"),
    "kimi-k2": (1026.0, "decoder"),
    "nemotron-4-340b": (341.0, "decoder"),
    "qwen3-next-80b-a3b": (79.7, "decoder"),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_totals(name: str) -> None:
    billions, section = ROUNDED[name]
    assert read_model(name).parameters(section) / 1e9 == pytest.approx(billions, rel=5e-3)  # type: ignore[arg-type]


def test_deepseek_v3_main_model_and_prediction_layer() -> None:
    spec = read_model("deepseek-v3")
    assert spec.parameters("decoder") == pytest.approx(671e9, rel=1e-3)
    # The card: 671B of the main model and 14B of the multi-token-prediction module, shared tensors included.
    assert spec.parameters("mtp") == pytest.approx(13.5e9, rel=0.05)
    assert "model.layers.61.eh_proj.weight" in expand(spec.families)


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k3", "qwen2.5-7b", "glm-5.1-fp8", "minimax-m3-nvfp4"])
def test_reading_is_fast(name: str) -> None:
    read_model(name)
    best = min(_seconds(name) for _ in range(5))
    limit = 0.04 if name in ("deepseek-v3", "kimi-k3", "qwen2.5-7b") else 0.15
    assert best < limit


def _seconds(name: str) -> float:
    start = time.process_time()
    read_model(name)
    return time.process_time() - start


def test_data_files_are_inside_the_package() -> None:
    assert models.DATA.is_relative_to(ROOT / "src" / "meshwright") or (models.DATA / "index.json").is_file()
