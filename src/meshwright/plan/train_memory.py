"""What every rank holds at the peak of a training step: ``train_memory(spec, layout, cluster, work, engine)``."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.ledger.schema import Holding
from meshwright.plan.memory import RankMemory, TrainMemory
from meshwright.plan.train_activations import activations
from meshwright.plan.train_engine import TrainEngine
from meshwright.plan.train_shards import TrainStage, stage_units, train_stages
from meshwright.plan.train_states import states
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import Coordinate
from meshwright.specs.workload import Train

#: Plain PyTorch with FSDP2, flash attention and an unfused loss: what ``plan train`` assumes without an engine.
DEFAULT_ENGINE = TrainEngine()


def stage_holdings(
    spec: ModelSpec, stage: TrainStage, layout: Layout, work: Train, engine: TrainEngine, name: str
) -> tuple[Holding, ...]:
    """Holdings of one rank of ``stage``, in bytes; terms weights, gradients, optimizer, activations, runtime."""
    held = states(stage_units(spec, layout, stage, engine), layout, work, engine)
    rows: list[tuple[str, str, int, str]] = [
        ("weights", "parameters", held.weights, "exact"),
        ("weights", "gathered parameters", held.gathered_weights, "modelled"),
        ("gradients", "gradients", held.gradients, "exact"),
        ("gradients", "unreduced gradients", held.gathered_gradients, "modelled"),
        ("optimizer", "moments and master weights", held.optimizer, "exact"),
    ]
    acts = activations(spec, stage, layout, work, engine)
    if acts.total >= held.step_gradients:
        rows += [("activations", part, size, "modelled") for part, size in acts.parts.items()]
    else:
        rows.append(("gradients", "fp32 gradients of the optimizer step", held.step_gradients, "exact"))
    rows.append(("runtime", "workspaces", engine.workspace_bytes, "calibrated"))
    rows.append(("runtime", "driver context", engine.context_bytes, "calibrated"))
    if layout.world > 1:
        rows.append(("runtime", "communicators", engine.communicator_bytes, "calibrated"))
    return tuple(Holding(name, term, tensor, size, source) for term, tensor, size, source in rows if size)


def fullest(stages: Sequence[TrainStage]) -> list[TrainStage]:
    """The stages one of which is the fullest: the first, the first with the most layers, the last."""
    longest = max(stages, key=lambda s: len(s.layers))
    return [stages[i] for i in sorted({0, longest.index, len(stages) - 1})]


def train_memory(
    spec: ModelSpec,
    layout: Layout,
    cluster: Cluster,
    work: Train,
    engine: TrainEngine = DEFAULT_ENGINE,
    *,
    few: bool = False,
) -> TrainMemory:
    """Training memory of every rank class (one a pipeline stage) at the peak of a step.

    Ranks of one stage hold the same: tensor, data, context and expert parallel shards are equal up to rounding.
    ``few``: only the stages that can be the fullest: the first, the last, and the first with the most layers (a
    search looks at many layouts; in-flight micro-batches never grow from one stage to the next).

    Raises:
        IllegalLayoutError: the pipeline has more parts than the model has layers.
    """
    stages = train_stages(spec, layout)
    per_stage = layout.tp * layout.dp * layout.cp
    ranks = tuple(
        RankMemory(
            rank=stage.index * per_stage,
            ranks=per_stage,
            rank_class=f"pp{stage.index}",
            coordinate=Coordinate(pp=stage.index),
            capacity_bytes=cluster.device.memory_bytes,
            holdings=stage_holdings(spec, stage, layout, work, engine, f"pp{stage.index}"),
        )
        for stage in (fullest(stages) if few else stages)
    )
    return TrainMemory(ranks)
