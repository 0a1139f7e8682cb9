"""A rank that serves: it does the passes it is told and decides nothing, so no collective ever depends on its clock.

The rank that samples (last stage, place 0 of tp) answers each pass with the chosen tokens; the others stay silent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshwright.runtime.checkpoint import TORCH_DTYPES, load
from meshwright.runtime.job import Sampling, own_device
from meshwright.runtime.mesh import Mesh, build_mesh
from meshwright.runtime.models.decoder import Decoder
from meshwright.runtime.sampling import Choice, Chosen, choose_rows
from meshwright.runtime.scope import scope
from meshwright.runtime.serve.cache import PagedCache, Planned
from meshwright.runtime.serve.job import ServeJob
from meshwright.runtime.serve.link import Link
from meshwright.runtime.serve.stage import StageRunner


class Worker:
    """One rank with its weights and its cache."""

    def __init__(self, rank: int, job: ServeJob) -> None:
        device = own_device(job.device, rank)
        dtype = TORCH_DTYPES[job.dtype]
        weights = load(job.model, job.placement, job.placement.coordinate(rank), dtype, device)
        self.mesh: Mesh = build_mesh(job.placement, rank, device)
        self.decoder = Decoder(self.mesh, weights, job.model.settings, dtype)
        self.cache: PagedCache = self.decoder.cache(job.blocks, job.block_size)
        self.stage = StageRunner(self.mesh, self.decoder, self.cache, job.depth)
        self.source = self.decoder.last and self.mesh.group("tp").index == self.mesh.group("cp").index == 0

    def run(self, message: dict[str, Any]) -> list[Chosen] | None:
        """One pass; what was chosen, on the rank that samples."""
        batch = self.cache.planned([Planned(*row) for row in message["rows"]])
        with scope(phase=batch.phase, step=message["n"]):
            logits = self.stage.run(batch)
        for block in self.decoder.sparse:
            block.log.loads.clear()
        if not self.source:
            return None
        if logits is None:
            return []
        return choose_rows(logits, [_choice(c) for c in message["choose"]])

    def idle(self, number: int) -> None:
        """A pass in which only other replicas have tokens."""
        with scope(phase="decode", step=number):
            self.stage.idle()


def _choice(row: Sequence[Any]) -> Choice:
    temperature, top_k, top_p, seed, place, logprobs, bias = row
    return Choice(Sampling(temperature, top_k, top_p, seed), place, logprobs, tuple((int(t), b) for t, b in bias))


def work(rank: int, job: ServeJob) -> int:
    """Body of a rank: passes until it is told to stop or the scheduler is gone; how many it did."""
    worker = Worker(rank, job)
    link = Link(job.host, job.port, job.secret, {"rank": rank, "epoch": job.epoch})
    passes = 0
    with torch.inference_mode():
        while (message := link.receive()) is not None and message["op"] != "stop":
            if message["op"] == "idle":
                worker.idle(message["n"])
            else:
                chosen = worker.run(message)
                if chosen is not None:
                    link.send({"n": message["n"], "chosen": chosen})
            passes += 1
    worker.stage.drain()
    link.close()
    return passes
