"""EngineProfile of TensorRT-LLM 1.2 (PyTorch backend): how it splits a model.

Sources: ``tensorrt_llm/mapping.py`` (sizes, layers of a stage, experts of a rank),
``docs/source/features/parallel-strategy.md`` (attention tensor or data parallel, MoE tensor x expert parallel =
tensor parallel size). There is no wheel to read; what the documents do not say is marked as assumed in ``rules``.
"""

from __future__ import annotations

from meshwright.engines.trtllm.rules import check, split_layers
from meshwright.specs.profile import EngineProfile

#: Version as the user writes it -> full version.
VERSIONS = {"1.2": "1.2.0"}


def _profile(version: str) -> EngineProfile:
    return EngineProfile(
        engine="trtllm",
        version=VERSIONS[version],
        serves=True,
        trains=False,
        rank_order=("pp", "cp", "dp", "tp"),
        split_layers=split_layers,
        check=check,
        ep_over=("dp", "cp", "tp"),
        ep_fills=True,
        moe_tp_over=("dp", "cp", "tp"),
        draft_shares_ends=True,
        vision_on="all",
        replicated_labels=frozenset({"index_heads"}),
        constants={
            # How it communicates (plan.wire.Ways): hidden states and residual between stages; attention data
            # parallelism gathers tokens (wide expert parallelism has an all-to-all of its own).
            "wire_pp_tensors": 2,
            "wire_logits": "all_gather",
            "wire_experts": "all_to_all",
            "wire_context": "ring",
        },
    )


#: Profiles by the short version.
PROFILES: dict[str, EngineProfile] = {version: _profile(version) for version in VERSIONS}
