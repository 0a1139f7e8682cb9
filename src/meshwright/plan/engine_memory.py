"""What a serving engine adds to weights and cache on one rank: activation peak, contexts, CUDA graphs.

Activation peak. The engine profiles one step of ``batched_tokens`` tokens and ``sequences`` sequences. Two moments
compete for the peak:

* the sampler: ``sequences x vocabulary`` logits in the compute dtype plus ``sampler_bytes`` each, the hidden states
  of all tokens and of the sampled ones, and expert workspaces that outlive their layer;
* the widest layer: ``tokens x (4 hidden + 3 inner)`` values.

Both rest on few constants shared by all models (``constants/serving.json``); the peak does not shrink with tensor
parallelism where the sampler decides, because every rank gathers the logits of the whole vocabulary.
"""

from __future__ import annotations

from math import log2

from meshwright.ledger.schema import Holding
from meshwright.plan.constants.serving import EngineMemory
from meshwright.plan.loading import compute_dtype, expert_inner, is_mxfp4
from meshwright.specs.cluster import Cluster, Device
from meshwright.specs.dtypes import size_bytes
from meshwright.specs.model import Attention, Layer, ModelSpec
from meshwright.specs.placement import Placement, RankClass, Stage
from meshwright.specs.profile import ServeSettings

#: Links over which the fused all-reduce works.
_FUSED_LINKS = frozenset({"nvlink", "nvswitch"})


def step_tokens(settings: ServeSettings) -> tuple[int, int]:
    """Tokens and sequences of a step; both settings must be set."""
    assert settings.max_num_batched_tokens is not None
    assert settings.max_num_seqs is not None
    tokens = settings.max_num_batched_tokens
    return tokens, min(settings.max_num_seqs, tokens)


def expert_workspace(placement: Placement, layer: Layer, tokens: int, width: int, constants: EngineMemory) -> int:
    """Bytes of the buffers between the two products of fused experts: outputs of the first (reused for the second)
    and of the activation, ``tokens x topk`` rows each. With attention data parallelism the tokens of all replicas
    meet, up to the chunk that the kernel works on."""
    moe = layer.moe
    if moe is None:
        return 0
    rows = min(tokens * placement.layout.dp, max(tokens, constants.moe_chunk_tokens)) * moe.topk
    inner = expert_inner(placement, moe)
    first = inner * (2 if moe.gated else 1)
    return rows * (max(first, moe.latent or placement.spec.hidden) + inner) * width


def _inner_width(layer: Layer, tp: int) -> int:
    """Width on this rank of one branch of the dense or shared feed-forward block."""
    widths = [m.intermediate for m in (layer.mlp,) if m] + [m.shared_intermediate for m in (layer.moe,) if m]
    return -(-max(widths, default=0) // tp)


def _mla_expansion(a: Attention | None, tp: int, context: int, settings: ServeSettings, limit: int) -> int:
    """Values that the profile run expands from cached latents (vLLM ``mla/common.py``: keys and values of
    ``min(max(8 x context, 4 x sequences x block), 65536)`` tokens)."""
    if a is None or a.kind != "mla" or a.indexer is not None or not limit:
        return 0
    _, seqs = step_tokens(settings)
    tokens = min(max(8 * context, 4 * seqs * (settings.block_size or 16)), limit)
    return tokens * -(-a.heads // tp) * (a.head_dim - a.rope_head_dim + a.v_head_dim)


def distinct_layers(spec: ModelSpec, stage: Stage) -> list[Layer]:
    """Layers of a stage, equal ones once (a ModelSpec keeps equal layers as one object)."""
    return list({id(spec.layers[index]): spec.layers[index] for index in stage.layers}.values())


def _layer_peak(
    placement: Placement, stage: Stage, settings: ServeSettings, context: int, constants: EngineMemory, width: int
) -> int:
    """Peak of the widest layer of the stage."""
    tokens, _ = step_tokens(settings)
    spec, layout = placement.spec, placement.layout
    copies = constants.layer_hidden_copies + (constants.pipeline_hidden_copies if layout.pp > 1 else 0)
    worst = 0
    for layer in distinct_layers(spec, stage):
        inner = constants.layer_inner_copies * _inner_width(layer, layout.tp)
        size = int(tokens * inner * width)
        size += expert_workspace(placement, layer, tokens, width, constants)
        expanded = _mla_expansion(layer.attention, layout.tp, context, settings, constants.mla_context_tokens)
        worst = max(worst, size, expanded * width)
    return worst + int(tokens * copies * spec.hidden * width)


def _vision_bytes(placement: Placement, settings: ServeSettings, constants: EngineMemory, width: int) -> int:
    """Encoder output of the profiled items, held while the language model runs."""
    spec = placement.spec
    if settings.text_only or not any(True for _ in spec.select("vision")):
        return 0
    tokens = max(step_tokens(settings)[0], constants.vision_tokens)
    return int(tokens * spec.hidden * constants.vision_copies * width)


def _sampler_peak(
    placement: Placement, stage: Stage, settings: ServeSettings, constants: EngineMemory, width: int
) -> int:
    """Peak of the sampler on a stage that has the head, else 0."""
    if not stage.head:
        return 0
    tokens, seqs = step_tokens(settings)
    spec = placement.spec
    logits = int(seqs * spec.vocab * (width + constants.sampler_bytes))
    kept = 0
    if constants.workspace_kept and not is_mxfp4(spec):
        kept = max(
            (expert_workspace(placement, layer, tokens, width, constants) for layer in distinct_layers(spec, stage)),
            default=0,
        )
    return logits + (tokens + seqs) * spec.hidden * width + kept


def activation_bytes(
    placement: Placement, stage: Stage, settings: ServeSettings, context: int, constants: EngineMemory
) -> int:
    """Activation peak of a rank of ``stage`` as the engine's profile run sees it."""
    width = size_bytes(compute_dtype(placement, settings))
    sampler = _sampler_peak(placement, stage, settings, constants, width)
    layer = _layer_peak(placement, stage, settings, context, constants, width)
    vision = _vision_bytes(placement, settings, constants, width) if stage.embedding else 0
    return constants.fixed_bytes + max(sampler, layer) + vision


def _compute_capability(device: Device) -> int:
    """Major compute capability of an NVIDIA device, 0 for others."""
    major = device.capability.partition(".")[0]
    return int(major) if device.vendor == "nvidia" and major.isdecimal() else 0


def non_torch_bytes(placement: Placement, cluster: Cluster, constants: EngineMemory) -> int:
    """Memory outside the allocator: device context, communicators, all-reduce workspaces."""
    layout, outside = placement.layout, constants.non_torch
    width = layout.tp
    if placement.profile.wide_labels and placement.spec.moe:  # one tensor-parallel world around attention replicas
        width *= layout.dp
    if width == 1:
        communicators = outside.tp_bytes - outside.one_bytes if layout.dp > 1 and placement.spec.moe else 0
        return (outside.pp_only_bytes if layout.pp > 1 else outside.one_bytes) + communicators
    device = cluster.device
    inside = width <= cluster.devices_per_node
    if inside and _compute_capability(device) >= 9 and cluster.intra.kind in _FUSED_LINKS:
        doublings = log2(width / 2)
        return outside.tp_fused_bytes + int(doublings * outside.tp_doubling_bytes)
    return outside.tp_bytes


def captured_graphs(sequences: int) -> int:
    """Graphs captured by default: pieces for 1, 2, 4, 8 to 256 by 8 and on to 512 by 16 tokens (at most twice the
    sequences), whole ones up to the sequences (vLLM ``config/vllm.py``; logs show 51 and 35 for 256 sequences)."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    pieces = [s for s in sizes if s <= min(512, 2 * sequences)]
    return len(pieces) + len([s for s in sizes if s <= sequences])


def graph_bytes(stage: Stage, settings: ServeSettings, constants: EngineMemory) -> int:
    """CUDA-graph memory that the engine takes from the pool; 0 where it does not count it."""
    if settings.enforce_eager or not constants.graphs_counted:
        return 0
    _, seqs = step_tokens(settings)
    return captured_graphs(seqs) * (constants.graph_bytes + len(stage.layers) * constants.graph_layer_bytes)


def engine_holdings(
    placement: Placement,
    rank_class: RankClass,
    cluster: Cluster,
    settings: ServeSettings,
    context: int,
    constants: EngineMemory,
) -> list[Holding]:
    """Activations and runtime of one rank class."""
    stage = placement.stages[rank_class.coordinate.pp]
    name = rank_class.name
    outside = non_torch_bytes(placement, cluster, constants)
    if not constants.profiled:  # the share is taken of what contexts and communicators leave
        assert settings.utilization is not None
        outside = int(outside * settings.utilization)
        return [Holding(name, "runtime", "context_and_communicators", outside, "calibrated")] if outside else []
    graphs = graph_bytes(stage, settings, constants) if cluster.device.kind == "gpu" else 0
    terms = [
        ("activations", "profile_peak", activation_bytes(placement, stage, settings, context, constants), "calibrated"),
        ("runtime", "context_and_communicators", outside, "calibrated"),
        ("runtime", "cuda_graphs", graphs, "modelled"),
    ]
    return [Holding(name, term, tensor, size, source) for term, tensor, size, source in terms if size]
