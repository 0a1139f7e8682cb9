"""EngineProfile: how one version of one engine splits a model, what it refuses, what memory it adds.

A profile is handed to ``place`` and to ``plan``; neither knows an engine by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.rules import Rule
from meshwright.specs.workload import Workload

Axis = Literal["dp", "pp", "cp", "tp"]

RuleCheck = Callable[[ModelSpec, Layout, "Cluster | None", "Workload | None"], list[Rule]]
LayerSplit = Callable[[int, int], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """One version of one engine.

    Attributes:
        engine, version: ``vllm``, ``0.33.0``.
        serves, trains: what it can do.
        rank_order: axes from the slowest to the fastest varying; rank = index in that order.
        split_layers: ``(layers, stages) -> layers of each stage``.
        check: every broken rule of a layout (general rules of ``specs.checks`` included).
        uneven_tp: units may be dealt unevenly (our own runtime); otherwise degrees must divide.
        vocab_multiple: rows of embedding and head are padded to a multiple of this before the split.
        vocab_times_tp: whether the multiple itself is multiplied by tp (Megatron).
        ep_over: axes whose product an expert group spans.
        ep_whole: with expert parallelism every expert is whole on its rank (vLLM); otherwise it is cut over tp
            where the expert group fits beside tp (see ``specs.shares.expert_tp``).
        ep_fills: with expert parallelism an expert is cut over the ranks of the stage that ep leaves (SGLang and
            TensorRT-LLM: MoE tensor parallel = tp_size / ep) unless the layout says otherwise.
        wide_labels: labels that are cut over every rank of a stage where a mixture of experts has attention data
            parallelism (SGLang: dense feed-forward blocks stay tensor parallel over tp_size); with expert parallelism
            shared experts stay with their tokens, and everything does where attention is not cut (wide EP).
        moe_tp_over: axes over which one expert is cut when ep is 1.
        shared_whole_under_ep: with ep, tp and dp all above 1 tokens are sharded over tp around the experts and the
            shared experts are held whole (vLLM's sequence parallel MoE).
        draft_shares_ends: draft layers (mtp) use the model's embedding and head instead of the checkpoint's copies.
        vision_on: stages that load the encoder of a multimodal wrapper.
        replicated_labels: dimension labels that this engine never cuts (beyond ``model`` and ``fixed``).
        constants: memory and limits, read from ``plan/constants`` or the engine's code; each documented there.
    """

    engine: str
    version: str
    serves: bool
    trains: bool
    rank_order: tuple[Axis, ...]
    split_layers: LayerSplit
    check: RuleCheck
    uneven_tp: bool = False
    vocab_multiple: int = 1
    vocab_times_tp: bool = False
    ep_over: tuple[Axis, ...] = ("dp", "cp", "tp")
    ep_whole: bool = False
    ep_fills: bool = False
    wide_labels: frozenset[str] = frozenset()
    moe_tp_over: tuple[Axis, ...] = ("tp",)
    shared_whole_under_ep: bool = False
    draft_shares_ends: bool = False
    vision_on: Literal["first", "all"] = "first"
    replicated_labels: frozenset[str] = frozenset()
    constants: Mapping[str, float | int | str | bool] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """``vllm 0.33.0``."""
        return f"{self.engine} {self.version}"


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What a user may set on a serving engine; None means the engine's own default (the profile knows it).

    Attributes:
        utilization: share of device memory that the engine may take (vLLM ``--gpu-memory-utilization``).
        max_num_batched_tokens: tokens of one engine step.
        max_num_seqs: sequences of one engine step.
        kv_dtype: cache element type (``auto``: the model's, or what the checkpoint asks for).
        block_size: tokens of a cache block.
        enforce_eager: no CUDA graphs.
        quantization: quantization applied while loading (``fp8``), or None.
        dtype: compute dtype instead of the configuration's.
        speculative: load the multi-token-prediction layers.
        speculative_tokens: draft tokens a step when ``speculative``.
        text_only: do not load the vision encoder.
        as_typed: the settings are those of a command as it stands: what it leaves open is the engine's own default even
            where a planner would choose better (SGLang's headroom beside many attention replicas).
    """

    utilization: float | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    kv_dtype: str = "auto"
    block_size: int | None = None
    enforce_eager: bool = False
    quantization: str | None = None
    dtype: str | None = None
    speculative: bool = False
    speculative_tokens: int = 1
    text_only: bool = False
    as_typed: bool = False
