"""Profile of accelerate 1.15.

Source: ``parallelism_config.py`` _get_mesh (dp_replicate, dp_shard, cp, sp, tp, the last varying fastest).
"""

from __future__ import annotations

from meshwright.engines.accelerate.rules import check
from meshwright.engines.own.profile import split_layers
from meshwright.specs.profile import EngineProfile

ACCELERATE = EngineProfile(
    engine="accelerate",
    version="1.15.0",
    serves=False,
    trains=True,
    rank_order=("pp", "dp", "cp", "tp"),
    split_layers=split_layers,
    check=check,
    uneven_tp=True,
    ep_over=("dp", "cp"),
    moe_tp_over=("tp",),
)

#: Profiles by the short version, newest first.
PROFILES: dict[str, EngineProfile] = {"1.15": ACCELERATE}
