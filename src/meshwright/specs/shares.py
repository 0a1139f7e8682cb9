"""How units are dealt over the ranks of an axis: pure arithmetic, no model names and no engines.

A share is a half-open run of units. Every tensor dimension that carries the same label is cut by the same share,
so weights, biases, scales and zeros of one projection always agree on where a rank begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from meshwright.errors import IllegalLayoutError
from meshwright.specs.layout import Layout
from meshwright.specs.profile import EngineProfile


@dataclass(frozen=True, slots=True)
class Share:
    """Units ``start`` to ``stop`` of ``units``; ``padding`` empty units are stored behind them."""

    start: int
    stop: int
    units: int
    padding: int = 0

    @property
    def size(self) -> int:
        """Units held, padding included."""
        return self.stop - self.start + self.padding

    def interval(self, units: int) -> tuple[int, int]:
        """The same share of a dimension of ``units`` units.

        Exact where one number divides the other; otherwise rounded outward, because a scale that belongs to two
        ranks must be held by both.
        """
        return self.start * units // self.units, -(-self.stop * units // self.units)


WHOLE = Share(0, 1, 1)


@lru_cache(maxsize=1 << 14)
def part(units: int, parts: int, index: int) -> tuple[int, int]:
    """Run ``index`` of ``units`` dealt into ``parts`` runs; the first ``units % parts`` get one more."""
    small, more = divmod(units, parts)
    start = index * small + min(index, more)
    return start, start + small + (1 if index < more else 0)


@lru_cache(maxsize=1 << 14)
def plain(units: int, degree: int, index: int, uneven: bool) -> Share:
    """Share of units that belong to no group. Without ``uneven`` the dimension is cut into exact ``degree`` ths."""
    if not uneven:
        return Share(index, index + 1, degree)
    return Share(*part(units, degree, index), units)


@lru_cache(maxsize=1 << 14)
def groups_of(groups: int, degree: int, index: int) -> Share:
    """Share of groups (KV heads, state-space groups): dealt while there are enough, else held by several ranks."""
    if groups >= degree:
        return Share(*part(groups, degree, index), groups)
    if degree % groups:
        raise IllegalLayoutError(
            f"{groups} KV heads or groups can neither be divided nor replicated over {degree} tensor parallel ranks; "
            f"choose a divisor or a multiple of {groups}"
        )
    group = index // (degree // groups)
    return Share(group, group + 1, groups)


@lru_cache(maxsize=1 << 14)
def members_of(heads: int, groups: int, degree: int, index: int) -> Share:
    """Share of heads that belong to groups: whole groups, or a piece of one where the group is replicated."""
    if heads % groups:
        return Share(*part(heads, degree, index), heads)
    per_group = heads // groups
    held = groups_of(groups, degree, index)
    if groups >= degree:
        return Share(held.start * per_group, held.stop * per_group, heads)
    copies = degree // groups
    start, stop = part(per_group, copies, index % copies)
    base = held.start * per_group
    return Share(base + start, base + stop, heads)


@lru_cache(maxsize=1 << 14)
def padded(units: int, degree: int, index: int, multiple: int) -> Share:
    """Share of rows that are padded to a multiple before an even cut (vocabulary); the last ranks hold the padding."""
    each = padded_units(units, multiple) // degree
    start, stop = min(units, index * each), min(units, (index + 1) * each)
    return Share(start, stop, units, each - (stop - start))


def padded_units(units: int, multiple: int) -> int:
    """``units`` rounded up to a multiple."""
    return -(-units // multiple) * multiple


@dataclass(frozen=True, slots=True)
class ExpertGrid:
    """How the ranks of one stage are laid over experts.

    Ranks are counted in the profile's order without the pipeline axis. Fastest varies the place inside one expert
    (``etp``), then the expert group (``ep``), then the replica of the whole set.
    """

    etp: int
    ep: int
    replicas: int

    def place(self, flat: int) -> tuple[int, int, int]:
        """``(etp index, ep index, replica)`` of rank ``flat`` of the stage."""
        return flat % self.etp, flat // self.etp % self.ep, flat // (self.etp * self.ep)


def degree_of(layout: Layout, axes: tuple[str, ...]) -> int:
    """Product of the degrees of some axes."""
    return prod(getattr(layout, axis) for axis in axes)


def expert_tp(layout: Layout, profile: EngineProfile) -> int:
    """Ranks over which one expert is cut.

    As the layout says; else, without expert parallelism, the axes the profile names; else tp when the expert group
    fits beside it (training: experts over dp x cp), and 1 when the group needs tp itself (serving: over tp x dp).
    """
    if layout.etp is not None:
        return layout.etp
    if layout.ep == 1:
        return degree_of(layout, profile.moe_tp_over)
    if profile.ep_fills:
        return max(1, layout.tp * layout.cp * layout.dp // layout.ep)
    if profile.ep_whole or (layout.dp * layout.cp) % layout.ep:
        return 1
    return layout.tp


def expert_grid(layout: Layout, profile: EngineProfile) -> ExpertGrid:
    """Grid of a layout.

    Raises:
        IllegalLayoutError: ep x etp does not divide the ranks of a stage.
    """
    ranks = layout.dp * layout.cp * layout.tp
    etp = expert_tp(layout, profile)
    if ranks % (etp * layout.ep):
        raise IllegalLayoutError(
            f"expert parallel {layout.ep} x expert tensor parallel {etp} does not divide the {ranks} ranks of a stage "
            f"(tp {layout.tp} x cp {layout.cp} x dp {layout.dp}); choose ep as a divisor of {ranks}"
        )
    return ExpertGrid(etp, layout.ep, ranks // (etp * layout.ep))
