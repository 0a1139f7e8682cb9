"""EngineProfile of this project's own runtime: it deals units unevenly and pads nothing."""

from __future__ import annotations

from meshwright.engines.own.rules import check
from meshwright.specs.profile import EngineProfile
from meshwright.specs.shares import part


def split_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of every stage: as even as can be, the first stages get one more."""
    bounds = (part(layers, stages, index) for index in range(stages))
    return tuple(stop - start for start, stop in bounds)


OWN = EngineProfile(
    engine="meshwright",
    version="0.1",
    serves=True,
    trains=True,
    rank_order=("pp", "dp", "cp", "tp"),
    split_layers=split_layers,
    check=check,
    uneven_tp=True,
    ep_over=("dp", "cp", "tp"),
    moe_tp_over=("tp",),
    constants={"wire_context_dealt": True, "wire_moe_sp_slices": False, "wire_router_dtype": "f32", "keeps_f32": True},
)

#: Profiles by the short version, newest first.
PROFILES: dict[str, EngineProfile] = {"0.1": OWN}
