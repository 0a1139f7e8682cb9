"""Outside oracle: how many collectives torch's own tensor parallelism and FSDP2 issue, on a world that is faked.

The program runs in a process of its own, because a process group is global state.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from meshwright.engines.own.profile import OWN
from meshwright.plan.training_step import training_entries
from meshwright.specs.build import decoder
from meshwright.specs.layout import parse_layout
from meshwright.specs.placement import place
from meshwright.specs.workload import Train

PROGRAM = """
import json, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(8, 24, bias=False), nn.Linear(24, 8, bias=False)
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)
    def forward(self, x):
        x = x + self.o(self.qkv(x).sin())
        return x + self.down(self.up(x).relu())

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(3))
    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * 1.0

def counts(model):
    out = []
    with CommDebugMode() as mode:
        loss = model(torch.zeros(1, 4, dtype=torch.long)).sum()
    out.append({str(k): v for k, v in mode.get_comm_counts().items()})
    with CommDebugMode() as mode:
        loss.backward()
    return [*out, {str(k): v for k, v in mode.get_comm_counts().items()}]

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
mesh = init_device_mesh("cpu", (2,))
tp = Model()
plan = {"qkv": ColwiseParallel(), "o": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
for layer in tp.layers:
    parallelize_module(layer, mesh, plan)
result = {"tp": counts(tp)}
for name, reshard in (("reshard", True), ("keep", False)):
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    result[name] = counts(model)
print(json.dumps(result))
"""

SPEC = decoder(hidden=256, layers=3, heads=8, vocab=512, ffn=512)
NAMES = {"_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter"}


@pytest.fixture(scope="module")
def torch_counts() -> dict[str, Any]:
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-800:]
    counts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return counts


def predicted(layout: str, phase: str, *, inside: bool = False) -> dict[str, int]:
    entries = training_entries(place(SPEC, parse_layout(layout), OWN), Train(seq=32, global_batch=2))
    rows = [e for e in entries if e.group in {"tp", "dp"} and e.phase == phase and (e.layer is not None or not inside)]
    assert len({e.rank_class for e in rows}) <= 1
    return dict(Counter(e.op for e in rows for _ in range(e.count // (2 if layout == "tp=2" else 1))))


@pytest.mark.parametrize(
    ("name", "layout"), [("reshard", "dp=2,zero=3"), ("keep", "dp=2,zero=3,reshard_after_forward=off")]
)
def test_fsdp_gathers_and_scatters_as_torch_does(name: str, layout: str, torch_counts: dict[str, Any]) -> None:
    """Layers and root: gathered before each forward, again before the backward unless kept, each reduced once."""
    for phase, found in zip(("forward", "backward"), torch_counts[name], strict=True):
        assert predicted(layout, phase) == {NAMES[op.split(".")[1]]: n for op, n in found.items()}


def test_tensor_parallel_sums_as_torch_does(torch_counts: dict[str, Any]) -> None:
    """Two sums a layer forward and two backward, with q, k and v read as one block."""
    for phase, found in zip(("forward", "backward"), torch_counts["tp"], strict=True):
        assert predicted("tp=2", phase, inside=True) == {op.split(".")[1]: n for op, n in found.items()}
