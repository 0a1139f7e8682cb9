"""Replicas that meet at experts walk their passes in step: one without tokens still joins every exchange.

Whether a micro-batch goes on changes what is sent, so it is decided alike on all ranks: from the prompts, which every
rank knows, where texts have a fixed length; else by a sum over dp of how many sequences are alive.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.moves.expert import replicas_meet
from meshwright.runtime.collectives import all_reduce
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.scope import scope
from meshwright.specs.shares import part


class Replicas:
    """Passes of the micro-batches of all replicas.

    Args:
        mesh: of this rank. lengths: tokens of every prompt. new_tokens: at most so many for each.
        wanted: micro-batches of a replica, at most. chunk: most prompt tokens of a sequence in a pass.
        ends: texts may end before ``new_tokens``.
    """

    def __init__(
        self, mesh: Mesh, lengths: Sequence[int], new_tokens: int, wanted: int, chunk: int | None, ends: bool
    ) -> None:
        dp, self.ends, self.device = mesh.group("dp"), ends, mesh.device
        self.dp = dp
        runs = [range(*part(len(lengths), dp.size, place)) for place in range(dp.size)]
        self.mine = runs[dp.index]
        self.in_step = replicas_meet(mesh.placement)
        most = max(map(len, runs)) if self.in_step else len(self.mine)
        self.count = max(1, min(wanted, most))
        self.passes = [0] * self.count
        for run in runs if self.in_step else ():
            for index in range(self.count):
                own = [lengths[i] for i in self.sequences(run, index)]
                if own:
                    pieces = -(-max(own) // chunk) if chunk else 1
                    self.passes[index] = max(self.passes[index], pieces + new_tokens - 1)

    def sequences(self, run: range, index: int) -> range:
        """Prompts of micro-batch ``index`` of a replica, whose prompts are ``run``."""
        low, high = part(len(run), self.count, index)
        return run[low:high]

    def goes_on(self, index: int, passed: int, alive: int) -> bool:
        """Whether micro-batch ``index`` has another pass, after ``passed`` of them; ``alive``: own sequences left."""
        if not self.in_step:
            return alive > 0
        if not self.ends:
            return passed < self.passes[index]
        with scope(name="sequences alive"):
            return bool(all_reduce(torch.tensor([alive], device=self.device), self.dp).item())
