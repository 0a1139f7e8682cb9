"""Which gradients ranks of tp must sum, because they hold the same parameter and saw different parts of its gradient.

Between the edges of a block a rank works with its own heads, columns or experts, so what it finds for a parameter that
all hold alike is a part: norms of query and key heads, the projections to a latent, routers, biases that one rank adds
for all, and key and value heads that several ranks hold. Outside the blocks every rank finds the whole gradient, unless
the sequence is dealt there (sp): then norms and biases behind a sum see some of the tokens. Gradients over data ranks
are another matter (``train.data_parallel``).
"""

from __future__ import annotations

from meshwright.runtime.checkpoint import own
from meshwright.specs.placement import Coordinate, Placement, Shard

#: Biases that are added behind the sum over tp.
BEHIND = {("attention", "o"), ("mlp", "down")}


def sums_of(placement: Placement, at: Coordinate) -> dict[str, str]:
    """Axis (``tp``, ``kv``, ``etp``) over which the gradient of a tensor is summed, for those where it must be."""
    out = {}
    for name, shard in own(placement, at):
        axis = axis_of(placement, shard)
        if axis is not None:
            out[name] = axis
    return out


def axis_of(placement: Placement, shard: Shard) -> str | None:
    """The axis of one tensor; None: its gradient is whole, or this rank alone has its rows."""
    layout, family = placement.layout, shard.family
    if layout.tp == 1:
        return None
    labels = {segment.label for dim in family.dims for segment in dim}
    if family.role == "expert":
        shared = placement.cuts.grid.etp > 1 and "expert_mlp" not in labels
        return "etp" if shared else None
    if shard.shape != family.shape:
        return "kv" if "kv_heads" in labels and _copies(placement, shard) else None
    outside = family.role == "norm" or (family.part == "bias" and (family.role, family.op) in BEHIND)
    return "tp" if layout.sp or not outside else None


def _copies(placement: Placement, shard: Shard) -> bool:
    """Whether several ranks of tp hold the same KV heads."""
    attention = placement.spec.layers[shard.layers[0]].attention
    return attention is not None and attention.kv_heads < placement.layout.tp


def idle(placement: Placement, at: Coordinate, shard: Shard) -> bool:
    """Whether a rank leaves a tensor to another that adds it for all: the bias behind a product whose partial sums
    meet later."""
    family = shard.family
    if family.op != "down" or family.part != "bias":
        return False
    place = placement.place(at)
    return {"expert": place.etp, "shared_expert": place.tp}.get(family.role, 0) > 0
