"""How tokens reach their experts and come back: a ladder of dispatchers with two methods, the local one first.

::

    x_TD, experts of each token ──dispatch──> rows sorted by held expert ──experts──> rows ──combine──> y_TKD

``LocalDispatch``: every rank of tp has all tokens and takes the rows of its own experts; nothing travels, the sum over
tp completes the tokens. ``AllToAll``: tokens of several data ranks meet at the experts: counts first, then the rows
there and back. What is sent where is counted by ``moves.expert``.

Legend: T tokens, K experts a token visits, R rows that arrive, D model width, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.moves.expert import Exchange, dealt, exchange, kept, round_robin, slice_of
from meshwright.runtime.mesh import Group, Mesh
from meshwright.runtime.scope import scope


@dataclass(frozen=True, slots=True)
class Ticket:
    """What ``combine`` needs to know of its dispatch.

    Attributes:
        moved: the counts. tokens, choices: T and K.
        order_R: which of the T x K rows each sorted row is.
        arrived_R: where in what arrived the rows sorted by expert lie; None where nothing travelled.
    """

    moved: Exchange
    tokens: int
    choices: int
    order_R: Tensor
    arrived_R: Tensor | None = None


class Dispatcher(Protocol):
    """Tokens to the experts of this rank, and back."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, whole: int) -> tuple[Tensor, Ticket]:
        """Rows for the experts held here, expert by expert; ``whole``: tokens of which x_TD may be a slice."""
        ...

    def combine(self, y_RD: Tensor, ticket: Ticket) -> Tensor:
        """What the experts made of the rows, ``(T, K, D)`` by token; zero where another rank of tp has the expert."""
        ...


@dataclass(frozen=True, slots=True)
class EvenChoice:
    """A choice of experts that depends on nothing: number i of a pass goes to expert ``i % E``.

    For a dry-run, in which no router has numbers: all data ranks are taken to have equally many tokens, so that every
    rank can count what it would receive. ``prove.routing`` counts the same for the prediction.
    """

    def ids(self, tokens: int, choices: int, experts: int, first: int, device: torch.device) -> Tensor:
        """Experts of the tokens from ``first`` on, ``(T, K)``."""
        at = torch.arange(first * choices, (first + tokens) * choices, device=device)
        return (at % experts).view(tokens, choices)


@dataclass(slots=True)
class LocalDispatch:
    """Without a dispatch: rows of the experts held here, of all tokens.

    Attributes:
        experts: E. members, index: ranks of tp that share out the experts, and which of them this is.
        given: the choice of a dry-run.
    """

    experts: int
    members: int = 1
    index: int = 0
    given: EvenChoice | None = None
    slices: ClassVar[int] = 1

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, whole: int) -> tuple[Tensor, Ticket]:
        """Take the rows of the own experts."""
        tokens, choices = ids_TK.shape
        counts = own_counts(ids_TK, self.experts, self.given, 0)
        moved = kept(counts, self.members, self.index)
        start = sum(counts[: dealt(self.experts, self.members)[self.index][0]])
        order_R = ids_TK.flatten().argsort(stable=True)[start : start + sum(moved.rows)]
        return x_TD.index_select(0, order_R // choices), Ticket(moved, tokens, choices, order_R)

    def combine(self, y_RD: Tensor, ticket: Ticket) -> Tensor:
        """Rows back to their tokens; zero for the experts of other ranks."""
        y = y_RD.new_zeros((ticket.tokens * ticket.choices, y_RD.shape[1]))
        y[ticket.order_R] = y_RD
        return y.view(ticket.tokens, ticket.choices, y_RD.shape[1])


@dataclass(slots=True)
class AllToAll:
    """Rows travel to the ranks of their experts and back (Shazeer et al., arXiv:1701.06538, section 3.1, over ranks).

    Attributes:
        experts: E. group: the ranks that share them out.
        slices: into how many slices the tokens of a data rank are cut. places: the slice of every member.
        given: the choice of a dry-run.
    """

    experts: int
    group: Group
    slices: int
    places: tuple[int, ...]
    given: EvenChoice | None = None

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, whole: int) -> tuple[Tensor, Ticket]:
        """Exchange counts, send the rows sorted by expert, sort what arrives by expert."""
        tokens, choices = ids_TK.shape
        moved = self._exchanged(ids_TK, whole)
        order_R = ids_TK.flatten().argsort(stable=True)
        with scope(name="tokens dispatch"):
            arrived = self._send(x_TD.index_select(0, order_R // choices), moved.sent_rows, moved.received_rows)
        arrived_R = torch.tensor(moved.by_expert(), dtype=torch.int64, device=x_TD.device)
        return arrived.index_select(0, arrived_R), Ticket(moved, tokens, choices, order_R, arrived_R)

    def combine(self, y_RD: Tensor, ticket: Ticket) -> Tensor:
        """Undo the sorting, send back, and put every row to its token."""
        moved = ticket.moved
        back = torch.empty_like(y_RD)
        back[ticket.arrived_R] = y_RD
        with scope(name="tokens combine"):
            returned = self._send(back, moved.received_rows, moved.sent_rows)
        y = torch.empty_like(returned)
        y[ticket.order_R] = returned
        return y.view(ticket.tokens, ticket.choices, y_RD.shape[1])

    def _send(self, x_RD: Tensor, to: Sequence[int], frm: Sequence[int]) -> Tensor:
        out = x_RD.new_empty((sum(frm), x_RD.shape[1]))
        dist.all_to_all_single(out, x_RD.contiguous(), list(frm), list(to), group=self.group.pg)
        return out

    def _exchanged(self, ids_TK: Tensor, whole: int) -> Exchange:
        """How many rows every member sends for each expert held here."""
        index, size = self.group.index, self.group.size
        low = slice_of(whole, self.slices, self.places[index])[0]
        counts = own_counts(ids_TK, self.experts, self.given, low)
        held = [high - low for low, high in dealt(self.experts, size)]
        theirs = torch.empty(held[index] * size, dtype=torch.int64, device=ids_TK.device)
        with scope(name="expert counts"):
            sent = torch.tensor(counts, dtype=torch.int64, device=ids_TK.device)
            dist.all_to_all_single(theirs, sent, [held[index]] * size, held, group=self.group.pg)
        if self.given is not None:
            return exchange([self._even(place, whole, ids_TK.shape[1]) for place in self.places], index)
        return Exchange(index, counts, tuple(map(tuple, theirs.view(size, held[index]).tolist())))

    def _even(self, place: int, whole: int, choices: int) -> tuple[int, ...]:
        low, high = slice_of(whole, self.slices, place)
        return round_robin(low * choices, high * choices, self.experts)


def own_counts(ids_TK: Tensor, experts: int, given: EvenChoice | None, first: int) -> tuple[int, ...]:
    """Rows for every expert; ``first``: number of the first token within its data rank's pass."""
    if given is not None:
        tokens, choices = ids_TK.shape
        return round_robin(first * choices, (first + tokens) * choices, experts)
    return tuple(torch.bincount(ids_TK.flatten(), minlength=experts).tolist())


def dispatcher(mesh: Mesh, experts: int) -> LocalDispatch | AllToAll:
    """The lowest rung that a layout needs: the mesh has a group for experts where tokens travel to them."""
    placement, grid = mesh.placement, mesh.placement.cuts.grid
    if mesh.group("ep").size == 1:
        return LocalDispatch(experts, grid.ep, mesh.coordinate.ep)
    group, tp = mesh.group("ep"), placement.layout.tp
    slices = tp if grid.etp == 1 else 1
    places = tuple(placement.coordinate(rank).tp if slices > 1 else 0 for rank in group.ranks)
    return AllToAll(experts, group, slices, places)
