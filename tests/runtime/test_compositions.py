"""Axes composed, up to eight ranks, each proven: numbers, tokens, caches, every entry and every byte.

Two are drawn anew from a seed in every ``make test``; ``make prove-all`` runs all and lists them in its result file.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from meshwright.prove.proof import Proof
from meshwright.specs.layout import parse_layout
from tests.proving import proofs
from tests.runtime import moe_models, tiny

Record = Callable[[str, object], None]
slow = pytest.mark.slow

#: Dense models, mixtures of experts, latent attention; sizes that rarely divide.
COMPOSITIONS: tuple[tuple[str, str], ...] = (
    ("llama", "tp=2,pp=2"),  # 6 + 3 heads, 51 + 50 columns, 66 + 65 rows
    ("llama", "tp=3,pp=2"),
    ("llama", "tp=2,pp=2,dp=2"),
    ("llama", "tp=2,pp=3,stage_layers=1+3+1"),
    ("even", "tp=4,pp=2"),  # each KV head on two ranks
    ("even", "tp=8"),
    ("llama", "tp=2,sp=on,pp=2"),
    ("even", "tp=4,sp=on,dp=2"),
    ("biased", "tp=3,sp=on,pp=2"),
    ("llama", "cp=2,tp=2"),
    ("llama", "cp=2,tp=2,sp=on,pp=2"),
    ("llama", "cp=2,tp=3"),
    ("llama", "cp=2,pp=2,dp=2"),
    ("llama", "cp=5"),
    ("even", "cp=4,tp=2,cp_kind=ulysses"),
    ("even", "cp=2,tp=2,pp=2,cp_kind=ulysses"),
    ("qwen3", "cp=2,tp=2,dp=2"),
    ("mistral", "cp=4,tp=2"),
    ("gemma3", "cp=2,tp=2,sp=on"),
    ("gemma3", "tp=2,pp=2,dp=2"),
    ("qwen3_moe", "tp=2,ep=4,dp=2"),
    ("qwen3_moe", "tp=2,ep=4,dp=2,pp=2"),
    ("qwen3_moe", "pp=2,ep=2,dp=2"),
    ("qwen3_moe", "tp=2,ep=2,sp=on,pp=2"),
    ("qwen3_moe", "cp=2,tp=2,ep=4"),
    ("qwen3_moe", "cp=2,ep=2,pp=2"),
    ("mixtral", "dp=3,ep=3,tp=2"),
    ("gpt_oss", "tp=2,ep=4,dp=2"),
    ("gpt_oss", "cp=2,tp=2"),
    ("moe:deepseek_v3", "tp=2,ep=4,dp=2"),
    ("moe:deepseek_v3", "pp=2,ep=2,dp=2"),
    ("moe:deepseek_v3", "cp=2,ep=2"),
    ("deepseek_v2", "tp=3,pp=2"),
    ("deepseek_v3", "tp=2,sp=on,pp=2"),
    ("deepseek_v3", "cp=2,tp=2,pp=2"),
    ("deepseek_v3", "cp=3,pp=2,cp_kind=ulysses"),
)
#: Prompts, unequal; with more replicas than prompts some have none.
LENGTHS = (9, 4, 6, 5)


def proven(name: str, layout: str, folder: Path, record: Record, **options: Any) -> Proof:
    """Prove one composition and note what was compared."""
    moe = name.startswith("moe:") or name not in tiny.MODELS
    made = moe_models.write(folder / "m", name.removeprefix("moe:")) if moe else tiny.write(folder / "m", name)
    proof = proofs(made, layout, [None], lengths=LENGTHS, numbers=folder / "n", timeout_s=250, **options)[0]
    assert proof.proven, (proof.first, [str(c) for c in proof.checks if not c.ok])
    assert proof.comparison is not None
    facts = {
        "model": name,
        "layout": layout,
        "world": proof.world,
        "entries": proof.comparison.entries,
        "products": proof.comparison.products,
        "worst": proof.checks[0].worst,
    }
    for key, value in facts.items():
        record(f"composition {key}", value)
    return proof


def test_they_are_many_and_cover_what_is_promised() -> None:
    layouts = [parse_layout(layout) for _, layout in COMPOSITIONS]
    assert len(set(COMPOSITIONS)) >= 20
    assert max(layout.world for layout in layouts) == 8
    several = [sum(d > 1 for d in (o.tp, o.pp, o.dp, o.cp, o.ep)) + o.sp for o in layouts]
    assert sum(count > 1 for count in several) >= 30
    for axes in (("tp", "pp"), ("tp", "ep", "dp"), ("cp", "tp"), ("pp", "ep"), ("tp", "sp")):
        assert sum(
            all(getattr(layout, axis) > 1 or getattr(layout, axis) is True for axis in axes) for layout in layouts
        )


@pytest.mark.parametrize("seed", [1, 2])
def test_a_drawn_composition_is_proven(tmp_path: Path, record_property: Record, seed: int) -> None:
    """Sizes, options and prompts as they come, of those with at most four ranks."""
    draw = random.Random(seed)
    name, layout = draw.choice([c for c in COMPOSITIONS if parse_layout(c[1]).world <= 4])
    chunk, block = draw.choice((None, 2, 3)), draw.choice((1, 4, 16))
    proven(name, layout, tmp_path, record_property, new_tokens=3, chunk=chunk, block_size=block)


@slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "layout"), COMPOSITIONS)
def test_composition_is_proven(tmp_path: Path, record_property: Record, name: str, layout: str) -> None:
    proven(name, layout, tmp_path, record_property)
