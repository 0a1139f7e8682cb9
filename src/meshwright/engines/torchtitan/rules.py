"""What torchtitan refuses of a layout, with the place in its code that says so (torchtitan 0.3.0)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.engines.torchtitan.stages import split_layers, split_parts
from meshwright.specs import checks
from meshwright.specs.checks import broken, divisors, named
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.rules import Rule
from meshwright.specs.splits import splits
from meshwright.specs.workload import Serve, Train, Workload

_DECODER = "torchtitan/models/common/decoder.py"
_DIMS = "torchtitan/distributed/parallel_dims.py"
_PIPELINE = "torchtitan/distributed/pipeline_parallel.py"
_TRAINER = "torchtitan/trainer.py"

#: Where torchtitan says what the general checks find.
_WHERE = {
    "world_exceeds_cluster": f"{_DIMS}:186",
    "more_stages_than_layers": f"{_PIPELINE}:401",
    "stage_count": _PIPELINE,
    "stage_sum": _PIPELINE,
    "more_chunks_than_layers": f"{_PIPELINE}:401",
    "ep_without_experts": _DIMS,
    "ep_exceeds_experts": "torchtitan/models/common/moe_sharding.py",
    "batch_not_whole": f"{_TRAINER}:421",
    "sequence_over_cp": f"{_TRAINER}:307",
    "sequence_over_sp": f"{_TRAINER}:307",
}


def check(spec: ModelSpec, layout: Layout, cluster: Cluster | None, workload: Workload | None) -> list[Rule]:
    """Every rule that a layout breaks, illegal ones first."""
    found = [
        *_training_only(layout, workload),
        *checks.world_fits(layout, cluster),
        *_heads(spec, layout),
        *checks.stages(spec, layout, split_layers),
        *_parts(spec, layout),
        *checks.virtual_stages(spec, layout),
        *checks.experts(spec, layout),
        *_experts(spec, layout),
        *_sharding(layout),
        *checks.tp_inside_node(layout, cluster),
    ]
    if isinstance(workload, Train):
        found += [rule for rule in checks.batches(layout, workload) if rule.code != "interleaved_micro_batches"]
        found += checks.context_divides(layout, workload)
        found += _positions(spec, workload)
    placed = (rule if rule.where else replace(rule, where=_WHERE.get(rule.code, "")) for rule in found)
    return sorted(placed, key=lambda rule: rule.severity != "illegal")


def _training_only(layout: Layout, workload: Workload | None) -> Iterator[Rule]:
    if isinstance(workload, Serve):
        yield broken("does_not_serve", "illegal", "torchtitan trains and does not serve", "use --engine vllm")
    asked = [
        (layout.dcp > 1, f"decode context parallel {layout.dcp}"),
        (layout.cp_kind != "auto", f"choice of context parallelism by the layout (cp_kind {layout.cp_kind})"),
        (layout.schedule == "zb-h1", "pipeline schedule zb-h1"),
        (layout.zero in {1, 2}, f"ZeRO-{layout.zero}: parameters are sharded too (zero=3) or copied (zero=0)"),
        (layout.fsdp is not None and layout.fsdp.wrap != "layer", "FSDP of the whole model at once"),
        (layout.fsdp is not None and layout.fsdp.prefetch != 1, "a setting for FSDP prefetch"),
        (layout.fsdp is not None and layout.fsdp.reduce_dtype != "f32", "gradients reduced in another dtype than f32"),
    ]
    for given, what in asked:
        if given:
            yield broken("not_of_this_engine", "illegal", f"torchtitan has no {what}", "leave it out", _DIMS)


def _heads(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    tp = layout.tp
    for a in splits(spec).attentions:
        groups = a.kv_heads if a.kind == "gqa" else a.heads
        legal = divisors(a.heads, groups)
        for name, count, code, line in (
            ("attention heads", a.heads, "heads_divide_tp", 150),
            ("KV heads", groups, "kv_heads_divide_tp", 155),
        ):
            if count % tp:
                yield broken(
                    code,
                    "illegal",
                    f"{count} {name} are not divisible by tensor parallel size {tp}",
                    f"choose tp from {named(legal, tp)}",
                    f"{_DECODER}:{line}",
                    heads=count,
                    tp=tp,
                )
                break


def _parts(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    """Parts of the pipeline when torchtitan deals them: none may be empty; tied embeddings cannot be cut."""
    if layout.pp == 1:
        return
    if spec.tied:
        yield broken(
            "tied_under_pipeline",
            "illegal",
            f"embedding and head are one tensor, which {layout.pp} pipeline stages would have to share",
            "use pp 1 with FSDP or tensor parallelism",
            f"{_DECODER}:140",
            stages=layout.pp,
        )
    chunks = layout.virtual if layout.schedule == "interleaved" else 2 if layout.schedule in {"zbv", "dualpipev"} else 1
    parts, layers = layout.pp * max(1, chunks), len(spec.layers)
    if layout.schedule == "interleaved" and layout.virtual < 2:
        yield broken(
            "interleaved_without_chunks",
            "illegal",
            f"the interleaved schedule needs 2 stages a rank or more, virtual is {layout.virtual}",
            "use virtual=2, or schedule=1f1b",
            f"{_PIPELINE}:253",
            virtual=layout.virtual,
        )
        return
    if layout.stage_layers and min(layout.stage_layers) < chunks:
        yield broken(
            "empty_part",
            "illegal",
            f"a stage of {min(layout.stage_layers)} layers cannot fill the {chunks} parts that every rank holds",
            f"give every stage {chunks} layers or more",
            _PIPELINE,
            layers=min(layout.stage_layers),
            parts=chunks,
        )
    if layout.stage_layers or parts > layers:
        return
    sizes = split_parts(layers, parts)
    if min(sizes[0], sizes[-1]) < 1:
        yield broken(
            "empty_part",
            "unwise",
            f"{layers} layers over {parts} parts: embedding and head count as a layer each, so an end holds 0 layers",
            f"use at most {max(1, (layers + 2) // 2)} parts, or pipeline_parallel_first_stage_less_layers 0",
            f"{_PIPELINE}:437",
            layers=layers,
            parts=parts,
        )
    elif max(sizes) > -(-layers // parts):
        yield broken(
            "uneven_stages",
            "unwise",
            f"{layers} layers over {parts} parts are {checks.text_split(sizes)}; every step waits for the longest",
            "choose parts that divide the layers + 2, or set pipeline_parallel_first_stage_less_layers",
            f"{_PIPELINE}:437",
            layers=layers,
            parts=parts,
        )


def _experts(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    moes = splits(spec).moes
    replicas = layout.fsdp.replicas if layout.fsdp is not None else 1 if layout.zero == 3 else layout.dp
    ranks = layout.dp // max(1, min(replicas, layout.dp)) * layout.cp * layout.tp
    for moe in moes:
        if layout.ep <= moe.experts and moe.experts % layout.ep:
            yield broken(
                "experts_divide_ep",
                "illegal",
                f"{moe.experts} experts are not divisible by expert parallel degree {layout.ep}",
                f"choose ep from {named(divisors(moe.experts), layout.ep)}",
                "torchtitan/models/common/token_dispatcher.py:262",
                experts=moe.experts,
                ep=layout.ep,
            )
        elif layout.ep == 1 and moe.intermediate % layout.tp:
            yield broken(
                "width_divides_tp",
                "illegal",
                f"expert width {moe.intermediate} is not divisible by tensor parallel size {layout.tp}",
                "use expert parallelism, which keeps experts whole",
                "torchtitan/models/common/moe_sharding.py",
                size=moe.intermediate,
                tp=layout.tp,
            )
    if moes and layout.ep > 1 and ranks % layout.ep:
        yield broken(
            "expert_grid",
            "illegal",
            f"ep {layout.ep} does not divide the {ranks} ranks of dp_shard x cp {layout.cp} x tp {layout.tp}",
            f"choose ep from {named(divisors(ranks), layout.ep)}",
            f"{_DIMS}:279",
            ep=layout.ep,
            ranks=ranks,
        )
    if moes and layout.ep > 1 and layout.etp not in {None, 1}:
        yield broken(
            "no_expert_tp",
            "illegal",
            f"expert tensor parallel {layout.etp} with ep {layout.ep}: experts are whole on their rank",
            "leave etp out",
            "torchtitan/models/common/moe_sharding.py",
            etp=layout.etp or 0,
        )
    if moes and layout.ep == 1 and layout.etp not in {None, layout.tp}:
        yield broken(
            "no_expert_tp",
            "illegal",
            f"expert tensor parallel {layout.etp} without ep: experts are cut over tp {layout.tp}",
            "leave etp out, or use ep",
            "torchtitan/models/common/moe_sharding.py",
            etp=layout.etp or 0,
            tp=layout.tp,
        )


def _sharding(layout: Layout) -> Iterator[Rule]:
    knobs = layout.fsdp
    if layout.zero == 0 and layout.cp > 1:
        yield broken(
            "context_shards",
            "illegal",
            f"with context parallel {layout.cp} FSDP shards over its ranks; zero=0 cannot be had",
            "use zero=3",
            _DIMS,
            cp=layout.cp,
        )
    if layout.zero == 3 and layout.dp * layout.cp == 1:
        yield broken(
            "zero_on_one_rank",
            "unwise",
            f"FSDP over dp {layout.dp} x cp {layout.cp} = 1 rank shards nothing and saves 0 bytes",
            "raise dp",
            _DIMS,
            zero=3,
            ranks=1,
        )
    if layout.zero == 3 and knobs is not None and layout.dp % knobs.replicas:
        yield broken(
            "fsdp_replicas",
            "illegal",
            f"{knobs.replicas} replicas do not divide {layout.dp} data parallel ranks",
            f"choose replicas from {named(divisors(layout.dp), knobs.replicas)}",
            f"{_DIMS}:186",
            replicas=knobs.replicas,
            ranks=layout.dp,
        )
    again = knobs is not None and knobs.reshard_after_forward
    if layout.zero == 3 and layout.pp > 1 and again and layout.dp * layout.cp > 1:
        yield broken(
            "zero3_under_pipeline",
            "unwise",
            f"resharding after every forward under {layout.pp} pipeline stages gathers every parameter again for each "
            "micro-batch",
            "leave parallelism.fsdp_reshard_after_forward at default, which keeps them under a pipeline",
            "torchtitan/distributed/fsdp.py:71",
            stages=layout.pp,
        )


def _positions(spec: ModelSpec, work: Train) -> Iterator[Rule]:
    if spec.max_positions and work.seq > spec.max_positions:
        yield broken(
            "positions_below_sequence",
            "illegal",
            f"sequences of {work.seq} tokens exceed the {spec.max_positions} positions of the model",
            f"use training.seq_len of at most {spec.max_positions}",
            f"{_DECODER}:170",
            seq=work.seq,
            positions=spec.max_positions,
        )
