"""Rules that hold for every engine: sizes, cluster, pipeline, data parallelism, batches.

Each check is a small pure function that returns the rules a layout breaks, without the nearest legal layouts
(``specs.nearest`` adds those). Engines add their own checks to these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import gcd, isqrt

from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import LayerSplit
from meshwright.specs.rules import Rule, Severity
from meshwright.specs.splits import splits
from meshwright.specs.workload import Train


def broken(code: str, severity: Severity, message: str, way_out: str, where: str = "", **numbers: int) -> Rule:
    """A rule with its numbers."""
    return Rule(code, severity, message, way_out, where, tuple(numbers.items()))


@lru_cache(maxsize=1 << 10)
def divisors(*numbers: int) -> tuple[int, ...]:
    """Common divisors of positive numbers, ascending."""
    whole = gcd(*numbers)
    low = [d for d in range(1, isqrt(whole) + 1) if whole % d == 0]
    return tuple(dict.fromkeys([*low, *(whole // d for d in reversed(low))]))


def named(values: Sequence[int], around: int, keep: int = 6) -> str:
    """The few values nearest to ``around``, as text in ascending order."""
    return ", ".join(map(str, sorted(sorted(values, key=lambda v: (abs(v - around), v))[:keep])))


#: A link between nodes that is less slow than this keeps tensor parallelism (trays of one NVLink domain).
MUCH_SLOWER = 1.5


def world_fits(layout: Layout, cluster: Cluster | None) -> Iterator[Rule]:
    """The product of the degrees against the devices of the cluster."""
    if cluster is None:
        return
    world, devices = layout.world, cluster.devices
    product = f"tp {layout.tp} x pp {layout.pp} x cp {layout.cp} x dp {layout.dp} = {world}"
    if world > devices:
        yield broken(
            "world_exceeds_cluster",
            "illegal",
            f"{product} devices are needed, {cluster} has {devices}",
            f"lower a degree so that the product is at most {devices}",
            world=world,
            devices=devices,
        )
    elif world < devices:
        yield broken(
            "devices_idle",
            "unwise",
            f"{product} devices are used of {devices}; {devices - world} idle",
            f"raise dp to {layout.dp * devices // world}"
            if devices % world == 0
            else f"choose degrees whose product is {devices}",
            world=world,
            devices=devices,
        )


def tp_inside_node(layout: Layout, cluster: Cluster | None) -> Iterator[Rule]:
    """Tensor parallel groups that cross a node run their all-reduces, two a layer, over the slow link."""
    if cluster is None or cluster.nodes == 1 or layout.tp == 1 or layout.world <= cluster.devices_per_node:
        return
    inside = cluster.devices_per_node
    if layout.tp <= inside and inside % layout.tp == 0:
        return
    ratio = cluster.intra.bandwidth_bytes_s / max(1.0, cluster.inter.bandwidth_bytes_s)
    if ratio < MUCH_SLOWER:
        return
    fit = max(d for d in divisors(inside) if d <= layout.tp)
    yield broken(
        "tp_crosses_node",
        "unwise",
        f"tensor parallel {layout.tp} crosses nodes of {inside} devices: two all-reduces a layer over "
        f"{cluster.inter.name}, {ratio:.0f} times slower than {cluster.intra.name}",
        f"keep tp at {fit} and use pipeline stages or replicas across nodes",
        "Megatron-LM (arXiv:2104.04473), section 5.4",
        tp=layout.tp,
        devices_per_node=inside,
    )


def stages(spec: ModelSpec, layout: Layout, split: LayerSplit) -> Iterator[Rule]:
    """Pipeline stages against layers, and a hand-made split against both."""
    layers, pp = len(spec.layers), layout.pp
    if pp > layers:
        yield broken(
            "more_stages_than_layers",
            "illegal",
            f"{pp} pipeline stages for {layers} layers: {pp - layers} stages would be empty",
            f"choose pp of at most {layers}",
            stages=pp,
            layers=layers,
        )
    if not layout.stage_layers:
        return
    given = layout.stage_layers
    if len(given) != pp:
        yield broken(
            "stage_count",
            "illegal",
            f"the split names {len(given)} stages, pp is {pp}",
            f"give {pp} numbers, for instance {text_split(split(layers, pp)) if pp <= layers else layers}",
            given=len(given),
            stages=pp,
        )
    elif sum(given) != layers:
        yield broken(
            "stage_sum",
            "illegal",
            f"the split {text_split(given)} holds {sum(given)} layers, the model has {layers}",
            f"for instance {text_split(split(layers, pp)) if pp <= layers else layers}",
            given=sum(given),
            layers=layers,
        )


def even_stages(spec: ModelSpec, layout: Layout) -> list[Rule]:
    """Engines that deal only equal stages (Megatron-LM without first and last stage sizes)."""
    layers, pp = len(spec.layers), layout.pp
    if layers % pp == 0 or layout.stage_layers:
        return []
    return [
        broken(
            "layers_divide_pp",
            "illegal",
            f"{layers} layers are not divisible by {pp} pipeline stages",
            f"choose pp from {named(divisors(layers), pp)}, or name the layers of the first and last stage",
            "Megatron-LM megatron/core/transformer/transformer_block.py",
            layers=layers,
            stages=pp,
        )
    ]


def uneven_stages(spec: ModelSpec, layout: Layout, split: LayerSplit) -> Iterator[Rule]:
    """Stages that hold more layers than others set the pace of all."""
    layers, pp = len(spec.layers), layout.pp
    if layers % pp == 0 or pp > layers or layout.stage_layers:
        return
    yield broken(
        "uneven_stages",
        "unwise",
        f"{layers} layers over {pp} stages are {text_split(split(layers, pp))}; every step waits for the longest",
        f"pp {named(divisors(layers), pp, 4)} divides them evenly",
        layers=layers,
        stages=pp,
    )


def text_split(counts: tuple[int, ...]) -> str:
    """``20+20+22+18``."""
    return "+".join(map(str, counts))


def experts(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    """Expert parallelism needs experts, and at least one for every member of the group."""
    if layout.ep == 1:
        return
    moes = splits(spec).moes
    if not moes:
        yield broken(
            "ep_without_experts",
            "illegal",
            f"expert parallel {layout.ep} on a dense model: it has 0 experts",
            "use ep 1; a dense model is divided by tp, pp and replicas",
            ep=layout.ep,
            experts=0,
        )
    for moe in moes:
        if layout.ep > moe.experts:
            yield broken(
                "ep_exceeds_experts",
                "illegal",
                f"expert parallel {layout.ep} for {moe.experts} experts: {layout.ep - moe.experts} ranks "
                "would hold none",
                f"choose ep of at most {moe.experts}",
                ep=layout.ep,
                experts=moe.experts,
            )
        elif moe.experts % layout.ep:
            yield broken(
                "experts_uneven",
                "unwise",
                f"{moe.experts} experts over expert parallel {layout.ep}: some ranks hold "
                f"{moe.experts // layout.ep + 1}, others {moe.experts // layout.ep}",
                f"choose ep from {named(divisors(moe.experts), layout.ep)}",
                ep=layout.ep,
                experts=moe.experts,
            )


def zero_needs_ranks(layout: Layout) -> Iterator[Rule]:
    """ZeRO shards over the data parallel ranks: with one of them it shards nothing."""
    ranks = layout.dp * layout.cp
    if layout.zero and ranks == 1:
        yield broken(
            "zero_on_one_rank",
            "unwise",
            f"ZeRO-{layout.zero} over dp {layout.dp} x cp {layout.cp} = 1 rank shards nothing and saves 0 bytes",
            "raise dp, or drop zero",
            zero=layout.zero,
            ranks=ranks,
        )
    if layout.zero == 3 and layout.pp > 1:
        yield broken(
            "zero3_under_pipeline",
            "unwise",
            f"ZeRO-3 with {layout.pp} pipeline stages gathers every parameter again for each micro-batch",
            "use zero=1 with pipeline stages, or zero=3 without them",
            "Rajbhandari et al. (arXiv:1910.02054), section 7",
            zero=3,
            stages=layout.pp,
        )
    fsdp = layout.fsdp
    if fsdp is not None and ranks % fsdp.replicas:
        yield broken(
            "fsdp_replicas",
            "illegal",
            f"{fsdp.replicas} FSDP replicas do not divide {ranks} data parallel ranks",
            f"choose replicas from {named(divisors(ranks), fsdp.replicas)}",
            replicas=fsdp.replicas,
            ranks=ranks,
        )


def batches(layout: Layout, train: Train) -> Iterator[Rule]:
    """Whole micro-batches of a step on every rank; fewer micro-batches than stages leave bubbles."""
    each = layout.dp * layout.micro_batch
    if train.global_batch % each:
        legal = divisors(train.global_batch)
        yield broken(
            "batch_not_whole",
            "illegal",
            f"a global batch of {train.global_batch} sequences is not a multiple of dp {layout.dp} x micro-batch "
            f"{layout.micro_batch} = {each}",
            f"choose dp x micro-batch from {named(legal, each)}",
            global_batch=train.global_batch,
            per_round=each,
        )
        return
    rounds = train.global_batch // each
    if layout.schedule == "interleaved" and rounds % layout.pp and layout.virtual > 1:
        yield broken(
            "interleaved_micro_batches",
            "illegal",
            f"the interleaved schedule needs micro-batches in multiples of the {layout.pp} stages, there are {rounds}",
            f"choose a global batch of {each * layout.pp * max(1, rounds // layout.pp)}",
            "Narayanan et al. (arXiv:2104.04473), section 2.2",
            micro_batches=rounds,
            stages=layout.pp,
        )
    if layout.pp > 1 and rounds < layout.pp and layout.schedule in {"gpipe", "1f1b"}:
        yield broken(
            "few_micro_batches",
            "unwise",
            f"{rounds} micro-batches for {layout.pp} stages: {100 * (layout.pp - 1) / (rounds + layout.pp - 1):.0f} % "
            "of the step is pipeline bubble",
            f"use at least {layout.pp} micro-batches (lower dp or the micro-batch)",
            micro_batches=rounds,
            stages=layout.pp,
        )


def virtual_stages(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    """Schedules with several model chunks a rank."""
    chunked = layout.schedule in {"interleaved", "zbv", "dualpipev"}
    v, pp, layers = layout.virtual, layout.pp, len(spec.layers)
    if v > 1 and not chunked:
        yield broken(
            "virtual_without_chunks",
            "illegal",
            f"{v} model chunks a rank with the schedule {layout.schedule}, which has 1",
            "use schedule=interleaved, or virtual=1",
            virtual=v,
        )
    if chunked and pp == 1:
        yield broken(
            "chunks_without_stages",
            "illegal",
            f"the schedule {layout.schedule} interleaves pipeline stages, pp is 1",
            "use pp of at least 2, or schedule=1f1b",
            pp=pp,
        )
    if layout.schedule in {"zbv", "dualpipev"} and v not in {1, 2}:
        yield broken(
            "two_chunks",
            "illegal",
            f"the schedule {layout.schedule} has 2 model chunks a rank, not {v}",
            "leave virtual unset",
            virtual=v,
        )
    chunks = pp * (max(v, 2) if chunked else 1)
    if chunked and pp > 1 and layers < chunks:
        yield broken(
            "more_chunks_than_layers",
            "illegal",
            f"{chunks} model chunks for {layers} layers",
            f"lower pp or virtual so that their product is at most {layers}",
            chunks=chunks,
            layers=layers,
        )


def context_divides(layout: Layout, train: Train) -> Iterator[Rule]:
    """The sequence against context and sequence parallelism."""
    pieces = layout.cp * 2 if layout.cp > 1 else 1
    if train.seq % pieces:
        yield broken(
            "sequence_over_cp",
            "illegal",
            f"a sequence of {train.seq} tokens is not a multiple of 2 x cp {layout.cp} = {pieces} (each rank holds two "
            "chunks so that causal work is even)",
            f"pad the sequence to {-(-train.seq // pieces) * pieces}",
            seq=train.seq,
            pieces=pieces,
        )
    if layout.sp and (train.seq // layout.cp) % layout.tp:
        yield broken(
            "sequence_over_sp",
            "illegal",
            f"{train.seq // layout.cp} tokens a rank are not a multiple of sequence parallel size {layout.tp}",
            f"pad the sequence to a multiple of {layout.tp * layout.cp}",
            seq=train.seq,
            tp=layout.tp,
        )
    if layout.sp and layout.tp == 1:
        yield broken(
            "sp_without_tp",
            "unwise",
            "sequence parallelism shards norms over tp, and tp is 1",
            "drop sp, or raise tp",
            tp=1,
        )


def ulysses(heads: int, kv_heads: int, degree: int) -> list[Rule]:
    """Ulysses sequence parallelism (all-to-all of heads): the degree must divide the heads.

    Source: Jacobs et al. (arXiv:2309.14509), section 3.
    """
    if heads % degree == 0:
        return []
    return [
        broken(
            "heads_over_ulysses",
            "illegal",
            f"{heads} attention heads are not divisible by Ulysses sequence parallel size {degree}",
            f"choose from {named(divisors(heads), degree)}, or ring attention, which does not cut heads",
            "arXiv:2309.14509, section 3",
            heads=heads,
            degree=degree,
            kv_heads=kv_heads,
        )
    ]


def dp_does_not_cure(layout: Layout, needed_bytes: int, capacity_bytes: int) -> list[Rule]:
    """Replicas asked to cure a model that does not fit: every replica holds all of it.

    Args:
        layout: the layout that was asked for.
        needed_bytes: what the worst rank must hold.
        capacity_bytes: what its device offers.
    """
    if layout.dp == 1 or layout.zero == 3 or needed_bytes <= capacity_bytes:
        return []
    gib = 1 << 30
    return [
        broken(
            "dp_does_not_cure_memory",
            "illegal",
            f"a rank needs {needed_bytes / gib:.1f} GiB and has {capacity_bytes / gib:.1f} GiB; dp {layout.dp} makes "
            "copies and cuts no weights",
            f"use the {layout.dp} replicas' devices for tp or pp instead: world {layout.world} at dp 1",
            needed_bytes=needed_bytes,
            capacity_bytes=capacity_bytes,
            dp=layout.dp,
        )
    ]
