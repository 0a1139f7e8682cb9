"""An export is the same bytes under any layout, and transformers computes the same loss with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import engines
from meshwright.errors import InputError
from meshwright.runtime.folder import INDEX, SINGLE, Model, read_folder
from meshwright.runtime.train import export as exports
from meshwright.runtime.train.corpus import Corpus
from meshwright.runtime.train.export import export
from meshwright.runtime.train.folders import STATE, folder_name, write_json
from meshwright.runtime.train.job import facts_of
from meshwright.runtime.train.source import keep_model, read_source
from meshwright.specs.layout import parse_layout
from meshwright.specs.placement import place
from tests.runtime import moe_models, tiny
from tests.runtime.train import saves

CORPUS = Corpus("none", 2, 100, 1, "mark", 5)


def _facts(folder: Path) -> dict[str, Any]:
    return {"version": 1, "step": 3, "position": 9, **facts_of(read_source(folder), CORPUS)}


def _saved(folder: Path, model: Model, layout: str, base: Path) -> Path:
    """A checkpoint of the model's own weights under a layout, as a run leaves it."""
    placement = place(model.spec, parse_layout(layout), engines.profile("meshwright"))
    held = [
        {kind: saves.whole(model, placement, kind, rank) for kind in saves.KINDS}
        for rank in range(placement.layout.world)
    ]
    there = base / folder_name(3)
    saves.save(there, placement, held)
    write_json(there / STATE, _facts(folder))
    keep_model(read_source(folder), base)
    (base / "latest").write_text(there.name + "\n")
    return base


def _bytes(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.mark.parametrize("name", ["tied", "mixtral"])
def test_exports_of_all_layouts_are_byte_equal_and_give_the_weights_back(tmp_path: Path, name: str) -> None:
    """Gate and up, KV heads held twice, experts dealt out, both ends of a tied table: back in one order."""
    mixture = name == "mixtral"
    folder = moe_models.write(tmp_path / name, name) if mixture else tiny.write(tmp_path / name, name)
    (folder / "tokenizer_config.json").write_text("{}\n")
    model = read_folder(folder)
    layouts = ["tp=1", "tp=2,dp=2,ep=2,zero=1"] if mixture else ["tp=1", "tp=6", "pp=3,dp=2,zero=1"]
    found = []
    for number, layout in enumerate(layouts):
        base = _saved(folder, model, layout, tmp_path / f"run{number}")
        found.append(_bytes(export(base, tmp_path / f"out{number}")))
    assert all(other == found[0] for other in found[1:])
    assert sorted(found[0]) == ["config.json", SINGLE, "tokenizer_config.json"]
    again = read_folder(tmp_path / "out0")
    alone = place(model.spec, parse_layout("tp=1"), engines.profile("meshwright"))
    want = saves.whole(model, alone, "weight", 0)
    back = saves.whole(again, alone, "weight", 0)
    assert want.keys() == back.keys()
    assert all(torch.equal(want[key], back[key]) for key in want)


def test_a_large_model_is_cut_into_files_that_transformers_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = tiny.write(tmp_path / "m", "llama")
    monkeypatch.setattr(exports, "FILE_BYTES", 300_000)
    out = export(_saved(folder, read_folder(folder), "tp=2", tmp_path / "run"), tmp_path / "out")
    index = json.loads((out / INDEX).read_text())
    files = set(index["weight_map"].values())
    assert len(files) == 3
    assert files == {file.name for file in out.glob("*.safetensors")}
    ids = torch.tensor([list(tiny.PROMPTS[0])])
    logits = [transformers.AutoModelForCausalLM.from_pretrained(f).eval()(ids).logits for f in (folder, out)]
    assert torch.equal(*logits)


def test_another_type_of_the_weights(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m", "llama")
    out = export(_saved(folder, read_folder(folder), "tp=1", tmp_path / "run"), tmp_path / "out", "bf16")
    model = read_folder(out)
    assert {row.dtype for row in model.stored.values()} == {"bf16"}
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_folder_in_the_way_and_a_damaged_checkpoint(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m", "llama")
    base = _saved(folder, read_folder(folder), "tp=1", tmp_path / "run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(InputError, match="is there already and not empty"):
        export(base, tmp_path / "full")
    (base / folder_name(3) / "rank-00000.bin").write_bytes(b"")
    with pytest.raises(InputError, match="truncated"):
        export(base, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_a_checkpoint_that_bears_the_mark_of_another_model(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "m", "llama")
    base = _saved(folder, read_folder(folder), "tp=1", tmp_path / "run")
    state = base / folder_name(3) / STATE
    facts = json.loads(state.read_text())
    facts["config"]["hidden_size"] = 144
    state.write_text(json.dumps(facts))
    with pytest.raises(InputError, match="made of another model than its own configuration"):
        export(base, tmp_path / "out")
