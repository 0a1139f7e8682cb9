"""Lower bound of an optimizer step from the counted ledger; see ``plan.cost`` for what it is and is not.

``train_cost`` adds the time that ``training_time`` predicts, made when it is first asked for: layouts are compared by
it, and the bound says how far it is from the peaks.
"""

from __future__ import annotations

from meshwright.moves.pipeline import FOLDED, schedule, simulate
from meshwright.plan.cost import Links, Tally, tally
from meshwright.plan.plan import Cost, Prediction
from meshwright.plan.train_engine import TrainEngine
from meshwright.plan.training_step import microbatches, training_ops
from meshwright.plan.training_time import TrainingTime, training_time
from meshwright.plan.training_time_work import is_data_parallel as is_data_parallel
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.placement import Placement
from meshwright.specs.workload import Train

#: Part of the compute that gradient and parameter collectives can hide behind: the backward, two thirds of a step
#: (DistributedDataParallel: Li et al. 2020, arXiv 2006.15704).
HIDDEN = 2 / 3


def bubble_parts(layout: Layout, micro_batches: int) -> tuple[int, str]:
    """The closed form (p-1)/(busy + p-1): ``busy`` in units of the bubble, and how it is written with m and v.

    1F1B and GPipe m, interleaved v m (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). Split backwards, all
    parts equally long: ZB-H1 3 m (Qi et al. 2023, arXiv 2401.10241, section 2.2), ZBV and DualPipeV, whose unit is a
    third of a half stage, 6 m from 2 p micro-batches on (counted by ``moves.pipeline.simulate``).
    """
    if layout.schedule in FOLDED:
        return 6 * micro_batches, "6m"
    if layout.schedule == "zb-h1" and layout.virtual == 1:
        return 3 * micro_batches, "3m"
    return layout.virtual * micro_batches, "v m" if layout.virtual > 1 else "m"


def bubble(layout: Layout, micro_batches: int) -> float:
    """Share of a step that a stage stands idle; see ``bubble_parts``. A folded pipeline with fewer than 2 p
    micro-batches has no closed form and is simulated."""
    p = layout.pp
    if p > 1 and layout.schedule == "zbv" and micro_batches < 2 * p:
        return simulate(schedule("zbv", p, micro_batches, 2)).bubble
    return (p - 1) / (bubble_parts(layout, micro_batches)[0] + p - 1)


def step_tallies(placement: Placement, cluster: Cluster, work: Train) -> dict[str, tuple[Tally, Tally]]:
    """By rank class: sums of what runs in the step proper, and of the data-parallel collectives."""
    out = {}
    for rank_class, lists in training_ops(placement, work):
        links = Links(placement, cluster, rank_class.coordinate)
        step = data = Tally()
        for ops, times in lists:
            alone = [op for op in ops if is_data_parallel(op.group)]
            if alone:
                data = data.plus(tally(alone, cluster.device, links), times)
            step = step.plus(tally((op for op in ops if not is_data_parallel(op.group)), cluster.device, links), times)
        out[rank_class.name] = (step, data)
    return out


def train_cost(
    placement: Placement,
    cluster: Cluster,
    work: Train,
    engine: TrainEngine | None = None,
    *,
    whole: Placement | None = None,
) -> Cost:
    """Lower bound of a step: the slowest rank's work stretched by the bubble, and the data-parallel collectives that
    the backward cannot hide; beside it the prediction for ``engine``'s kernels (plain PyTorch without one).

    ``whole``: the placement that is predicted, where ``placement`` holds only some of its rank classes.
    """
    layout = placement.layout
    idle = bubble(layout, microbatches(layout, work))
    step_s, worst, shown = 0.0, Tally(), 0.0
    for step, data in step_tallies(placement, cluster, work).values():
        exposed = max(0.0, data.wire_s - HIDDEN * step.compute_s)
        seconds = step.seconds / (1.0 - idle) + exposed
        if seconds >= step_s:
            step_s, worst, shown = seconds, step.plus(data), step.wire_s + exposed

    def predict() -> TrainingTime:
        return training_time(whole or placement, cluster, work, engine)

    return Cost(
        bytes_read=worst.bytes_moved,
        flops=worst.flops,
        wire_bytes=worst.wire_bytes,
        messages=worst.messages,
        step_s=step_s,
        prefill_s=0.0,
        tokens_per_s=work.global_batch * work.seq / step_s if step_s else 0.0,
        wire_share=shown / step_s if step_s else 0.0,
        bubble=idle,
        step_later=Prediction(predict),
    )
