"""Write the accuracy table of README.md and README.zh.md: ``python docs/accuracy.py [--truth DIR]``.

The figures are those of ``bench/score.py``, its rows put together as ``accuracy.toml`` says. The table stands between
the comments ``<!-- accuracy -->`` and ``<!-- /accuracy -->``; nothing else is touched. It needs the shared
measurements, so it is run by hand, and the table says when.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from bench.scoring import ScoreRow, Summary

#: The files, in the order of the languages of ``accuracy.toml``.
FILES = ("README.md", "README.zh.md")
#: Metrics of the second table.
TIMES = re.compile(r"tokens/s|TTFT|TPOT")
MARKS = re.compile(r"<!-- accuracy -->\n.*?<!-- /accuracy -->", re.DOTALL)


def percent(value: float | None) -> str:
    """``0.0123`` -> ``1.23 %``; a dash where there is nothing."""
    return "-" if value is None else f"{100 * value:.2f} %"


def line(name: str, s: Summary) -> str:
    """One row of the table."""
    cells = (name, str(s.rows), str(s.answered), percent(s.median), percent(s.mean), percent(s.p90))
    return f"| {' | '.join(cells)} |"


def table(
    words: dict[str, Any], rows: list[ScoreRow], held_out: dict[str, dict[str, Summary]], language: int, day: str
) -> str:
    """The table in one language, with the day below it.

    Args:
        words: ``accuracy.toml``.
        rows: of all scorers.
        held_out: errors on rows that were left out of the fit, by source.
        language: 0 English, 1 Chinese.
        day: when the rows were scored.

    Raises:
        ValueError: rows that no line sums up.
    """
    from bench.scoring import summarize

    keys = {id(r): f"{r.source}: {r.metric}" for r in rows if not re.search("Megatron golden .* allocated", r.source)}
    out = [f"| {' | '.join(words['head'][language])} |", "|---|" + "--:|" * 5]
    missed: set[str] = set()
    for part, times in (("line", False), ("time", True)):
        of = {key: name for key, name in keys.items() if bool(TIMES.search(name)) == times}
        lines = []
        for spec in words[part]:
            chosen = [r for r in rows if re.search(spec["rows"], of.get(id(r), ""))]
            if chosen:
                lines.append(line(spec["name"][language], summarize(chosen)))
        missed |= {name for name in of.values() if not any(re.search(spec["rows"], name) for spec in words[part])}
        if times and lines:
            out += ["", f"| {' | '.join(words['head_times'][language])} |", "|---|" + "--:|" * 5]
        out += lines
        for source, names in words["names"].items() if not times else ():
            if source in held_out:
                name = words["held_out"][language].format(names[language])
                out.append(line(name, held_out[source]["leave one model out"]))
    if missed:
        raise ValueError(f"no line of the table sums up {', '.join(sorted(missed))}")
    return "\n".join([*out, "", words["date"][language].format(day), ""])


def main() -> int:
    """Score, and rewrite the table of both files."""
    from bench.score import collect, truth_folder

    from bench import fit_training_memory, score_serving_memory

    parser = argparse.ArgumentParser(description="Write the accuracy table of the READMEs.")
    parser.add_argument("--truth", help="folder with the measurements; default: the shared ones")
    truth = truth_folder(parser.parse_args().truth)
    words = tomllib.loads((ROOT / "docs" / "accuracy.toml").read_text(encoding="utf-8"))
    rows = collect(truth)
    held_out = fit_training_memory.held_out(truth) | score_serving_memory.held_out(truth)
    day = datetime.now(UTC).date().isoformat()
    for language, name in enumerate(FILES):
        path = ROOT / name
        made = table(words, rows, held_out, language, day)
        before, after = MARKS.split(path.read_text(encoding="utf-8"))
        path.write_text(f"{before}<!-- accuracy -->\n{made}<!-- /accuracy -->{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
