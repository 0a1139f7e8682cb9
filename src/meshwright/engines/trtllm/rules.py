"""What TensorRT-LLM refuses, with the place that says so.

Our ``tp`` is attention tensor parallel. With ``enable_attention_dp`` every rank of ``tensor_parallel_size`` holds the
whole attention and serves requests of its own: our ``tp`` 1 and ``dp`` = ``tensor_parallel_size``. Experts lie over all
of them: MoE tensor x MoE expert parallel = ``tensor_parallel_size``. ``dp`` of a dense model means independent
instances.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.specs import checks, quantized, serving_checks
from meshwright.specs.checks import broken, divisors, named
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.rules import Rule
from meshwright.specs.splits import Width
from meshwright.specs.workload import Workload

_TP = "tensor parallel size"
_HEADS = "TensorRT-LLM _torch/modules/attention.py"
_MAPPING = "TensorRT-LLM mapping.py"
_DOCS = "TensorRT-LLM docs/source/features/parallel-strategy.md"
_PLACES = quantized.Places("TensorRT-LLM _torch/modules/linear.py", "TensorRT-LLM _torch/modules/linear.py")


def split_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of every stage as ``Mapping.pp_layers`` deals them: the first ``layers % stages`` stages get one more."""
    each, more = divmod(layers, stages)
    return tuple(each + (1 if stage < more else 0) for stage in range(stages))


def expert_ranks(layout: Layout) -> int:
    """Ranks over which one expert is cut: MoE tensor parallel, what expert parallel leaves unless it is stated."""
    if layout.etp is not None:
        return layout.etp
    return max(1, layout.tp * layout.cp * layout.dp // layout.ep)


def check(spec: ModelSpec, layout: Layout, cluster: Cluster | None, workload: Workload | None) -> list[Rule]:
    """Every rule that a layout breaks, illegal ones first."""
    tp, moe = layout.tp, spec.moe is not None
    found = [
        *serving_checks.serving_only(layout, workload, "TensorRT-LLM"),
        *checks.world_fits(layout, cluster),
        *serving_checks.heads_divide(spec, tp, _TP, _HEADS),
        *serving_checks.kv_heads_divide(spec, tp, _TP, _HEADS),
        *serving_checks.states_divide(spec, tp, _TP, "TensorRT-LLM _torch/modules/mamba/mamba2_mixer.py"),
        *serving_checks.widths_divide(spec, tp, expert_ranks(layout), tp, "TensorRT-LLM _torch/modules/linear.py"),
        *quantized.blocks_divide(spec, layout, _degree, _PLACES),
        *checks.experts(spec, layout),
        *serving_checks.even_experts(spec, layout, f"{_MAPPING} ep_experts"),
        *(_expert_grid(layout) if moe else ()),
        *(_attention_dp(layout) if moe else ()),
        *_context(layout),
        *checks.stages(spec, layout, split_layers),
        *checks.uneven_stages(spec, layout, split_layers),
        *serving_checks.cache_copies(
            spec,
            layout,
            f"use enable_attention_dp: true with tensor_parallel_size {layout.tp * layout.dp}, so that a token is "
            "cached once",
            f"{_DOCS}: KV cache replicated where heads are fewer than the tensor parallel size",
        ),
        *checks.tp_inside_node(layout, cluster),
    ]
    return sorted(found, key=lambda rule: rule.severity != "illegal")


def _degree(width: Width, layout: Layout) -> int:
    return expert_ranks(layout) if width.label == "expert_mlp" else layout.tp


def _expert_grid(layout: Layout) -> Iterator[Rule]:
    ranks = layout.tp * layout.cp * layout.dp
    etp = expert_ranks(layout)
    if ranks % layout.ep or layout.ep * etp != ranks:
        yield broken(
            "moe_tp_times_ep",
            "illegal",
            f"MoE tensor parallel {etp} x MoE expert parallel {layout.ep} = {etp * layout.ep} is not "
            f"tensor_parallel_size {ranks}",
            f"choose ep from {named(divisors(ranks), layout.ep)}; MoE tensor parallel follows from it",
            f"{_MAPPING}: tp_size must equal to moe_tp_size * moe_ep_size; {_DOCS}",
            moe_tp=etp,
            ep=layout.ep,
            ranks=ranks,
        )


def _attention_dp(layout: Layout) -> Iterator[Rule]:
    """Attention data parallelism is all or nothing."""
    if layout.dp > 1 and layout.tp > 1:
        ranks = layout.tp * layout.dp
        yield broken(
            "attention_dp_is_whole",
            "illegal",
            f"attention data parallel {layout.dp} with attention tensor parallel {layout.tp}: enable_attention_dp "
            f"makes every one of the {ranks} ranks hold the whole attention",
            f"use tp 1 and dp {ranks}, or tp {ranks} and dp 1",
            f"{_DOCS}, attention module",
            dp=layout.dp,
            tp=layout.tp,
        )


def _context(layout: Layout) -> Iterator[Rule]:
    if layout.dcp > 1:
        yield broken(
            "no_decode_context_parallel",
            "illegal",
            f"decode context parallel {layout.dcp}: TensorRT-LLM has no such size",
            "use dcp 1",
            f"{_MAPPING}",
            dcp=layout.dcp,
        )
    if layout.cp > 1 and (layout.ep > 1 or layout.dp > 1):
        yield broken(
            "cp_with_experts",
            "illegal",
            f"context parallel {layout.cp} with ep {layout.ep} and dp {layout.dp} is not supported",
            "use cp 1",
            f"{_MAPPING}: CP don't support MoE tp/ep yet",
            cp=layout.cp,
            ep=layout.ep,
        )
    elif layout.cp > 1:
        yield broken(
            "cp_needs_config",
            "unwise",
            f"context parallel {layout.cp} needs a cp_config of a kind that the model supports",
            "add cp_config: {cp_type: ...} to the file of --config, or use cp 1",
            "TensorRT-LLM llmapi/llm_args.py CpConfig",
            cp=layout.cp,
        )
