"""A plan in the terminal: verdict first, then the memory table, reasons, what else was looked at, what to type."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from math import inf
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from meshwright.ledger.schema import Ledger
from meshwright.plan.memory import RankMemory, ServeMemory
from meshwright.plan.plan import Alternative, Candidate, Plan
from meshwright.plan.serving_time import ServingTime
from meshwright.specs.layout import product
from meshwright.specs.units import GIB, binary, gib
from meshwright.specs.workload import Serve

if TYPE_CHECKING:
    from meshwright.plan.strategies import StrategyRow
    from meshwright.plan.training_time import TrainingTime

#: Rows of the memory table; the rest is summarised in a line.
MAX_ROWS = 12


def console(*, wide: bool = False) -> Console:
    """Standard output, wide enough for tables when it is not a terminal."""
    width = None if sys.stdout.isatty() else 170 if wide else 120
    return Console(width=width, highlight=False, soft_wrap=False)


def table(*columns: str, title: str | None = None) -> Table:
    """A table without borders; the first column is left-aligned, the others right-aligned."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right", no_wrap=index != 0)
    return made


def _number(nbytes: int) -> str:
    return f"{nbytes / GIB:,.2f}"


def _where(row: RankMemory) -> str:
    c = row.coordinate
    places = [f"{axis} {value}" for axis, value in (("dp", c.dp), ("pp", c.pp), ("cp", c.cp), ("tp", c.tp)) if value]
    ranks = f"rank {row.rank}" if row.ranks == 1 else f"rank {row.rank} and {row.ranks - 1:,} like it"
    return f"{ranks} ({', '.join(places)})" if places else ranks


def memory_table(plan: Plan, candidate: Candidate) -> Table:
    """One row a class of equal ranks, worst first; GiB."""
    serve = plan.kind == "serve"
    terms = ("weights", "KV needed") if serve else ("weights", "gradients", "optimizer")
    made = table(
        "GiB a rank", *terms, "activations", "runtime", "total", "limit" if serve else "device", "left", title="Memory"
    )
    rows = sorted(candidate.memory.ranks, key=lambda r: (r.capacity_bytes - r.total_bytes, r.rank))
    for row in rows[:MAX_ROWS]:
        states = [row.kv_cache_bytes] if serve else [row.gradients_bytes, row.optimizer_bytes]
        left = row.capacity_bytes - row.total_bytes
        made.add_row(
            _where(row),
            _number(row.weights_bytes),
            *(_number(s) for s in states),
            _number(row.activations_bytes),
            _number(row.runtime_bytes),
            _number(row.total_bytes),
            _number(row.capacity_bytes),
            _number(left),
            style="red" if left < 0 else None,
        )
    if len(rows) > MAX_ROWS:
        made.add_row(f"... {len(rows) - MAX_ROWS} more kinds of ranks, each with more left", *[""] * (6 + len(terms)))
    return made


def _capacity_line(memory: ServeMemory) -> str:
    return (
        f"KV cache of one replica: {memory.kv_cache_tokens:,} tokens in {gib(memory.kv_pool_bytes)} a rank "
        f"({binary(memory.kv_bytes_per_token)} a token); {memory.max_requests:,} requests of this length at once; "
        f"longest single request {memory.longest_context:,} tokens"
    )


def speed_table(time: ServingTime) -> Table:
    """Predicted times and throughput with their intervals and percentiles."""
    made = table("Predicted", "mean", "80 % interval", "p50", "p90", "p99", title="Speed")
    percents = (50, 90, 99)
    for name, found, of in (("TTFT ms", time.ttft, time.ttft_percentile), ("TPOT ms", time.tpot, time.tpot_percentile)):
        made.add_row(
            name,
            _short(found.value * 1e3),
            f"{_short(found.low * 1e3)} to {_short(found.high * 1e3)}",
            *(_short(of(p) * 1e3) for p in percents),
        )
    rate = time.tokens_per_s
    made.add_row("output tokens/s", _short(rate.value), f"{_short(rate.low)} to {_short(rate.high)}", *[""] * 3)
    return made


def _short(value: float) -> str:
    """Three digits or whole numbers; a queue without end has no time."""
    if value == inf:
        return "no end"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def speed_line(time: ServingTime) -> str:
    """How sure the times are, for how many requests, and what a token's time is made of."""
    sure = {
        "calibrated": "calibrated on measured runs of this engine and device generation",
        "modelled": "modelled: engine, device or links lie outside the measured runs",
    }
    parts = ", ".join(f"{name} {_short(s * 1e3)}" for name, s in time.tpot_parts if s > 0.005 * time.tpot.value)
    many = "one request decodes" if time.running == 1 else f"{time.running:,} requests decode"
    return f"{sure.get(time.tpot.word, time.tpot.word)}; {many} together on a replica; ms of a token: {parts}"


def step_table(time: TrainingTime) -> Table:
    """The predicted optimizer step with its interval, and the rates that follow from it."""
    step, made = time.step, table("Predicted", "mean", "80 % interval", title="Speed")
    low, high = step.value / step.high, step.value / step.low
    made.add_row("step s", _short(step.value), f"{_short(step.low)} to {_short(step.high)}")
    rates = (
        ("tokens/s", time.tokens_per_s),
        ("tokens/s/GPU", time.tokens_per_s_device),
        ("model TFLOP/s/GPU", time.flops_s_device / 1e12),
        ("MFU %", 100 * time.mfu),
    )
    for name, rate in rates:
        made.add_row(name, _short(rate), f"{_short(rate * low)} to {_short(rate * high)}")
    return made


def step_line(time: TrainingTime) -> str:
    """How sure the step is, what stands idle, and what it is made of."""
    sure = {
        "calibrated": "calibrated on measured steps of this device generation",
        "modelled": "modelled: the layout spans nodes, or its devices or element type lie outside the measured steps",
    }
    whole = time.step.value
    parts = ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in time.parts if seconds > 0.005 * whole)
    return (
        f"{sure.get(time.step.word, time.step.word)}; bubble {time.bubble:.1%}, exposed communication "
        f"{_short(time.exposed_s)} s ({time.exposed_s / whole:.0%}); of the step: {parts}"
    )


def _alternatives(rows: Iterable[Alternative]) -> Table:
    made = table("Other layouts that work", "worst rank", "left", "compared")
    made.columns[3].justify = "left"
    made.columns[3].no_wrap = False
    for alternative in rows:
        worst = alternative.candidate.memory.worst
        made.add_row(
            product(alternative.candidate.layout),
            gib(worst.total_bytes),
            gib(worst.capacity_bytes - worst.total_bytes),
            escape(alternative.lost_by),
        )
    return made


def show_plan(plan: Plan, out: Console | None = None, *, title: str = "") -> None:
    """Print the plan; ``title`` names the pool it is of."""
    out = out or console()
    if title:
        out.print(f"[bold]{title}[/bold]")
    out.print(escape(plan.verdict), style="bold green" if plan.ok else "bold red")
    for rule in plan.rules:
        where = f" ({rule.where})" if rule.where else ""
        said = f"{rule.severity}: {rule.message}{where}"
        out.print(escape(f"way out: {rule.way_out}" if said == plan.verdict else f"{said}; {rule.way_out}"))
    if plan.kind == "serve":
        _show_layouts(plan, out)
    show_detail(plan, out)


def _show_layouts(plan: Plan, out: Console) -> None:
    """Layouts side by side by predicted figures."""
    from meshwright.report.serving import cells, head, judged, layout_rows

    within = judged(plan)
    rows = [cells(row, within) for row in layout_rows(plan)]
    if not rows:
        return
    made = table(*head(within))
    made.columns[-1].justify = "left"
    made.columns[-1].no_wrap = made.columns[0].no_wrap = False
    made.columns[0].max_width = 30
    for row in rows:
        made.add_row(*(escape(cell) for cell in row))
    out.print()
    out.print(made)


def show_split(plan: Plan, prefill: Plan, out: Console | None = None) -> None:
    """Print the plan of two pools: verdict, ratios of workers, layouts side by side, then each side."""
    from meshwright.report.serving import RATIO_HEAD, ratio_rows

    out = out or console()
    out.print(escape(plan.verdict), style="bold green" if plan.ok and prefill.ok else "bold red")
    found = plan.served.split if plan.served is not None else None
    if found is not None and isinstance(plan.workload, Serve):
        made = table(*RATIO_HEAD)
        for row in ratio_rows(found, plan.workload.osl):
            made.add_row(*(escape(cell) for cell in row))
        out.print()
        out.print(made)
    for side, name in ((prefill, "Prefill worker"), (plan, "Decode worker")):
        out.print(f"\n[bold]{name}[/bold]: {escape(product(side.layout) if side.layout else '')}", end="")
        _show_memory(side, out)
    _show_speed(plan, out)
    _show_reasons(plan, out)
    _show_commands(plan, out)
    _show_notes(plan, out)


def show_detail(plan: Plan, out: Console) -> None:
    """Memory, speed, reasons, what was rejected, what to type."""
    _show_memory(plan, out)
    _show_speed(plan, out)
    _show_reasons(plan, out)
    if plan.alternatives and plan.kind == "train":
        out.print()
        out.print(_alternatives(plan.alternatives))
    if plan.rejected:
        out.print()
        made = table("Rejected", "because")
        made.columns[1].justify = "left"
        made.columns[1].no_wrap = False
        for rejected in plan.rejected:
            made.add_row(product(rejected.layout), escape(rejected.reason))
        out.print(made)
    _show_commands(plan, out)
    _show_notes(plan, out)


def _show_memory(plan: Plan, out: Console) -> None:
    if plan.chosen is None:
        return
    out.print()
    out.print(memory_table(plan, plan.chosen))
    if isinstance(plan.chosen.memory, ServeMemory):
        out.print(escape(_capacity_line(plan.chosen.memory)))


def _show_speed(plan: Plan, out: Console) -> None:
    if plan.chosen is None:
        return
    served, step = plan.chosen.cost.predicted, plan.chosen.cost.predicted_step
    if served is not None:
        out.print()
        out.print(speed_table(served))
        out.print(escape(speed_line(served)))
    if step is not None:
        out.print()
        out.print(step_table(step))
        out.print(escape(step_line(step)))


def _show_reasons(plan: Plan, out: Console) -> None:
    if plan.reasons:
        out.print("\n[bold]Why[/bold]")
        for reason in plan.reasons:
            out.print(escape(f"- {reason.text}"))


def _show_notes(plan: Plan, out: Console) -> None:
    if plan.notes:
        out.print("\n[bold]Assumed[/bold]")
        for note in plan.notes:
            out.print(escape(f"- {note}"))


def _show_commands(plan: Plan, out: Console) -> None:
    if not plan.commands:
        return
    out.print(f"\n[bold]What to type[/bold] ({escape(plan.engine)})")
    for command in plan.commands:
        where = "every node" if command.node is None else f"node {command.node}"
        note = f": {command.note}" if command.note else ""
        out.print(escape(f"# {where}, {command.purpose}{note}"), style="dim", soft_wrap=True)
        env = "".join(f"{key}={value} " for key, value in command.env)
        out.print(escape(env + command.text), soft_wrap=True)


def _print_rows(out: Console, head: Sequence[str], rows: Iterable[Sequence[str]], left: Iterable[int]) -> None:
    made = table(*head)
    for index in left:
        made.columns[index].justify = "left"
    for column in made.columns:
        column.no_wrap = False
    for row in rows:
        made.add_row(*(escape(cell) for cell in row))
    out.print(made)


def show_ledger(ledger: Ledger, phase: str | None, out: Console | None = None) -> None:
    """Print the counted ledger of the first rank class: totals, then by layer."""
    from meshwright.report.tables import first_class, ledger_rows, total_rows

    out = out or console(wide=True)
    out.print(f"\n[bold]Ledger[/bold] of the {escape(first_class(ledger))}; counted, not timed")
    _print_rows(out, *total_rows(ledger, phase), left=(1,))
    out.print()
    _print_rows(out, *ledger_rows(ledger, phase), left=(1, 2, 3, 4, 6, 7))


def show_strategies(rows: Sequence[StrategyRow], out: Console | None = None) -> None:
    """Print what each strategy cuts, sends and where it belongs."""
    from meshwright.report.tables import strategy_rows

    out = out or console(wide=True)
    out.print("\n[bold]Strategies[/bold] for this model and cluster, counted by the ledger")
    _print_rows(out, *strategy_rows(rows), left=(1, 2, 5))
