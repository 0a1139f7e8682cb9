"""Profile of DeepSpeed 0.19.8.

Sources: ``runtime/pipe/topology.py`` (axes pipe, data, model, the last varying fastest), ``__init__.py`` (mesh of
data x sequence), ``module_inject/tp_shard.py`` (uneven shares), ``module_inject/auto_ep_config.py`` (whole experts).
"""

from __future__ import annotations

from meshwright.engines.deepspeed.rules import check
from meshwright.engines.own.profile import split_layers
from meshwright.specs.profile import EngineProfile

DEEPSPEED = EngineProfile(
    engine="deepspeed",
    version="0.19.8",
    serves=False,
    trains=True,
    rank_order=("pp", "dp", "cp", "tp"),
    split_layers=split_layers,
    check=check,
    uneven_tp=True,
    ep_over=("dp", "cp", "tp"),
    moe_tp_over=("tp",),
)

#: Profiles by the short version, newest first.
PROFILES: dict[str, EngineProfile] = {"0.19": DEEPSPEED}
