"""``--html``: one self-contained page that opens offline. Everything that came from a user is escaped."""

from __future__ import annotations

from html import escape
from pathlib import Path

from meshwright.errors import InputError
from meshwright.ledger.schema import Ledger
from meshwright.plan.plan import Plan
from meshwright.report import page_pareto, page_schedule, page_times
from meshwright.report.page_memory import memory
from meshwright.report.page_parts import STYLE as STYLE
from meshwright.report.page_parts import listing, script, table
from meshwright.report.page_times import Times
from meshwright.report.serving import RATIO_HEAD, cells, head, judged, layout_rows, ratio_rows
from meshwright.report.tables import ledger_rows
from meshwright.specs.layout import product
from meshwright.specs.units import gib
from meshwright.specs.workload import Serve


def _choices(plan: Plan, *, pools: bool = False) -> str:
    """Other layouts and why they lost, what was rejected; of two pools the ratios of workers."""
    parts = []
    alone = plan.kind == "serve" and not pools
    compared = [cells(row, judged(plan)) for row in layout_rows(plan)] if alone else []
    split = plan.served.split if pools and plan.served is not None else None
    if split is not None and isinstance(plan.workload, Serve):
        ratios = list(ratio_rows(split, plan.workload.osl))
        return "<h2>Ratios of workers</h2>" + table(RATIO_HEAD, ratios, (8,))
    if len(compared) > 1:
        parts.append("<h2>Layouts side by side</h2>" + table(head(judged(plan)), compared, (6,)))
    elif plan.alternatives:
        rows = [
            (product(a.candidate.layout), gib(a.candidate.memory.worst.total_bytes), a.lost_by)
            for a in plan.alternatives
        ]
        parts.append("<h2>Other layouts that work</h2>" + table(("layout", "worst rank", "compared"), rows, (2,)))
    if plan.rejected:
        rejected = [(product(r.layout), r.reason) for r in plan.rejected]
        parts.append("<h2>Rejected</h2>" + table(("layout", "because"), rejected, (1,)))
    return "".join(parts)


def _commands(plan: Plan) -> str:
    blocks = []
    for command in plan.commands:
        where = "every node" if command.node is None else f"node {command.node}"
        env = "".join(f"{key}={value} " for key, value in command.env)
        note = f": {command.note}" if command.note else ""
        blocks.append(f"<pre># {escape(where)}, {escape(command.purpose + note)}\n{escape(env + command.text)}</pre>")
    return f"<h2>What to type ({escape(plan.engine)})</h2>{''.join(blocks)}" if blocks else ""


def _pictures(plan: Plan, times: Times, prefill: Plan | None) -> str:
    """Layouts compared, parts of the times, one layer, the pipeline."""
    compared = parts = ""
    if times.step is not None and times.engine is not None:
        compared = page_pareto.pareto(plan, page_pareto.training_points(plan, times.engine))
        parts = page_times.training_parts(times.step)
    elif plan.chosen is not None and plan.chosen.cost.predicted is not None:
        parts = page_times.serving_parts(plan.chosen.cost.predicted)
    if plan.kind == "serve" and prefill is None:
        compared = page_pareto.pareto(plan, page_pareto.serving_curves(plan))
    layers = page_times.layers(plan, times.timelines)
    return "".join((compared, parts, layers, page_schedule.pipeline(plan, times.timelines)))


def render(plan: Plan, ledger: Ledger | None, times: Times | None = None, prefill: Plan | None = None) -> str:
    """The page as text.

    Args:
        plan, ledger: what is shown.
        times: what was timed; without it there are no pictures but those of memory.
        prefill: plan of a prefill pool, of which ``plan`` is the decode pool.
    """
    parts = [
        f"<h1>{escape(plan.spec.name)} on {escape(str(plan.cluster))}</h1>",
        f'<p class="sub">{escape(plan.engine)}; {plan.spec.parameters("decoder") / 1e9:,.2f} B parameters, '
        f"{gib(plan.spec.weight_bytes())} of weights</p>",
        f'<p class="verdict {"yes" if plan.ok else "no"}">{escape(plan.verdict)}</p>',
        listing("Rules", (f"{r.severity}: {r.message}; {r.way_out}" for r in plan.rules)),
        listing("Why", (r.text for r in plan.reasons)),
        _pictures(plan, times, prefill) if times is not None else "",
    ]
    if prefill is not None and prefill.chosen is not None:
        parts.append(memory(prefill, prefill.chosen, "prefill"))
    if plan.chosen is not None:
        parts.append(memory(plan, plan.chosen, "decode" if prefill is not None else ""))
    parts += [_choices(plan, pools=prefill is not None), _commands(plan)]
    if ledger is not None:
        head, body = ledger_rows(ledger)
        rows = table(head, body, (1, 2, 3, 4, 6, 7))
        parts.append(f"<h2>Ledger: what one pass computes and sends</h2>{rows}")
    parts.append(listing("Assumed", plan.notes))
    title = escape(f"{plan.spec.name} on {plan.cluster}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style>{script() if plan.chosen is not None else ''}</head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def write_page(
    plan: Plan, ledger: Ledger | None, path: Path, times: Times | None = None, prefill: Plan | None = None
) -> None:
    """Write the page (see ``render``); folders on the way are made.

    Raises:
        InputError: the path cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(plan, ledger, times, prefill), encoding="utf-8")
    except OSError as error:
        raise InputError(f"--html {path}: {error.strerror or error}") from None
