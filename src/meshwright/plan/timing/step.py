"""One step of a serving engine as work: what is multiplied, read and sent for B decoding requests and a prompt.

A *step* runs the tokens of decoding requests (one each) and of a prompt through the layers together: products see all
tokens, attention and recurrent cores each sequence by itself. ``step_work`` counts it from the placement's own ops
(``plan.layer_ops``); ``step_seconds`` times the count. Between the two stands ``Work``, plain numbers that do not
depend on any constant, so that a fit or a search can time the same counts for many constants or layouts at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from meshwright.plan.cores import Batch
from meshwright.plan.forward import embedding_ops, head_ops, serving_context, stage_hand_off
from meshwright.plan.layer_ops import AFTER_CORE, Context, layer_ops
from meshwright.plan.products import Held, Kind
from meshwright.plan.timing.collective import Wiring
from meshwright.plan.timing.compute import ShapeClass, op_outputs, op_width, shape_class
from meshwright.plan.wire import Op
from meshwright.specs.dtypes import DTYPE_BYTES
from meshwright.specs.model import Attention
from meshwright.specs.placement import Coordinate, Placement
from meshwright.specs.profile import ServeSettings


class Kernel(NamedTuple):
    """Equal work on the compute stream, ``repeats`` times.

    Attributes:
        kind: shape class (``compute.ShapeClass``). dtype: of the weights.
        moved_bytes, flops: of one run. width: narrower side of a product's weight, 0 for other ops.
        experts, held: experts whose weights are read, and those that the rank holds (0: no experts).
        rows: tokens that each of them multiplies (0: no experts).
        spread: the experts lie on several ranks, so that the busiest one decides.
        part: what the time is shown as: weights, experts, attention, other.
        repeats: in the step.
        outputs: elements of a product's result, 0 for other ops.
    """

    kind: ShapeClass
    dtype: str
    moved_bytes: float
    flops: float
    width: float
    experts: int
    held: int
    rows: float
    spread: bool
    part: str
    repeats: int
    outputs: float = 0.0


class Message(NamedTuple):
    """Equal collectives, ``repeats`` times; ``payload_bytes``: what enters on a rank."""

    op: str
    wiring: Wiring
    payload_bytes: float
    repeats: int


class Work(NamedTuple):
    """Everything that one rank does in a step.

    Attributes:
        kernels, messages: work and collectives.
        launches: kernels that an engine launches for it (fused as engines do it; see ``launches_of``), without
            expert_launches: those of mixtures of experts, and
            quantizing: those that quantize a product's input block by block.
        passes_bytes: bytes of the hidden states that all these kernels read and write, beyond what ``kernels`` count.
        requests: decoding requests of the rank.
    """

    kernels: tuple[Kernel, ...]
    messages: tuple[Message, ...]
    launches: float
    expert_launches: float
    quantizing: float
    passes_bytes: float
    requests: int


#: Kernels of the parts of a layer, as serving engines fuse them. Attention: one product for q, k, v, rotary embedding
#: with the cache write, the core and its merge of splits, the output product. MLA: first projections fused, q_b, two
#: absorbed products, rotary embedding, cache write, core and merge, output. Indexer: three products, norm, scores,
#: top-k. Feed-forward: up, activation, down. Experts: router, top-k, sort, two grouped products, activation, finish.
#: Recurrent mixer: two input products, convolution, core, gate, output. Counted from the engines' model code
#: (vLLM and SGLang ``models/llama.py``, ``qwen3_moe.py``, ``deepseek_v2.py``, ``qwen3_next.py``).
LAUNCHES = {"gqa": 5, "mla": 9, "indexer": 6, "mlp": 3, "moe": 7, "recurrent": 6}


def launches_of(kind: Kind) -> int:
    """Kernels that one layer launches: its norms and the parts of ``LAUNCHES``."""
    count = len(kind.norms)
    for mixer in kind.layer.mixers:
        if isinstance(mixer, Attention):
            count += LAUNCHES[mixer.kind]
            count += LAUNCHES["indexer"] if mixer.indexer is not None and mixer.indexer.heads else 0
        else:
            count += LAUNCHES["recurrent"]
    count += LAUNCHES["mlp"] * (kind.layer.mlp is not None)
    if kind.layer.moe is not None and kind.layer.moe.shared_intermediate:
        count += LAUNCHES["mlp"]
    return count


def quantizing_of(kind: Kind, block: bool) -> int:
    """Kernels of one layer that quantize the input of a product block by block before it (DeepSeek-V3's FP8, arXiv
    2412.19437 section 3.3.2); static scales and FP4 are applied by the kernel before."""
    if not block:
        return 0
    inputs = {(p.role, p.op in AFTER_CORE, p.op == "q_b") for p in kind.products if p.dtype.startswith("f8")}
    return len(inputs)


def kinds_of(own: Held) -> list[tuple[Kind, int]]:
    """Distinct kinds of layers of a rank, with how many of each."""
    counts = Counter(id(kind) for kind in own.kinds.values())
    kinds = {id(kind): kind for kind in own.kinds.values()}
    return [(kinds[key], count) for key, count in counts.items()]


class Groups:
    """How the groups of one rank are wired; ``dp_shard`` counts as ``dp``."""

    def __init__(self, placement: Placement, per_node: int, at: Coordinate) -> None:
        self.placement, self.per_node, self.at = placement, per_node, at
        self._known: dict[str, Wiring] = {}

    def of(self, group: str) -> Wiring:
        """Wiring of the group of an axis."""
        if group not in self._known:
            if group == "world":
                ranks: Sequence[int] = range(self.placement.layout.world)
            else:
                ranks = self.placement.group(group.removesuffix("_shard").removesuffix("_replicate"), self.at)
            node = self.placement.rank(self.at) // self.per_node
            near = sum(rank // self.per_node == node for rank in ranks)
            self._known[group] = Wiring(len(ranks), near)
        return self._known[group]


class StepContexts(NamedTuple):
    """What the layers of a step share: ``whole`` for products, ``parts`` for the cores of each kind of request."""

    whole: Context
    parts: tuple[Context, ...]

    @property
    def decode(self) -> int:
        """Decoding requests."""
        return sum(c.batch.sequences for c in self.parts if c.batch.phase == "decode")

    @property
    def sampled(self) -> int:
        """Sequences whose next token is chosen."""
        return sum(c.batch.sequences for c in self.parts)


def contexts(placement: Placement, settings: ServeSettings, batch: Batch) -> StepContexts:
    """A step of decoding requests, or of one prompt on every replica."""
    own = serving_context(placement, batch, settings)
    return StepContexts(own, (own,))


def together(decode: StepContexts, prompt: StepContexts) -> StepContexts:
    """A step of both: products see all tokens, cores those of their own."""
    first = decode.whole.batch
    tokens = first.tokens + prompt.whole.batch.tokens
    whole = replace(decode.whole, batch=Batch("decode", tokens, 1, first.past), cache={})
    return StepContexts(whole, (*decode.parts, *prompt.parts))


def step_work(placement: Placement, per_node: int, own: Held, stage: int, at: Coordinate, step: StepContexts) -> Work:
    """Count one step of the rank at ``at``.

    Args:
        placement: model, layout, engine.
        per_node: devices of a node.
        own: what the rank multiplies (``plan.products.held``). stage: its pipeline stage.
        step: what runs in the step.
    """
    whole, parts = step.whole, step.parts
    groups = Groups(placement, per_node, at)
    kernels: list[Kernel] = []
    messages: list[Message] = []
    last = len(placement.stages) - 1
    ends = embedding_ops(whole, own.ends) if stage == 0 else stage_hand_off(whole, "recv", stage - 1)
    tail = head_ops(placement, whole, own.ends, step.sampled) if stage == last else stage_hand_off(whole, "send", stage)
    _add([*ends, *tail], 1, 0, False, groups, kernels, messages)
    spread = placement.cuts.grid.ep > 1
    launches, expert_launches, quantizing, passes = 4.0, 0.0, 0.0, 0.0
    quantization = placement.spec.quantization
    block = quantization is not None and quantization.block is not None
    for kind, count in kinds_of(own):
        held = max((p.experts for p in kind.products if p.role == "expert"), default=0)
        ops = layer_ops(whole, kind)
        if len(parts) > 1:
            ops = [op for op in ops if op.op not in _CORES]
            ops = [*ops, *(op for part in parts for op in layer_ops(part, kind) if op.op in _CORES)]
        _add(ops, count, held, spread, groups, kernels, messages)
        of_layer = launches_of(kind)
        launches += of_layer * count
        topk = 0
        if kind.layer.moe is not None:
            expert_launches += LAUNCHES["moe"] * count
            of_layer, topk = of_layer + LAUNCHES["moe"], kind.layer.moe.topk
        quantizing += quantizing_of(kind, block) * count
        passes += count * (2 * of_layer + 4 * topk) * whole.held_tokens * whole.hidden * DTYPE_BYTES[whole.dtype]
    return Work(
        kernels=tuple(kernels),
        messages=tuple(messages),
        launches=launches,
        expert_launches=expert_launches,
        quantizing=quantizing,
        passes_bytes=passes,
        requests=step.decode,
    )


_CORES = frozenset({"attention", "recurrent"})


def _part(op: Op, kind: str) -> str:
    if kind == "experts":
        return "experts"
    if kind == "attention" or op.op == "recurrent":
        return "attention"
    return "weights" if kind == "dense" else "other"


def work_of(op: Op, count: int, held: int, spread: bool, groups: Groups) -> Kernel | Message:
    """An op as work, ``count`` times.

    Args:
        op: of the ledger, no mark. count: how often the step runs it.
        held: experts on the rank; 0 where a model stores them as one product (DBRX). spread: on several ranks.
        groups: of the rank.
    """
    if op.group is not None:
        return Message(op.op, groups.of(op.group), op.payload, count * op.repeats)
    kind = shape_class(op)
    experts = op.shapes[1][0] if kind == "experts" and held else 0
    return Kernel(
        kind,
        op.dtype,
        op.payload,
        op.flops,
        op_width(op),
        experts,
        held if experts else 0,
        op.shapes[0][0] / experts if experts else 0.0,
        spread,
        _part(op, kind),
        count * op.repeats,
        op_outputs(op),
    )


def _add(
    ops: Iterable[Op],
    count: int,
    held: int,
    spread: bool,
    groups: Groups,
    kernels: list[Kernel],
    messages: list[Message],
) -> None:
    for op in ops:
        if op.op == "mark":
            continue
        found = work_of(op, count, held, spread, groups)
        if isinstance(found, Message):
            messages.append(found)
        else:
            kernels.append(found)
