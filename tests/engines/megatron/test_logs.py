"""What Megatron prints about memory, also from logs that are cut or noisy."""

from __future__ import annotations

from meshwright.engines.megatron import ENGINE

LOG = """\
using world size: 16, data-parallel size: 2, context-parallel size: 1, hierarchical context-parallel sizes: None, \
tensor-model-parallel size: 4, pipeline-model-parallel size: 2
using torch.bfloat16 for parameters ...
------------------------ arguments ------------------------
  context_parallel_size ........................... 1
  expert_model_parallel_size ...................... 1
  expert_tensor_parallel_size ..................... 4
  micro_batch_size ................................ 2
  num_layers ...................................... 32
  pipeline_model_parallel_size .................... 2
  recompute_granularity ........................... None
  sequence_parallel ............................... True
  tensor_model_parallel_size ...................... 4
  use_distributed_optimizer ....................... True
-------------------- end of arguments ---------------------
 > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 1073741824
 > number of parameters on (tensor, gtp_weight_remat, pipeline) model parallel rank (3, 0, 1): 1074000000
Theoretical memory footprints: weight and optimizer=12000.00 MB, activation=3000.50 MB, total=15000.50 MB
 [2026-11-29 20:00:00] iteration        2/      20 | consumed samples:           64 | elapsed time: 900.0
[Rank 0] (after 2 iterations) memory (MB) | allocated: 12288.00 | max allocated: 20480.50 | reserved: 21000.00 | \
max reserved: 22000.00
[Rank 8] (after 2 iterations) memory (MB) | allocated: 12000.25 | max allocated: 19000.00 | reserved: 21000.00 | \
max reserved: 22000.00
"""

MIB = 1 << 20


def test_memory_parameters_and_degrees() -> None:
    log = ENGINE.read_log(LOG.splitlines())
    assert log is not None
    assert str(log.layout) == "tp=4,pp=2,dp=2,sp=on,zero=1,micro_batch=2"
    held = {(h.rank_class, h.term, h.tensor): h.bytes for h in log.holdings}
    assert held["rank 0", "weights", "parameters"] == 2 * 1073741824
    assert held["rank 11", "weights", "parameters"] == 2 * 1074000000
    assert held["rank 0", "total", "max allocated"] == round(20480.5 * MIB)
    assert held["rank 8", "allocator", "allocated"] == round(12000.25 * MIB)
    assert all(h.source == "measured" for h in log.holdings)
    ((line, meaning),) = log.misleading
    assert "12000.00 MB" in line
    assert "formulas" in meaning


def test_cut_and_noise() -> None:
    text = LOG.splitlines()
    for stop in range(0, len(LOG), 7):
        ENGINE.read_log(LOG[:stop].splitlines())
    noisy = [chr(n) * 50 for n in range(1, 200)] + ["\x00\ufffd" * 1000, "[Rank 0] memory (MB) | " + "a" * 1_000_000]
    log = ENGINE.read_log([*noisy, *text, *noisy])
    assert log is not None
    assert len(log.holdings) == 10
    assert any("cut" in note for note in log.notes)


def test_what_is_missing_is_said() -> None:
    log = ENGINE.read_log(LOG.splitlines()[:3])
    assert log is not None
    assert log.holdings == ()
    assert any("[Rank N]" in note for note in log.notes)


def test_logs_of_others_are_not_read() -> None:
    assert ENGINE.read_log(["INFO 11-29 Loading weights took 3.2 GiB", "step:  1  memory: 30.10GiB(38.00%)"]) is None
    assert ENGINE.read_log([]) is None
