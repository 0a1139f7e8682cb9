"""The nearest legal layouts, and the rules of a layout together with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import log2

from meshwright.errors import IllegalLayoutError
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import EngineProfile
from meshwright.specs.rules import Rule
from meshwright.specs.splits import splits
from meshwright.specs.workload import Workload

#: Most layouts that are tried; small neighbourhoods only.
MAX_TRIED = 300
#: Refused layouts of one tp after which that tp is given up, when none of it was legal.
MAX_MISSES = 12


def explain(
    spec: ModelSpec,
    layout: Layout,
    profile: EngineProfile,
    cluster: Cluster | None = None,
    workload: Workload | None = None,
) -> list[Rule]:
    """Every rule that a layout breaks, the illegal ones with the nearest legal layouts. Empty: legal and wise.

    The first illegal rule (rules come illegal ones first) also names them in its way out, with the layers of their
    stages.
    """
    rules = profile.check(spec, layout, cluster, workload)
    if not any(rule.severity == "illegal" for rule in rules):
        return rules
    near = nearest_legal(spec, layout, profile, cluster, workload)
    out = [replace(rule, nearest=near) if rule.severity == "illegal" else rule for rule in rules]
    if near:
        names = "; ".join(describe(option, spec, profile) for option in near)
        out[0] = replace(out[0], way_out=f"{out[0].way_out}; nearest legal layouts: {names}")
    return out


def refuse(rules: list[Rule]) -> None:
    """End with the first illegal rule, if there is one.

    Raises:
        IllegalLayoutError: what is wrong with both numbers, the way out, and the nearest legal layouts.
    """
    for rule in rules:
        if rule.severity == "illegal":
            raise IllegalLayoutError(f"{rule.message}; {rule.way_out}")


def describe(layout: Layout, spec: ModelSpec, profile: EngineProfile) -> str:
    """A layout as text, with the layers of its stages where they differ."""
    text = str(layout)
    if layout.pp > 1 and not layout.stage_layers:
        counts = profile.split_layers(len(spec.layers), layout.pp)
        if len(set(counts)) > 1:
            text += f" (stages of {', '.join(map(str, counts))} layers)"
    return text


def nearest_legal(
    spec: ModelSpec,
    layout: Layout,
    profile: EngineProfile,
    cluster: Cluster | None = None,
    workload: Workload | None = None,
    keep: int = 5,
) -> tuple[Layout, ...]:
    """Legal layouts near an illegal one, best first; empty when the neighbourhood holds none.

    The budget is the devices of the cluster, else the world of the layout. The first answers differ in kind: the
    nearest smaller and larger tp, tp traded for pipeline stages, tp traded for replicas, experts dealt whole.
    """
    devices = cluster.devices if cluster is not None else layout.world
    ranked: list[tuple[tuple[float, ...], str, Layout]] = []
    tried = 0
    misses: dict[int, int] = {}
    for candidate in _neighbours(spec, layout, devices):
        if tried >= MAX_TRIED:
            break
        if candidate == layout or misses.get(candidate.tp, 0) >= MAX_MISSES:
            continue
        tried += 1
        if any(rule.severity == "illegal" for rule in profile.check(spec, candidate, cluster, workload)):
            misses[candidate.tp] = misses.get(candidate.tp, 0) + 1
            continue
        misses[candidate.tp] = -MAX_TRIED
        ranked.append((_distance(candidate, layout, devices), _kind(candidate, layout), candidate))
    ranked.sort(key=lambda item: item[0])
    best: dict[str, Layout] = {}
    for _, kind, candidate in ranked:
        best.setdefault(kind, candidate)
    rest = [candidate for _, _, candidate in ranked if candidate not in best.values()]
    return tuple([*best.values(), *rest][:keep])


def _distance(candidate: Layout, asked: Layout, devices: int) -> tuple[float, ...]:
    """Idle (or more) devices weigh most, then how far the degrees are from those asked for, then the larger tp."""
    far = sum(abs(log2(getattr(candidate, a) / getattr(asked, a))) for a in ("tp", "pp", "dp", "cp", "dcp"))
    target = min(asked.world, devices)
    idle = abs(log2(candidate.world / target))
    turned = candidate.ep != asked.ep and (candidate.ep == 1) != (asked.ep == 1)
    return (round(4 * idle + far + (0.5 if turned else 0.0), 6), -candidate.tp, candidate.pp, candidate.dp)


def _kind(candidate: Layout, asked: Layout) -> str:
    """In which way a candidate departs from what was asked."""
    if asked.ep == 1 < candidate.ep:
        return "experts whole"
    if candidate.pp > asked.pp:
        return "stages"
    if candidate.dp > asked.dp:
        return "replicas"
    if candidate.tp != asked.tp:
        return "larger tp" if candidate.tp > asked.tp else "smaller tp"
    return "other"


def _degrees(asked: int, limit: int) -> list[int]:
    """Degrees worth trying: small ones, powers of two, the asked one and its neighbours."""
    powers = [1 << i for i in range(limit.bit_length())]
    around = [asked + step for step in (-2, -1, 0, 1, 2)] + [asked // 2, asked * 2]
    return sorted({d for d in [*range(1, min(limit, 6) + 1), *powers, *around] if 1 <= d <= limit})


def _neighbours(spec: ModelSpec, layout: Layout, devices: int) -> Iterator[Layout]:
    """Layouts that differ in tp and in at most one of pp, dp, cp, dcp and ep."""
    moe = bool(splits(spec).moes)
    base = layout.with_(stage_layers=()) if layout.stage_layers else layout
    for tp in sorted(_degrees(layout.tp, devices), key=lambda d: abs(log2(d / layout.tp))):
        freed = layout.tp // tp if layout.tp % tp == 0 else 0
        stages = {layout.pp, layout.pp * freed, *(_degrees(layout.pp, devices // tp))} - {0}
        replicas = {layout.dp, layout.dp * freed, devices // (tp * layout.pp * layout.cp)} - {0}
        options = [base.with_(tp=tp, zero=0, fsdp=None, sp=False, virtual=1, etp=None, schedule="1f1b")]
        options += [base.with_(tp=tp, cp=1), base.with_(tp=tp, dcp=1), base.with_(tp=tp, cp=1, dcp=1)]
        options += [base.with_(tp=tp, dp=1)]
        options += [base.with_(tp=tp, pp=pp) for pp in sorted(stages)]
        options += [base.with_(tp=tp, dp=dp) for dp in sorted(replicas)]
        options += [base.with_(tp=tp, pp=pp, dp=1) for pp in sorted(stages)] if layout.dp > 1 else []
        for option in dict.fromkeys(options):
            if option.tp * option.pp * option.dp * option.cp > devices:
                continue
            for ep in dict.fromkeys((layout.ep, 1, option.tp * option.dp * option.cp)) if moe else (1,):
                yield option.with_(ep=ep) if option.ep != ep else option
