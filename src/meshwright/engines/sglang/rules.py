"""What SGLang refuses, with the place in its code that says so.

Source: the wheel 0.5.23; paths are relative to ``sglang/srt``. Our ``tp`` is its attention tensor parallel, our ``dp``
its attention data parallel (or independent replicas of a dense model), our ``cp`` its prefill context parallel:
``--tp-size`` = tp x dp x cp spans one pipeline stage. Experts lie over those ranks: ``--ep-size`` groups, an expert cut
over what they leave.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.engines.sglang.sizes import expert_ranks, replica_ranks, split_layers, wide_ranks
from meshwright.specs import checks, quantized, serving_checks
from meshwright.specs.checks import broken, divisors, named
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.rules import Rule
from meshwright.specs.splits import Width, splits
from meshwright.specs.workload import Workload

_TP = "attention tensor parallel size"
_HEADS = "SGLang models/llama.py LlamaAttention: heads % attn_tp_size"
_DIVIDE = "SGLang distributed/utils.py:69 divide: 'X is not divisible by Y'"
_PLACES = quantized.Places(
    "SGLang layers/quantization/fp8.py:597-608 validate_block_quant_shapes",
    "SGLang layers/quantization/marlin_utils.py:165-190 verify_marlin_supports_shape",
)


def check(spec: ModelSpec, layout: Layout, cluster: Cluster | None, workload: Workload | None) -> list[Rule]:
    """Every rule that a layout breaks, illegal ones first."""
    tp = layout.tp
    moe = spec.moe is not None
    found = [
        *serving_checks.serving_only(layout, workload, "SGLang"),
        *checks.world_fits(layout, cluster),
        *serving_checks.heads_divide(spec, tp, _TP, _HEADS),
        *serving_checks.kv_heads_divide(spec, tp, _TP, _HEADS),
        *serving_checks.states_divide(spec, tp, _TP, "SGLang layers/attention/mamba/mamba.py"),
        *checks.experts(spec, layout),
        *serving_checks.even_experts(spec, layout, "SGLang layers/moe/fused_moe_triton/layer.py:414"),
        *(_expert_grid(layout) if moe else ()),
        *(_enough_experts(spec, layout) if moe else ()),
        *serving_checks.widths_divide(
            spec, wide_ranks(layout, moe), expert_ranks(layout), _shared(layout, moe), _DIVIDE
        ),
        *quantized.blocks_divide(spec, layout, lambda width, lay: _degree(width, lay, moe), _PLACES),
        *checks.stages(spec, layout, split_layers),
        *checks.uneven_stages(spec, layout, split_layers),
        *_context_parallel(spec, layout),
        *_cache_copies(spec, layout),
        *_partial_attention(spec, layout),
        *checks.tp_inside_node(layout, cluster),
        *_nodes_alike(layout, cluster, moe),
    ]
    return sorted(found, key=lambda rule: rule.severity != "illegal")


def _shared(layout: Layout, moe: bool) -> int:
    """Ranks that share the shared experts: whole where tokens travel to the experts (layers/moe, deepep backends)."""
    if layout.ep > 1 and layout.dp > 1:
        return 1
    return wide_ranks(layout, moe)


def _degree(width: Width, layout: Layout, moe: bool) -> int:
    """How many ranks share a side of a quantized matrix."""
    if width.label == "expert_mlp":
        return expert_ranks(layout)
    if width.label == "shared_mlp":
        return _shared(layout, moe)
    return wide_ranks(layout, moe) if width.label == "mlp" else layout.tp


def _expert_grid(layout: Layout) -> Iterator[Rule]:
    """``ep x MoE tensor parallel x MoE data parallel = tp_size``."""
    ranks = layout.tp * layout.cp * layout.dp
    if ranks % layout.ep:
        yield broken(
            "ep_divides_tp_size",
            "illegal",
            f"expert parallel {layout.ep} does not divide --tp-size {ranks} (tp {layout.tp} x cp {layout.cp} x dp "
            f"{layout.dp}), inside which it lies",
            f"choose ep from {named(divisors(ranks), layout.ep)}",
            "SGLang runtime_context.py:73-218",
            ep=layout.ep,
            ranks=ranks,
        )
        return
    held = layout.ep * expert_ranks(layout)
    copies = ranks // held if ranks % held == 0 else 0
    if copies not in {1, layout.dp if replica_ranks(layout) else 0, layout.cp}:
        yield broken(
            "moe_grid",
            "illegal",
            f"ep {layout.ep} x expert tensor parallel {expert_ranks(layout)} = {held} of the {ranks} ranks of a stage; "
            f"MoE data parallel beside it must equal the context parallel size {layout.cp}",
            f"leave etp unset (it becomes {ranks // layout.ep})",
            "SGLang arg_groups/parallel_hook.py handle_context_parallelism",
            held=held,
            ranks=ranks,
        )
    elif copies == layout.cp > 1 and layout.pp > 1:
        yield broken(
            "moe_dp_with_pp",
            "illegal",
            f"MoE data parallel {copies} with {layout.pp} pipeline stages",
            "use pp 1, or leave etp unset",
            "SGLang arg_groups/parallel_hook.py: 'PP is not supported with context parallelism'",
            copies=copies,
            stages=layout.pp,
        )


def _enough_experts(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    """MoE models refuse more ranks of a stage than they have experts, whatever ep is."""
    ranks = replica_ranks(layout) or layout.tp * layout.cp * layout.dp
    for moe in splits(spec).moes:
        if ranks > moe.experts and layout.ep <= moe.experts:
            yield broken(
                "tp_size_exceeds_experts",
                "illegal",
                f"--tp-size {ranks} is greater than the number of experts {moe.experts}",
                f"use at most {moe.experts} ranks a stage, and pipeline stages or replicas for the rest",
                "SGLang models/deepseek_v2.py:714, models/qwen2_moe.py",
                ranks=ranks,
                experts=moe.experts,
            )


def _context_parallel(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    """Decode context parallel lies inside attention tp and excludes prefill context parallel."""
    if layout.dcp > 1 and layout.cp > 1:
        yield broken(
            "dcp_with_prefill_cp",
            "illegal",
            f"decode context parallel {layout.dcp} does not support prefill context parallel {layout.cp}",
            "use one of the two",
            "SGLang arg_groups/parallel_hook.py handle_decode_context_parallelism",
            dcp=layout.dcp,
            cp=layout.cp,
        )
    if layout.tp % layout.dcp:
        yield broken(
            "dcp_divides_tp",
            "illegal",
            f"attention tensor parallel {layout.tp} is not a multiple of decode context parallel {layout.dcp}",
            f"choose dcp from {named(divisors(layout.tp), layout.dcp)}",
            "SGLang runtime_context.py:73-218",
            tp=layout.tp,
            dcp=layout.dcp,
        )
    for a in splits(spec).attentions:
        holders = layout.tp // layout.dcp
        if layout.dcp > 1 and a.kind != "mla" and holders > a.kv_heads:
            yield broken(
                "dcp_leaves_copies",
                "unwise",
                f"decode context parallel {layout.dcp} of tp {layout.tp} leaves {holders} holders of "
                f"{a.kv_heads} KV heads",
                f"use dcp {layout.tp // a.kv_heads}",
                "SGLang runtime_context.py: KV heads of a rank = max(1, kv_heads // (tp // dcp))",
                holders=holders,
                kv_heads=a.kv_heads,
            )


def _cache_copies(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    ranks = layout.tp * layout.dp * layout.cp
    way = f"use attention data parallelism (--tp-size {ranks} --attn-dp-size {ranks}), so that a token is cached once"
    yield from serving_checks.cache_copies(
        spec, layout, way, "SGLang docs, DeepSeek usage: data parallelism attention for MLA"
    )


def _partial_attention(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    """Attention data parallelism of some ranks only, without an all-to-all: a bug of DeepSeek-V4's code path."""
    if spec.model_type != "deepseek_v4" or min(layout.dp, layout.tp) == 1 or layout.ep > 1:
        return
    yield broken(
        "partial_attention_dp",
        "unwise",
        f"attention data parallel {layout.dp} with attention tensor parallel {layout.tp} and no all-to-all backend "
        f"scaled the activations of DeepSeek-V4 by {layout.tp}: a healthy server with garbage output",
        f"use dp {layout.dp * layout.tp} or dp 1, or expert parallelism with --moe-a2a-backend deepep",
        "SGLang issue 31699, pull 32609",
        dp=layout.dp,
        tp=layout.tp,
    )


def _nodes_alike(layout: Layout, cluster: Cluster | None, moe: bool) -> Iterator[Rule]:
    """One server over several nodes has equally many ranks on each."""
    if cluster is None:
        return
    one = layout.tp * layout.cp * layout.pp * (layout.dp if moe and not replica_ranks(layout) else 1)
    nodes = -(-one // cluster.devices_per_node)
    if one % nodes:
        yield broken(
            "ranks_over_nodes",
            "illegal",
            f"{one} ranks are not divisible by the {nodes} nodes they need",
            f"choose degrees whose product is a multiple of {nodes}",
            "SGLang arg_groups/validation_hook.py check_server_args: (tp_size * pp_size) % nnodes",
            ranks=one,
            nodes=nodes,
        )
