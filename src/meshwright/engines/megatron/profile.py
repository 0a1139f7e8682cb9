"""EngineProfile of Megatron-core 0.19: how ``pretrain_gpt.py`` lays a model over ranks.

Sources (megatron-core 0.19.2): rank order ``megatron/core/parallel_state.py`` ``initialize_model_parallel`` (default
``tp-cp-ep-dp-pp``, the left axis varies fastest; experts have a grid of their own, ``tp-ep-dp-pp`` with expert tensor
parallelism in the place of tp); vocabulary ``megatron/training/vocab_utils.py`` ``vocab_size_with_padding`` (a multiple
of 128 x tp); expert tensor parallelism defaults to tp (``model_parallel_config.py`` ``__post_init__``).
"""

from __future__ import annotations

from meshwright.engines.megatron.rules import check
from meshwright.engines.megatron.stages import split_layers
from meshwright.specs.profile import EngineProfile

#: Version as the user writes it -> full version.
VERSIONS = {"0.19": "0.19.2"}

#: ``--make-vocab-size-divisible-by``.
VOCAB_MULTIPLE = 128

#: Profiles by the short version, newest first.
PROFILES: dict[str, EngineProfile] = {
    short: EngineProfile(
        engine="megatron",
        version=version,
        serves=False,
        trains=True,
        rank_order=("pp", "dp", "cp", "tp"),
        split_layers=split_layers,
        check=check,
        vocab_multiple=VOCAB_MULTIPLE,
        vocab_times_tp=True,
        ep_over=("dp", "cp", "tp"),
        moe_tp_over=("tp",),
        constants={
            # How it communicates (plan.wire.Ways): core/tensor_parallel/layers.py gathers sharded inputs again in the
            # backward; core/pipeline_parallel/p2p_communication.py sends one tensor, already a sequence slice under
            # sequence parallelism; core/transformer/moe/token_dispatcher.py: alltoall, which ``emit`` asks
            # for (pretrain_gpt.py's own default gathers all tokens).
            "wire_sp_gathers_again": True,
            "wire_experts": "all_to_all",
            "wire_logits": "gather",
            "wire_context": "ring",
        },
    )
    for short, version in VERSIONS.items()
}
