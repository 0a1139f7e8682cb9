"""The clock of ``make bench``, and what keeps a cold plan quick: few modules, each layout counted once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench.speed import COMMANDS, measure, run_once

from meshwright import engines
from meshwright.plan import train as training
from meshwright.plan.cost import stage_ranks
from meshwright.plan.train_cost import bubble, step_tallies
from meshwright.plan.training_step import microbatches, training_entries, training_ops
from meshwright.specs.cluster import parse_cluster
from meshwright.specs.hf.read import read_model
from meshwright.specs.layout import parse_layout
from meshwright.specs.placement import Placement, place
from meshwright.specs.workload import Train

#: Modules of the project that planning may load: 108 when the times were added (engines' flags, readers of other
#: models, judges and reports of other verbs stay away).
MOST_MODULES = 125
COUNT = """
import json, sys
from contextlib import redirect_stdout, suppress
from io import StringIO
sys.argv = ["meshwright", *sys.argv[1:]]
from meshwright.cli.main import main
with redirect_stdout(StringIO()), suppress(SystemExit):
    main()
print(json.dumps(sorted(m for m in sys.modules if m.startswith(("meshwright.", "rich")))))
"""


def modules(arguments: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", COUNT, *arguments.split()], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-1000:]
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_planning_loads_few_modules_and_no_table_for_json() -> None:
    loaded = modules(COMMANDS["dense 70B, search on 2x4"] + " --json")
    assert "meshwright.plan.serve" in loaded
    assert not [m for m in loaded if m.startswith("rich")]
    assert len(loaded) < MOST_MODULES
    assert not [m for m in loaded if m.startswith(("meshwright.judge", "meshwright.engines.sglang"))]


def test_text_loads_the_tables() -> None:
    """The check above can fail: a plan in words does load rich."""
    assert "rich.table" in modules("plan serve smollm2-135m --on 1xH100")


def test_the_clock_counts_the_child_alone() -> None:
    row = measure("version", "--version", 2, {"PATH": "/usr/bin:/bin"})
    assert 0 < row.cpu_s_min <= row.cpu_s_median < 60
    assert row.peak_memory_bytes > 1 << 20
    with pytest.raises(RuntimeError, match="ended with 2"):
        run_once([sys.executable, "-m", "meshwright.cli.main", "plan", "serve", "no-such-model"], {})


def counted(name: str, layout: str) -> tuple[Placement, Train]:
    profile = engines.profile("meshwright")
    work = Train(seq=4096, global_batch=64)
    return place(read_model(name), parse_layout(layout), profile), work


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama-3.1-8b", "tp=2,pp=2,dp=2,zero=1"),
        ("mixtral-8x7b", "tp=2,dp=4,ep=4,zero=3"),
        ("llama-3.1-8b", "pp=2,dp=2,schedule=interleaved,virtual=2"),
    ],
)
def test_counted_lists_are_the_entries(name: str, layout: str) -> None:
    """The short cut of the search adds up what the full ledger lists."""
    placement, work = counted(name, layout)
    long: dict[str, list[int]] = {}
    for e in training_entries(placement, work):
        row = long.setdefault(e.rank_class, [0, 0, 0])
        for index, value in enumerate((e.payload_bytes, e.wire_bytes, e.flops)):
            row[index] += (value or 0) * e.count
    short = {
        rank_class.name: [
            sum(getattr(op, what) * op.repeats * times for ops, times in lists for op in ops if op.op != "mark")
            for what in ("payload", "wire", "flops")
        ]
        for rank_class, lists in training_ops(placement, work)
    }
    assert short == long


def test_equal_layers_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """126 equal layers are one kind of layer for the cost and for the activations."""
    from meshwright.plan import products, train_activations

    calls: dict[str, int] = {"kind": 0, "layer": 0}
    kind_of, layer_bytes = products.kind_of, train_activations.layer_bytes

    def count_kind(*a: object) -> object:
        calls["kind"] += 1
        return kind_of(*a)  # type: ignore[arg-type]

    def count_layer(*a: object) -> object:
        calls["layer"] += 1
        return layer_bytes(*a)  # type: ignore[arg-type]

    monkeypatch.setattr(products, "kind_of", count_kind)
    monkeypatch.setattr(train_activations, "layer_bytes", count_layer)
    placement, work = counted("llama-3.1-405b", "tp=8,pp=2,dp=2,zero=1")
    cluster = parse_cluster("4x8xH100-SXM@ib-400g")
    stage_ranks(placement, cluster)
    assert calls["kind"] == 1
    training.train_memory(placement.spec, placement.layout, cluster, work)
    assert calls["layer"] == placement.layout.pp
    assert set(step_tallies(placement, cluster, work)) == {c.name for c in placement.classes}
    assert bubble(placement.layout, microbatches(placement.layout, work)) == pytest.approx(1 / 33)


def test_results_name_commit_machine_and_date(tmp_path: Path) -> None:
    out = tmp_path / "speed.json"
    code = "import bench.speed as s; s.COMMANDS = {'v': '--version'}; s.main()"
    subprocess.run([sys.executable, "-c", code, "--runs", "1", "--json", str(out)], check=True, timeout=120)
    result = json.loads(out.read_text())
    assert {"date", "commit", "machine", "rows"} <= set(result)
    assert result["rows"][0]["command"] == "meshwright --version"
