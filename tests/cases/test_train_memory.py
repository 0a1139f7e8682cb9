"""``train-memory`` reports that are about no single engine; most have their tests beside the engine they are about.

DeepSpeed, accelerate, transformers and torchtitan: ``tests/engines/<engine>/test_cases.py``.
"""

from __future__ import annotations

import pytest

from tests.engines.torchtitan.commands import LLAMA_8B, t
from tests.judge.asked import check

#: Reports that no command, configuration or plan decides.
NOT_DECIDED = {
    "C090": "frozen weights beside adapters that FSDP did not shard: adapters are not modelled",
}

#: Reports that are answered wrongly: what is said, and what was seen.
WRONG = {
    "C088": (
        "7B with FSDP and offload on four A100-40: 13 GiB a rank at batch 3, said to fit; it ran out of memory "
        "and fitted at batch 2 (length, versions and evaluation not stated; others ran out at the same)"
    ),
}

ALPACA = (
    "torchrun --nproc_per_node={} train.py --bf16 True --per_device_train_batch_size {} --max_seq_length 512 "
    "--fsdp 'full_shard auto_wrap{}'"
)


def test_what_is_right_about_offload_on_forty_gigabytes() -> None:
    """Eight devices with offload and four with batch 2 fit, and offload is what four need at batch 4."""
    for devices, batch, offload, starts in ((8, 2, " offload", True), (4, 2, " offload", True), (4, 4, "", False)):
        verdict = check(ALPACA.format(devices, batch, offload), f"{devices}xA100-40G", model="llama-7b")
        assert verdict.starts is starts, (devices, batch, verdict.verdict)


def test_the_wrong_answer_is_still_wrong() -> None:
    """When this fails, take the case out of the table."""
    assert check(ALPACA.format(4, 3, " offload"), "4xA100-40G", model="llama-7b").starts


def test_c184_what_sixteen_times_the_devices_save() -> None:
    """Model states of 8 B parameters over 128 ranks instead of 8: 15.4 GiB less were measured."""
    small = LLAMA_8B + t(local_batch_size=2)
    large = small.replace("8 -m", "8 --nnodes 16 --node-rank 0 --master-addr a -m")
    totals = []
    for command, nodes in ((small, 1), (large, 16)):
        verdict = check(command, f"{nodes}x8xH100-96G@ib-400g")
        assert verdict.plan.chosen is not None
        totals.append(verdict.plan.chosen.memory.worst.total_bytes / 2**30)
    assert totals[0] - totals[1] == pytest.approx(15.4, rel=0.1)
