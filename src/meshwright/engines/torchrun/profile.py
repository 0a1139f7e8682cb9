"""Profile of a plain script under torchrun: its parallelism is not known, so what holds for our own runtime counts."""

from __future__ import annotations

from meshwright.engines.own.profile import split_layers
from meshwright.engines.own.rules import check
from meshwright.specs.profile import EngineProfile

TORCHRUN = EngineProfile(
    engine="torchrun",
    version="2.13",
    serves=False,
    trains=True,
    rank_order=("pp", "dp", "cp", "tp"),
    split_layers=split_layers,
    check=check,
    uneven_tp=True,
)

#: Profiles by the short version, newest first.
PROFILES: dict[str, EngineProfile] = {"2.13": TORCHRUN}
