"""What vLLM refuses, with the place in its code that says so.

Sources: the wheels 0.33.0 and 0.26.0, whose rules on layouts agree; paths are relative to the package. 0.26 states
the decode context rules as assertions where 0.33 prints messages that name the flags. What does differ by version
are flags (see ``flags``).
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.engines.vllm.quantized import blocks_divide
from meshwright.engines.vllm.stages import VOCAB_PADDING, split_layers
from meshwright.specs import checks, serving_checks
from meshwright.specs.checks import broken, divisors, named
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.rules import Rule
from meshwright.specs.shares import padded_units
from meshwright.specs.splits import splits
from meshwright.specs.workload import Workload

_TP = "tensor parallel size"


def check(spec: ModelSpec, layout: Layout, cluster: Cluster | None, workload: Workload | None) -> list[Rule]:
    """Every rule that a layout breaks, illegal ones first."""
    found = [
        *_serving_only(layout, workload),
        *checks.world_fits(layout, cluster),
        *serving_checks.heads_divide(spec, layout.tp, _TP, "vLLM config/model.py:1545 verify_with_parallel_config"),
        *serving_checks.kv_heads_divide(spec, layout.tp, _TP, "vLLM model_executor/models/llama.py LlamaAttention"),
        *_vocabulary(spec, layout),
        *serving_checks.states_divide(spec, layout.tp, _TP, "vLLM model_executor/layers/mamba/mamba_mixer2.py"),
        *_widths(spec, layout),
        *blocks_divide(spec, layout),
        *checks.stages(spec, layout, split_layers),
        *checks.experts(spec, layout),
        *_expert_parallel(spec, layout),
        *_context_parallel(spec, layout),
        *_replicated_cache(spec, layout),
        *checks.tp_inside_node(layout, cluster),
        *_whole_nodes(layout, cluster),
    ]
    return sorted(found, key=lambda rule: rule.severity != "illegal")


def _serving_only(layout: Layout, workload: Workload | None) -> Iterator[Rule]:
    """vLLM serves: it has no optimizer, no training schedule and no degree inside an expert."""
    yield from serving_checks.serving_only(layout, workload, "vLLM")
    if layout.etp not in {None, 1}:
        yield broken("not_of_this_engine", "illegal", f"vLLM has no etp {layout.etp}", "leave it out when serving")


def _vocabulary(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    rows = padded_units(spec.vocab, VOCAB_PADDING)
    if rows % layout.tp:
        yield broken(
            "vocab_over_tp",
            "illegal",
            f"the vocabulary of {spec.vocab}, padded to {rows} (a multiple of {VOCAB_PADDING}), is not divisible by "
            f"tensor parallel size {layout.tp}",
            f"choose tp from {named([d for d in range(1, 65) if rows % d == 0], layout.tp)}",
            "vLLM model_executor/layers/vocab_parallel_embedding.py",
            vocab=spec.vocab,
            padded=rows,
            tp=layout.tp,
        )


def _widths(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    """Widths of feed-forward blocks: dense over tp, experts over tp x cp x dp without expert parallelism."""
    blocks = splits(spec)
    flat = layout.tp * layout.cp * layout.dp
    sizes = [("MLP width", mlp.intermediate, layout.tp, "tensor parallel size") for mlp in blocks.mlps]
    for moe in blocks.moes:
        if layout.ep == 1:
            sizes.append(("expert width", moe.intermediate, flat, "tp x cp x dp ="))
        if moe.shared_intermediate:
            sizes.append(("shared expert width", moe.shared_intermediate, layout.tp, "tensor parallel size"))
    for what, size, degree, over in dict.fromkeys(sizes):
        if size % degree:
            yield broken(
                "width_over_tp",
                "illegal",
                f"{what} {size} is not divisible by {over} {degree}",
                f"choose from {named(divisors(size), degree)}" + (", or expert parallelism" if "=" in over else ""),
                "vLLM distributed/utils.py divide",
                size=size,
                degree=degree,
            )


def _expert_parallel(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    """``--enable-expert-parallel`` is a switch: the size follows from the other degrees."""
    flat = layout.tp * layout.cp * layout.dp
    if layout.ep not in {1, flat}:
        yield broken(
            "ep_is_tp_dp",
            "illegal",
            f"ep {layout.ep}: in vLLM expert parallel is off or tp {layout.tp} x cp {layout.cp} x dp "
            f"{layout.dp} = {flat}",
            f"use ep={flat} (--enable-expert-parallel) or ep=1",
            "vLLM model_executor/layers/fused_moe/config.py:1104-1200",
            ep=layout.ep,
            ranks=flat,
        )


def balanced_experts(spec: ModelSpec, layout: Layout, redundant: int = 0) -> list[Rule]:
    """EPLB (``--enable-eplb``) needs equally many experts a rank, and expert parallelism.

    Args:
        spec: the model.
        layout: its degrees.
        redundant: ``num_redundant_experts``.
    """
    flat = layout.tp * layout.cp * layout.dp
    found = []
    if flat == 1 or layout.ep == 1:
        found.append(
            broken(
                "eplb_needs_ep",
                "illegal",
                f"the expert load balancer needs expert parallelism; ep is {layout.ep}",
                "add --enable-expert-parallel and more than one rank",
                "vLLM config/parallel.py",
                ep=layout.ep,
            )
        )
    for moe in splits(spec).moes:
        if (moe.experts + redundant) % layout.ep:
            more = -moe.experts % layout.ep
            found.append(
                broken(
                    "eplb_experts_even",
                    "illegal",
                    f"{moe.experts} + {redundant} redundant experts are not divisible by expert parallel {layout.ep}",
                    f"use {more} redundant experts",
                    "vLLM model_executor/layers/fused_moe/layer.py:255-290",
                    experts=moe.experts + redundant,
                    ep=layout.ep,
                )
            )
    return found


def offline_replicas(spec: ModelSpec, layout: Layout) -> list[Rule]:
    """The offline ``LLM`` class and external load balancing refuse data parallelism for dense models."""
    if layout.dp == 1 or splits(spec).moes:
        return []
    return [
        broken(
            "offline_dp_dense",
            "illegal",
            f"dp {layout.dp} of a dense model is refused offline and with external load balancing",
            f"start {layout.dp} independent instances, or serve online with internal load balancing",
            "vLLM config/parallel.py, engine/arg_utils.py:2380-2560",
            dp=layout.dp,
        )
    ]


def _context_parallel(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    """Decode context parallel lies inside tp; prefill context parallel (cp) adds ranks."""
    tp, dcp, pcp = layout.tp, layout.dcp, layout.cp
    if pcp == 1 and tp % dcp:
        yield broken(
            "dcp_divides_tp",
            "illegal",
            f"tensor parallel {tp} is not a multiple of decode context parallel {dcp}",
            f"choose dcp from {named(divisors(tp), dcp)}",
            "vLLM config/parallel.py",
            tp=tp,
            dcp=dcp,
        )
    if pcp > 1 and dcp not in {1, pcp, tp * pcp}:
        yield broken(
            "dcp_with_pcp",
            "illegal",
            f"decode context parallel {dcp} beside prefill context parallel {pcp}",
            f"choose dcp 1, {pcp} or {tp * pcp}",
            "vLLM config/parallel.py",
            dcp=dcp,
            pcp=pcp,
        )
    if dcp == 1:
        return
    for a in splits(spec).attentions:
        if a.kind == "mla":
            continue
        copies = tp // a.kv_heads
        if tp <= a.kv_heads or dcp > copies:
            yield broken(
                "dcp_needs_copies",
                "illegal",
                f"decode context parallel {dcp} needs {dcp} copies of each KV head; tensor parallel {tp} over "
                f"{a.kv_heads} KV heads makes {max(1, copies)}",
                f"choose dcp of at most {max(1, copies)}",
                "vLLM config/model.py verify_with_parallel_config",
                dcp=dcp,
                copies=max(1, copies),
            )
        elif (a.heads // a.kv_heads) % dcp:
            yield broken(
                "dcp_divides_group",
                "illegal",
                f"{a.heads // a.kv_heads} query heads a KV head are not divisible by decode context parallel {dcp}",
                f"choose dcp from {named(divisors(a.heads // a.kv_heads), dcp)}",
                "vLLM config/model.py verify_with_parallel_config",
                heads_per_kv=a.heads // a.kv_heads,
                dcp=dcp,
            )


def _replicated_cache(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    """A cache that every rank holds again wastes the memory that tensor parallelism was to free."""
    blocks = splits(spec)
    copies = max((layout.tp // a.kv_heads for a in blocks.attentions if a.kind == "gqa"), default=1)
    if blocks.softmax_mla and layout.tp > layout.dcp:
        yield broken(
            "latent_cache_replicated",
            "unwise",
            f"tensor parallel {layout.tp} holds {layout.tp // layout.dcp} copies of the MLA cache",
            f"use dp {layout.tp} with expert parallelism, or -dcp {layout.tp}, so that a token is cached once",
            "vLLM docs, context parallel deployment",
            tp=layout.tp,
            dcp=layout.dcp,
        )
    elif copies > layout.dcp and not blocks.softmax_mla:
        yield broken(
            "kv_heads_replicated",
            "unwise",
            f"tensor parallel {layout.tp} holds {copies // layout.dcp} copies of each KV head",
            f"use decode context parallel {copies} (-dcp {copies}), or tp {max(1, layout.tp // copies)}",
            "vLLM docs, context parallel deployment",
            copies=copies,
            dcp=layout.dcp,
        )


def _whole_nodes(layout: Layout, cluster: Cluster | None) -> Iterator[Rule]:
    """Several nodes take equally many ranks each (multi-node mp)."""
    if cluster is None or layout.world <= cluster.devices_per_node:
        return
    nodes = -(-layout.world // cluster.devices_per_node)
    if layout.world % nodes:
        yield broken(
            "ranks_over_nodes",
            "unwise",
            f"{layout.world} ranks over {nodes} nodes are not equally many a node",
            "without Ray, choose degrees whose product is a multiple of the nodes",
            "vLLM engine/arg_utils.py:2380-2560",
            world=layout.world,
            nodes=nodes,
        )
