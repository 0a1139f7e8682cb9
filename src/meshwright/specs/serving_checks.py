"""Rules that serving engines share: what tensor parallelism must divide, and what a server does not do.

Each function is told over how many ranks the engine cuts, and where its code says so.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.specs.checks import broken, divisors, named
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.rules import Rule
from meshwright.specs.splits import splits
from meshwright.specs.workload import Train, Workload


def serving_only(layout: Layout, workload: Workload | None, engine: str) -> Iterator[Rule]:
    """A server has no optimizer and no training schedule."""
    if isinstance(workload, Train):
        yield broken("does_not_train", "illegal", f"{engine} serves and does not train", "use --engine meshwright")
    asked = [
        (layout.zero > 0 or layout.fsdp is not None, f"ZeRO-{layout.zero} or FSDP"),
        (layout.virtual > 1, f"{layout.virtual} virtual stages"),
        (layout.schedule != "1f1b", f"pipeline schedule {layout.schedule}"),
        (layout.sp, "sequence parallel training"),
        (layout.cp_kind != "auto", f"choice of context parallelism (cp_kind {layout.cp_kind})"),
    ]
    for given, what in asked:
        if given:
            yield broken("not_of_this_engine", "illegal", f"{engine} has no {what}", "leave it out when serving")


def heads_divide(spec: ModelSpec, tp: int, what: str, where: str) -> Iterator[Rule]:
    """Query heads, and groups of output heads (DeepSeek-V4), are dealt whole.

    Args:
        spec: the model.
        tp: ranks that share one attention.
        what: what the engine calls that degree.
        where: where its code says so.
    """
    for heads in dict.fromkeys(a.heads for a in splits(spec).attentions):
        if heads % tp:
            yield broken(
                "heads_divide_tp",
                "illegal",
                f"{heads} attention heads are not divisible by {what} {tp}",
                f"choose tp from {named(divisors(heads), tp)}",
                where,
                heads=heads,
                tp=tp,
            )
    groups = splits(spec).head_units
    if groups and groups % tp and spec.heads % tp == 0:
        yield broken(
            "head_groups_over_tp",
            "illegal",
            f"{groups} groups of output heads are not divisible by {what} {tp}",
            f"choose tp from {named(divisors(groups), tp)}",
            where,
            groups=groups,
            tp=tp,
        )


def kv_heads_divide(spec: ModelSpec, tp: int, what: str, where: str) -> Iterator[Rule]:
    """KV heads are divided when there are enough of them, replicated when the degree is a multiple, else refused."""
    for a in splits(spec).attentions:
        kv = a.kv_heads
        if a.kind == "mla" or (kv % tp == 0 if kv >= tp else tp % kv == 0):
            continue
        fate = "divided among" if kv >= tp else "replicated evenly over"
        yield broken(
            "kv_heads_over_tp",
            "illegal",
            f"{kv} KV heads cannot be {fate} {what} {tp}",
            f"choose tp as a divisor or a multiple of {kv} that divides {a.heads} heads",
            where,
            kv_heads=kv,
            tp=tp,
        )


def states_divide(spec: ModelSpec, tp: int, what: str, where: str) -> Iterator[Rule]:
    """State-space and linear attention heads; groups divide, or one group is held by all."""
    for r in splits(spec).recurrents:
        if r.heads % tp:
            yield broken(
                "state_heads_over_tp",
                "illegal",
                f"{r.heads} heads of the {r.kind} layers are not divisible by {what} {tp}",
                f"choose tp from {named(divisors(r.heads), tp)}",
                where,
                heads=r.heads,
                tp=tp,
            )
        elif r.groups % tp and r.groups != 1:
            yield broken(
                "state_groups_over_tp",
                "illegal",
                f"{r.groups} groups of the {r.kind} layers are not divisible by {what} {tp}, and more than 1 is not "
                "replicated",
                f"choose tp from {named(divisors(r.groups), tp)}",
                where,
                groups=r.groups,
                tp=tp,
            )


def widths_divide(spec: ModelSpec, dense: int, expert: int, shared: int, where: str) -> Iterator[Rule]:
    """Widths of feed-forward blocks.

    Args:
        spec: the model.
        dense, expert, shared: ranks that share a dense block, one expert, the shared experts.
        where: where the engine's code says so.
    """
    blocks = splits(spec)
    sizes = [("MLP width", mlp.intermediate, dense) for mlp in blocks.mlps]
    for moe in blocks.moes:
        sizes.append(("expert width", moe.intermediate, expert))
        if moe.shared_intermediate:
            sizes.append(("shared expert width", moe.shared_intermediate, shared))
    for what, size, degree in dict.fromkeys(sizes):
        if size % degree:
            yield broken(
                "width_over_tp",
                "illegal",
                f"{what} {size} is not divisible by the {degree} ranks that share it",
                f"choose from {named(divisors(size), degree)}"
                + (", or expert parallelism" if what == "expert width" else ""),
                where,
                size=size,
                degree=degree,
            )


def even_experts(spec: ModelSpec, layout: Layout, where: str) -> Iterator[Rule]:
    """Engines whose expert layer takes equally many experts a rank only."""
    for moe in splits(spec).moes:
        if layout.ep > 1 and moe.experts >= layout.ep and moe.experts % layout.ep:
            yield broken(
                "experts_divide_ep",
                "illegal",
                f"{moe.experts} experts are not divisible by expert parallel size {layout.ep}",
                f"choose tp from {named(divisors(moe.experts), layout.ep)}",
                where,
                experts=moe.experts,
                ep=layout.ep,
            )


def cache_copies(spec: ModelSpec, layout: Layout, way_out: str, where: str) -> Iterator[Rule]:
    """A cache that every rank holds again wastes the memory that tensor parallelism was to free."""
    blocks = splits(spec)
    if blocks.softmax_mla and layout.tp > layout.dcp:
        yield broken(
            "latent_cache_replicated",
            "unwise",
            f"tensor parallel {layout.tp} holds {layout.tp // layout.dcp} copies of the MLA cache: the latent vector "
            "has one head, which is not divided",
            way_out,
            where,
            tp=layout.tp,
            dcp=layout.dcp,
        )
        return
    copies = max((layout.tp // a.kv_heads for a in blocks.attentions if a.kind == "gqa"), default=1)
    if copies > layout.dcp:
        yield broken(
            "kv_heads_replicated",
            "unwise",
            f"tensor parallel {layout.tp} holds {copies // layout.dcp} copies of each KV head",
            f"use tp {max(1, layout.tp // copies)}, or decode context parallel {copies}",
            where,
            copies=copies,
            dcp=layout.dcp,
        )
