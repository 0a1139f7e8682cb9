"""What every rank holds: the result types that serving and training memory share."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.ledger.schema import Holding
from meshwright.specs.placement import Coordinate


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of the ranks of one class, in bytes.

    Attributes:
        rank: first rank of the class.
        ranks: how many ranks are alike.
        rank_class: its name in the placement.
        coordinate: of the first rank.
        capacity_bytes: what the device (serving: the engine's share of it) offers.
        holdings: every term in detail; the sums below follow from them by ``term``.
    """

    rank: int
    ranks: int
    rank_class: str
    coordinate: Coordinate
    capacity_bytes: int
    holdings: tuple[Holding, ...]

    def term(self, name: str) -> int:
        """Bytes of one term: weights, kv_cache, gradients, optimizer, activations, runtime."""
        return sum(h.bytes for h in self.holdings if h.term == name)

    @property
    def weights_bytes(self) -> int:
        """Parameters as held."""
        return self.term("weights")

    @property
    def kv_cache_bytes(self) -> int:
        """Cache that the workload needs (serving)."""
        return self.term("kv_cache")

    @property
    def gradients_bytes(self) -> int:
        """Gradients and gradient buffers (training)."""
        return self.term("gradients")

    @property
    def optimizer_bytes(self) -> int:
        """Moments and master weights (training)."""
        return self.term("optimizer")

    @property
    def activations_bytes(self) -> int:
        """Activation peak."""
        return self.term("activations")

    @property
    def runtime_bytes(self) -> int:
        """Contexts, communicators, CUDA graphs, workspaces."""
        return self.term("runtime")

    @property
    def total_bytes(self) -> int:
        """Sum of all terms."""
        return sum(h.bytes for h in self.holdings)

    @property
    def fits(self) -> bool:
        """Whether the sum is within the capacity."""
        return self.total_bytes <= self.capacity_bytes


@dataclass(frozen=True, slots=True)
class ServeMemory:
    """Serving memory of a layout.

    Attributes:
        ranks: one row a rank class, worst first is not implied; see ``worst``.
        kv_cache_tokens: tokens that one replica's pool holds, as the engine would print it (minimum over ranks).
        kv_pool_bytes: pool of the worst rank.
        kv_bytes_per_token: bytes of one more token on the worst rank (growth at the asked context).
        max_requests: requests of the workload's context that fit, over all replicas.
        longest_context: longest single request that one replica's pool holds, capped at the model's maximum.
        needed_bytes: pool that the asked concurrency needs on the worst rank.
        notes: sentences (cache replicated, minimum decided by stage 3, ...).
    """

    ranks: tuple[RankMemory, ...]
    kv_cache_tokens: int
    kv_pool_bytes: int
    kv_bytes_per_token: float
    max_requests: int
    longest_context: int
    needed_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> RankMemory:
        """The rank with the least left."""
        return min(self.ranks, key=lambda r: (r.capacity_bytes - r.total_bytes, r.rank))

    @property
    def fits(self) -> bool:
        """Whether every rank holds its share of the workload."""
        return all(r.fits for r in self.ranks)


@dataclass(frozen=True, slots=True)
class TrainMemory:
    """Training memory of a layout: one row a rank class, at the peak of a step."""

    ranks: tuple[RankMemory, ...]
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> RankMemory:
        """The rank with the least left."""
        return min(self.ranks, key=lambda r: (r.capacity_bytes - r.total_bytes, r.rank))

    @property
    def fits(self) -> bool:
        """Whether every rank stays within its device."""
        return all(r.fits for r in self.ranks)
