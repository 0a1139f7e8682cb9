"""Published measurements of torchtitan as commands: what the command is understood as takes what was measured.

The benchmark is of December 2024 (llama3_h100_202412_torchtitan.md, H100 of 96 GB): its loss was one cross-entropy in
fp32 over all logits, where 0.3 goes through the sequence in pieces; so the pieces are taken out here. A micro-batch was
the local batch divided by the stages.
"""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from meshwright.engines.torchtitan import ENGINE
from meshwright.plan.train_engine import engine_preset
from meshwright.plan.train_memory import train_memory
from meshwright.specs.cluster import parse_cluster
from meshwright.specs.hf.read import read_model
from meshwright.specs.workload import Train
from tests.engines.torchtitan.commands import LLAMA_8B, LLAMA_405B, p, t

GIB = 1 << 30
FULL = " activation_checkpoint:full"
SMALL_16 = LLAMA_8B.replace("8 -m", "8 --nnodes 16 --node-rank 0 --master-addr a -m")
BIG = LLAMA_405B + " --compile.no_enable_async_tensor_parallel" + p(pipeline_parallel_degree=8)
CP8 = p(context_parallel_degree=8)

#: Case, command, nodes, measured GiB (eager where the table has it), layout.
MEASURED = [
    ("C183", LLAMA_8B + t(local_batch_size=2), 1, 82.4, "dp=8,zero=3,micro_batch=2"),
    ("C184", SMALL_16 + t(local_batch_size=2), 16, 67.0, "dp=128,zero=3,micro_batch=2"),
    ("C185", LLAMA_8B + t(seq_len=32768) + FULL, 1, 83.9, "dp=8,zero=3"),
    ("C187", LLAMA_8B + t(seq_len=131072) + p(context_parallel_degree=4) + FULL, 1, 84.0, "dp=2,cp=4,zero=3"),
    ("C188", LLAMA_8B + t(seq_len=262144) + CP8 + FULL, 1, 84.5, "cp=8,zero=3"),
    ("C190", BIG + p(pipeline_parallel_microbatch_size=4) + t(local_batch_size=32), 64, 82.5,
     "tp=8,pp=8,dp=8,sp=on,zero=3,micro_batch=4"),
    ("C192", BIG + t(local_batch_size=8, seq_len=32768), 64, 75.3,
     "tp=8,pp=8,dp=8,sp=on,zero=3"),
    ("C193", BIG + t(local_batch_size=8, seq_len=262144) + CP8, 64, 84.9,
     "tp=8,pp=8,cp=8,sp=on,zero=3"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "command", "nodes", "measured", "layout"), MEASURED, ids=[m[0] for m in MEASURED])
def test_memory_of_the_command(case: str, command: str, nodes: int, measured: float, layout: str) -> None:
    cluster = parse_cluster(f"{nodes}x8xH100-SXM@ib-400g")
    found = ENGINE.parse(shlex.split(command), {}, lambda name: None)
    assert found.model is not None
    spec = read_model(found.model, allow_online=False)
    found = ENGINE.complete(found, spec, cluster)
    assert str(found.layout) == layout
    assert isinstance(found.workload, Train)
    illegal = [r.code for r in ENGINE.profile().check(spec, found.layout, cluster, found.workload)]
    illegal += [r.code for r in found.findings]
    refused = found.workload.seq > spec.max_positions
    assert illegal == (["positions_below_sequence"] if refused else []), case
    options = {k: v for k, v in found.train_options.items() if k not in {"preset", "logit_bytes"}}
    spec = replace(spec, max_positions=0)
    memory = train_memory(spec, found.layout, cluster, found.workload, engine_preset("torchtitan", **options))
    assert memory.worst.total_bytes / GIB == pytest.approx(measured, rel=0.1)


def test_pieces_of_the_loss_take_less() -> None:
    """What 0.3 changes about the first case: logits of one eighth of the sequence at a time."""
    cluster = parse_cluster("1x8xH100-SXM")
    found = ENGINE.parse(shlex.split(MEASURED[0][1]), {}, lambda name: None)
    spec = read_model("llama-3.1-8b", allow_online=False)
    assert isinstance(found.workload, Train)
    sizes = []
    for options in ({}, {"logit_bytes": found.train_options["logit_bytes"]}):
        memory = train_memory(spec, found.layout, cluster, found.workload, engine_preset("torchtitan", **options))
        sizes.append(memory.worst.total_bytes)
    logits = 2 * 8192 * 128256
    assert sizes[0] - sizes[1] == pytest.approx(logits * (12 - 1.5), rel=0.01)
