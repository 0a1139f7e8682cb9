"""``hang`` reports whose lines tell: what the ranks print, and what the doctor must say and must not say."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.doctor.findings import Finding
from meshwright.doctor.hang import diagnose
from meshwright.doctor.readers.walk import read_incident
from tests.doctor.log_maker import dump_signal_line, pyspy_lines, watchdog_lines

#: Reports that no line or dump of the job decides.
NOT_DECIDED = {
    "C073": "one engine driven by hand under data parallelism: nothing is left but a stack in step()",
    "C104": "a version with a fault: the doctor compares ranks, it keeps no list of releases",
    "C263": "heads that sequence parallelism does not divide: check refuses it before the start",
    "C272": "device order between nodes: nothing that ranks record",
    "C273": "a service of the switch that is down: no rank prints it",
    "C274": "an overlay network: no lines given",
    "C275": "no cause is known in the thread",
    "C276": "a default that changed: nothing that ranks record",
    "C279": "ranks that never met: rendezvous, no collective",
    "C298": "nccl-tests without PyTorch: one process prints nothing",
}


def _init(rank: int, world: int) -> str:
    return (
        f"node1:{70 + rank}:{70 + rank} [{rank}] NCCL INFO comm 0x55{rank:04x} rank {rank} nranks {world} "
        f"cudaDev {rank} nvmlDev {rank} busId {rank}000 commId 0x1f2e3d4c5b6a7988 - Init COMPLETE"
    )


def _doctor(folder: Path, files: dict[str, list[str]]) -> list[Finding]:
    for name, lines in files.items():
        (folder / name).write_text("\n".join(lines) + "\n")
    return diagnose(read_incident(folder))


def _gave_up(rank: int, seq: int, op: str, numel: int, enqueued: int | None = None) -> list[str]:
    return watchdog_lines("2.6", rank, seq, op, numel, seq if enqueued is None else enqueued)


@pytest.mark.parametrize(("name", "seq", "world"), [("C101", 1, 2), ("C107", 5, 8)])
def test_the_first_tiny_collective_hangs_on_all(tmp_path: Path, name: str, seq: int, world: int) -> None:
    """Communication was never up: P2P, IOMMU, interface; nobody is blamed, the model is not looked at."""
    lines = [_init(rank, world) for rank in range(world)]
    lines += [line for rank in range(world) for line in _gave_up(rank, seq, "ALLREDUCE", 1)]
    first = _doctor(tmp_path, {"out.log": lines})[0]
    assert (first.kind, first.guilty_ranks, first.waiting_ranks) == ("all_arrived", (), tuple(range(world)))
    assert any("never have been up" in line for line in first.evidence)
    assert any("NCCL_P2P_LEVEL" in line for line in first.advice)
    assert any("NCCL_SOCKET_IFNAME" in line for line in first.advice)


def test_c101_without_the_size_of_the_job_it_stays_open(tmp_path: Path) -> None:
    lines = [line for rank in range(2) for line in _gave_up(rank, 1, "ALLREDUCE", 1)]
    first = _doctor(tmp_path, {"out.log": lines})[0]
    assert (first.kind, first.guilty_ranks, first.confidence) == ("unknown", (), "low")
    assert first.waiting_ranks == (0, 1)
    assert any("how many ranks" in line for line in first.unknown)


def test_c105_one_rank_captures_graphs_while_the_others_wait(tmp_path: Path) -> None:
    """Control flow that differs: the rank that waits in no collective is named, with where it is."""
    lines = [line for rank in range(7) for line in _gave_up(rank, 20518, "ALLREDUCE", 106_496)]
    lines.append(dump_signal_line(7, 0, 20_517, 20_517))
    frames = [("capture", "vllm/worker/model_runner.py", 880), ("capture_model", "vllm/worker/model_runner.py", 640)]
    first = _doctor(tmp_path, {"out.log": lines, "stack_7.txt": pyspy_lines(4711, frames, "python w.py --rank 7")})[0]
    assert (first.kind, first.guilty_ranks, first.seq) == ("host_stuck", (7,), 20518)
    assert first.call_site == "model_runner.py:880"
    assert any("compilation" in line for line in first.advice)


def test_c106_ranks_that_are_a_call_apart_are_not_blamed_with_certainty(tmp_path: Path) -> None:
    """Rank 0 waits in 5730, rank 3 still in 5729, which it did enter: no rank is silent."""
    lines = _gave_up(0, 5730, "BROADCAST", 3_612_672) + _gave_up(3, 5729, "BROADCAST", 3_612_672)
    findings = _doctor(tmp_path, {"out.log": lines})
    assert not [f for f in findings if f.confidence == "high"]
    assert not [f for f in findings if f.kind in {"wrong_op", "wrong_shape", "host_stuck"}]


def test_three_operations_at_one_place_have_no_majority(tmp_path: Path) -> None:
    """ms-swift#10183: the disagreement is plain, who is right is not."""
    calls = (("BROADCAST", 64), ("BROADCAST", 24_000_000), ("ALLREDUCE", 1))
    lines = [line for rank, (op, numel) in enumerate(calls) for line in _gave_up(rank, 914, op, numel)]
    first = _doctor(tmp_path, {"out.log": lines})[0]
    assert first.kind in {"wrong_op", "wrong_shape"}
    assert first.confidence == "low"
    assert first.seq == 914


def test_a_stray_collective_on_a_few(tmp_path: Path) -> None:
    """pytorch#140563: 1025 elements on most ranks, 262144 on a few."""
    lines = [line for rank in range(8) for line in _gave_up(rank, 77, "ALLREDUCE", 262_144 if rank in (2, 5) else 1025)]
    first = _doctor(tmp_path, {"out.log": lines})[0]
    assert (first.kind, first.guilty_ranks) == ("wrong_shape", (2, 5))
    assert first.alternative is not None
    assert "skipped or extra" in first.alternative


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "dead_rank"),
        ("[rank1]: KeyError: 'labels'", "dead_rank"),
    ],
)
def test_a_death_is_the_cause_and_what_others_print_louder_is_not(tmp_path: Path, line: str, kind: str) -> None:
    """sglang#20287 and the like: the launcher sits on rank 0's pipe while another rank is dead."""
    lines = [
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "/srv/train.py", line 12, in step',
        line,
        "[rank0]: RuntimeError: Connection closed by peer",
        *(text for rank in (0, 2, 3) for text in _gave_up(rank, 30, "ALLREDUCE", 1)),
    ]
    first = _doctor(tmp_path, {"out.log": lines})[0]
    assert (first.kind, first.guilty_ranks, first.call_site) == (kind, (1,), "train.py:12")
    assert any("closed by peer" in text for text in first.consequences)
