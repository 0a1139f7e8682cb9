"""Score predictions against measured truth: per source the count, the answers, the errors and the worst rows.

python bench/score.py                     # $MESHWRIGHT_SHARED/truth, ../shared/truth, or the sample in bench/data
python bench/score.py --truth DIR --json  # a folder with files of the same columns; missing files are named
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.scoring import ScoreRow, Summary

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "bench" / "data"

#: Files that the scorers read.
FILES = ("ground_truth.csv", "megatron_golden_memory.csv", "megatron_args.jsonl", "serving_latency.csv")


def truth_folder(stated: str | None) -> Path:
    """The folder to score on: the stated one, the shared measurements, or the committed sample."""
    if stated is not None:
        return Path(stated)
    shared = Path(os.environ.get("MESHWRIGHT_SHARED", ROOT.parent / "shared")) / "truth"
    return shared if shared.is_dir() else SAMPLE


def collect(truth: Path) -> list[ScoreRow]:
    """Rows of every scorer; a scorer whose file is missing gives none."""
    from bench import score_serving_latency, score_serving_memory, score_training_memory, score_training_time

    scorers: tuple[Callable[[Path], list[ScoreRow]], ...] = (
        score_training_memory.rows,
        score_training_time.rows,
        score_serving_memory.rows,
        score_serving_latency.rows_with_peer,
        score_serving_latency.throughput_rows,
    )
    found: list[ScoreRow] = []
    for scorer in scorers:
        try:
            found += scorer(truth)
        except FileNotFoundError:
            continue
    return found


def by_source(rows: Sequence[ScoreRow]) -> dict[str, list[ScoreRow]]:
    """Rows by source and, where a source measures several things, by metric."""
    metrics: dict[str, set[str]] = {}
    for row in rows:
        metrics.setdefault(row.source, set()).add(row.metric)
    groups: dict[str, list[ScoreRow]] = {}
    for row in rows:
        several = len(metrics[row.source]) > 1
        groups.setdefault(f"{row.source}: {row.metric}" if several else row.source, []).append(row)
    return groups


def percent(value: float | None) -> str:
    """``0.0123`` -> ``1.23 %``; a dash for None."""
    return "-" if value is None else f"{100 * value:.2f} %"


def errors(s: Summary) -> str:
    """Median, mean and 90th percentile of the absolute error, in columns."""
    return f"{percent(s.median):>9} {percent(s.mean):>9} {percent(s.p90):>9}"


def summary_json(summary: Summary) -> dict[str, object]:
    """A summary with stable keys."""
    return {
        "rows": summary.rows,
        "answered": summary.answered,
        "median": summary.median,
        "mean": summary.mean,
        "p90": summary.p90,
        "worst": [
            {"name": r.name, "metric": r.metric, "predicted": r.predicted, "measured": r.measured, "unit": r.unit,
             "error": r.error}
            for r in summary.worst
        ],
    }  # fmt: skip


def reasons(rows: Sequence[ScoreRow]) -> dict[str, int]:
    """Why rows have no answer, with how many."""
    counts: dict[str, int] = {}
    for row in rows:
        if row.predicted is None:
            counts[row.reason or "no reason given"] = counts.get(row.reason or "no reason given", 0) + 1
    return dict(sorted(counts.items(), key=lambda pair: -pair[1]))


def report(groups: dict[str, list[ScoreRow]]) -> str:
    """The table that people read."""
    from bench.scoring import summarize

    lines = [f"{'source':58} {'rows':>5} {'answered':>8} {'median':>9} {'mean':>9} {'p90':>9}"]
    for name, rows in groups.items():
        s = summarize(rows)
        lines.append(f"{name[:58]:58} {s.rows:5d} {s.answered:8d} {errors(s)}")
        lines += [f"    {percent(r.error):>10}  {r.name[:110]}" for r in s.worst if r.error]
        lines += [f"    no answer for {n}: {why}" for why, n in list(reasons(rows).items())[:4]]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the scorers. Exit code 1 when the folder holds nothing to score."""
    parser = argparse.ArgumentParser(description="Score predictions against measured truth.")
    parser.add_argument("--truth", help="folder with files of the same columns as the shared truth")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--no-held-out", action="store_true", help="skip the refits on parts of the rows")
    options = parser.parse_args(argv)
    sys.path.insert(0, str(ROOT))
    from bench import score_serving_latency, score_serving_memory, score_training_time
    from bench.fit_training_memory import held_out
    from bench.scoring import summarize

    truth = truth_folder(options.truth)
    missing = [name for name in FILES if not (truth / name).is_file()]
    rows = collect(truth)
    if not rows:
        print(f"nothing to score in {truth}: it holds none of {', '.join(FILES)}", file=sys.stderr)
        return 1
    groups = by_source(rows)
    splits = {} if options.no_held_out else held_out(truth) | score_serving_memory.held_out(truth)
    if options.json:
        result = {
            "truth": str(truth),
            "missing": missing,
            "sources": {
                name: summary_json(summarize(group)) | {"unanswered": reasons(group)} for name, group in groups.items()
            },
            "held_out": {name: {kind: summary_json(s) for kind, s in kinds.items()} for name, kinds in splits.items()},
        }
        print(json.dumps(result, indent=1))
        return 0
    print(f"truth: {truth}" + (f" (missing: {', '.join(missing)})" if missing else ""))
    print(report(groups))
    if splits:
        print("\nfitted constants refitted on a part, scored on the rest (see bench/fit_training_memory.py)")
    for name, kinds in splits.items():
        for kind, s in kinds.items():
            print(f"{name[:34]:34} {kind:24} {s.answered:5d} {errors(s)}")
    if (truth / FILES[0]).is_file():
        print("\n" + "\n".join(score_training_time.chosen(truth)))
        if not options.no_held_out:
            print("\n" + "\n".join(score_training_time.held_out(truth)))
    if (truth / score_serving_latency.FILE).is_file():
        print("\n" + "\n".join(score_serving_latency.by_system(truth, rows)))
        if not options.no_held_out:
            print("\n" + "\n".join(score_serving_latency.held_out(truth)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
