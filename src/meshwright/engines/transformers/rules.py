"""What transformers 5.24 refuses, or fails at in the middle of a forward (paths relative to the package)."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.engines.own.profile import split_layers
from meshwright.specs import checks
from meshwright.specs.checks import broken, divisors, named
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import EngineProfile
from meshwright.specs.rules import Rule
from meshwright.specs.splits import splits
from meshwright.specs.workload import Train, Workload

_MESH = "transformers distributed/configuration_utils.py _validate_mesh_config"


def check(spec: ModelSpec, layout: Layout, cluster: Cluster | None, workload: Workload | None) -> list[Rule]:
    """Every rule that a layout breaks, illegal ones first."""
    found = [
        *checks.world_fits(layout, cluster),
        *_not_here(layout),
        *_heads(spec, layout),
        *checks.stages(spec, layout, split_layers),
        *_pipeline(layout, workload),
        *_experts(spec, layout),
        *checks.zero_needs_ranks(layout),
        *checks.tp_inside_node(layout, cluster),
    ]
    if isinstance(workload, Train):
        found += checks.batches(layout, workload)
    return sorted(found, key=lambda rule: rule.severity != "illegal")


def _not_here(layout: Layout) -> Iterator[Rule]:
    asked = [
        (
            layout.cp > 1,
            f"no context parallelism (cp {layout.cp})",
            "use --engine accelerate (cp) or deepspeed (Ulysses)",
        ),
        (layout.zero in {1, 2}, f"no ZeRO-{layout.zero}", "use fsdp_size (zero=3)"),
        (layout.sp, "no sequence parallelism yet", "drop sp"),
        (layout.cp_kind != "auto", "no choice of context parallelism", "leave cp_kind out"),
        (layout.virtual > 1 or layout.schedule != "1f1b", "no pipeline schedules", "leave them out"),
        (layout.etp not in {None, 1}, "no tensor parallelism inside an expert", "use etp 1"),
    ]
    for given, what, way in asked:
        if given:
            yield broken("not_of_this_engine", "illegal", f"transformers has {what}", way, _MESH)


def _heads(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    """Column-wise projections are cut evenly, KV heads are not replicated: fewer of them than ranks fail.

    Seen on CPU with one KV head and two ranks: it loads and fails in the middle of the first forward.
    """
    for a in splits(spec).attentions:
        legal = divisors(a.heads, a.kv_heads) if a.kind == "gqa" else divisors(a.heads)
        if a.heads % layout.tp:
            yield broken(
                "heads_divide_tp",
                "illegal",
                f"{a.heads} attention heads are not divisible by tp_size {layout.tp}",
                f"choose tp_size from {named(legal, layout.tp)}",
                "transformers distributed/tensor_parallel.py",
                heads=a.heads,
                tp=layout.tp,
            )
        elif a.kind == "gqa" and a.kv_heads % layout.tp:
            yield broken(
                "kv_heads_over_tp",
                "illegal",
                f"{a.kv_heads} KV heads are not divisible by tp_size {layout.tp}: this version does not replicate them "
                "and fails in the forward",
                f"choose tp_size from {named(legal, layout.tp)}",
                "transformers distributed/tensor_parallel.py get_kv_heads_per_rank",
                kv_heads=a.kv_heads,
                tp=layout.tp,
            )


def _pipeline(layout: Layout, workload: Workload | None) -> Iterator[Rule]:
    if layout.pp == 1:
        return
    if isinstance(workload, Train):
        yield broken(
            "pipeline_without_backward",
            "illegal",
            f"{layout.pp} pipeline stages: transformers sends activations forward only, there is no backward",
            "train with fsdp_size and tp_size; stages are for generation",
            "transformers distributed/pipeline_parallel.py",
            stages=layout.pp,
        )
    if layout.dp > 1:
        yield broken(
            "fsdp_with_pipeline",
            "illegal",
            f"fsdp_size x dp_replicate_size {layout.dp} beside pp_size {layout.pp} is not supported",
            "combine tp with fsdp, or tp with pp",
            _MESH,
            dp=layout.dp,
            stages=layout.pp,
        )


def _experts(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    yield from (r for r in checks.experts(spec, layout) if r.code != "experts_uneven")
    if layout.ep == 1:
        return
    replicas = layout.fsdp.replicas if layout.fsdp is not None else 1
    ranks = layout.dp // replicas * layout.tp
    if layout.ep % layout.tp or ranks % layout.ep:
        legal = [d for d in divisors(ranks) if d % layout.tp == 0]
        yield broken(
            "ep_over_ranks",
            "illegal",
            f"ep_size {layout.ep} must be a multiple of tp_size {layout.tp} and divide fsdp_size x tp_size = {ranks}",
            f"choose ep_size from {named(legal, layout.ep)}",
            _MESH,
            ep=layout.ep,
            ranks=ranks,
        )
    for moe in splits(spec).moes:
        if layout.ep <= moe.experts and moe.experts % layout.ep:
            yield broken(
                "experts_over_ep",
                "illegal",
                f"{moe.experts} experts are not divisible by ep_size {layout.ep}",
                f"choose ep_size from {named(divisors(moe.experts), layout.ep)}",
                "transformers distributed/expert_parallel.py GroupedGemmParallel",
                experts=moe.experts,
                ep=layout.ep,
            )


TRANSFORMERS = EngineProfile(
    engine="transformers",
    version="5.24",
    serves=False,
    trains=True,
    rank_order=("pp", "dp", "cp", "tp"),
    split_layers=split_layers,
    check=check,
    uneven_tp=True,
    ep_over=("dp", "cp", "tp"),
    ep_whole=True,
    moe_tp_over=("tp",),
)
