"""Profile of transformers 5.24. Source: ``distributed/utils.py`` initialize_distributed_mesh (pp, dp_replicate, fsdp,
tp, the last varying fastest); ``distributed/pipeline_parallel.py`` layer_range_for_rank (first stages get one more)."""

from __future__ import annotations

from meshwright.engines.transformers.rules import TRANSFORMERS
from meshwright.specs.profile import EngineProfile

#: Profiles by the short version, newest first.
PROFILES: dict[str, EngineProfile] = {"5.24": TRANSFORMERS}
