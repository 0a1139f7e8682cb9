"""Passes of one rank's stage of the pipeline: hidden states in, own layers, hidden states or logits out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.collectives import recv, send
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.models.decoder import Decoder
from meshwright.runtime.scope import scope
from meshwright.runtime.serve.cache import Batch, PagedCache


class StageRunner:
    """Runs passes on this rank's stage; sends do not wait, so that stages overlap."""

    def __init__(self, mesh: Mesh, decoder: Decoder, cache: PagedCache, in_flight: int) -> None:
        self.mesh, self.decoder, self.cache = mesh, decoder, cache
        self.group = mesh.group("pp")
        self.in_flight = in_flight
        self.sending: deque[tuple[dist.Work | None, Tensor]] = deque()

    def run(self, batch: Batch, after: Callable[[int], None] | None = None) -> Tensor | None:
        """One pass; logits of the sampled rows on the last stage's tp place 0, if there are any.

        ``after`` is told each layer that is done.
        """
        d, stage = self.decoder, self.group.index
        d.edges.begin(batch.tokens)
        if d.first:
            x_TD = d.embed(batch.ids_T)
        else:
            shape = (d.edges.held(batch.tokens), self.mesh.placement.spec.hidden)
            with scope(name="hidden states"):
                x_TD = recv(shape, d.dtype, self.mesh.device, self.group, stage - 1)
        x_TD = d.stage(x_TD, batch, self.cache, after)
        if not d.last:
            self.drain(self.in_flight - 1)
            with scope(name="hidden states"):
                self.sending.append((send(x_TD, self.group, stage + 1), x_TD))
            return None
        return d.logits(d.ends(x_TD, batch)) if batch.sampled.numel() else None

    def idle(self) -> Tensor | None:
        """A pass without tokens: nothing is handed on and nothing sampled."""
        self.decoder.idle()
        return None

    def drain(self, keep: int = 0) -> None:
        """Wait for the oldest sends until at most ``keep`` are under way."""
        while len(self.sending) > keep:
            work, _ = self.sending.popleft()
            if work is not None:
                work.wait()
