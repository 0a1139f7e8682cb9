"""EngineProfile of SGLang 0.5.23: how it splits, and how it communicates.

Sources are files of the wheel (relative to ``sglang/srt``): sizes ``runtime_context.py:73-218``, layer split
``distributed/utils.py:110``, experts ``layers/moe/fused_moe_triton/layer.py``, dense blocks and shared experts under
attention data parallelism ``models/deepseek_v2.py`` (tensor parallel over ``tp_size`` unless
``--moe-dense-tp-size 1``; shared experts whole with an all-to-all backend), vocabulary
``layers/vocab_parallel_embedding.py``.
"""

from __future__ import annotations

from meshwright.engines.sglang.rules import check
from meshwright.engines.sglang.sizes import VOCAB_PADDING, split_layers
from meshwright.specs.profile import EngineProfile

#: Version as the user writes it -> full version.
VERSIONS = {"0.5.23": "0.5.23"}


def _profile(version: str) -> EngineProfile:
    return EngineProfile(
        engine="sglang",
        version=VERSIONS[version],
        serves=True,
        trains=False,
        rank_order=("pp", "dp", "cp", "tp"),
        split_layers=split_layers,
        check=check,
        vocab_multiple=VOCAB_PADDING,
        ep_over=("dp", "cp", "tp"),
        ep_fills=True,
        wide_labels=frozenset({"mlp", "shared_mlp"}),
        moe_tp_over=("dp", "cp", "tp"),
        shared_whole_under_ep=True,
        draft_shares_ends=True,
        vision_on="all",
        replicated_labels=frozenset({"index_heads"}),
        constants={
            # How it communicates (plan.wire.Ways): model_executor hands PPProxyTensors (hidden states, residual) over
            # with all_gather_group = attention tp; layers/logits_processor.py gathers on all ranks; experts over
            # attention data parallelism use the DeepEP all-to-all that the emitted command asks for.
            "wire_pp_tensors": 2,
            "wire_pp_slices": True,
            "wire_logits": "all_gather",
            "wire_experts": "all_to_all",
            "wire_moe_tp_slices": True,
            "wire_context": "all_gather",
        },
    )


#: Profiles by the short version.
PROFILES: dict[str, EngineProfile] = {version: _profile(version) for version in VERSIONS}
