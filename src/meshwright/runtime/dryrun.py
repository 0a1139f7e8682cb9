"""One coordinate of any world on one process: the same model code, with no weights, no numbers and no other ranks.

Tensors lie on torch's ``meta`` device (shapes and types only), process groups are of torch's ``fake`` backend, which
moves nothing, and only those that hold the coordinate are made. ``Decoder`` and ``generate`` run as they are; the
recorder sees every collective, hand-off and matrix product as in a real run.

What a rank would receive does not exist, so whatever the program branches on is given: every sampled token is 0, and
where experts are chosen the choice is even (``parallel.expert.EvenChoice``). A mistake that changes only numbers cannot
be seen here.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from meshwright.ledger.schema import Ledger
from meshwright.runtime.models.settings import Settings
from meshwright.specs.placement import Placement
from meshwright.specs.shares import part

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch._C._distributed_c10d import Store

    from meshwright.runtime.models.decoder import Decoder

#: Ranks of the largest world in which a coordinate is run.
MAX_WORLD = 131_072
#: What a coordinate imports; torch's compiler is in it because shapes without data are computed by code of its.
MODULES = (
    "torch._dynamo",
    "torch.testing._internal.distributed.fake_pg",
    "meshwright.runtime.checkpoint",
    "meshwright.runtime.record",
)


@dataclass(frozen=True, slots=True)
class DryJob:
    """What one coordinate is told.

    Attributes:
        placement: of the model. rank: global rank of the coordinate. settings: numbers that no tensor holds.
        prompts: of all replicas, a multiple of dp. tokens: length of each.
        new_tokens, block_size, micro_batches, dtype: of the generation.
        mutation: name of a planted mistake.
    """

    placement: Placement
    rank: int
    settings: Settings
    prompts: int
    tokens: int
    new_tokens: int
    dtype: str = "bf16"
    block_size: int = 16
    micro_batches: int | None = None
    mutation: str | None = None


@dataclass(slots=True)
class DryRank:
    """What it brings back.

    Attributes:
        ledger: entries of source ``dry-run``, and the bytes that weights and KV cache would take.
        seconds: from its start to its end. peak_bytes: most memory that its process ever had.
    """

    rank: int
    ledger: Ledger
    seconds: float
    peak_bytes: int


def run_dry(_: int, job: DryJob) -> DryRank:
    """Run one coordinate, in a process that has no process group yet."""
    from meshwright.runtime.checkpoint import TORCH_DTYPES
    from meshwright.runtime.generate import generate
    from meshwright.runtime.mesh import build_mesh
    from meshwright.runtime.models.decoder import Decoder
    from meshwright.runtime.mutate import mutation
    from meshwright.runtime.parallel.expert import EvenChoice
    from meshwright.runtime.record import Recorder

    began = time.perf_counter()
    placement, at = job.placement, job.placement.coordinate(job.rank)
    mistake = mutation(job.mutation, placement, job.new_tokens) if job.mutation else None
    if mistake and mistake.place:
        placement = mistake.place(placement, at)
    weights = empty_weights(placement, job.rank, TORCH_DTYPES[job.dtype])
    if mistake and mistake.weights:
        mistake.weights(placement, at, weights)
    if placement.layout.world > 1:
        meet_nobody(job.rank, placement.layout.world)
    mesh = build_mesh(placement, job.rank, "meta", own_groups=True)
    if mesh.store is not None:
        mesh = replace(mesh, store=given_tokens(micro_batch_sizes(job)))
    decoder = Decoder(mesh, weights, job.settings, TORCH_DTYPES[job.dtype])
    give_samples(decoder)
    for block in decoder.sparse:
        block.ways.given = EvenChoice()
    recorder = Recorder(job.placement, job.rank, matmuls=True, source="dry-run")
    with mistake.at_work(mesh, decoder) if mistake else nullcontext(), recorder:
        out = generate(
            mesh,
            decoder,
            ((0,) * job.tokens,) * job.prompts,
            job.new_tokens,
            micro_batches=job.micro_batches,
            block_size=job.block_size,
        )
    recorder.hold("weights", None, sum(w.numel() * w.element_size() for w in weights.values()))
    recorder.hold("kv_cache", None, out.kv_cache_bytes)
    return DryRank(job.rank, recorder.ledger(), time.perf_counter() - began, peak_bytes())


def empty_weights(placement: Placement, rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors without data for everything that a rank would load."""
    import torch

    from meshwright.runtime.checkpoint import element_type, own

    return {
        name: torch.empty(shard.shape, dtype=element_type(shard.family, placement.spec, dtype), device="meta")
        for name, shard in own(placement, placement.coordinate(rank))
    }


def meet_nobody(rank: int, world: int) -> None:
    """Start torch.distributed on its ``fake`` backend: a world in which nobody answers and nothing waits."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


def micro_batch_sizes(job: DryJob) -> tuple[int, ...]:
    """Sequences of every micro-batch of a replica."""
    layout = job.placement.layout
    sequences = job.prompts // layout.dp
    groups = min(job.micro_batches or layout.pp, sequences)
    return tuple(high - low for low, high in (part(sequences, groups, index) for index in range(groups)))


def given_tokens(sizes: Sequence[int]) -> Store:
    """A store in which the sampled tokens of every pass lie already: 0 for every sequence of the micro-batch."""
    from torch._C._distributed_c10d import Store

    class Given(Store):
        def set(self, key: str, value: str) -> None:
            """Nobody reads it."""

        def get(self, key: str) -> bytes:
            """``tokens/replica/micro-batch/pass``."""
            return b",".join([b"0"] * sizes[int(key.split("/")[-2])])

        def add(self, key: str, value: int) -> int:
            return value

        def wait(self, keys: list[str], *_: object) -> None:
            """Nobody is awaited."""

        def delete_key(self, key: str) -> bool:
            return True

    return Given()


def give_samples(decoder: Decoder) -> None:
    """Let the sampler see one logit a row, a number, in place of logits without data; all else runs as it is."""
    import torch

    compute = decoder.logits

    def logits(x_SD: Tensor) -> Tensor | None:
        made = compute(x_SD)
        return None if made is None else torch.zeros(made.shape[0], 1)

    decoder.logits = logits  # type: ignore[method-assign]


def peak_bytes() -> int:
    """Most memory that this process ever had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
