"""What torchtitan prints about memory, also from logs that are cut or noisy."""

from __future__ import annotations

from meshwright.engines.torchtitan import ENGINE

HEAD = "[titan] 2026-11-29 20:00:00,000 - root - INFO - "
LOG = f"""\
[rank0]:{HEAD}torchtitan version: 0.3.0 (0.0.0 means __version__ is not defined).
[rank0]:{HEAD}Building device mesh with parallelism: pp=1, dp_replicate=2, dp_shard=2, cp=1, tp=2, ep=1
[rank0]:{HEAD}CUDA capacity: NVIDIA H100 with 79.19GiB memory
[rank0]:{HEAD}\x1b[34mModel llama3 8B \x1b[31msize: 8,030,261,248 total parameters\x1b[39m
[rank0]:{HEAD}CUDA memory usage for model: 3.77GiB(4.76%)
[rank0]:{HEAD}Trainer is initialized with local batch size 2, global batch size 8, gradient accumulation steps 1
[rank0]:{HEAD}\x1b[31mstep:  1  \x1b[32mloss: 12.25  \x1b[36mmemory: 30.10GiB(38.00%)  tps: 900
[rank3]:{HEAD}step:  1  loss: 12.25  memory: 29.50GiB(37.00%)  tps: 900
[rank0]:{HEAD}step:  2  loss: 12.00  memory: 33.25GiB(42.00%)  tps: 950
"""

GIB = 1 << 30


def test_memory_and_degrees() -> None:
    log = ENGINE.read_log(LOG.splitlines())
    assert log is not None
    assert (log.version, log.model) == ("0.3", "llama3 8B")
    assert str(log.layout) == "tp=2,dp=4,sp=on,zero=3,micro_batch=2,replicas=2"
    held = {(h.rank_class, h.term, h.tensor): h.bytes for h in log.holdings}
    assert held == {
        ("rank 0", "weights", "reserved after loading"): round(3.77 * GIB),
        ("rank 0", "total", "max reserved"): round(33.25 * GIB),
        ("rank 3", "total", "max reserved"): round(29.5 * GIB),
    }
    assert "reserved" in log.misleading[0][1]


def test_cut_and_noise() -> None:
    for stop in range(0, len(LOG), 5):
        ENGINE.read_log(LOG[:stop].splitlines())
    noisy = [chr(n) * 50 for n in range(1, 200)] + ["\x00\ufffd" * 1000, "step: 1 memory: " + "9" * 1_000_000]
    log = ENGINE.read_log([*noisy, *LOG.splitlines(), *noisy])
    assert log is not None
    assert len(log.holdings) == 3
    assert any("cut" in note for note in log.notes)


def test_what_is_missing_is_said() -> None:
    log = ENGINE.read_log(LOG.splitlines()[:3])
    assert log is not None
    assert log.holdings == ()
    assert any("log_freq" in note for note in log.notes)
    assert ENGINE.read_log(["[Rank 0] (after 2 iterations) memory (MB) | allocated: 12288.00"]) is None
