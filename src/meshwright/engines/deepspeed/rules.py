"""What DeepSpeed 0.19 refuses, with the place in its code that says so (paths relative to the package)."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.engines.own.profile import split_layers
from meshwright.specs import checks
from meshwright.specs.checks import broken, divisors, named
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.rules import Rule
from meshwright.specs.splits import splits
from meshwright.specs.workload import Train, Workload

_ULYSSES = "DeepSpeed runtime/sequence_parallel/ulysses_sp.py"


def check(spec: ModelSpec, layout: Layout, cluster: Cluster | None, workload: Workload | None) -> list[Rule]:
    """Every rule that a layout breaks, illegal ones first."""
    found = [
        *checks.world_fits(layout, cluster),
        *_not_here(layout),
        *_tensor_parallel(spec, layout),
        *_ulysses(spec, layout),
        *checks.stages(spec, layout, split_layers),
        *_pipeline(layout),
        *checks.uneven_stages(spec, layout, split_layers),
        *_experts(spec, layout),
        *checks.zero_needs_ranks(layout),
        *checks.tp_inside_node(layout, cluster),
    ]
    if isinstance(workload, Train):
        found += checks.batches(layout, workload)
        found += _sequence(layout, workload)
    return sorted(found, key=lambda rule: rule.severity != "illegal")


def _not_here(layout: Layout) -> Iterator[Rule]:
    asked = [
        (layout.sp, "no sequence parallel norms (sp)", "drop sp; sequence_parallel_size is cp here"),
        (layout.dcp > 1, "no decode context parallelism", "use dcp 1"),
        (layout.cp_kind == "ring", "no ring attention", "leave cp_kind out; DeepSpeed's cp is Ulysses"),
        (layout.virtual > 1 or layout.schedule != "1f1b", f"no pipeline schedule {layout.schedule}", "use 1f1b"),
    ]
    for given, what, way in asked:
        if given:
            yield broken("not_of_this_engine", "illegal", f"DeepSpeed has {what}", way, "DeepSpeed runtime/pipe")


def _tensor_parallel(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    """AutoTP deals heads by whole KV heads and takes uneven shares; ranks beyond the KV heads hold no attention."""
    tp = layout.tp
    for a in splits(spec).attentions:
        if a.heads < tp:
            yield broken(
                "fewer_units_than_tp",
                "illegal",
                f"{a.heads} attention heads for autotp_size {tp}",
                f"choose autotp_size from {named(divisors(a.heads), tp)}",
                "DeepSpeed module_inject/tp_shard.py get_shard_size",
                heads=a.heads,
                tp=tp,
            )
        elif a.kind == "gqa" and a.kv_heads < tp:
            yield broken(
                "kv_heads_over_tp",
                "illegal" if tp % a.kv_heads else "unwise",
                f"{a.kv_heads} KV heads for autotp_size {tp}: {tp - a.kv_heads} ranks hold no attention and wait for "
                "the others",
                f"choose autotp_size from {named(divisors(a.kv_heads), tp)}",
                "DeepSpeed runtime/engine.py _apply_autotp_partitioning",
                kv_heads=a.kv_heads,
                tp=tp,
            )
        elif a.heads % tp or (a.kind == "gqa" and a.kv_heads % tp):
            count, what = (a.heads, "attention heads") if a.heads % tp else (a.kv_heads, "KV heads")
            legal = divisors(a.heads, a.kv_heads) if a.kind == "gqa" else divisors(a.heads)
            yield broken(
                "uneven_units",
                "unwise",
                f"{count} {what} are not divisible by autotp_size {tp}: some ranks hold {-(-count // tp)}, others "
                f"{count // tp} (kernel injection refuses it)",
                f"choose autotp_size from {named(legal, tp)}",
                "DeepSpeed module_inject/tp_shard.py get_shard_size",
                heads=count,
                tp=tp,
            )


def _ulysses(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    """Heads go to ranks by an all-to-all: whole ones; KV heads divide or are replicated."""
    sp = layout.cp
    if sp == 1:
        return
    for a in splits(spec).attentions:
        legal = [d for d in divisors(a.heads) if d % a.kv_heads == 0 or a.kv_heads % d == 0]
        if a.heads % sp:
            yield broken(
                "heads_over_ulysses",
                "illegal",
                f"{a.heads} attention heads are not divisible by sequence_parallel_size {sp}",
                f"choose from {named(legal, sp)} and give the rest of the devices to data parallelism, or use ring "
                "attention, which does not cut heads",
                f"{_ULYSSES}:148",
                heads=a.heads,
                sp=sp,
            )
        elif a.kind == "gqa" and a.kv_heads % sp and sp % a.kv_heads:
            yield broken(
                "kv_heads_over_ulysses",
                "illegal",
                f"{a.kv_heads} KV heads are neither a multiple nor a divisor of sequence_parallel_size {sp}",
                f"choose from {named(legal, sp)}",
                f"{_ULYSSES}:150",
                kv_heads=a.kv_heads,
                sp=sp,
            )
    if layout.tp > 1 or layout.pp > 1:
        yield broken(
            "ulysses_alone",
            "illegal",
            f"sequence_parallel_size {sp} beside tp {layout.tp} and pp {layout.pp}: the mesh is data x sequence only",
            "keep autotp_size and pipeline stages at 1, or sequence_parallel_size at 1",
            "DeepSpeed __init__.py initialize (mesh of data_parallel and sequence_parallel)",
            sp=sp,
            tp=layout.tp,
            pp=layout.pp,
        )


def _sequence(layout: Layout, work: Train) -> Iterator[Rule]:
    if work.seq % layout.cp:
        yield broken(
            "sequence_over_ulysses",
            "illegal",
            f"a sequence of {work.seq} tokens is not divisible by sequence_parallel_size {layout.cp}",
            f"pad the sequence to {-(-work.seq // layout.cp) * layout.cp}",
            f"{_ULYSSES}:707",
            seq=work.seq,
            sp=layout.cp,
        )


def _pipeline(layout: Layout) -> Iterator[Rule]:
    if layout.pp > 1 and layout.zero >= 2:
        yield broken(
            "zero_under_pipeline",
            "illegal",
            f"ZeRO-{layout.zero} with {layout.pp} pipeline stages: stages 2 and 3 are incompatible with the pipeline",
            "use zero_optimization.stage 1, or no pipeline",
            "DeepSpeed runtime/pipe/engine.py:76",
            zero=layout.zero,
            stages=layout.pp,
        )


def _experts(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    """AutoEP: whole experts, equally many a rank; no pipeline in ZeRO-3, no Ulysses in ZeRO-3."""
    yield from (r for r in checks.experts(spec, layout) if r.code != "experts_uneven")
    ranks = layout.dp * layout.cp * layout.tp
    etp = layout.etp or 1
    if layout.ep == etp == 1:
        return
    if ranks % (layout.ep * etp):
        yield broken(
            "ep_over_ranks",
            "illegal",
            f"autoep_size {layout.ep} x expert_tensor_parallel_size {etp} does not divide the {ranks} ranks of a stage",
            f"choose autoep_size from {named(divisors(ranks), layout.ep)}",
            "DeepSpeed module_inject/auto_ep_folding.py",
            ep=layout.ep,
            ranks=ranks,
        )
    for moe in splits(spec).moes:
        if layout.ep <= moe.experts and moe.experts % layout.ep:
            yield broken(
                "experts_over_ep",
                "illegal",
                f"{moe.experts} experts are not divisible by autoep_size {layout.ep}",
                f"choose autoep_size from {named(divisors(moe.experts), layout.ep)}",
                "DeepSpeed module_inject/auto_ep_config.py:377",
                experts=moe.experts,
                ep=layout.ep,
            )
    if layout.zero == 3 and (layout.cp > 1 or etp > 1):
        yield broken(
            "autoep_zero3",
            "illegal",
            f"AutoEP under ZeRO-3: no sequence_parallel_size {layout.cp}, no expert_tensor_parallel_size {etp}",
            "keep both at 1, or use ZeRO stage 1 or 2",
            "DeepSpeed runtime/engine.py _validate_zero3_moe_compatibility",
            sp=layout.cp,
            etp=etp,
        )
