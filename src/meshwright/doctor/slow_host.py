"""What all ranks alike spend their steps on besides work and collectives: data, launches, synchronization, pauses."""

from __future__ import annotations

from meshwright.doctor.findings import Finding, ranks_text
from meshwright.doctor.slow_advice import ADVICE
from meshwright.doctor.slow_view import SlowView
from meshwright.doctor.slow_words import faster_text, of_text, time_text

#: Share of a step from which on each is a finding. A device that idles a little between kernels is usual.
SHARES = {"data": 0.05, "gc": 0.03, "compile": 0.05, "checkpoint": 0.05, "sync": 0.1, "launch": 0.2, "barrier": 0.05}
_LABELS = {"launch": ("launch", "idle")}
_KINDS = {
    "data": "input_bound",
    "gc": "gc_pauses",
    "compile": "launch_bound",
    "checkpoint": "sync_bound",
    "sync": "sync_bound",
    "launch": "launch_bound",
    "barrier": "sync_bound",
}
_SAYS = {
    "data": "waiting for data takes {part} of every step on {who}",
    "gc": "garbage collection stops {who} for {part} of a step on average",
    "compile": "{who} compile in the recorded steps, {part} of each",
    "checkpoint": "writing checkpoints takes {part} of a step on average",
    "sync": "the host waits for its device and then launches anew: {part} of every step on {who} the device has "
    "nothing to do after {count:.0f} synchronizations",
    "launch": "the device waits for its host {part} of every step on {who}: {count:.0f} launches for {kernels:.0f} "
    "kernels a step, {each} each",
    "barrier": "barriers take {part} of every step on {who}",
}


def findings(view: SlowView, blamed: dict[str, float]) -> list[Finding]:
    """One a cause; ``blamed`` seconds of a label are ranks' lateness and told elsewhere."""
    found = []
    for cause, least in SHARES.items():
        if cause == "launch" and not view.on_device:
            continue
        part = view.mean_s(*_LABELS.get(cause, (cause,))) - blamed.get(cause, 0.0)
        if view.step_s and part >= least * view.step_s:
            found.append(_finding(view, cause, part))
    return found


def _finding(view: SlowView, cause: str, part: float) -> Finding:
    kind = _KINDS[cause]
    steps = sum(len(t.steps) for t in view.tracks)
    counts = {key: sum(t.counts.get(key, 0) for t in view.tracks) / max(1, steps) for key in _COUNTS}
    work = sum(s for t in view.tracks for _, s in t.work.values())
    often = sum(n for t in view.tracks for n, _ in t.work.values())
    text = _SAYS[cause].format(
        part=of_text(part, view.step_s),
        who="every rank" if len(view.ranks) > 1 else ranks_text(view.ranks),
        count=counts["synchronizations" if cause == "sync" else "launches"],
        kernels=counts["kernels"],
        each=time_text(work / often / 1e9 if often else 0.0),
    )
    after = max(0.0, view.step_s - part)
    shares = ", ".join(
        f"rank {r} {100 * view.label_s(r, *_LABELS.get(cause, (cause,))) / view.step_s:.0f} %" for r in view.ranks[:8]
    )
    return Finding(
        kind,
        view.ranks,
        (),
        confidence=_confidence(view),
        headline=f"{text}. Without it {faster_text(view.step_s, after)}",
        evidence=(f"of a step: {shares}", _work_line(view)),
        advice=ADVICE[kind],
        numbers=(("step_s", view.step_s), ("own_s", part), ("step_without_s", after), *counts.items()),
    )


def _confidence(view: SlowView) -> str:
    """One step may be an odd one; some ranks may be odd ones."""
    if view.steps < 2 or not all(t.marked for t in view.tracks):
        return "low"
    return "high" if view.steps > 2 and len(view.ranks) >= view.world else "medium"


_COUNTS = ("kernels", "launches", "synchronizations", "graph_launches")


def _work_line(view: SlowView) -> str:
    parts = {name: view.mean_s(name) for name in ("forward", "backward", "optimizer", "compute", "copy")}
    shown = ", ".join(f"{name} {time_text(s)}" for name, s in parts.items() if s > 0)
    return (
        f"work of a step: {shown or 'none recorded'}; a busy device would not tell: it is busy while it waits as well"
    )
