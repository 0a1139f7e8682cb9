"""A rank that serves: it does the passes it is told and decides nothing, so no collective ever depends on its clock.

The rank that samples (last stage, place 0 of tp) answers each pass with the chosen tokens; the others stay silent.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from meshwright.ledger.schema import Ledger
from meshwright.runtime.checkpoint import TORCH_DTYPES, load
from meshwright.runtime.job import Sampling, own_device
from meshwright.runtime.mesh import build_mesh, build_pools
from meshwright.runtime.models.decoder import Decoder
from meshwright.runtime.record import Recorder
from meshwright.runtime.sampling import Choice, choose_rows
from meshwright.runtime.scope import scope
from meshwright.runtime.serve.cache import PagedCache, Planned
from meshwright.runtime.serve.handoff import Planner, PointToPoint, Receiver, Sender, Transport
from meshwright.runtime.serve.job import ServeJob
from meshwright.runtime.serve.link import Link
from meshwright.runtime.serve.stage import StageRunner


class Worker:
    """One rank with its weights, its cache and its end of the hand-over, where there is one."""

    def __init__(self, rank: int, job: ServeJob) -> None:
        self.rank = rank
        device = own_device(job.device, rank)
        dtype = TORCH_DTYPES[job.dtype]
        first = job.placement.layout.world
        decodes = rank >= first
        placement = job.decode if decodes and job.decode is not None else job.placement
        weights = load(job.model, placement, placement.coordinate(rank - first * decodes), dtype, device)
        if job.decode is None:
            self.mesh = build_mesh(placement, rank, device)
        else:
            self.mesh = build_pools((job.placement, job.decode), rank, device)[1]
        self.decoder = Decoder(self.mesh, weights, job.model.settings, dtype)
        self.cache: PagedCache = self.decoder.cache(*(job.decode_cache if decodes else job.cache))
        self.stage = StageRunner(self.mesh, self.decoder, self.cache, placement.layout.pp)
        self.source = self.decoder.last and self.mesh.group("tp").index == self.mesh.group("cp").index == 0
        self.link = Link(
            job.control.host, job.control.port, job.control.secret, {"rank": rank, "epoch": job.control.epoch}
        )
        self.sender: Sender | None = None
        self.receiver: Receiver | None = None
        if job.decode is not None:
            planner, transport = Planner(job.placement, job.decode), self._transport(job)
            if decodes:
                self.receiver = Receiver(rank, planner, self.cache, transport, self._arrived)
            else:
                self.sender = Sender(rank, planner, self.cache, transport)

    def _transport(self, job: ServeJob) -> Transport:
        """What carries keys and values."""
        if job.kv_transport == "torch":
            return PointToPoint()
        from meshwright.runtime.serve.nixl import Nixl

        assert self.mesh.store is not None
        return Nixl(self.rank, dist.get_world_size(), self.mesh.store)

    def _arrived(self, transfer: int) -> None:
        self.link.send({"arrived": transfer})

    def serve(self) -> None:
        """Do what the engine says until it says stop, or is gone."""
        while (message := self.link.receive()) is not None and message["op"] != "stop":
            match message["op"]:
                case "pass":
                    self._run(message)
                case "idle":
                    with scope(phase="decode", step=message["n"]):
                        self.stage.idle()
                case "expect":
                    assert self.receiver is not None
                    self.receiver.expect(*message["transfer"])
                case "place":
                    assert self.receiver is not None
                    self.receiver.place(message["transfer"], message["table"])
                case "forget":
                    assert self.receiver is not None
                    self.receiver.forget(message["transfer"])
        self.stage.drain()
        self.link.close()

    def _run(self, message: dict[str, Any]) -> None:
        """One pass; the rank that samples answers."""
        batch = self.cache.planned([Planned(*row) for row in message["rows"]])
        after = self.sender.after(message["kv"]) if self.sender is not None else None
        with scope(phase=batch.phase, step=message["n"]):
            logits = self.stage.run(batch, after)
        for block in self.decoder.sparse:
            block.log.loads.clear()
        if self.source:
            choices = [_choice(row) for row in message["choose"]]
            chosen = [] if logits is None else choose_rows(logits, choices)
            self.link.send({"n": message["n"], "chosen": chosen})


def _choice(row: Sequence[Any]) -> Choice:
    temperature, top_k, top_p, seed, place, logprobs, bias = row
    return Choice(Sampling(temperature, top_k, top_p, seed), place, logprobs, tuple((int(t), b) for t, b in bias))


def work(rank: int, job: ServeJob) -> Ledger | None:
    """Body of a rank: passes until it is told to stop or the engine is gone; what it recorded, if it was told to."""
    worker = Worker(rank, job)
    recorder = Recorder(rank=rank) if job.record else None
    with recorder or nullcontext(), torch.inference_mode():
        worker.serve()
    return recorder.ledger() if recorder is not None else None
