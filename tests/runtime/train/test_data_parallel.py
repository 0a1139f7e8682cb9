"""ZeRO-0, 1 and 2 compute what one process computes: gradients, norms, weights, whatever sizes and micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import inf

import pytest
import torch

from meshwright.errors import InputError
from meshwright.moves import buckets
from meshwright.runtime.launch.local import run_local
from meshwright.runtime.train.data_parallel import DataOptions
from meshwright.runtime.train.optimizer import Settings
from meshwright.runtime.train.zero import refuse_half
from tests.runtime.train import small
from tests.runtime.train.small import Case

#: One launch runs all cases of a world; on a machine that others load it takes its time.
LAUNCH_S = 200
pytestmark = pytest.mark.timeout(LAUNCH_S + 40)
F64 = torch.float64
FUSED = DataOptions(bucket_elements=1 << 20)
NARROW = DataOptions(Settings(), torch.bfloat16, bucket_elements=60)
LARGEST = DataOptions(norm=inf, bucket_elements=60)

#: In fp32: one step with one and with three micro-batches.
PLAIN = [Case(zero=zero, micro=micro, most=most) for zero in (0, 1, 2) for micro, most in ((1, None), (3, 0.5))]
#: By the number of ranks: five steps in fp64 with experts, clipping and uneven micro-batches, reduced in the backward
#: and after it; and SGD.
LONG = {
    world: [
        *(
            Case(zero=zero, micro=3, steps=5, ep=1 + (world == 4), most=1.0, dtype=F64, overlap=overlap)
            for zero in (0, 1, 2)
            for overlap in ((True, False) if world == 2 else (True,))
        ),
        *(
            Case(zero=1, micro=2, steps=3, dtype=F64, options=DataOptions(Settings("sgd", momentum=m)))
            for m in (0, 0.8)
        ),
    ]
    for world in (2, 3, 4)
}
AHEAD = [*(Case(zero=zero, micro=2) for zero in (0, 1, 2)), Case(overlap=False), Case(options=FUSED)]
BF16 = [Case(zero=zero, steps=3, options=NARROW) for zero in (0, 1, 2)]
INF = [Case(zero=zero, ep=2, options=LARGEST) for zero in (0, 1)]
PIECES = [Case(zero=zero) for zero in (0, 1, 2)]
PLANTED = [
    ("mean instead of sum", Case(), "gradients"),
    ("only the last micro-batch", Case(zero=1, micro=3), "gradients"),
    ("last rank not updated", Case(zero=1), "weights"),
    ("decay everywhere", Case(zero=2), "weights"),
    ("experts over all data ranks", Case(ep=2), "gradients"),
    ("norm of one group", Case(zero=1, most=0.5), "norms"),
    ("replicas counted by all", Case(most=0.5), "norms"),
]
BAD = [replace(case, mutation=name, steps=2, dtype=F64) for name, case, _ in PLANTED]
GOOD = [replace(case, mutation=None) for case in BAD]
ALL = {2: [*PLAIN, *AHEAD, *BF16, *INF, *LONG[2]], 3: [*PIECES, *LONG[3]], 4: [*LONG[4], *GOOD, *BAD]}


@cache
def launched(world: int) -> list[list[small.Result]]:
    """Results of every rank of all cases of a world: one launch."""
    return run_local(small.run_cases, world, (world, ALL[world]), LAUNCH_S)


def results(world: int, cases: Sequence[Case]) -> list[small.Result]:
    """Results of rank 0, whole tensors."""
    return [launched(world)[0][ALL[world].index(case)] for case in cases]


def apart(world: int, case: Case, found: small.Result) -> tuple[float, float, float]:
    """Largest relative difference of any gradient, any weight and any norm to one process."""
    want = small.reference(world, case, case.options.optimizer.kind)
    norms = max(abs(a - b) / b for a, b in zip(found.norms, want.norms, strict=True))
    gradients = small.far(found.gradients, want.gradients)
    return max(gradients.values()), max(small.far(found.weights, want.weights).values()), norms


def test_every_stage_equals_one_process_in_fp32() -> None:
    for case, found in zip(PLAIN, results(2, PLAIN), strict=True):
        assert max(apart(2, case, found)) < 1e-5, case


@pytest.mark.parametrize("world", LONG)
def test_five_steps_with_uneven_micro_batches_experts_and_clipping(world: int) -> None:
    for case, found in zip(LONG[world], results(world, LONG[world]), strict=True):
        assert max(apart(world, case, found)) < 1e-11, case


def test_buffers_are_dealt_out_and_pieces_cover_every_element() -> None:
    for case in PIECES:
        ranks = [of[ALL[3].index(case)] for of in launched(3)]
        held: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for rank in ranks:
            for numel, own in rank.buffers:
                assert own == (buckets.piece(numel, 3) if case.zero else numel)
            for name, kind, start, numel in rank.pieces:
                held.setdefault((name, kind), []).append((start, numel))
        assert {kind for _, kind in held} == {"weight", "exp_avg", "exp_avg_sq"}
        for (name, _), runs in held.items():
            whole = ranks[0].weights[name].numel()
            assert sum(numel for _, numel in runs) == whole * (1 if case.zero else 3), name
            assert max(start + numel for start, numel in runs) == whole
        assert any(numel % 3 for numel, _ in ranks[0].buffers), "no uneven buffer was tested"


def test_reductions_are_launched_inside_the_last_backward() -> None:
    found = results(2, AHEAD)
    assert [len(r.buffers) for r in found] == [4, 4, 4, 4, 1]
    # A matrix that a rank does not use holds its bucket and those behind it back, on that rank alone.
    assert min(r.ahead for r in found[:3]) >= 1
    assert found[3].ahead == 0


def test_bf16_weights_follow_fp32_masters() -> None:
    """Masters differ from a run in fp32 by bf16 gradients only; the stages agree but for the order of sums."""
    found = results(2, BF16)
    want = small.reference(2, replace(BF16[0], options=DataOptions(Settings())))
    for result in found:
        assert all(x.dtype == torch.bfloat16 for x in result.weights.values())
        assert max(small.far(result.weights, want.weights).values()) < 0.1
        assert max(small.far(result.weights, found[0].weights).values()) < 0.02


def test_the_largest_element_bounds_too() -> None:
    for case, found in zip(INF, results(2, INF), strict=True):
        want = max(float(g.abs().max()) for g in small.reference(2, case).gradients.values())
        assert found.norms[0] == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize(("number", "seen"), [(n, seen) for n, (_, _, seen) in enumerate(PLANTED)])
def test_planted_mistakes_are_seen(number: int, seen: str) -> None:
    good, bad = results(4, [GOOD[number], BAD[number]])
    assert max(apart(4, GOOD[number], good)) < 1e-11
    gradients, weights, norms = apart(4, BAD[number], bad)
    assert {"gradients": gradients, "weights": weights, "norms": norms}[seen] > 1e-4


def test_half_precision_is_refused() -> None:
    with pytest.raises(InputError, match="loss scaling"):
        refuse_half(torch.float16)
    refuse_half(torch.bfloat16, torch.float32, None)


def test_buckets_cover_all_units_in_order() -> None:
    assert buckets.fill([5, 5, 5, 1], 9) == ((0, 2), (2, 4))
    assert buckets.fill([20, 1], 9) == ((0, 1), (1, 2))
    assert buckets.fill([], 9) == ()
    for sizes in ([3] * 7, [1, 50, 2, 2], [0, 0]):
        runs = buckets.fill(sizes, 8)
        assert [i for low, high in runs for i in range(low, high)] == list(range(len(sizes)))
        assert all(low < high for low, high in runs)
