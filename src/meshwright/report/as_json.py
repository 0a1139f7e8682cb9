"""A Plan as JSON with stable keys; the names are those of the Python objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from meshwright.plan.memory import RankMemory, ServeMemory
from meshwright.plan.plan import Candidate, Cost, Plan
from meshwright.plan.spread import rank_rows
from meshwright.specs.layout import Layout, product
from meshwright.specs.placement import Coordinate
from meshwright.specs.rules import Rule
from meshwright.specs.workload import Serve, Workload

if TYPE_CHECKING:
    from meshwright.plan.search.train import Point
    from meshwright.plan.training_time import TrainingTime

#: Above this many ranks ``memory.ranks`` lists one row a class of equal ranks instead of one a rank.
MAX_RANK_ROWS = 4096


def plain(value: Any) -> Any:
    """Dataclasses, tuples and mappings as what ``json.dumps`` takes."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    return value


def layout_json(layout: Layout) -> dict[str, Any]:
    """The degrees and knobs by name, ``world``, and the text form that ``--layout`` takes."""
    return {**asdict(layout), "world": layout.world, "text": str(layout), "product": product(layout)}


def coordinate_json(c: Coordinate) -> dict[str, int]:
    """A coordinate by axis."""
    return {"dp": c.dp, "pp": c.pp, "cp": c.cp, "tp": c.tp, "ep": c.ep}


def rule_json(rule: Rule) -> dict[str, Any]:
    """A broken rule with its numbers and the nearest legal layouts."""
    return {
        "code": rule.code,
        "severity": rule.severity,
        "message": rule.message,
        "way_out": rule.way_out,
        "where": rule.where,
        "numbers": dict(rule.numbers),
        "nearest": [str(n) for n in rule.nearest],
    }


def rank_json(row: RankMemory, kind: str) -> dict[str, Any]:
    """Memory of one rank (or of one class of equal ranks) in bytes."""
    out: dict[str, Any] = {
        "rank": row.rank,
        "ranks": row.ranks,
        "rank_class": row.rank_class,
        "coordinate": coordinate_json(row.coordinate),
        "weights_bytes": row.weights_bytes,
    }
    if kind == "serve":
        out["kv_cache_bytes"] = row.kv_cache_bytes
    else:
        out["gradients_bytes"] = row.gradients_bytes
        out["optimizer_bytes"] = row.optimizer_bytes
    out |= {
        "activations_bytes": row.activations_bytes,
        "runtime_bytes": row.runtime_bytes,
        "total_bytes": row.total_bytes,
        "capacity_bytes": row.capacity_bytes,
    }
    return out


def memory_json(plan: Plan, candidate: Candidate) -> dict[str, Any]:
    """``memory``: the worst rank, every rank, and every term in detail by class."""
    memory = candidate.memory
    rows = rank_rows(candidate.placement, memory.ranks, MAX_RANK_ROWS)
    out: dict[str, Any] = {
        "worst": rank_json(memory.worst, plan.kind),
        "ranks": [rank_json(r, plan.kind) for r in rows],
        "holdings": [plain(h) for r in memory.ranks for h in r.holdings],
        "notes": list(memory.notes),
    }
    if isinstance(memory, ServeMemory):
        out |= {
            "kv_pool_bytes": memory.kv_pool_bytes,
            "kv_bytes_per_token": memory.kv_bytes_per_token,
            "kv_needed_bytes": memory.needed_bytes,
            "max_requests": memory.max_requests,
            "longest_context": memory.longest_context,
        }
    return out


def cost_json(cost: Cost, work: Workload | None = None) -> dict[str, Any]:
    """Counts and lower bounds; ``predicted``: means with their intervals, percentiles and parts in seconds.

    ``predicted_step``: an optimizer step (training), with rates, exposed communication and parts.
    """
    made = {"later", "step_later"}
    out: dict[str, Any] = {f.name: getattr(cost, f.name) for f in fields(cost) if f.name not in made}
    out["predicted_step"] = step_json(cost.predicted_step)
    time = cost.predicted
    out["predicted"] = time and {
        "ttft_s": finite(time.ttft.json()),
        "tpot_s": finite(time.tpot.json()),
        "tokens_per_s": finite(time.tokens_per_s.json()),
        "requests_per_s": time.requests_per_s,
        "goodput_per_s": time.goodput(work.ttft_s, work.tpot_s) if isinstance(work, Serve) else time.requests_per_s,
        "running": time.running,
        "stable": time.stable,
        "ttft_percentiles_s": finite({f"p{n}": time.ttft_percentile(n) for n in (50, 90, 99)}),
        "tpot_percentiles_s": finite({f"p{n}": time.tpot_percentile(n) for n in (50, 90, 99)}),
        "ttft_parts_s": finite(dict(time.ttft_parts)),
        "tpot_parts_s": finite(dict(time.tpot_parts)),
    }
    return out


def step_json(time: TrainingTime | None) -> dict[str, Any] | None:
    """A predicted optimizer step: seconds, tokens a second, model FLOP/s, exposed communication, bubble, parts."""
    return time and {
        "step_s": time.step.json(),
        "tokens_per_s": time.tokens_per_s,
        "tokens_per_s_device": time.tokens_per_s_device,
        "flops_s_device": time.flops_s_device,
        "mfu": time.mfu,
        "exposed_s": time.exposed_s,
        "bubble": time.bubble,
        "parts_s": dict(time.parts),
    }


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers that JSON can hold: None where a queue grows without end."""
    return {k: None if v in (inf, -inf) or v != v else v for k, v in values.items()}


def candidate_json(plan: Plan, candidate: Candidate) -> dict[str, Any]:
    """A layout that was looked at in full, in short."""
    out: dict[str, Any] = {
        "layout": layout_json(candidate.layout),
        "fits": candidate.fits,
        "worst": rank_json(candidate.memory.worst, plan.kind),
        "copies": candidate.copies,
        "cost": cost_json(candidate.cost, plan.workload),
    }
    if isinstance(candidate.memory, ServeMemory):
        out["kv_cache_tokens"] = candidate.memory.kv_cache_tokens
        out["max_requests"] = candidate.memory.max_requests
    return out


def search_json(plan: Plan) -> dict[str, Any] | None:
    """The search over arrays: how large its space was, the points that nothing beats, the most promising ones."""
    if plan.served is not None:
        from meshwright.report.serving import served_json

        return served_json(plan.served)
    found = plan.searched
    if found is None:
        return None
    names = ("size", "illegal", "uneven", "unfit", "tight", "costed")

    def point(p: Point) -> dict[str, Any]:
        told = {"parts_s" if name == "parts" else name: value for name, value in plain(p).items()}
        return {**told, "layout": layout_json(p.layout)}

    return {name: getattr(found, name) for name in names} | {
        "pareto": [point(p) for p in found.pareto],
        "best": [point(p) for p in found.best],
        "rivals": {axis: None if p is None else point(p) for axis, p in found.rivals.items()},
        "left_out": [{"what": what, "why": why} for what, why in found.left_out],
    }


def plan_json(plan: Plan) -> dict[str, Any]:
    """The whole plan; keys are stable, new ones may be added."""
    chosen = plan.chosen
    serve = chosen.memory if chosen and isinstance(chosen.memory, ServeMemory) else None
    return {
        "kind": plan.kind,
        "verdict": plan.verdict,
        "ok": plan.ok,
        "motive": plan.motive,
        "model": {
            "name": plan.spec.name,
            "architecture": plan.spec.architecture,
            "source": plan.spec.source,
            "parameters": plan.spec.parameters("decoder"),
            "weight_bytes": plan.spec.weight_bytes(),
            "layers": len(plan.spec.layers),
            "quantization": plain(plan.spec.quantization),
        },
        "cluster": {
            "text": str(plan.cluster),
            "nodes": plan.cluster.nodes,
            "devices_per_node": plan.cluster.devices_per_node,
            "device": plan.cluster.device.name,
            "memory_bytes": plan.cluster.device.memory_bytes,
            "intra": plan.cluster.intra.name,
            "inter": plan.cluster.inter.name,
            "inter_assumed": plan.cluster.inter_assumed,
            "intra_bytes_s": plan.cluster.intra.device_bandwidth_bytes_s(plan.cluster.devices_per_node),
            "inter_bytes_s": plan.cluster.inter.device_bandwidth_bytes_s(plan.cluster.devices_per_node),
        },
        "engine": plan.engine,
        "workload": plain(plan.workload),
        "settings": plain(plan.settings),
        "layout": layout_json(plan.layout) if plan.layout else None,
        "copies": chosen.copies if chosen else 1,
        "legal": plan.legal,
        "fits": plan.fits,
        "fast_enough": plan.fast_enough,
        "rules": [rule_json(r) for r in plan.rules],
        "reasons": [plain(r) for r in plan.reasons],
        "memory": memory_json(plan, chosen) if chosen else None,
        "kv_cache_tokens": serve.kv_cache_tokens if serve else None,
        "cost": cost_json(chosen.cost, plan.workload) if chosen else None,
        "alternatives": [{**candidate_json(plan, a.candidate), "lost_by": a.lost_by} for a in plan.alternatives],
        "rejected": [{"layout": layout_json(r.layout), "code": r.code, "reason": r.reason} for r in plan.rejected],
        "search": search_json(plan),
        "commands": [
            {"node": c.node, "purpose": c.purpose, "text": c.text, "env": dict(c.env), "note": c.note}
            for c in plan.commands
        ],
        "notes": list(plan.notes),
    }
