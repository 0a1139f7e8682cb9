"""What our own runtime refuses. It deals units unevenly, so most sizes need not divide."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.specs import checks
from meshwright.specs.checks import broken
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.rules import Rule
from meshwright.specs.shares import groups_of, members_of, part
from meshwright.specs.splits import splits
from meshwright.specs.workload import Train, Workload


def check(spec: ModelSpec, layout: Layout, cluster: Cluster | None, workload: Workload | None) -> list[Rule]:
    """Every rule that a layout breaks, illegal ones first."""
    found = [
        *checks.world_fits(layout, cluster),
        *_units(spec, layout),
        *_kv_heads(spec, layout),
        *checks.stages(spec, layout, _split),
        *checks.experts(spec, layout),
        *_expert_grid(layout),
        *checks.virtual_stages(spec, layout),
        *checks.uneven_stages(spec, layout, _split),
        *_blocks(spec, layout),
        *_all_to_all(spec, layout),
        *_ring_instead(spec, layout),
        *_decode_context(layout),
        *checks.zero_needs_ranks(layout),
        *checks.tp_inside_node(layout, cluster),
    ]
    if isinstance(workload, Train):
        found += checks.batches(layout, workload)
        found += checks.context_divides(layout, workload)
    return sorted(found, key=lambda rule: rule.severity != "illegal")


def _split(layers: int, stages: int) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in (part(layers, stages, index) for index in range(stages)))


def _units(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    """Every rank needs at least one unit of everything that tensor parallelism cuts."""
    blocks = splits(spec)
    counts = [("attention heads", a.heads) for a in blocks.attentions]
    counts += [("groups of output heads", blocks.head_units)] if blocks.head_units else []
    counts += [("state-space heads", r.heads) for r in blocks.recurrents]
    counts += [("MLP columns", mlp.intermediate) for mlp in blocks.mlps]
    counts += [("expert columns", moe.intermediate) for moe in blocks.moes if layout.ep == 1 and layout.etp != 1]
    counts += [("shared expert columns", n) for moe in blocks.moes if (n := moe.shared_intermediate)]
    counts += [("vocabulary rows", spec.vocab)]
    for what, count in dict.fromkeys(counts):
        if count < layout.tp:
            yield broken(
                "fewer_units_than_tp",
                "illegal",
                f"{count} {what} for tensor parallel {layout.tp}: {layout.tp - count} ranks would hold none",
                f"choose tp of at most {count}",
                units=count,
                tp=layout.tp,
            )
        elif count % layout.tp and what != "vocabulary rows":
            yield broken(
                "uneven_units",
                "unwise",
                f"{count} {what} over tensor parallel {layout.tp}: the first ranks hold {-(-count // layout.tp)}, the "
                f"last {count // layout.tp}; every step waits for the first",
                f"tp {checks.named(checks.divisors(count), layout.tp, 4)} deals them evenly",
                units=count,
                tp=layout.tp,
            )


def _kv_heads(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    """Fewer KV heads than ranks are held by several ranks each, equally many of them."""
    for a in splits(spec).attentions:
        if a.kind == "gqa" and a.kv_heads < layout.tp and layout.tp % a.kv_heads:
            yield broken(
                "kv_heads_over_tp",
                "illegal",
                f"{a.kv_heads} KV heads can neither be divided nor replicated over tensor parallel {layout.tp}",
                f"choose tp of at most {a.kv_heads}, or a multiple of it",
                kv_heads=a.kv_heads,
                tp=layout.tp,
            )


def _expert_grid(layout: Layout) -> Iterator[Rule]:
    """Expert groups lie over data, context and tensor parallel ranks."""
    ranks = layout.dp * layout.cp * layout.tp
    whole = layout.ep * (layout.etp or 1)
    if ranks % whole:
        yield broken(
            "ep_over_ranks",
            "illegal",
            f"ep {layout.ep} x etp {layout.etp or 1} = {whole} does not divide the {ranks} ranks of a stage "
            f"(dp {layout.dp} x cp {layout.cp} x tp {layout.tp})",
            f"choose ep from {checks.named(checks.divisors(ranks), layout.ep)}",
            ep=layout.ep,
            ranks=ranks,
        )


def _decode_context(layout: Layout) -> Iterator[Rule]:
    if layout.dcp > 1 and layout.tp % layout.dcp:
        yield broken(
            "dcp_divides_tp",
            "illegal",
            f"tensor parallel {layout.tp} is not a multiple of decode context parallel {layout.dcp}",
            f"choose dcp from {checks.named(checks.divisors(layout.tp), layout.dcp)}",
            tp=layout.tp,
            dcp=layout.dcp,
        )


def _blocks(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    """Quantized matrices are dealt by whole blocks or groups: the width must consist of them."""
    q = spec.quantization
    if q is None or layout.tp == 1:
        return
    for width in splits(spec).quantized:
        block = width.block or (q.group if width.packed else 0)
        if block and width.label not in {"heads", "kv_heads"} and width.size % block and width.side == "in":
            yield broken(
                "quant_block",
                "illegal",
                f"{width.name} width {width.size} is not a whole number of {q.method} blocks of {block}, so tensor "
                f"parallel {layout.tp} would cut one",
                "use tp 1 with pipeline stages or replicas",
                size=width.size,
                block=block,
            )


def _all_to_all(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    """Ulysses deals the heads of every rank of tp over cp: KV heads divide it, or travel in equally many copies."""
    cp, tp = layout.cp, layout.tp
    if cp == 1 or layout.cp_kind != "ulysses":
        return
    for a in splits(spec).attentions:
        held = set()
        for index in {0, tp - 1} if a.kind != "gqa" or a.kv_heads >= tp or tp % a.kv_heads == 0 else ():
            heads = members_of(a.heads, a.kv_heads if a.kind == "gqa" else a.heads, tp, index).size
            held.add((heads, groups_of(a.kv_heads, tp, index).size if a.kind == "gqa" else heads))
        for heads, kv_heads in sorted(held):
            if heads % cp or (kv_heads % cp and cp % kv_heads):
                yield broken(
                    "heads_over_ulysses",
                    "illegal",
                    f"{heads} query and {kv_heads} KV heads of a rank cannot be dealt over context parallel {cp} by "
                    "all-to-all",
                    "leave cp_kind out: ring attention does not cut heads; or choose a cp that divides them",
                    "arXiv:2309.14509, section 3",
                    heads=heads,
                    kv_heads=kv_heads,
                    cp=cp,
                )


def _ring_instead(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    """Heads that context parallelism cannot deal out: the all-to-all form is out, ring attention works."""
    for a in splits(spec).attentions:
        if layout.cp > 1 and layout.cp_kind == "auto" and a.heads % layout.cp:
            rule = checks.ulysses(a.heads, a.kv_heads, layout.cp)[0]
            yield broken(
                rule.code,
                "unwise",
                rule.message,
                "ring attention is used, which does not cut heads",
                rule.where,
                heads=a.heads,
                degree=layout.cp,
            )
