"""ZeRO-3 computes what one process does: two values of every knob, replicas, experts, and the way of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from meshwright.runtime.launch.local import run_local
from meshwright.specs.layout import Fsdp, Layout
from tests.runtime.train import small
from tests.runtime.train.small import Case
from tests.runtime.train.test_data_parallel import apart

#: One launch runs all cases of a world; on a machine that others load it takes its time.
LAUNCH_S = 200
pytestmark = pytest.mark.timeout(LAUNCH_S + 40)
F64 = torch.float64


def case(*, pp: int = 1, ep: int = 1, micro: int = 1, dtype: torch.dtype = F64, **knobs: Any) -> Case:
    """Two steps with clipping; gathered in fp32 unless told otherwise."""
    layout = Layout(pp=pp, zero=3, fsdp=Fsdp(**{"param_dtype": "f32", **knobs}))
    return Case(zero=3, layout=layout, steps=2, most=0.5, ep=ep, micro=micro, dtype=dtype)


#: One of each knob beside the defaults; several micro-batches; with a pipeline one gather and one reduction a step.
EXACT = [
    case(),
    case(micro=3),
    case(wrap="model"),
    case(reshard_after_forward=False, micro=2),
    case(prefetch=2),
    case(replicas=2),
    case(pp=2, micro=3),
    case(pp=2, micro=2, wrap="model"),
]
FOUR = [case(ep=2, micro=2), case(ep=2, pp=2, micro=2), case(replicas=2, ep=2), case(replicas=2, wrap="model")]
FP32, BF16, REDUCED = (
    replace(case(dtype=torch.float32, **knobs), steps=1)
    for knobs in ({}, {"param_dtype": "bf16"}, {"reduce_dtype": "bf16"})
)
PLANTED = [
    ("fsdp means", case(), "gradients"),
    ("fsdp experts over all data ranks", case(ep=2), "gradients"),
    ("fsdp replicas counted by all", case(replicas=2), "norms"),
]
BAD = [replace(good, mutation=name) for name, good, _ in PLANTED]
ALL = {2: [*EXACT, FP32, BF16, REDUCED], 4: [*FOUR, *BAD]}


@cache
def launched(world: int) -> list[list[small.Result]]:
    """Results of every rank of all cases of a world: one launch."""
    return run_local(small.run_cases, world, (world, ALL[world]), LAUNCH_S)


def results(world: int, cases: Sequence[Case]) -> list[small.Result]:
    """Whole tensors of some cases."""
    return [launched(world)[0][ALL[world].index(c)] for c in cases]


@pytest.mark.parametrize(("world", "cases"), [(2, EXACT), (4, FOUR)])
def test_every_knob_equals_one_process(world: int, cases: list[Case]) -> None:
    for c, found in zip(cases, results(world, cases), strict=True):
        assert max(apart(world, c, found)) < 1e-11, c.layout


def test_fp32_equals_one_process() -> None:
    assert max(apart(2, FP32, results(2, [FP32])[0])) < 1e-5


def test_types_of_gathered_parameters_and_of_reduced_gradients() -> None:
    """bf16 shows in the gradients by its rounding, and the values that are kept stay fp32."""
    for narrow in (BF16, REDUCED):
        found = results(2, [narrow])[0]
        gradients, weights, _ = apart(2, narrow, found)
        assert 1e-4 < gradients < 0.1
        assert weights < 1e-3 + 2 * small.RATE
        assert all(x.dtype == torch.float32 for x in found.weights.values())
    assert apart(2, BF16, results(2, [BF16])[0])[0] > apart(2, REDUCED, results(2, [REDUCED])[0])[0]


def test_pieces_are_rows_and_cover_every_element() -> None:
    held: dict[tuple[str, str], int] = {}
    for rank in launched(2):
        for name, kind, _, numel in rank[0].pieces:
            held[name, kind] = held.get((name, kind), 0) + numel
    weights = results(2, EXACT[:1])[0].weights
    assert held == {(n, kind): w.numel() for n, w in weights.items() for kind in ("weight", "exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize(("number", "seen"), [(n, seen) for n, (_, _, seen) in enumerate(PLANTED)])
def test_planted_mistakes_are_seen(number: int, seen: str) -> None:
    gradients, weights, norms = apart(4, BAD[number], results(4, [BAD[number]])[0])
    assert {"gradients": gradients, "weights": weights, "norms": norms}[seen] > 1e-4
