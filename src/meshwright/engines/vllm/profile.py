"""EngineProfiles of vLLM 0.33, 0.32 and 0.26: how they split, and their limits.

Sources are files of the wheels: vLLM 0.33.0 (parallel sizes ``config/parallel.py``, layer split
``distributed/utils.py:198``, experts ``model_executor/layers/fused_moe/config.py:1104-1200``, vocabulary padding
``layers/vocab_parallel_embedding.py``) and 0.26.0, in which the same places agree. 0.32 (the CPU build on PyPI) has
the parallel flags of 0.33.
"""

from __future__ import annotations

from meshwright.engines.vllm.rules import check
from meshwright.engines.vllm.stages import VOCAB_PADDING, split_layers
from meshwright.specs.profile import EngineProfile

#: Version as the user writes it -> full version.
VERSIONS = {"0.33": "0.33.0", "0.32": "0.32.0", "0.26": "0.26.0"}


def _profile(version: str) -> EngineProfile:
    return EngineProfile(
        engine="vllm",
        version=VERSIONS[version],
        serves=True,
        trains=False,
        rank_order=("dp", "pp", "cp", "tp"),
        split_layers=split_layers,
        check=check,
        vocab_multiple=VOCAB_PADDING,
        ep_over=("dp", "cp", "tp"),
        ep_whole=True,
        moe_tp_over=("dp", "cp", "tp"),
        shared_whole_under_ep=True,
        draft_shares_ends=True,  # v1/spec_decode: the draft takes the target's embedding and head
        vision_on="all",  # models/interfaces.py _mark_tower_model: skipped by modality limits, not by stage
        replicated_labels=frozenset({"index_heads"}),
        constants={
            # How it communicates (plan.wire.Ways): v1/worker/gpu_worker.py hands IntermediateTensors (hidden states,
            # residual) over with all_gather_group=tp; layers/logits_processor.py gathers on all ranks;
            # config/parallel.py all2all_backend; device_communicators/all2all.py.
            "wire_pp_tensors": 2,
            "wire_pp_slices": True,
            "wire_logits": "all_gather",
            "wire_experts": "allgather_reducescatter",
            "wire_moe_tp_slices": True,
            "wire_context": "all_gather",
        },
    )


#: Profiles by the short version, newest first.
PROFILES: dict[str, EngineProfile] = {version: _profile(version) for version in VERSIONS}
