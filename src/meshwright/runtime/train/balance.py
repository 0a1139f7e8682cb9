"""What keeps experts evenly busy: a loss on the router, or a bias that moves against the load.

Both count over all tokens of the layer's micro-batch (loss) or step (bias) wherever they are, so that neither knows of
the layout. The loss of a layer is ``c E sum_e f_e P_e`` with f_e the share of choices that went to expert e and P_e its
mean probability (Fedus et al., arXiv:2101.03961, section 2.2, with f over K choices). The bias is that of DeepSeek-V3
(arXiv:2412.19437, section 2.1.2): added to scores for the choice only, without a gradient, and after every step moved
by a fixed rate towards experts that had too few.

Legend: T tokens of this rank, D model width, E experts, K experts a token visits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.runtime.collectives import all_reduce
from meshwright.runtime.mesh import Group, Mesh
from meshwright.runtime.models.moe import Router
from meshwright.runtime.scope import scope


@dataclass(frozen=True, slots=True)
class Balance:
    """How experts are kept busy.

    Attributes:
        loss: c, weight of the balancing loss; 0: none. rate: by which biases of routers that have one move a step.
    """

    loss: float = 0.0
    rate: float = 0.0


class _WithLoss(torch.autograd.Function):
    """Hands a tensor on; in the backward a loss beside it gets the gradient ``scale``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, loss
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor, None]:
        return dx, torch.full_like(ctx.like, ctx.scale), None


@dataclass(slots=True)
class Counts:
    """What a router counts.

    Attributes:
        rows_E: since the last step, rows that this rank's tokens sent to every expert.
        loss: since then, this rank's part of the balancing losses.
        scale: of the loss of the pass that runs. again: it runs for the backward, and was counted before.
    """

    rows_E: Tensor
    loss: Tensor
    scale: float = 1.0
    again: bool = False

    def take(self, other: Counts) -> None:
        """Go on where another stopped."""
        self.rows_E, self.loss = other.rows_E, other.loss

    def clear(self) -> None:
        """A new step begins."""
        self.rows_E.zero_()
        self.loss.zero_()


@dataclass(frozen=True, slots=True)
class TrainRouter(Router):
    """A router that counts, and adds the balancing loss.

    Attributes:
        balance: how. counts: what it counted.
        data: groups over which the tokens of a micro-batch are spread (dp+cp, and tp where its ranks route slices).
        copies: ranks of tp that route the same tokens; each adds its part of the loss, as gradients are summed.
    """

    balance: Balance
    counts: Counts
    data: tuple[Group, ...]
    copies: int

    def __call__(self, x_TD: Tensor, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As ``Router``."""
        scores_TE = self.scores(x_TD)
        weights_TK, ids_TK = self.weighed(scores_TE, given)
        rows_E = torch.bincount(ids_TK.flatten(), minlength=scores_TE.shape[1])
        if not self.counts.again:
            self.counts.rows_E += rows_E
        if not self.balance.loss:
            return weights_TK, ids_TK
        loss, scale = self._loss(scores_TE, rows_E), self.counts.scale / self.copies
        if not self.counts.again:
            self.counts.loss += loss.detach() * scale
        added: Tensor = _WithLoss.apply(weights_TK, loss, scale)  # type: ignore[no-untyped-call]
        return added, ids_TK

    def _loss(self, scores_TE: Tensor, rows_E: Tensor) -> Tensor:
        """This rank's part of the balancing loss: shares of choices over all ranks, probabilities of own tokens."""
        counted = rows_E.to(scores_TE.dtype)
        with scope(name="expert shares"):
            for group in self.data:
                counted = all_reduce(counted, group)
        choices = counted.sum()
        mean_E = _probabilities(scores_TE, self.how.score).sum(0) * (self.choices / choices)
        return self.balance.loss * scores_TE.shape[1] * (counted / choices * mean_E).sum()


def _probabilities(scores_TE: Tensor, score: str) -> Tensor:
    """How likely each expert is, as a share of one."""
    if score == "softmax":
        return scores_TE
    return scores_TE.softmax(-1) if score == "chosen" else scores_TE / scores_TE.sum(-1, keepdim=True)


def train_router(router: Router, balance: Balance, mesh: Mesh, *, sliced: bool) -> TrainRouter:
    """The router of a layer, for training; ``sliced``: every rank of tp routes a slice of the tokens."""
    tp, experts, device = mesh.group("tp"), router.gate.weight.shape[0], mesh.device
    counts = Counts(
        torch.zeros(experts, dtype=torch.int64, device=device), torch.zeros((), dtype=torch.float64, device=device)
    )
    data = (mesh.group("dp+cp"), tp) if sliced else (mesh.group("dp+cp"),)
    copies = 1 if sliced else tp.size
    return TrainRouter(router.gate, router.correction, router.how, router.choices, balance, counts, data, copies)


def move_bias(correction_E: Tensor, counts: Counts, data: tuple[Group, ...], rate: float) -> None:
    """Move the bias of a router after a step: up for experts with fewer rows than the mean, down for the others."""
    rows_E = counts.rows_E.clone()
    with scope(name="expert loads"):
        for group in data:
            rows_E = all_reduce(rows_E, group)
    loads_E = rows_E.to(torch.float64)
    correction_E += (rate * torch.sign(loads_E.mean() - loads_E)).to(correction_E.dtype)
