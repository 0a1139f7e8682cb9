"""Checkpoints: any layout to any other and back to the bit, whole or not there, and nothing hostile gets in."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright import engines
from meshwright.errors import InputError
from meshwright.runtime.checkpoint import own
from meshwright.runtime.folder import Model, read_folder
from meshwright.runtime.train import checkpoint, folders
from meshwright.runtime.train.checkpoint import Checkpoints, fill, load, stored
from meshwright.runtime.train.pieces import LocalPiece, tensor_pieces, whole_piece
from meshwright.runtime.train.storage import Writer
from meshwright.specs.layout import parse_layout
from meshwright.specs.placement import Placement, place
from tests.runtime import moe_models, tiny
from tests.runtime.train import saves

Folder = Callable[[str], Path]

#: Every way to hold a tensor: uneven heads and vocabulary, replicated KV heads, tied ends, folded stages, runs of ZeRO.
DENSE = (
    "tp=1",
    "tp=2",
    "tp=6",
    "dp=4,zero=1",
    "tp=3,dp=2,zero=2",
    "pp=3,stage_layers=1+3+1",
    "pp=2,schedule=zbv,zero=1,dp=3",
    "pp=2,virtual=2,schedule=interleaved",
    "cp=2,dp=2,zero=3",
)
SPARSE = (
    "tp=1",
    "tp=2",
    "ep=2,dp=2,zero=1",
    "ep=4,dp=4,zero=1",
    "tp=2,dp=2,ep=2",
    "tp=2,dp=2,ep=4,etp=1,zero=2",
    "pp=2",
)


def _placed(model: Model, layout: str) -> Placement:
    return place(model.spec, parse_layout(layout), engines.profile("meshwright"))


def _held(model: Model, placement: Placement) -> list[dict[str, dict[str, Tensor]]]:
    ranks = range(placement.layout.world)
    return [{kind: saves.whole(model, placement, kind, rank) for kind in saves.KINDS} for rank in ranks]


def _same(found: list[dict[str, dict[str, Tensor]]], want: list[dict[str, dict[str, Tensor]]], pl: Placement) -> None:
    """Every element that a rank reads (its run, with ZeRO) is what it would hold, to the bit."""
    for rank, (got, right) in enumerate(zip(found, want, strict=True)):
        runs = zip(saves.pieces(pl, rank, got), saves.pieces(pl, rank, right), strict=True)
        for a, b in runs:
            assert (a.name, a.kind, a.start) == (b.name, b.kind, b.start)
            assert torch.equal(a.tensor, b.tensor), (rank, a.kind, a.name)


def _chain(model: Model, layouts: list[str], folder: Path) -> None:
    """Save under the first layout; load and save again under each next one: always the same values."""
    before = _placed(model, layouts[0])
    saves.save(folder / "0", before, _held(model, before))
    for number, layout in enumerate(layouts[1:], 1):
        after = _placed(model, layout)
        found = saves.read(folder / str(number - 1), after)
        _same(found, _held(model, after), after)
        saves.save(folder / str(number), after, found)
        assert stored(folder / str(number)) == stored(folder / "0")


def _tour(layouts: tuple[str, ...]) -> list[str]:
    """A walk through every ordered pair of layouts (each node leaves by all others: an Eulerian tour)."""
    left = {a: [b for b in layouts if b != a] for a in layouts}
    stack, path = [layouts[0]], []
    while stack:
        at = stack[-1]
        if left[at]:
            stack.append(left[at].pop())
        else:
            path.append(stack.pop())
    return path[::-1]


def test_a_chain_of_layouts_keeps_every_bit(tmp_path: Path, checkpoint: Folder) -> None:
    chain = ["tp=6", "tp=3,dp=2,zero=2", "pp=2,schedule=zbv,zero=1,dp=3", "tp=1", "tp=2"]
    _chain(read_folder(checkpoint("tied")), chain, tmp_path)


def test_experts_are_dealt_anew_to_the_bit(tmp_path: Path) -> None:
    chain = ["ep=4,dp=4,zero=1", "tp=2,dp=2,ep=2", "tp=2,dp=2,ep=4,etp=1,zero=2", "tp=1"]
    _chain(read_folder(moe_models.write(tmp_path / "m", "mixtral")), chain, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "qwen3_moe"])
def test_every_pair_of_layouts_of_experts_keeps_every_bit(tmp_path: Path, name: str) -> None:
    _chain(read_folder(moe_models.write(tmp_path / "m", name)), _tour(SPARSE), tmp_path / "saves")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "biased", "deepseek_v3"])
def test_every_pair_of_layouts_keeps_every_bit(tmp_path: Path, checkpoint: Folder, name: str) -> None:
    tour = _tour(DENSE)
    assert len(set(pairwise(tour))) == len(DENSE) * (len(DENSE) - 1)
    _chain(read_folder(checkpoint(name)), tour, tmp_path)


def test_a_wrong_interval_is_noticed(tmp_path: Path, checkpoint: Folder) -> None:
    """The check above can fail: one rank that offers its rows in another order."""
    model = read_folder(checkpoint("llama"))
    before = _placed(model, "tp=2")
    held = _held(model, before)
    name = "model.layers.1.self_attn.q_proj.weight"
    held[1]["weight"][name] = held[1]["weight"][name].flip(0)
    saves.save(tmp_path / "0", before, held)
    after = _placed(model, "tp=1")
    with pytest.raises(AssertionError, match="q_proj"):
        _same(saves.read(tmp_path / "0", after), _held(model, after), after)


def test_every_value_is_stored_once_and_writing_is_dealt_out(tmp_path: Path, checkpoint: Folder) -> None:
    """A tied embedding on two stages and four replicas of everything: as many bytes as one copy, spread over ranks."""
    model = read_folder(checkpoint("tied"))
    placement = _placed(model, "pp=2,dp=4")
    saves.save(tmp_path / "0", placement, _held(model, placement))
    sizes = [file.stat().st_size for file in (tmp_path / "0").glob("*.bin")]
    values = 3 * 4 * model.spec.parameters("decoder")
    assert values <= sum(sizes) < 1.05 * values
    assert len(sizes) == 8
    assert max(sizes) < 0.3 * values


def test_a_piece_that_nobody_offers_is_no_checkpoint(tmp_path: Path, checkpoint: Folder) -> None:
    model = read_folder(checkpoint("llama"))
    placement = _placed(model, "tp=2")
    held = _held(model, placement)
    del held[1]["exp_avg"]["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"hold 3672 of 7272 values of exp_avg/model\.layers\.0\.mlp\.up_proj"):
        saves.save(tmp_path / "0", placement, held)
    assert not (tmp_path / "0" / folders.INDEX).exists()


def _alone(base: Path, model: Model, keep: int = 2) -> tuple[Checkpoints, list[LocalPiece]]:
    placement = _placed(model, "tp=1")
    held = {"weight": saves.whole(model, placement, "weight", 0)}
    return Checkpoints(base, placement, 0, keep), list(saves.pieces(placement, 0, held))


def test_training_goes_on_while_a_save_is_written(
    tmp_path: Path, checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save returns before a byte is written; what is written is what was there when it was asked for."""
    model = read_folder(checkpoint("llama"))
    checkpoints, pieces = _alone(tmp_path, model)
    go, write = threading.Event(), Writer.write_data

    def late(self: Writer, *args: Any) -> Any:
        assert go.wait(20)
        return write(self, *args)

    monkeypatch.setattr(Writer, "write_data", late)
    before = [piece.tensor.clone() for piece in pieces]
    checkpoints.save(5, pieces, {})
    assert folders.latest(tmp_path) is None
    for piece in pieces:
        piece.tensor.zero_()
    go.set()
    checkpoints.wait()
    found = folders.latest(tmp_path)
    assert found == tmp_path / "step-00000005"
    load(found, pieces, checkpoints.placement, checkpoints.coordinate)
    assert all(torch.equal(piece.tensor, want) for piece, want in zip(pieces, before, strict=True))


def test_the_random_state_comes_back(tmp_path: Path, checkpoint: Folder) -> None:
    checkpoints, pieces = _alone(tmp_path, read_folder(checkpoint("llama")))
    torch.manual_seed(11)
    checkpoints.save(1, pieces, {})
    want = torch.rand(3)
    checkpoints.wait()
    torch.manual_seed(12)
    load(folders.find(tmp_path), pieces, checkpoints.placement, checkpoints.coordinate)
    assert torch.equal(torch.rand(3), want)


class _Killed(BaseException):
    """Ends a save where a kill would."""


@pytest.mark.parametrize(("step", "keep", "stay"), [(3, 2, [2, 3]), (2, 1, [2])])
def test_an_end_at_any_call_leaves_a_whole_checkpoint(
    tmp_path: Path, checkpoint: Folder, monkeypatch: pytest.MonkeyPatch, step: int, keep: int, stay: list[int]
) -> None:
    """Every call by which a save changes the disk is the last one once; the pointer always names a whole checkpoint.

    Also of a run that went back and makes the checkpoint of step 2 again.
    """
    model = read_folder(checkpoint("llama"))
    names = ("fsync", "rename", "replace", "rmdir", "unlink", "open", "mkdir")
    real = {name: getattr(os, name) for name in names}
    ends = 0
    for last in range(1000):
        base = tmp_path / str(last)
        checkpoints, pieces = _alone(base, model)
        pieces = pieces[:3]
        for earlier in (1, 2):
            checkpoints.save(earlier, pieces, {})
        checkpoints.wait()
        checkpoints, _ = _alone(base, model, keep)
        count = 0

        def dying(name: str, last: int = last) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                if count > last:
                    raise _Killed
                return real[name](*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for name in names:
                patch.setattr(os, name, dying(name))
            try:
                checkpoints.save(step, pieces, {})
                checkpoints.wait()
                whole = True
            except (_Killed, RuntimeError):  # DCP wraps what ends its own threads
                whole, ends = False, ends + 1
        found = folders.latest(base)
        assert found is not None
        load(found, pieces, checkpoints.placement, checkpoints.coordinate)
        if whole:
            assert folders.steps(base) == stay
            break
        again, _ = _alone(base, model, keep=1)
        assert not [p for p in base.iterdir() if p.name.startswith(".")], "what was left half done stays"
        again.save(4, pieces, {})
        again.wait()
        assert folders.latest(base) == base / "step-00000004"
    assert ends >= 8


def test_only_the_last_checkpoints_stay(tmp_path: Path, checkpoint: Folder) -> None:
    checkpoints, pieces = _alone(tmp_path, read_folder(checkpoint("llama")), keep=2)
    for step in (1, 2, 3, 3, 4):
        checkpoints.save(step, pieces[:1] if step < 4 else pieces, {})
    checkpoints.wait()
    assert folders.steps(tmp_path) == [3, 4]


def test_a_disk_that_is_full_is_told_and_the_last_checkpoint_stays(
    tmp_path: Path, checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, pieces = _alone(tmp_path, read_folder(checkpoint("llama")))
    checkpoints.save(1, pieces, {})
    checkpoints.wait()

    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Writer, "write_data", full)
    checkpoints.save(2, pieces, {})
    with pytest.raises(InputError, match=r"checkpoint of step 2 in .*: No space left on device"):
        checkpoints.wait()
    assert folders.latest(tmp_path) == tmp_path / "step-00000001"


def _edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        raw = json.loads((folder / folders.INDEX).read_text())
        change(raw)
        (folder / folders.INDEX).write_text(json.dumps(raw))

    return edit


KEY = "weight/model.norm.weight"


def _chunk(place: int, value: Any) -> Callable[[Path], None]:
    def change(raw: dict[str, Any]) -> None:
        raw["tensors"][KEY]["chunks"][0][place] = value

    return _edit(change)


def _tensor(**values: Any) -> Callable[[Path], None]:
    return _edit(lambda raw: raw["tensors"][KEY].update(values))


def _flip(folder: Path) -> None:
    file = folder / "rank-00000.bin"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _cut(folder: Path) -> None:
    with (folder / "rank-00000.bin").open("r+b") as file:
        file.truncate(1000)


DAMAGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "no index": (lambda f: (f / folders.INDEX).unlink(), "cannot be read .*not whole"),
    "cut index": (lambda f: os.truncate(f / folders.INDEX, 300), "index.json"),
    "no json": (lambda f: (f / folders.INDEX).write_text("hello"), "index.json"),
    "deep json": (lambda f: (f / folders.INDEX).write_text("[" * 200_000), "index.json"),
    "other version": (_edit(lambda raw: raw.update(version=9)), "this release reads version 1"),
    "tensors no table": (_edit(lambda raw: raw.update(tensors=[])), "version"),
    "no values": (lambda f: (f / "rank-00000.bin").unlink(), "rank-00000.bin: cannot be read"),
    "cut values": (_cut, "1000 bytes, index.json promises .* truncated"),
    "a bit": (_flip, "does not have the checksum"),
    "a file elsewhere": (_chunk(2, "../../etc/passwd.bin"), "a .bin file beside it is needed"),
    "an absolute file": (_chunk(2, "/etc/passwd"), "a .bin file beside it is needed"),
    "no file name": (_chunk(2, 7), "a .bin file beside it is needed"),
    "negative place": (_chunk(3, -64), "malformed"),
    "far place": (_chunk(3, 1 << 40), "truncated"),
    "odd place": (_chunk(3, 65), "a .bin file beside it"),
    "real numbers": (_chunk(0, [0.5]), "malformed"),
    "other extents": (_chunk(1, [7]), "hold 7 of its 72 values"),
    "outside": (_chunk(0, [9]), "lie outside it or over each other; the index is damaged"),
    "twice": (_edit(lambda r: r["tensors"][KEY]["chunks"].append(r["tensors"][KEY]["chunks"][0])), "over each other"),
    "unknown type": (_tensor(dtype="complex"), "malformed"),
    "other shape": (_tensor(shape=[8, 9]), "lie outside"),
    "huge shape": (_tensor(shape=[1 << 60]), "malformed"),
    "no chunks": (_tensor(chunks=[]), "hold 0 of its 72"),
    "chunks no list": (_tensor(chunks=5), "malformed"),
    "missing tensor": (_edit(lambda raw: raw["tensors"].pop(KEY)), "weight/model.norm.weight is not in the checkpoint"),
    "renamed tensor": (_edit(lambda r: r["tensors"].update({KEY: r["tensors"]["random/cpu"]})), "the model has 72"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Path]:
    base = tmp_path_factory.mktemp("sound")
    model = read_folder(tiny.write(base / "model", "llama"))
    checkpoints, pieces = _alone(base / "run", model)
    checkpoints.save(1, pieces, {})
    checkpoints.wait()
    return model, folders.find(base / "run")


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_or_hostile_checkpoint_ends_in_one_line(tmp_path: Path, sound: tuple[Model, Path], case: str) -> None:
    damage, says = DAMAGED[case]
    model, folder = sound
    copy = tmp_path / "step-00000001"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    damage(copy)
    placement = _placed(model, "tp=1")
    held = {"weight": saves.empty(placement, 0)}
    with pytest.raises(InputError, match=says) as error:
        load(copy, saves.pieces(placement, 0, held), placement, placement.coordinate(0))
    assert "\n" not in str(error.value)


def test_nothing_in_a_checkpoint_is_a_pickle(sound: tuple[Model, Path]) -> None:
    model, folder = sound
    assert sorted(file.suffix for file in folder.iterdir()) == [".bin", ".json", ".json"]
    placement = _placed(model, "tp=1")
    name, tensor = "model.norm.weight", saves.whole(model, placement, "weight", 0)["model.norm.weight"]
    assert tensor.numpy().tobytes() in (folder / "rank-00000.bin").read_bytes()
    assert dict(own(placement, placement.coordinate(0)))[name].family.shape == (72,)


@pytest.mark.parametrize("content", ["step-00000009\n", "../x", "", "step-1", "\xff" * 500])
def test_a_pointer_to_nothing_is_told_with_the_way_out(tmp_path: Path, content: str) -> None:
    (tmp_path / "step-00000004").mkdir()
    (tmp_path / folders.LATEST).write_text(content)
    with pytest.raises(InputError, match=r"which is no checkpoint in this folder; resume from .*step-00000004"):
        folders.find(tmp_path)


def test_a_folder_without_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no checkpoint there"):
        folders.find(tmp_path)


def test_random_boxes_of_random_runs(tmp_path: Path, checkpoint: Folder) -> None:
    """Loads of arbitrary runs of one tensor, whose stored boxes come from three dealt ranks."""
    model = read_folder(checkpoint("llama"))
    before = _placed(model, "tp=3,dp=2,zero=1")
    saves.save(tmp_path / "0", before, _held(model, before))
    alone = _placed(model, "tp=1")
    name = "model.layers.2.mlp.down_proj.weight"
    want = saves.whole(model, alone, "weight", 0)[name].view(-1)
    draw = random.Random(4)
    for _ in range(6):
        start = draw.randrange(want.numel())
        room = torch.zeros(draw.randrange(1, want.numel() - start + 1))
        piece = LocalPiece(name, "weight", room, start)
        fill(tmp_path / "0", list(tensor_pieces([piece], alone, alone.coordinate(0))))
        assert torch.equal(room, want[start : start + len(room)])
    found = checkpoint_whole(tmp_path / "0", f"weight/{name}")
    assert torch.equal(found.view(-1), want)


def checkpoint_whole(folder: Path, key: str) -> Tensor:
    """One whole tensor, by the function that an export uses."""
    tensor = torch.empty(stored(folder)[key])
    fill(folder, [whole_piece(key, tensor)])
    assert torch.equal(tensor, checkpoint.whole(folder, key))
    return tensor
