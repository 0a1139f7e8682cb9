"""Ledgers of our own recorder as evidence: the file of a rank, cut ones, groups, and the user's script beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.doctor.hang import diagnose
from meshwright.doctor.incident import COMPLETED, SCHEDULED, Incident
from meshwright.doctor.readers import flight_recorder, ledger, reader_for
from meshwright.doctor.source import in_loop_of
from meshwright.errors import InputError
from meshwright.ledger import store
from meshwright.ledger.schema import Entry, Ledger, Rank

from .fr_mistakes import source

SCRIPT = """import torch.distributed as dist
for step in range(5):
    dist.all_reduce(x)
    if rank == 1:
        dist.barrier()
dist.barrier()
"""


def _file(rank: int, calls: list[tuple[str, str, int]], group: str = "0-2", script: str = "/job/train.py") -> bytes:
    """Calls as (operation, state, line)."""
    own = Ledger(ranks=[Rank(rank, {}, f"rank{rank}", 1, "h", 0)], meta={"world": "3"})
    for number, (op, state, line) in enumerate(calls):
        own.entries.append(
            Entry(
                f"rank{rank}",
                op,
                stream=group,
                group=group,
                seq=number,
                shapes=((8,),),
                dtype="f32",
                enqueued_ns=1_000_000_000 + number,
                state=state,
                call_site=f"{script}:{line}",
                source="record",
            )
        )
    lines = [store.head_line(own), *store.row_lines("ranks", own.ranks), *store.row_lines("entries", own.entries)]
    return "".join(lines).encode()


def _incident(files: list[bytes]) -> Incident:
    found = Incident()
    ledger.read_many([source(f"{n}.jsonl", data) for n, data in enumerate(files)], found)
    return found


def _steps(count: int, last: str = "scheduled") -> list[tuple[str, str, int]]:
    return [("all_reduce", "completed", 3)] * (count - 1) + [("all_reduce", last, 3)]


def test_rows_become_columns() -> None:
    found = _incident([_file(r, _steps(3)) for r in range(3)])
    assert sorted(found.traces) == [0, 1, 2]
    assert list(found.traces[1].state) == [COMPLETED, COMPLETED, SCHEDULED]
    assert found.groups[found.traces[1].group[0]].members == (0, 1, 2)
    assert found.world == 3
    assert diagnose(found)[0].kind == "all_arrived"


def test_the_rank_that_never_came() -> None:
    found = _incident([_file(0, _steps(4)), _file(1, _steps(3, "completed")), _file(2, _steps(4))])
    first = diagnose(found)[0]
    assert (first.kind, first.guilty_ranks) == ("host_stuck", (1,))


@pytest.mark.parametrize(("line", "kind"), [(5, "extra_call"), (6, "uneven_inputs")])
def test_the_script_tells_a_branch_from_the_end_of_the_loop(tmp_path: Path, line: int, kind: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    odd = [*_steps(3, "completed"), ("barrier", "scheduled", line)]
    files = [_file(r, odd if r == 1 else _steps(4), script=str(script)) for r in range(3)]
    first = diagnose(_incident(files))[0]
    assert (first.kind, first.guilty_ranks, first.call_site) == (kind, (1,), f"train.py:{line}")


def test_loops_of_a_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert in_loop_of(str(script), 5, 3) is True
    assert in_loop_of(str(script), 6, 3) is False
    assert in_loop_of(str(script), 3, 6) is None
    assert in_loop_of(str(tmp_path / "gone.py"), 5, 3) is None
    broken = tmp_path / "broken.py"
    broken.write_text("for x in (")
    assert in_loop_of(str(broken), 1, 1) is None


def test_a_file_cut_by_the_death_of_its_process() -> None:
    whole = _file(0, _steps(4))
    found = _incident([whole[:-20], _file(1, _steps(4)), _file(2, _steps(4))])
    assert len(found.traces[0]) == 3
    assert any("broken lines" in lack for lack in found.lacks)


def test_a_prediction_is_no_evidence() -> None:
    own = Ledger(meta={"model": "x"})
    own.entries.append(Entry("stage0", "all_reduce", group="tp", source="predict"))
    data = "".join([store.head_line(own), *store.row_lines("entries", own.entries)]).encode()
    with pytest.raises(InputError, match="names no rank"):
        ledger.read(source("p.jsonl", data), Incident())


def test_recognised_by_its_first_line() -> None:
    data = _file(0, _steps(2))
    assert reader_for(data[:4096], "x") is ledger
    assert not flight_recorder.sniff(data[:4096], "trace_rank_0")


def test_names_of_groups() -> None:
    names = {"0-7": 8, "0-56:8": 8, "0,1,5": 3, "0-3 (2)": 4, "tp": 0, "0-99999999": 0, "3": 1}
    assert {n: len(ledger.ranks_of(n)) for n in names} == names
