"""Published traces, copied under names that say nothing: what is right about each must come out."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from meshwright.doctor.incident import Incident
from meshwright.doctor.judge import judge
from meshwright.doctor.readers.walk import read_incident
from meshwright.doctor.slow_view import view_of
from meshwright.report.doctor import as_json
from tests.shared import shared_dir


def shuffled(folder: Path, paths: list[Path]) -> Path:
    names = [f"{random.Random(len(str(p))).getrandbits(64):x}{n}".translate(DIGITS) for n, p in enumerate(paths)]
    random.Random(7).shuffle(names)
    for path, name in zip(paths, names, strict=True):
        (folder / name).write_bytes(path.read_bytes())
    return folder


#: No digit stays in a name, so that no rank can be read from it.
DIGITS = str.maketrans("0123456789", "ghijklmnop")


def incidents() -> Path:
    return shared_dir("incidents")


def test_last_to_arrive_of_dlrm(tmp_path: Path) -> None:
    incident = read_incident(shuffled(tmp_path, sorted((incidents() / "kineto_dlrm8").glob("*.gz"))))
    findings = judge(incident)
    times = as_json(findings, incident)["times"]
    assert [c["op"] for c in times["collectives"]] == ["all_to_all"] * 4 + [
        "all_reduce",
        "all_to_all",
        *["all_reduce"] * 2,
    ]
    assert [c["last"] for c in times["collectives"]] == [7, 7, 7, 7, 7, 5, 5, 4]
    first = times["collectives"][0]
    longest = sorted(first["wait_s"], key=lambda r: -first["wait_s"][r])[:2]
    assert longest == ["1", "3"]
    assert first["wait_s"]["1"] == pytest.approx(7.6e-3, rel=0.01)
    assert all(abs(t.offset_ns) < 10_000 for t in incident.tracks)
    share = next(line for f in findings for line in f.evidence if "waiting for the last" in line)
    assert int(share.split("%")[0].split()[-1]) > 80


def test_slow_worker_of_bytedance(tmp_path: Path) -> None:
    folder = incidents() / "straggler_bytedance"
    truth = json.loads((folder / "result-AR.json").read_text())
    worst = json.loads((folder / "mw-AR.json").read_text())
    finding = judge(read_incident(shuffled(tmp_path, sorted(folder.iterdir()))))[0]
    numbers = dict(finding.numbers)
    assert (finding.kind, finding.guilty_ranks, finding.confidence) == ("compute_straggler", (0,), "high")
    assert numbers["slowdown"] == pytest.approx(truth["blocking_slowdown"], rel=0.03)
    assert numbers["slowdown"] == pytest.approx(truth["blocking_slowdown"], rel=1e-4)
    assert numbers["share_of_worst_workers"] == pytest.approx(worst["Mw"], abs=0.01)


@pytest.mark.parametrize("source", ["kineto_hta", "kineto_tracelens"])
def test_every_trace_is_read_and_says_what_it_lacks(tmp_path: Path, source: str) -> None:
    for number, path in enumerate(sorted((incidents() / source).glob("*.gz"))):
        incident = read_incident(shuffled(_folder(tmp_path, number), [path]))
        findings = judge(incident)
        assert incident.tracks
        assert incident.tracks[0].steps
        assert not any("inside meshwright" in line for line in incident.lacks)
        assert findings[0].headline
        for word in _must_say(path.name, incident):
            assert any(word in line for line in findings[0].unknown), (path.name, word, findings[0].unknown)


def _must_say(name: str, incident: Incident) -> list[str]:
    """What is known to be missing in published traces."""
    words = []
    if "sglang" in name or "vllm" in name:
        words += ["graph replays", "no collective was recorded"]
    if "cpu_only" in name:
        words += ["no device activity", "299 of 300 ranks"]
    if "sampled_rank" in name:
        words.append("127 of 128 ranks")
    if "df_index" in name:
        words.append("2020 of 2020 collectives carry no arguments")
    if "mi250" in name:
        words.append("names no rank")
    if "ns_resolution" in name:
        words.append("no collective was recorded, though 35 were issued")
    return words


def _folder(base: Path, number: int) -> Path:
    folder = base / f"f{number}"
    folder.mkdir()
    return folder


def test_copies_of_one_rank_are_told_apart(tmp_path: Path) -> None:
    path = next((incidents() / "kineto_hta").glob("trace_filter_sampled_rank-1*"))
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(path.read_bytes())
    incident = read_incident(tmp_path)
    assert [t.rank for t in incident.tracks] == [0, 1, 2]
    assert all("several traces say they are of rank 1" in t.lacks[-1] for t in incident.tracks)
    assert view_of(incident).matched.spread_ns == 0
