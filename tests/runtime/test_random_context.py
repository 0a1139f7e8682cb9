"""Random sizes, prompts and chunks under sp and cp against transformers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from meshwright.errors import IllegalLayoutError
from meshwright.prove.proof import legal
from meshwright.runtime.folder import read_folder
from meshwright.runtime.job import GenerateJob
from meshwright.specs.layout import parse_layout
from tests.runtime import tiny
from tests.runtime.test_random_layouts import FAMILIES, _sizes

SEEDS = 24
LAYOUTS = (
    "cp=2",
    "cp=3",
    "cp=4",
    "cp=2,tp=2",
    "cp=2,tp=2,sp=on",
    "cp=2,pp=2",
    "cp=2,dp=2",
    "cp=2,cp_kind=ulysses",
    "cp=3,cp_kind=ulysses",
    "cp=4,cp_kind=ulysses",
    "tp=2,sp=on",
    "tp=3,sp=on",
    "tp=2,pp=2,sp=on",
)


def drawn(seed: int, folder: Path) -> GenerateJob:
    """A model, a layout that is legal for it, prompts and ways of batching."""
    draw = random.Random(1000 + seed)
    family = draw.choice(FAMILIES)
    sizes = _sizes(draw, family)
    tiny.write(folder, family, **sizes)
    spec = read_folder(folder).spec

    def fits(layout: str) -> bool:
        try:
            legal(spec, parse_layout(layout))
        except IllegalLayoutError:
            return False
        return True

    layout = draw.choice([text for text in LAYOUTS if fits(text)])
    lengths = [draw.randint(1, 20) for _ in range(draw.randint(1, 4))]
    prompts = [[draw.randrange(sizes["vocab_size"]) for _ in range(n)] for n in lengths]
    options = {"chunk": draw.choice((None, 1, 2, 5)), "block_size": draw.choice((1, 2, 4, 16))}
    return tiny.job(folder, layout, prompts, 5, **options)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_layout_equals_transformers(tmp_path: Path, seed: int) -> None:
    job = drawn(seed, tmp_path / "m")
    tiny.assert_same(tiny.on_ranks(job, 150), tiny.oracle(job.model.folder, job.prompts, 5))


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_draws_cover_both_ways_and_sp(tmp_path: Path) -> None:
    layouts = [drawn(seed, tmp_path / str(seed)).placement.layout for seed in range(SEEDS)]
    assert {o.cp for o in layouts} >= {1, 2, 3}
    assert sum(o.cp_kind == "ulysses" for o in layouts) > 1
    assert sum(o.sp for o in layouts) > 3
