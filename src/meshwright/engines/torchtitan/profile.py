"""EngineProfile of torchtitan 0.3: how its trainer lays a model over ranks.

Sources (torchtitan 0.3.0): meshes ``torchtitan/distributed/parallel_dims.py`` ``build_mesh``: ``pp, dp_replicate,
dp_shard, cp, tp`` from the slowest to the fastest axis; experts over ``dp_replicate, efsdp, ep``, where ep takes ranks
of dp_shard, cp and tp. Embedding and head are sharded without padding.
"""

from __future__ import annotations

from meshwright.engines.torchtitan.rules import check
from meshwright.engines.torchtitan.stages import split_layers
from meshwright.specs.profile import EngineProfile

#: Version as the user writes it -> full version.
VERSIONS = {"0.3": "0.3.0"}

#: Profiles by the short version, newest first.
PROFILES: dict[str, EngineProfile] = {
    short: EngineProfile(
        engine="torchtitan",
        version=version,
        serves=False,
        trains=True,
        rank_order=("pp", "dp", "cp", "tp"),
        split_layers=split_layers,
        check=check,
        ep_over=("dp", "cp", "tp"),
        ep_whole=True,
        moe_tp_over=("tp",),
        constants={
            # How it communicates (plan.wire.Ways): sequence parallel inputs are gathered again in the backward of
            # column parallel layers; context parallelism rotates K and V by all_gather
            # (torch.distributed.tensor.experimental attention); routed tokens by all_to_all.
            "wire_sp_gathers_again": True,
            "wire_experts": "all_to_all",
            "wire_context": "all_gather",
        },
    )
    for short, version in VERSIONS.items()
}
