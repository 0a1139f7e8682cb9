"""``check`` in the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from meshwright.report.as_json import layout_json, plain, plan_json, rule_json
from meshwright.report.terminal import console, memory_table, table

if TYPE_CHECKING:
    from meshwright.engines.base import BootLog
    from meshwright.judge.boot import Difference
    from meshwright.judge.verdict import Verdict
    from meshwright.specs.rules import Rule


def show_verdict(verdict: Verdict, out: Console | None = None) -> None:
    """Verdict line, the way out, what it holds, what is unwise, the mended command."""
    out = out or console()
    invocation = verdict.invocation
    out.print(escape(verdict.verdict), style="bold green" if verdict.ok else "bold red")
    told = _told(verdict)
    if told is not None and (told in invocation.findings or verdict.plan.kind == "train" or not verdict.suggestions):
        out.print(escape(f"way out: {told.way_out}"))
    if verdict.suggestions:
        out.print(escape("use " + "; or ".join(s.text for s in verdict.suggestions)))
    if verdict.way_out:
        out.print(escape(f"way out: {verdict.way_out}"))
    for rule in invocation.findings:
        if rule is not told:
            out.print(escape(f"{rule.severity}: {rule.message}; {rule.way_out}"))
    for text in verdict.unwise:
        if not any(rule.message in text for rule in invocation.findings):
            out.print(escape(f"unwise: {text}"))
    if verdict.plan.chosen is not None:
        out.print()
        out.print(memory_table(verdict.plan, verdict.plan.chosen))
    for line, meaning in verdict.misleading:
        out.print(escape(f'the log will say "{line}": {meaning}'))
    if invocation.unknown:
        out.print(escape(f"not known to {invocation.engine} {invocation.version}: {', '.join(invocation.unknown[:8])}"))
    if verdict.mended:
        out.print("\n[bold]Mended[/bold]")
        for command in verdict.mended:
            if command.node is not None:
                out.print(escape(f"# node {command.node}, {command.purpose}"), style="dim", soft_wrap=True)
            env = "".join(f"{key}={value} " for key, value in command.env)
            out.print(escape(env + command.text), soft_wrap=True)
        for file in verdict.mended_files:
            out.print(escape(f"# reads {file.path}: {file.purpose} (its text is in --json)"), style="dim")
    notes = (*invocation.notes, *verdict.plan.notes)
    if notes:
        out.print("\n[bold]Assumed[/bold]")
        for note in notes:
            out.print(escape(f"- {note}"))


def _told(verdict: Verdict) -> Rule | None:
    """The broken rule that the first line tells."""
    rules = (*verdict.invocation.findings, *verdict.plan.rules)
    return next((r for r in rules if r.severity == "illegal" and r.message in verdict.verdict), None)


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """The plan's keys, with the verdict on the command and what was understood of it."""
    invocation = verdict.invocation
    return {
        **plan_json(verdict.plan),
        "verdict": verdict.verdict,
        "ok": verdict.ok,
        "starts": verdict.starts,
        "understood": {
            "engine": invocation.engine,
            "version": invocation.version,
            "model": invocation.model,
            "layout": layout_json(invocation.layout),
            "prefill": layout_json(invocation.prefill) if invocation.prefill else None,
            "deployment": invocation.deployment,
            "nodes": invocation.nodes,
            "given": dict(invocation.given),
            "unknown": list(invocation.unknown),
            "findings": [rule_json(rule) for rule in invocation.findings],
            "notes": list(invocation.notes),
        },
        "prefill": plan_json(verdict.prefill) if verdict.prefill is not None else None,
        "suggestions": [{"layout": layout_json(s.layout), "text": s.text, "fits": s.fits} for s in verdict.suggestions],
        "way_out": verdict.way_out,
        "mended": [plain(command) for command in verdict.mended],
        "mended_files": [plain(file) for file in verdict.mended_files],
        "unwise": list(verdict.unwise),
        "misleading": [{"line": line, "meaning": meaning} for line, meaning in verdict.misleading],
    }


def show_log(log: BootLog, rows: Sequence[Difference], out: Console | None = None) -> None:
    """Predicted against what the engine printed, term by term."""
    from meshwright.judge.boot import gib_or_count

    out = out or console()
    version = f" {log.version}" if log.version else ""
    out.print(escape(f"boot log of {log.engine}{version}" + (f", {log.model}" if log.model else "")), style="bold")
    made = table("term", "predicted", "printed", "difference")
    for row in rows:
        relative = "-" if row.relative is None else f"{row.relative:+.1%}"
        made.add_row(row.term, gib_or_count(row.term, row.predicted), gib_or_count(row.term, row.printed), relative)
    out.print(made)
    for line, meaning in log.misleading:
        out.print(escape(f'"{line}": {meaning}'))
    for note in log.notes:
        out.print(escape(f"- {note}"))


def log_json(log: BootLog, rows: Sequence[Difference]) -> dict[str, Any]:
    """The log and the differences as JSON."""
    return {
        "engine": log.engine,
        "version": log.version,
        "model": log.model,
        "layout": layout_json(log.layout) if log.layout else None,
        "holdings": [plain(h) for h in log.holdings],
        "kv_cache_tokens": log.kv_cache_tokens,
        "max_concurrency": log.max_concurrency,
        "context": log.context,
        "differences": [
            {"term": r.term, "predicted": r.predicted, "printed": r.printed, "relative": r.relative} for r in rows
        ],
        "misleading": [{"line": line, "meaning": meaning} for line, meaning in log.misleading],
        "notes": list(log.notes),
    }
