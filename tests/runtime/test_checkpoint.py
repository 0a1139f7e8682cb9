"""A rank reads its own bytes and no others; every damaged or hostile folder ends in one line."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright import engines
from meshwright.errors import IllegalLayoutError, InputError
from meshwright.runtime import checkpoint as loader
from meshwright.runtime.checkpoint import load, own
from meshwright.runtime.folder import INDEX, SINGLE, read_folder
from meshwright.runtime.models.settings import check_runnable
from meshwright.specs.build import decoder
from meshwright.specs.layout import parse_layout
from meshwright.specs.placement import place
from tests.runtime import tiny

Folder = Callable[[str], Path]
LAYOUTS = ["tp=1", "tp=2", "tp=3", "pp=3,stage_layers=1+3+1", "tp=2,pp=2", "dp=2"]


class _Spied:
    """A slice reader that notes how many bytes every slice has."""

    def __init__(self, inner: Any, read: list[int]) -> None:
        self.inner, self.read = inner, read

    def __getitem__(self, cut: Any) -> torch.Tensor:
        piece: torch.Tensor = self.inner[cut]
        self.read.append(piece.numel() * piece.element_size())
        return piece


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "tied", "qwen2"])
def test_a_rank_reads_exactly_its_bytes(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch, name: str, layout: str
) -> None:
    read: list[int] = []
    real = loader.cut
    monkeypatch.setattr(loader, "cut", lambda stored, shard: real(_Spied(stored, read), shard))
    model = read_folder(checkpoint(name))
    placement = place(model.spec, parse_layout(layout), engines.profile("meshwright"))
    for rank in range(placement.layout.world):
        read.clear()
        at = placement.coordinate(rank)
        weights = load(model, placement, at, torch.float32)
        assert sum(read) == placement.weight_bytes(at)
        assert sum(w.untyped_storage().nbytes() for w in weights.values()) == placement.weight_bytes(at)


@pytest.mark.parametrize("layout", ["tp=2,pp=2", "tp=3"])
def test_bytes_of_other_ranks_do_not_matter(checkpoint: Folder, tmp_path: Path, layout: str) -> None:
    """Everything outside a rank's intervals is poisoned: what it loads is the same."""
    model = read_folder(checkpoint("llama"))
    whole = load_file(model.folder / SINGLE)
    placement = place(model.spec, parse_layout(layout), engines.profile("meshwright"))
    for rank in range(placement.layout.world):
        at = placement.coordinate(rank)
        poisoned = {name: torch.full_like(x, torch.nan) for name, x in whole.items()}
        for name, shard in own(placement, at):
            cut = tuple(slice(*ranges[0]) for ranges in shard.intervals)
            poisoned[name][cut] = whole[name][cut]
        folder = tmp_path / str(rank)
        folder.mkdir()
        (folder / "config.json").write_bytes((model.folder / "config.json").read_bytes())
        save_file(poisoned, folder / SINGLE)
        for name, x in load(read_folder(folder), placement, at, torch.float32).items():
            assert not x.isnan().any(), name


def test_ranks_together_hold_the_whole_tensor(checkpoint: Folder) -> None:
    model = read_folder(checkpoint("llama"))
    whole = load_file(model.folder / SINGLE)
    placement = place(model.spec, parse_layout("tp=2"), engines.profile("meshwright"))
    parts = [load(model, placement, placement.coordinate(r), torch.float32) for r in range(2)]
    for name, dim in (("self_attn.q_proj", 0), ("self_attn.o_proj", 1), ("mlp.down_proj", 1), ("mlp.up_proj", 0)):
        key = f"model.layers.2.{name}.weight"
        assert torch.equal(torch.cat([p[key] for p in parts], dim), whole[key])


def test_several_files_behind_an_index(checkpoint: Folder, tmp_path: Path) -> None:
    folder = _sharded(checkpoint("llama"), tmp_path)
    result = tiny.alone(tiny.job(folder, "tp=1"))
    tiny.assert_same((result.tokens, result.logits), tiny.oracle(checkpoint("llama")))


def _sharded(source: Path, folder: Path) -> Path:
    """The same model in two files with an index."""
    whole = load_file(source / SINGLE)
    names = sorted(whole)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, of in files.items():
        save_file({n: whole[n] for n in of}, folder / file)
    index = {"metadata": {}, "weight_map": {n: file for file, of in files.items() for n in of}}
    (folder / INDEX).write_text(json.dumps(index))
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder


# Bad input ----------------------------------------------------------------------------------------------------------


def _said(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_folder(folder)
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 400
    return line


@pytest.fixture
def broken(checkpoint: Folder, tmp_path: Path) -> Path:
    """A copy to damage."""
    for file in checkpoint("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def _reconfigure(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize("keep", [0, 5, 100, 3000, -1])
def test_a_truncated_file(broken: Path, keep: int) -> None:
    data = (broken / SINGLE).read_bytes()
    (broken / SINGLE).write_bytes(data[:keep])
    assert SINGLE in _said(broken)


def test_bytes_behind_the_last_tensor(broken: Path) -> None:
    with (broken / SINGLE).open("ab") as file:
        file.write(b"tail")
    assert "truncated or mixed up" in _said(broken)


def test_a_missing_tensor(broken: Path) -> None:
    _rewrite(broken, lambda t: t.__delitem__("model.layers.3.mlp.up_proj.weight"))
    assert "model.layers.3.mlp.up_proj.weight is missing" in _said(broken)


def test_a_wrong_shape(broken: Path) -> None:
    _rewrite(broken, lambda t: t.update({"model.norm.weight": torch.ones(70)}))
    assert "model.norm.weight is 70, config.json makes it 72" in _said(broken)


def test_a_wrong_dtype(broken: Path) -> None:
    _rewrite(broken, lambda t: t.update({"model.norm.weight": torch.ones(72).bfloat16()}))
    assert "model.norm.weight is stored as bf16, config.json says f32" in _said(broken)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 4}, r"model\.layers\.4\.\S+ \(and 8 more\) is in the weights, not in what config"),
        ({"num_hidden_layers": 6}, r"model\.layers\.5\.\S+ \(and 8 more\) is missing"),
        ({"intermediate_size": 100}, "is 101x72, config.json makes it 100x72"),
        ({"attention_bias": True}, r"q_proj\.bias \(and 19 more\) is missing"),
        ({"tie_word_embeddings": True, "vocab_size": 132}, "is 131x72, config.json makes it 132x72"),
        ({"dtype": "bfloat16"}, "is stored as f32, config.json says bf16"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
    ],
)
def test_a_configuration_that_disagrees(broken: Path, changes: dict[str, Any], said: str) -> None:
    import re

    _reconfigure(broken, **changes)
    assert re.search(said, _said(broken))


def _with_header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = (folder / SINGLE).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


@pytest.mark.parametrize(
    "row",
    [
        {"dtype": "F16", "shape": [72], "data_offsets": [0, 288]},
        {"dtype": "F32", "shape": [71], "data_offsets": [0, 288]},
        {"dtype": "F32", "shape": [-1, -72], "data_offsets": [0, 288]},
        {"dtype": "F32", "shape": [72.0], "data_offsets": [0, 288]},
        {"dtype": "X9", "shape": [72], "data_offsets": [0, 288]},
        {"dtype": "F32", "shape": "72", "data_offsets": [0, 288]},
        {"dtype": "F32", "shape": [72], "data_offsets": [0]},
        {"dtype": "F32", "shape": [72], "data_offsets": [1 << 62, (1 << 62) + 288]},
        {"dtype": "F32"},
        7,
        None,
    ],
)
def test_a_mislabelled_header(broken: Path, row: object) -> None:
    _with_header(broken, lambda h: h.update({"model.norm.weight": row}))
    _said(broken)


def test_a_header_longer_than_the_file(broken: Path) -> None:
    (broken / SINGLE).write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    assert "truncated or no safetensors file" in _said(broken)


@pytest.mark.parametrize(
    "file",
    ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..\\x.safetensors", "x.bin", ".safetensors\0", 5, None],
)
def test_an_index_that_leaves_the_folder(broken: Path, file: object) -> None:
    (broken / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    assert "a .safetensors file beside the index is needed" in _said(broken)


def test_an_index_that_promises_too_much(checkpoint: Folder, tmp_path: Path) -> None:
    folder = _sharded(checkpoint("llama"), tmp_path)
    raw = json.loads((folder / INDEX).read_text())
    raw["weight_map"]["model.norm.weight"] = next(
        f for f in set(raw["weight_map"].values()) if f != raw["weight_map"]["model.norm.weight"]
    )
    (folder / INDEX).write_text(json.dumps(raw))
    assert "model.norm.weight is missing, although" in _said(folder)
    raw["weight_map"]["model.norm.weight"] = "model-00003-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(raw))
    assert "cannot be read (No such file" in _said(folder)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"weight_map": {}}', '{"weight_map": 3}', "[" * 5000])
def test_an_index_that_is_none(broken: Path, content: str) -> None:
    (broken / INDEX).write_text(content)
    _said(broken)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    assert "config.json" in _said(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny.BASE))
    assert "safetensors weights are needed" in _said(tmp_path)


def test_a_file_that_changes_behind_our_back(broken: Path) -> None:
    model = read_folder(broken)
    placement = place(model.spec, parse_layout("tp=1"), engines.profile("meshwright"))
    (broken / SINGLE).write_bytes(b"gone")
    with pytest.raises(InputError, match="cannot be read any more"):
        load(model, placement, placement.coordinate(0), torch.float32)


# What the runtime does not run --------------------------------------------------------------------------------------


def test_models_and_layouts_that_are_not_run_are_refused() -> None:
    sizes = {"hidden": 64, "layers": 2, "heads": 4, "vocab": 100}
    dense = decoder(**sizes)  # type: ignore[arg-type]
    for layout in ("tp=2,pp=2,dp=2", "tp=2,sp=on", "cp=2"):
        check_runnable(dense, parse_layout(layout))
    for layout in ("tp=2,dcp=2", "dp=2,zero=1", "pp=2,virtual=2,schedule=interleaved"):
        with pytest.raises(IllegalLayoutError, match="does not execute"):
            check_runnable(dense, parse_layout(layout))
    with pytest.raises(IllegalLayoutError, match="on a dense model"):
        place(dense, parse_layout("dp=2,ep=2"), engines.profile("meshwright"))
    for layout in ("tp=1", "dp=2,ep=2"):
        check_runnable(decoder(**sizes, experts=4), parse_layout(layout))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="layer 0 is not attention with a gated MLP or experts"):
        check_runnable(decoder(**sizes, gated=False), parse_layout("tp=1"))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["config.json", SINGLE, "weights.safetensors"])
def test_a_named_pipe_in_the_folder_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    tiny.write(tmp_path, "llama")
    if name == "weights.safetensors":
        (tmp_path / SINGLE).unlink()
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    else:
        (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match=r"not a regular file|safetensors weights are needed"):
        read_folder(tmp_path)


def test_a_header_as_long_as_its_file_is_not_read_whole(tmp_path: Path) -> None:
    tiny.write(tmp_path, "llama")
    with (tmp_path / SINGLE).open("wb") as file:
        file.write(struct.pack("<Q", (1 << 40) - 8))
        file.truncate(1 << 40)
    with pytest.raises(InputError, match="bytes; at most 33554432 are read"):
        read_folder(tmp_path)
