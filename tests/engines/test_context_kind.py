"""How attention works over cp is chosen for our own runtime only, and only where heads can be dealt."""

from __future__ import annotations

import pytest

from meshwright import engines
from meshwright.specs.build import decoder
from meshwright.specs.layout import format_layout, parse_layout
from meshwright.specs.rules import Rule

#: 9 query heads over 3 KV heads.
SPEC = decoder(hidden=72, layers=2, heads=9, kv_heads=3, vocab=128, ffn=96)


def illegal(engine: str, layout: str) -> list[Rule]:
    found = engines.profile(engine).check(SPEC, parse_layout(layout), None, None)
    return [rule for rule in found if rule.severity == "illegal"]


@pytest.mark.parametrize(
    ("layout", "numbers"),
    [
        ("cp=3,cp_kind=ulysses", None),
        ("cp=2,cp_kind=ring", None),
        ("cp=2,cp_kind=ulysses", {"heads": 9, "kv_heads": 3, "cp": 2}),
        ("cp=9,cp_kind=ulysses", None),  # three copies of each KV head
        ("tp=3,cp=3,cp_kind=ulysses", None),
        ("tp=2,cp=3,cp_kind=ulysses", {"heads": 6, "kv_heads": 2, "cp": 3}),  # 6 + 3 heads
        ("tp=9,cp=2,cp_kind=ulysses", {"heads": 1, "kv_heads": 1, "cp": 2}),
    ],
)
def test_all_to_all_needs_heads_that_can_be_dealt(layout: str, numbers: dict[str, int] | None) -> None:
    found = illegal("meshwright", layout)
    assert [dict(rule.numbers) for rule in found if rule.code == "heads_over_ulysses"] == ([numbers] if numbers else [])


@pytest.mark.parametrize("engine", [name for name in engines.FOLDERS if name not in {"meshwright", "torchrun"}])
def test_no_other_engine_is_told(engine: str) -> None:
    assert any("cp_kind" in rule.message + rule.way_out for rule in illegal(engine, "cp=3,cp_kind=ring"))


def test_it_is_written_and_read() -> None:
    assert format_layout(parse_layout("cp=2,cp_kind=Ulysses")) == "cp=2,cp_kind=ulysses"
    assert format_layout(parse_layout("cp=2,cp_kind=auto")) == "cp=2"
