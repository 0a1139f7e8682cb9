"""What a rank of our own trainer holds over a step: parameters, gradients, optimizer state, by ZeRO stage."""

from __future__ import annotations

from meshwright.ledger.schema import Holding
from meshwright.plan.executed.reduction import Flat, Reduction
from meshwright.plan.train_states import moment_bytes
from meshwright.specs.dtypes import size_bytes
from meshwright.specs.placement import Placement
from meshwright.specs.workload import Train


def holdings(placement: Placement, train: Train, rank: int) -> list[Holding]:
    """Bytes of a rank by term, exact; rank class ``rank{n}``.

    ZeRO-0 keeps every flat whole, 1 a piece of the moments, 2 also of the gradients but for late flats, which are
    dealt out once a step. Working parameters stay whole in all three. ZeRO-3 keeps rows of every parameter,
    padded to equal ones but for the moments.
    """
    reduction = Reduction(placement, train, placement.coordinate(rank))

    def whole(flat: Flat) -> int:
        return flat.ranks * flat.piece if reduction.scattered(flat) else flat.numel

    def kept(flat: Flat) -> int:
        return flat.piece if reduction.scattered(flat) else flat.numel

    flats = reduction.all_flats
    dealt = [reduction.rows(p) for own in reduction.dealt.values() for p in own]
    padded = sum(size for _, size in dealt)
    gradients = sum(kept(flat) if reduction.zero == 2 and not flat.late else whole(flat) for flat in flats)
    sizes = {
        "weights": (padded + sum(map(whole, flats))) * size_bytes(train.param_dtype),
        "gradients": (padded + gradients) * size_bytes(train.grad_dtype),
        "optimizer": (sum(own for own, _ in dealt) + sum(map(kept, flats))) * moment_bytes(train),
    }
    return [Holding(f"rank{rank}", term, None, size, "exact") for term, size in sizes.items()]
