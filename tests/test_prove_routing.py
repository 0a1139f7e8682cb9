"""A routing written by hand, and what every rank must send for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from meshwright.errors import InputError
from meshwright.ledger.schema import Entry, Ledger
from meshwright.prove.predict import Request, predict
from meshwright.prove.routing import read_routing
from tests.runtime import moe_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, five experts of which a token visits two, model width 72."""
    return moe_models.write(tmp_path_factory.mktemp("m") / "m", "mixtral", num_hidden_layers=2)


def routed(path: Path, first: list[list[int]], second: list[list[int]]) -> str:
    """The same experts in both layers, for the tokens of two prompts of two tokens."""
    rows = [[prompt, at, ids] for prompt, each in enumerate((first, second)) for at, ids in enumerate(each)]
    path.write_text(json.dumps({"0": rows, "1": rows}), encoding="utf-8")
    return str(path)


def named(ledger: Ledger, rank: int, name: str) -> list[Entry]:
    return [e for e in ledger.entries if e.rank_class == f"rank{rank}" and e.name == name and e.layer == 0]


def test_splits_and_products_by_hand(folder: Path, tmp_path: Path) -> None:
    """Rank 0 holds experts 0, 1, 2 and rank 1 experts 3, 4.

    Prompt 0 (rank 0): experts 0, 3 and 0, 4: two rows stay, two go. Prompt 1 (rank 1): 0, 1 and 0, 2: all four go.
    """
    file = routed(tmp_path / "r.json", [[0, 3], [0, 4]], [[0, 1], [0, 2]])
    ledger = predict(Request(str(folder), "dp=2,ep=2", 2, 2, 1, routing=file))
    assert [e.splits for rank in (0, 1) for e in named(ledger, rank, "expert counts")] == [(3, 2), (3, 2)]
    there = [named(ledger, rank, "tokens dispatch")[0] for rank in (0, 1)]
    assert [e.splits for e in there] == [(2 * 72, 2 * 72), (4 * 72, 0)]
    assert [e.wire_bytes for e in there] == [2 * 72 * 4, 4 * 72 * 4]
    back = [named(ledger, rank, "tokens combine")[0] for rank in (0, 1)]
    assert [e.splits for e in back] == [(2 * 72, 4 * 72), (2 * 72, 0)]
    rows = [[e.shapes[0][0] for e in named(ledger, rank, "expert.gate") if e.shapes] for rank in (0, 1)]
    assert rows == [[4, 1, 1], [1, 1]]


def test_without_a_routing_choices_go_round(folder: Path) -> None:
    """Four choices of two tokens: experts 0, 1, 2, 3 on both ranks."""
    ledger = predict(Request(str(folder), "dp=2,ep=2", 2, 2, 1))
    assert [e.splits for rank in (0, 1) for e in named(ledger, rank, "tokens dispatch")] == [(3 * 72, 72)] * 2


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (None, "not a routing"),
        ("[1, 2]", "not a routing"),
        ('{"0": [[0, 0]]}', "not a routing"),
        ('{"0": [[0, 0, ["x"]]]}', "not a routing"),
    ],
)
def test_a_file_that_is_no_routing_is_refused_in_a_line(tmp_path: Path, text: str | None, line: str) -> None:
    file = tmp_path / "r.json"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=line):
        read_routing(file)


def test_tokens_and_experts_that_are_not_there_are_named(folder: Path, tmp_path: Path) -> None:
    short = routed(tmp_path / "s.json", [[0, 3]], [[0, 1], [0, 2]])
    with pytest.raises(InputError, match="no experts for prompt 0, position 1 in layer 0"):
        predict(Request(str(folder), "dp=2,ep=2", 2, 2, 1, routing=short))
    wrong = routed(tmp_path / "w.json", [[0, 3], [0, 9]], [[0, 1], [0, 2]])
    with pytest.raises(InputError, match="expert 9 of 5"):
        predict(Request(str(folder), "dp=2,ep=2", 2, 2, 1, routing=wrong))
