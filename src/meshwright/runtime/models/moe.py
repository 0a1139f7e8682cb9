"""Mixture of experts: a router chooses K of E experts for every token, whose results are summed by weight.

::

    scores_TE = f(x W[D, E])                weights_TK, ids_TK = best K (of the best groups, with a bias for the choice)
    x ──dispatch by ids──> rows of this rank's experts ──gate, up, down──> ──combine──> y_TKD
    out = sum_k weights y  (+ shared experts, which every token visits)

How tokens reach their experts is told in ``parallel.expert``. Where tokens of several data ranks meet, each rank of tp
sends one slice of them and the results are gathered over tp; else the sum over tp completes the tokens. Weights are
applied once, in fp32 or wider, when the results are back.

Legend: T tokens, D model width, E experts, K experts a token visits, R rows of this rank's experts, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.errors import InputError
from meshwright.moves.expert import dealt, slice_of
from meshwright.runtime.differentiable import gated
from meshwright.runtime.linear import linear
from meshwright.runtime.loads import ExpertLog, Load
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.models.moe_settings import ClampedGate, MoeSettings, Routing
from meshwright.runtime.models.parts import ACTIVATIONS, LayerWeights, Linear, Step
from meshwright.runtime.models.settings import Settings
from meshwright.runtime.parallel.expert import AllToAll, LocalDispatch, dispatcher
from meshwright.runtime.parallel.tensor import Edges
from meshwright.runtime.scope import where
from meshwright.specs.model import Moe


@dataclass(frozen=True, slots=True)
class Router:
    """Experts of every token and their weights.

    Attributes:
        gate: one logit an expert. correction: added to the scores for the choice only (DeepSeek-V3), or None.
        how: from logits to weights. choices: K.
    """

    gate: Linear
    correction: Tensor | None
    how: Routing
    choices: int

    def __call__(self, x_TD: Tensor, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights and experts, both ``(T, K)``; with ``given`` experts only the weights are computed.

        Logits and scores are fp32, or wider where the model is: a rounded score chooses another expert.
        """
        return self.weighed(self.scores(x_TD), given)

    def scores(self, x_TD: Tensor) -> Tensor:
        """Scores ``(T, E)``, or the logits where the softmax is over the chosen experts."""
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        bias = self.gate.bias.to(wide) if self.gate.bias is not None else None
        multiply = linear if torch.is_grad_enabled() else F.linear
        logits_TE = multiply(x_TD.to(wide), self.gate.weight.to(wide), bias)
        if self.how.score == "chosen":
            return logits_TE
        return logits_TE.sigmoid() if self.how.score == "sigmoid" else logits_TE.softmax(-1)

    def weighed(self, scores_TE: Tensor, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights and experts of every token, from its scores."""
        how = self.how
        ids_TK = self.choose(scores_TE) if given is None else given
        weights_TK = scores_TE.gather(1, ids_TK)
        if how.score == "chosen":
            weights_TK = weights_TK.softmax(-1)
        if how.renormalise:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        return weights_TK * how.scale, ids_TK

    def choose(self, scores_TE: Tensor) -> Tensor:
        """The best K experts of every token, of its best groups where experts lie in groups."""
        by_TE = scores_TE if self.correction is None else scores_TE + self.correction.to(scores_TE.dtype)
        if self.how.groups > 1:
            by_TE = self._in_best_groups(by_TE)
        return by_TE.topk(self.choices, dim=-1).indices

    def _in_best_groups(self, by_TE: Tensor) -> Tensor:
        """Experts outside the best groups cannot be chosen."""
        how = self.how
        by_TGN = by_TE.view(by_TE.shape[0], how.groups, by_TE.shape[1] // how.groups)
        best_TG = by_TGN.topk(how.group_best, dim=-1).values.sum(-1)
        kept = torch.zeros_like(best_TG, dtype=torch.bool)
        kept.scatter_(1, best_TG.topk(how.kept_groups, dim=-1).indices, True)
        return by_TGN.masked_fill(~kept[..., None], float("-inf")).flatten(1)


@dataclass(frozen=True, slots=True)
class GatedExpert:
    """One expert with three matrices, this rank's columns: a partial sum over the ranks that share it."""

    gate: Linear
    up: Linear
    down: Linear
    act: Callable[[Tensor], Tensor]

    def __call__(self, x_RD: Tensor) -> Tensor:
        """Its rows through it."""
        return self.down(gated(self.act, self.gate(x_RD), self.up(x_RD)))


@dataclass(frozen=True, slots=True)
class ClampedExpert:
    """One expert of GPT-OSS: matrices stored input first, columns of gate and up alternating, with biases.

    Attributes:
        down_bias: None where another rank that shares the expert adds it.
    """

    gate_up: Tensor
    gate_up_bias: Tensor
    down: Tensor
    down_bias: Tensor | None
    gate: ClampedGate

    def __call__(self, x_RD: Tensor) -> Tensor:
        """Its rows through it."""
        both = linear(x_RD, self.gate_up.t(), self.gate_up_bias)
        gate, up = both[:, ::2].clamp(max=self.gate.limit), both[:, 1::2].clamp(-self.gate.limit, self.gate.limit)
        return linear(gate * torch.sigmoid(self.gate.alpha * gate) * (up + 1), self.down.t(), self.down_bias)


@dataclass(frozen=True, slots=True)
class SharedExperts:
    """What every token visits: a gated block, this rank's columns; ``scale``: one logit a token (Qwen2-MoE)."""

    block: GatedExpert
    scale: Linear | None

    def __call__(self, x_TD: Tensor) -> Tensor:
        """A partial sum over tp."""
        y_TD = self.block(x_TD)
        return y_TD if self.scale is None else torch.sigmoid(self.scale(x_TD)) * y_TD


Expert = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class MixtureOfExperts:
    """The feed-forward block of a sparse layer.

    Attributes:
        experts: those held here, in order; ``first`` is the number of the first.
        sp: the sequence is sharded between the blocks. log: what it did.
    """

    layer: int
    edges: Edges
    router: Router
    experts: tuple[Expert, ...]
    shared: SharedExperts | None
    ways: LocalDispatch | AllToAll
    width: int
    first: int
    sp: bool
    log: ExpertLog = field(default_factory=ExpertLog)

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        """Run it on the tokens of a pass."""
        if self.ways.slices > 1:
            return self._by_slices(x_TD, step)
        x_TD = self.edges.enter(x_TD, "experts input")
        y_TD = self.routed(x_TD, step, 0, x_TD.shape[0])
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        return self.edges.leave(y_TD, "experts output")

    def _by_slices(self, x_TD: Tensor, step: Step) -> Tensor:
        """Each rank of tp sends its slice of the tokens; the results are gathered, unless they stay sharded (sp)."""
        tp, whole = self.edges.tp, self.edges.tokens
        low, high = slice_of(whole, tp.size, tp.index)
        mine_tD = x_TD[: high - low] if self.sp else self.edges.cut(x_TD, low, high, "experts input")
        y_tD = self.routed(mine_tD, step, low, whole)
        y_tD = F.pad(y_tD, (0, 0, 0, -(-whole // tp.size) - y_tD.shape[0]))
        shared = None
        if self.shared is not None:
            shared = self.shared(self.edges.enter(x_TD, "shared experts input"))
            shared = self.edges.leave(shared, "shared experts output")
        if not self.sp:
            y_tD = self.edges.join(y_tD, whole, "experts output")
        return y_tD if shared is None else y_tD + shared

    def routed(self, x_TD: Tensor, step: Step, first: int, whole: int) -> Tensor:
        """What the chosen experts make of the rows from ``first`` on, of a ``whole`` pass; without a token: 0."""
        real, given = step.batch.real, None
        if self.ways.given is not None:
            given = self.ways.given.ids(x_TD.shape[0], self.router.choices, self.ways.experts, first, x_TD.device)
        elif real is not None:
            rows = real[first : first + x_TD.shape[0]].nonzero().flatten()
            y_TD = torch.zeros_like(x_TD)
            y_TD[rows] = self._of_tokens(x_TD[rows], None, step, whole)
            return y_TD
        return self._of_tokens(x_TD, given, step, whole)

    def _of_tokens(self, x_TD: Tensor, given: Tensor | None, step: Step, whole: int) -> Tensor:
        weights_TK, ids_TK = self.router(x_TD, given)
        if self.log.keep:
            self._keep(ids_TK, step)
        y_TKD = self.visit(x_TD, ids_TK, whole)
        return weighted(y_TKD, weights_TK).to(x_TD.dtype)

    def visit(self, x_TD: Tensor, ids_TK: Tensor, whole: int) -> Tensor:
        """Tokens to their experts and back, ``(T, K, D)``, not weighted yet."""
        rows_RD, ticket = self.ways.dispatch(x_TD, ids_TK, whole)
        counts, at = ticket.moved.rows, where()
        self.log.loads.append(Load(self.layer, at.phase, at.step, at.microbatch, self.first, counts))
        return self.ways.combine(through(self.experts, rows_RD, counts), ticket)

    def idle(self, like: Tensor) -> None:
        """A pass without tokens: only what other data ranks send here is worked on."""
        if isinstance(self.ways, AllToAll):
            x_TD = like.new_empty((0, self.width))
            ids_TK = torch.empty((0, self.router.choices), dtype=torch.int64, device=like.device)
            self.visit(x_TD, ids_TK, 0)

    def _keep(self, ids_TK: Tensor, step: Step) -> None:
        batch = step.batch
        sequences = [s for s, n in zip(batch.sequences, batch.lengths, strict=True) for _ in range(n)]
        for s, position, ids in zip(sequences, batch.positions_T.tolist(), ids_TK.tolist(), strict=True):
            self.log.chosen[s, position] = ids


def weighted(y_TKD: Tensor, weights_TK: Tensor) -> Tensor:
    """Results of the K experts summed by weight, in the type of the weights."""
    return (y_TKD.to(weights_TK.dtype) * weights_TK[..., None]).sum(1)


def through(experts: Sequence[Expert], rows_RD: Tensor, counts: Sequence[int]) -> Tensor:
    """Rows sorted by expert through their experts, one after the other.

    An expert without rows is left out, but for training, where its gradient is zero rather than none.
    """
    rows, empty = zip(experts, rows_RD.split(list(counts)), strict=True), torch.is_grad_enabled()
    pieces = [expert(x) for expert, x in rows if x.shape[0] or empty]
    return torch.cat(pieces) if pieces else rows_RD


def mixture(w: LayerWeights, m: Moe, mesh: Mesh, settings: Settings, edges: Edges) -> MixtureOfExperts:
    """Build it from the weights of a layer.

    Raises:
        InputError: experts stored in a form that the runtime does not multiply.
    """
    how = settings.moe
    if how is None:
        raise InputError(f"layer {w.layer}: no routing is known for its experts; the runtime cannot run this model")
    correction = w.plain.get("router", [])
    router = Router(w.linear("router", "router"), correction[0] if correction else None, how.routing, m.topk)
    grid, at = mesh.placement.cuts.grid, mesh.placement.place(mesh.coordinate)
    act = ACTIVATIONS[settings.activation]
    experts = _experts(w, how, act, adds=at.etp == 0)
    shared = None
    if m.shared_intermediate:
        gate, up, down = (w.linear("shared_expert", op) for op in ("gate", "up", "down"))
        scaled = ("shared_expert", "shared_gate") in w.tensors
        scale = w.linear("shared_expert", "shared_gate") if scaled else None
        shared = SharedExperts(GatedExpert(gate, up, _once(down, at.tp == 0), act), scale)
    first = dealt(m.experts, grid.ep)[at.ep][0]
    layout = mesh.placement.layout
    ways, sp = dispatcher(mesh, m.experts), layout.sp and layout.tp > 1
    return MixtureOfExperts(w.layer, edges, router, experts, shared, ways, mesh.placement.spec.hidden, first, sp)


def _once(down: Linear, adds: bool) -> Linear:
    """A row-parallel product whose bias only one of the ranks adds that sum it."""
    return down if adds else Linear(down.weight)


def _experts(w: LayerWeights, how: MoeSettings, act: Callable[[Tensor], Tensor], *, adds: bool) -> tuple[Expert, ...]:
    """The experts held, stored one by one or all in one tensor."""
    if w.experts:
        mats = [w.experts[op]["weight"] for op in ("gate", "up", "down")]
        return tuple(
            GatedExpert(Linear(gate), Linear(up), Linear(down), act) for gate, up, down in zip(*mats, strict=True)
        )
    both, down = (w.tensors.get(("expert", op), {}) for op in ("gate_up", "down"))
    if how.gate is None or not {"weight", "bias"} <= both.keys() & down.keys():
        raise InputError(f"layer {w.layer}: experts in one tensor are multiplied for GPT-OSS only")
    rows = zip(both["weight"], both["bias"], down["weight"], down["bias"], strict=True)
    return tuple(ClampedExpert(a, b, c, d if adds else None, how.gate) for a, b, c, d in rows)
