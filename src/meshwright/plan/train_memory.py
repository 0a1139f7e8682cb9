"""What every rank holds at the peak of a training step: ``train_memory(spec, layout, cluster, work, engine)``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshwright.ledger.schema import Holding
from meshwright.plan.memory import RankMemory, TrainMemory
from meshwright.plan.train_activations import activations
from meshwright.plan.train_engine import TrainEngine
from meshwright.plan.train_shards import TrainStage, placed_elements, stage_units, train_stages
from meshwright.plan.train_states import states
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import Coordinate, Placement, RankClass
from meshwright.specs.workload import Train

#: Plain PyTorch with FSDP2, flash attention and an unfused loss: what ``plan train`` assumes without an engine.
DEFAULT_ENGINE = TrainEngine()


def stage_holdings(
    spec: ModelSpec,
    stage: TrainStage,
    layout: Layout,
    work: Train,
    engine: TrainEngine,
    name: str,
    placed: Mapping[str, int] | None = None,
) -> tuple[Holding, ...]:
    """Holdings of one rank of ``stage``, in bytes; terms weights, gradients, optimizer, activations, runtime."""
    held = states(stage_units(spec, layout, stage, engine, placed), layout, work, engine)
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


def fullest(spec: ModelSpec, stages: Sequence[TrainStage]) -> list[TrainStage]:
    """The stages one of which is the fullest: the last, and the first of those with the same mix of layers (a model may
    begin with small dense layers), since in-flight micro-batches never grow from one stage to the next."""
    first: dict[tuple[object, ...], TrainStage] = {}
    for stage in stages:
        mix = tuple(tuple(sorted(Counter(spec.patterns[i] for i in chunk).items())) for chunk in stage.chunks)
        first.setdefault((mix, stage.embedding, stage.head), stage)
    return list(first.values())


def _classes(model: Placement | ModelSpec, layout: Layout, stages: Sequence[TrainStage]) -> list[RankClass]:
    """Rank classes of a placement; without one, one a stage, ranks in the order pp, dp, cp, tp."""
    if isinstance(model, Placement):
        return list(model.classes)
    per_stage = layout.tp * layout.dp * layout.cp
    return [RankClass(f"pp{s.index}", Coordinate(pp=s.index), s.index * per_stage, per_stage) for s in stages]


def train_memory(
    model: Placement | ModelSpec,
    layout: Layout,
    cluster: Cluster,
    work: Train,
    engine: TrainEngine = DEFAULT_ENGINE,
    *,
    few: bool = False,
) -> TrainMemory:
    """Training memory of every rank class at the peak of a step.

    With a ``Placement`` its rank classes, stages and shards count (uneven cuts exactly); with a ``ModelSpec`` there is
    one class a stage and every cut is even, rounded up. Activations are those of the largest even share.
    ``few``: only the stages that can be the fullest (see ``fullest``; a search looks at many layouts).

    Raises:
        IllegalLayoutError: the pipeline has more parts than the model has layers.
    """
    spec = model.spec if isinstance(model, Placement) else model
    if isinstance(model, Placement) and layout.virtual == 1:
        layout = replace(layout, stage_layers=tuple(len(s.layers) for s in model.stages))
    stages = train_stages(spec, layout)
    wanted = {s.index for s in (fullest(spec, stages) if few else stages)}
    ranks = []
    for c in _classes(model, layout, stages):
        if c.coordinate.pp not in wanted:
            continue
        placed = placed_elements(model, c.coordinate) if isinstance(model, Placement) else None
        stage = stages[c.coordinate.pp]
        holdings = stage_holdings(spec, stage, layout, work, engine, c.name, placed)
        ranks.append(RankMemory(c.first_rank, c.ranks, c.name, c.coordinate, cluster.device.memory_bytes, holdings))
    return TrainMemory(tuple(ranks), notes(layout, work, engine))


def notes(layout: Layout, work: Train, engine: TrainEngine) -> tuple[str, ...]:
    """Sentences that the output repeats: what was assumed about engine, loss and schedule."""
    loss = "fused" if work.fused_cross_entropy else "unfused"
    said = [
        f"training memory: {engine.name} {engine.version}, {engine.attention or work.attention} attention, {loss} "
        f"cross-entropy ({engine.loss_bytes(work):g} bytes a local logit), routed tokens spread evenly"
    ]
    if layout.pp > 1:
        end = "first stage, with the embedding" if layout.schedule in {"zbv", "dualpipev"} else "last stage"
        said.append(f"schedule {layout.schedule}: every stage differs; the head and the loss lie on the {end}")
    return tuple(said)
