"""Activation peak of one pipeline stage: layers in flight, recomputation, the loss, boundaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.plan.train_engine import TrainEngine
from meshwright.plan.train_inflight import peak_held
from meshwright.plan.train_layers import (
    Saved,
    Shape,
    backward_extra,
    every_second_product,
    layer_saved,
    mlp_saved,
    norm_saved,
    shape_of,
    total,
)
from meshwright.plan.train_shards import TrainStage, largest_matrix, padded_vocab
from meshwright.specs.layout import Layout
from meshwright.specs.model import Layer, ModelSpec
from meshwright.specs.workload import Train

#: What recomputing a whole block leaves: what the block before and the norm made.
_BLOCK_EDGE = frozenset({"block input", "norm output", "dropout mask"})

#: Saved tensors that offloading a module moves to the host, by block (Megatron ``--offload-modules``).
_OFFLOADED: dict[str, tuple[tuple[str, str], ...]] = {
    "attn_norm": (("attention", "block input"),),
    "qkv_linear": (("attention", "norm output"),),
    "core_attn": (("attention", "query, key, value"), ("core", "scores"), ("core", "softmax statistics")),
    "attn_proj": (("attention", "context"),),
    "mlp_norm": (("mlp", "block input"), ("moe", "block input")),
    "expert_fc1": (("moe", "expert input"),),
    "moe_act": (("moe", "expert hidden before activation"),),
}


@dataclass(frozen=True, slots=True)
class Activations:
    """Activation peak of one rank of a stage, by what it is made of (bytes)."""

    parts: Mapping[str, int]
    in_flight: tuple[int, ...] = field(default=())

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return sum(self.parts.values())


def model_shape(spec: ModelSpec, layout: Layout, work: Train, engine: TrainEngine) -> Shape:
    """Token counts, and which optional tensors the model's table shows (query and key norms, norm biases)."""
    qk = any(f.role == "attention" and not f.op and len(f.shape) == 1 and f.part == "weight" for f in spec.families)
    bias = any(f.role == "norm" and f.part == "bias" for f in spec.families)
    rotary = not spec.learned_positions and bool(spec.heads)
    return shape_of(spec.hidden, layout, work, engine, qk_norm=qk and not spec.mla, rms=not bias, rotary=rotary)


def kept_after(blocks: Mapping[str, Saved], modules: tuple[str, ...]) -> dict[str, Saved]:
    """What selective recomputation of ``modules`` leaves of a layer's saved tensors."""
    kept = {name: dict(saved) for name, saved in blocks.items()}
    if "core_attn" in modules:
        kept.pop("core", None)
    for block in {"mlp", "moe"} & set(modules) & set(kept):
        kept[block] = {name: size for name, size in kept[block].items() if name in _BLOCK_EDGE}
    for saved in kept.values():
        if "moe_act" in modules:
            saved.pop("expert hidden", None)
        if "layernorm" in modules:
            saved.pop("norm output", None)
        if "shared_experts" in modules:
            for name in [n for n in saved if n.startswith("shared ")]:
                del saved[name]
    if "mla_up_proj" in modules and "query latent" in kept.get("attention", {}):
        kept["attention"].pop("query, key, value")
        kept["attention"].pop("key before rotary")
    return kept


def left_on_device(blocks: dict[str, Saved], modules: tuple[str, ...]) -> dict[str, Saved]:
    """What offloading the saved tensors of ``modules`` leaves on the device."""
    gone = {pair for module in modules for pair in _OFFLOADED.get(module, ())}
    return {b: {n: size for n, size in saved.items() if (b, n) not in gone} for b, saved in blocks.items()}


def layer_bytes(layer: Layer, s: Shape, layout: Layout, work: Train) -> tuple[int, int]:
    """``(kept from forward to backward, whole working set while its backward runs)`` of one layer."""
    blocks = layer_saved(layer, s, layout)
    whole = total(blocks)
    if s.engine.kernels == "torch":
        whole += backward_extra(layer, s)
    if work.recompute == "full":
        return s.width * s.rows * s.hidden, whole
    if work.recompute == "selective" and "every_second_product" in s.engine.recompute_modules:
        return every_second_product(layer, s), whole
    modules = s.engine.recompute_modules if work.recompute == "selective" else ()
    kept = left_on_device(kept_after(blocks, modules), s.engine.offload_modules)
    return total(kept), whole


def chunk_bytes(spec: ModelSpec, chunk: tuple[int, ...], s: Shape, layout: Layout, work: Train) -> tuple[int, int]:
    """``(kept a micro-batch, extra while one layer is recomputed)`` of one model chunk.

    Full recomputation keeps the input of every layer (``uniform`` with n: of every n-th, then n layers are alive at
    once); with ``recompute_layers`` = n and ``block`` only the first n layers are recomputed.
    """
    distinct = {id(spec.layers[i]): spec.layers[i] for i in chunk}  # equal layers of a ModelSpec are one object
    known = {key: layer_bytes(layer, s, layout, work) for key, layer in distinct.items()}
    pairs = [known[id(spec.layers[i])] for i in chunk]
    if not pairs:
        return 0, 0
    if work.recompute != "full":
        return sum(kept for kept, _ in pairs), max(whole - kept for kept, whole in pairs)
    n = work.recompute_layers or 1
    if s.engine.recompute_method == "block" and work.recompute_layers is not None:
        kept = sum(pair[0] if i < n else pair[1] for i, pair in enumerate(pairs))
        return kept, max((whole for i, (_, whole) in enumerate(pairs) if i < n), default=0)
    kept = sum(pair[0] for i, pair in enumerate(pairs) if i % n == 0)
    groups = [sum(w for _, w in pairs[i : i + n]) for i in range(0, len(pairs), n)]
    return kept, max(groups)


def local_logits(spec: ModelSpec, s: Shape, layout: Layout, engine: TrainEngine) -> int:
    """Logits of one micro-batch on one rank: tokens x padded vocabulary / tp."""
    return s.tokens * (padded_vocab(spec.vocab, layout.tp, engine) // layout.tp)


def boundary_tensors(engine: TrainEngine, held: tuple[int, ...], micro_batches: int) -> int:
    """Tensors of rows x hidden that a stage holds for its neighbours.

    Megatron: the received input, the gradient to send and one in transit. torch.distributed.pipelining: a receive
    buffer a micro-batch in both directions (``_PipelineStageBase._prepare_forward_infra``), and the output of every
    micro-batch in flight.
    """
    if engine.receive_buffers:
        return sum(held) + 2 * micro_batches
    return engine.boundary_tensors


def weight_gradient(layer: Layer, s: Shape, engine: TrainEngine, *, head: bool) -> int:
    """Temporary gradient of the largest hidden matrix of the last layer. Without the head's tensors beside it, that
    layer's MLP hidden tensors are already freed."""  # fmt: skip
    size = round(engine.weight_gradient_bytes * largest_matrix(layer, s.hidden, s.tp))
    if head or layer.mlp is None:
        return size
    hidden = mlp_saved(layer.mlp, s, norm=False)
    return max(0, size - sum(hidden.values()))


def score_buffer(spec: ModelSpec, s: Shape) -> int:
    """One layer's scores in the model's dtype: Megatron's local attention keeps one such buffer for all layers."""
    heads = -(-spec.heads // s.tp)
    return s.width * s.batch * heads * (s.seq // s.cp) * s.seq


def deferred_head(spec: ModelSpec, s: Shape, layout: Layout, engine: TrainEngine, micro_batches: int) -> int:
    """Inputs of the head of every micro-batch, and gradients of its logits until the limit
    (Megatron ``defer_embedding_wgrad_compute``)."""  # fmt: skip
    logits = local_logits(spec, s, layout, engine)
    return s.width * (s.tokens * s.hidden * micro_batches + logits * min(engine.deferred_head, micro_batches))


def head_bytes(spec: ModelSpec, s: Shape, layout: Layout, work: Train, engine: TrainEngine) -> dict[str, int]:
    """The last stage's end: final norm, its output, logits and the loss (``logit_bytes`` a local logit)."""
    logits = local_logits(spec, s, layout, engine)
    return {
        "final norm": (2 + engine.head_tensors) * s.width * s.rows * s.hidden + norm_saved(s),
        "logits and loss": round(engine.loss_bytes(work) * logits),
    }


def prediction_bytes(spec: ModelSpec, s: Shape, layout: Layout, work: Train, engine: TrainEngine) -> dict[str, int]:
    """Multi-token-prediction layers: the layer, its joined input with both norms (4 x R h), and what its own loss keeps
    (one fp32 tensor of logits, ``megatron/core/transformer/multi_token_prediction.py``)."""  # fmt: skip
    layers = [layer_bytes(layer, s, layout, work)[1 if engine.offload_modules else 0] for layer in spec.mtp_layers]
    if not layers:
        return {}
    return {
        "prediction layers": sum(layers) + len(layers) * 4 * s.width * s.rows * s.hidden,
        "prediction loss": len(layers) * 4 * local_logits(spec, s, layout, engine),
    }


def _standing(
    spec: ModelSpec, stage: TrainStage, s: Shape, layout: Layout, engine: TrainEngine, held: tuple[int, ...], micro: int
) -> dict[str, int]:
    """Buffers that are there whatever runs: boundaries, masks, the engine's own."""
    parts: dict[str, int] = {}
    if stage.embedding and s.dropout:
        parts["embedding dropout"] = s.rows * s.hidden * max(held)
    if layout.pp > 1:
        parts["boundaries"] = boundary_tensors(engine, held, micro) * s.width * s.rows * s.hidden
    if engine.attention_mask:
        parts["attention mask"] = s.batch * s.seq * s.seq
    if engine.gather_buffer and s.rows < s.tokens and stage.head:
        parts["sequence gather buffer"] = s.width * s.tokens * s.hidden
    if engine.score_buffer:
        parts["score buffer"] = score_buffer(spec, s)
    if engine.deferred_head and stage.head:
        parts["deferred head"] = deferred_head(spec, s, layout, engine, micro)
    return parts


def activations(spec: ModelSpec, stage: TrainStage, layout: Layout, work: Train, engine: TrainEngine) -> Activations:
    """Activation peak of one rank of ``stage``.

    The last stage's peak is the end of a forward (all its layers and the loss) or, with recomputation, the larger of
    the loss and one recomputed layer: they are not alive together (in reserved memory they are).
    """
    s = model_shape(spec, layout, work, engine)
    pairs = [chunk_bytes(spec, chunk, s, layout, work) for chunk in stage.chunks]
    micro = max(1, work.global_batch // max(1, layout.dp * layout.micro_batch))
    group = engine.microbatch_group or layout.pp
    schedule = "interleaved" if layout.schedule == "1f1b" and len(pairs) > 1 else layout.schedule
    held = peak_held([kept for kept, _ in pairs], schedule, stage.index, layout.pp, micro, group)
    layers = sum(n * kept for n, (kept, _) in zip(held, pairs, strict=True))
    if work.offload == "activations":
        layers -= round(layers * engine.offload_fraction)
    parts: dict[str, int] = {"layers": layers}
    recomputed = max((extra for _, extra in pairs), default=0)
    head: dict[str, int] = {}
    if stage.head:
        head = head_bytes(spec, s, layout, work, engine) | prediction_bytes(spec, s, layout, work, engine)
    if engine.weight_gradient_bytes and stage.layers:
        parts["weight gradient"] = weight_gradient(spec.layers[stage.layers[-1]], s, engine, head=stage.head)
    together = engine.reserved or bool(engine.offload_modules)
    if together or recomputed > sum(head.values()):
        parts["layer in its backward"] = recomputed
    if together or "layer in its backward" not in parts:
        parts |= head
    return Activations(parts | _standing(spec, stage, s, layout, engine, held, micro), held)
