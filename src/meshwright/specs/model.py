"""ModelSpec: what is split. Layer structure for the arithmetic, tensor table for the bytes.

All sizes are those of the whole model, before any split.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from meshwright.specs.tensors import Section, TensorFamily


@dataclass(frozen=True, slots=True)
class Indexer:
    """Token selector of sparse attention (DeepSeek-V3.2): scores every cached token, keeps ``topk``.

    Without heads (0) the layer has no selector and no keys of its own: it reuses the choice of the nearest layer
    before it that has (GLM-5.2).
    """

    heads: int
    head_dim: int
    topk: int


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention of one layer.

    Attributes:
        kind: ``gqa`` (also MHA and MQA) or ``mla``.
        heads, kv_heads: query heads, and heads of the cache (MLA caches one latent vector: 1).
        head_dim: width of a query and key head. MLA: nope + rope.
        v_head_dim: width of a value head (0: values are not cached, they are the keys).
        window: sliding window in tokens, or None.
        chunk: chunked local attention in tokens (Llama 4), or None.
        q_lora_rank, kv_lora_rank, rope_head_dim: MLA ranks; 0 where absent.
        indexer: sparse selector, or None.
        compress_ratio: tokens folded into one cached entry (DeepSeek-V4); 1 otherwise.
        shares_kv_with: layer whose cache is read instead of an own one (Gemma 3n, Gemma 4), or None.
        sinks: one learned sink logit a head (GPT-OSS).
        gated: an output gate of the same width as the output multiplies it.
        causal: False for encoders.
    """

    kind: Literal["gqa", "mla"]
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None
    chunk: int | None = None
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_head_dim: int = 0
    indexer: Indexer | None = None
    compress_ratio: int = 1
    shares_kv_with: int | None = None
    sinks: bool = False
    gated: bool = False
    causal: bool = True

    @property
    def cached_values_per_token(self) -> int:
        """Elements that the cache of this layer holds for one token, on one full copy (no indexer)."""
        if self.shares_kv_with is not None:
            return 0
        if self.kind == "mla":
            return self.kv_lora_rank + self.rope_head_dim
        return self.kv_heads * (self.head_dim + self.v_head_dim)

    @property
    def reach(self) -> int | None:
        """Tokens that a query can see back, or None when all of them."""
        return self.window if self.window is not None else self.chunk


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Linear attention or state-space mixer of one layer: a fixed state a sequence, no growing cache.

    Attributes:
        kind: ``mamba2``, ``mamba1``, ``gated_delta_net``, ``kda``, ``lightning``, ``rwkv``, ``short_conv``.
        heads: value heads; the state is ``heads x head_dim x state_dim``.
        head_dim: width of a value head.
        state_dim: width of the key side of the state.
        groups: key heads or B/C groups.
        conv_kernel: taps of the short convolution (0: none).
        conv_channels: channels it runs over.
        state_dtype: element type of the recurrent state, convolution state is in the model's.
    """

    kind: str
    heads: int
    head_dim: int
    state_dim: int
    groups: int = 1
    conv_kernel: int = 0
    conv_channels: int = 0
    state_dtype: str = "f32"

    @property
    def state_values(self) -> int:
        """Elements of the recurrent state of one sequence."""
        return self.heads * self.head_dim * self.state_dim

    @property
    def conv_values(self) -> int:
        """Elements of the convolution state of one sequence."""
        return max(0, self.conv_kernel - 1) * self.conv_channels


@dataclass(frozen=True, slots=True)
class Mlp:
    """Dense feed-forward block. ``gated``: SwiGLU or GeGLU, three matrices instead of two."""

    intermediate: int
    gated: bool = True


@dataclass(frozen=True, slots=True)
class Moe:
    """Mixture of experts.

    Attributes:
        experts, topk: routed experts and how many a token visits.
        intermediate: width of one routed expert.
        shared_intermediate: total width of the shared experts, 0 where there are none.
        gated: three matrices an expert instead of two.
        latent: width that tokens are projected to before the experts (Nemotron 3 Super, Kimi K3); 0: none.
        groups, topk_groups: group-limited routing (DeepSeek); 1 where absent.
    """

    experts: int
    topk: int
    intermediate: int
    shared_intermediate: int = 0
    gated: bool = True
    latent: int = 0
    groups: int = 1
    topk_groups: int = 1


Mixer = Attention | Recurrent
Ffn = Mlp | Moe


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: the token mixers (two where they run side by side) and the feed-forward blocks."""

    mixers: tuple[Mixer, ...]
    ffns: tuple[Ffn, ...]

    @property
    def attention(self) -> Attention | None:
        """The softmax attention of the layer, if it has one."""
        return next((m for m in self.mixers if isinstance(m, Attention)), None)

    @property
    def recurrent(self) -> Recurrent | None:
        """The recurrent mixer of the layer, if it has one."""
        return next((m for m in self.mixers if isinstance(m, Recurrent)), None)

    @property
    def moe(self) -> Moe | None:
        """The mixture of experts of the layer, if it has one."""
        return next((f for f in self.ffns if isinstance(f, Moe)), None)

    @property
    def mlp(self) -> Mlp | None:
        """The dense feed-forward block of the layer, if it has one."""
        return next((f for f in self.ffns if isinstance(f, Mlp)), None)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the checkpoint is quantized.

    Attributes:
        method: ``fp8``, ``gptq``, ``awq``, ``mxfp4``, ``nvfp4``, ``compressed-tensors``, ``modelopt``, ...
        weight_bits: bits of a quantized weight.
        group: elements of the input dimension that share a scale (0: per tensor or per channel).
        block: (out, in) block of two-dimensional scales, or None.
        kv_dtype: cache dtype that the checkpoint asks for, or None.
    """

    method: str
    weight_bits: int
    group: int = 0
    block: tuple[int, int] | None = None
    kv_dtype: str | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as its configuration describes it.

    Attributes:
        name: what the user called it.
        architecture: class name of ``architectures`` (or the model type where absent).
        model_type: ``model_type`` of the text part.
        hidden: model width.
        vocab: rows of the embedding as stored.
        layers: decoder layers in order.
        mtp_layers: multi-token-prediction layers, not part of a plain forward.
        families: the tensor table.
        tied: whether the head reuses the embedding (then no head tensor is stored).
        dtype: compute dtype of the configuration.
        max_positions: longest sequence of the configuration.
        quantization: or None.
        learned_positions: rows of a learned position table, 0 with rotary or none.
        bias, norm_bias: linear layers and norms carry biases (activation memory depends on it little).
        assumptions: sentences naming what was assumed where the configuration is silent or unknown.
        source: file, hub id or atlas entry it was read from.
        heads, kv_heads: of the first softmax attention, 0 without one.
        moe: the first mixture of experts, or None for a dense model.
        patterns: for every layer the number of its pattern: layers of one pattern are equal and have the same families.
        pattern_families: for every pattern the indices in ``families``.
    """

    name: str
    architecture: str
    model_type: str
    hidden: int
    vocab: int
    layers: tuple[Layer, ...]
    families: tuple[TensorFamily, ...]
    tied: bool
    dtype: str
    max_positions: int
    mtp_layers: tuple[Layer, ...] = ()
    quantization: Quantization | None = None
    learned_positions: int = 0
    assumptions: tuple[str, ...] = ()
    source: str = ""
    heads: int = field(init=False, compare=False)
    kv_heads: int = field(init=False, compare=False)
    moe: Moe | None = field(init=False, compare=False)
    patterns: tuple[int, ...] = field(init=False, compare=False, repr=False)
    pattern_families: tuple[tuple[int, ...], ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        seen: dict[Layer, Layer] = {}
        object.__setattr__(self, "layers", tuple(seen.setdefault(layer, layer) for layer in self.layers))
        first = next((a for layer in seen if (a := layer.attention)), None)
        object.__setattr__(self, "heads", first.heads if first else 0)
        object.__setattr__(self, "kv_heads", first.kv_heads if first else 0)
        object.__setattr__(self, "moe", next((m for layer in seen if (m := layer.moe)), None))
        patterns, families = _patterns(self.layers, self.families)
        object.__setattr__(self, "patterns", patterns)
        object.__setattr__(self, "pattern_families", families)

    @property
    def mla(self) -> bool:
        """Whether the cache holds MLA latents."""
        return any((a := layer.attention) and a.kind == "mla" for layer in self.layers)

    def select(self, *sections: Section) -> Iterable[TensorFamily]:
        """The families of the given sections (all when none is given)."""
        return (f for f in self.families if not sections or f.section in sections)

    def weight_bytes(self, *sections: Section) -> int:
        """Bytes of the stored tensors of the given sections (all when none is given)."""
        return sum(f.total_bytes for f in self.select(*sections))

    def parameters(self, *sections: Section) -> int:
        """Logical parameters of the given sections (all when none is given); scales do not count."""
        return sum(f.parameters for f in self.select(*sections))


def _patterns(
    layers: tuple[Layer, ...], families: tuple[TensorFamily, ...]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Patterns of decoder layers that are one object when equal; see ``ModelSpec``."""
    members: list[list[int]] = [[] for _ in layers]
    for number, family in enumerate(families):
        if family.section == "decoder":
            for layer in family.layers:
                if layer < len(members):
                    members[layer].append(number)
    known: dict[tuple[int, ...], int] = {}
    patterns = tuple(known.setdefault((id(at), *of), len(known)) for at, of in zip(layers, members, strict=True))
    return patterns, tuple(key[1:] for key in known)


def active_parameters(spec: ModelSpec) -> int:
    """Parameters that one token uses in a plain forward: the routed experts it visits and all the rest.

    Embedding and head count in full, as in published figures (DeepSeek-V3: 37 B of 671 B). Tensors whose first
    dimension runs over the experts count as many of them as a token visits.
    """
    total = 0
    for family in spec.select("decoder"):
        fused = next((s.units for s in family.dims[0] if s.label == "experts"), 0) if family.dims else 0
        stored = family.experts or fused
        if not stored:
            total += family.parameters
            continue
        one = family.numel * family.elements * max(1, family.experts) // stored
        for layer in family.layers:
            moe = spec.layers[layer].moe
            total += one * (min(moe.topk, stored) if moe else stored)
    return total
