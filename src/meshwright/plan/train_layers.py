"""Bytes that one layer saves for its backward, one micro-batch, tensor by tensor.

Legend: T tokens of a micro-batch on one rank of the cp group (mbs x seq / cp), R tokens outside the tensor
parallel region (T / tp with sequence parallelism, else T), h hidden, a and g query and key heads of the rank, d head
width, f MLP width of the rank. Sources: Korthikanti et al. (arXiv 2205.05198) for the shapes; what Transformer
Engine's and Megatron-LM's modules save (``transformer_engine/pytorch/module/layernorm_linear.py``,
``megatron/core/transformer``), checked on the golden memory values of Megatron-LM's functional tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.plan.train_engine import TrainEngine
from meshwright.specs.dtypes import size_bytes
from meshwright.specs.layout import Layout
from meshwright.specs.model import Attention, Layer, Mlp, Moe, Recurrent
from meshwright.specs.workload import Train

Saved = dict[str, int]


@dataclass(frozen=True, slots=True)
class Shape:
    """Token counts of one micro-batch on one rank, and what every layer shares.

    Attributes:
        batch: sequences. tokens: T. rows: R. hidden: h.
        tp, cp: degrees. width: bytes of an activation element.
        dropout, bias, qk_norm, rms, rotary: whether the model (or the run) has them.
    """

    batch: int
    seq: int
    tokens: int
    rows: int
    hidden: int
    tp: int
    cp: int
    width: int
    dropout: bool
    qk_norm: bool
    rms: bool
    rotary: bool
    attention: str
    engine: TrainEngine

    @property
    def linear_width(self) -> int:
        """Bytes of a saved input of a linear layer."""
        return 1 if self.engine.fp8 else self.width


def shape_of(
    hidden: int, layout: Layout, work: Train, engine: TrainEngine, *, qk_norm: bool, rms: bool, rotary: bool
) -> Shape:
    """Token counts of a layout (sequence split evenly over cp, and over tp with sequence parallelism)."""
    tokens = layout.micro_batch * work.seq // layout.cp
    sp = layout.sp and layout.tp > 1
    return Shape(
        batch=layout.micro_batch,
        seq=work.seq,
        tokens=tokens,
        rows=tokens // layout.tp if sp else tokens,
        hidden=hidden,
        tp=layout.tp,
        cp=layout.cp,
        width=size_bytes("bf16") if work.param_dtype != "f32" else 4,
        dropout=work.dropout > 0,
        qk_norm=qk_norm,
        rms=rms,
        rotary=rotary,
        attention=engine.attention or work.attention,
        engine=engine,
    )


def _cut(units: int, degree: int) -> int:
    return -(-units // degree)


def norm_saved(s: Shape) -> int:
    """Statistics of one norm: mean and reciprocal deviation in fp32 (RMSNorm: one)."""
    return (4 if s.rms else 8) * s.rows


def core_attention(a: Attention, s: Shape) -> Saved:
    """What the attention core saves besides query, key, value and its output.

    Flash keeps the logarithm of the softmax sum (fp32, T x heads); the unfused core keeps the softmax, and with
    dropout its mask (one byte) and its output.
    """
    heads = _cut(a.heads, s.tp)
    if s.attention in {"flash", "cudnn"}:
        extra = 0
        if s.attention == "cudnn":
            extra = s.width * s.tokens * heads * a.v_head_dim
        return {"softmax statistics": 4 * s.tokens * heads, "cudnn output": extra}
    scores = s.batch * heads * (s.seq // s.cp) * s.seq
    kept = s.engine.score_bytes or s.width + ((1 + s.width) if s.dropout else 0)
    return {"scores": kept * scores}


def attention_saved(a: Attention, s: Shape) -> tuple[Saved, Saved]:
    """``(kept with every recompute but full, core)`` of one attention block, its norm and residual included."""
    w, t = s.width, s.tokens
    heads = _cut(a.heads, s.tp)
    context = w * t * heads * a.v_head_dim
    saved: Saved = {
        "block input": w * s.rows * s.hidden,
        "norm output": s.linear_width * s.rows * s.hidden,
        "norm statistics": norm_saved(s),
        "context": context,
    }
    if s.dropout:
        saved["dropout mask"] = s.rows * s.hidden
    if a.kind == "mla":
        saved |= _mla_saved(a, s, heads)
    else:
        kv = _cut(a.kv_heads, s.tp)
        saved["query, key, value"] = w * t * (heads * a.head_dim + kv * (a.head_dim + a.v_head_dim))
        if s.rotary and s.engine.rope_copies:
            saved["rotated query, key"] = w * t * (heads + kv) * a.head_dim
        if s.cp > 1:
            saved["key, value of the ring"] = w * t * kv * (a.head_dim + a.v_head_dim)
        if s.qk_norm:
            saved["query, key before norm"] = w * t * (heads + kv) * a.head_dim
    if a.gated:
        saved["attention gate"] = 2 * context
    return saved, core_attention(a, s)


def _mla_saved(a: Attention, s: Shape, heads: int) -> Saved:
    w, t = s.width, s.tokens
    nope = a.head_dim - a.rope_head_dim
    saved: Saved = {
        "query, key, value": w * t * heads * (2 * a.head_dim + a.v_head_dim),
        "key before rotary": w * t * heads * nope,
    }
    if a.q_lora_rank:
        saved["query latent"] = 2 * w * s.rows * a.q_lora_rank
    saved["key latent"] = w * s.rows * (2 * a.kv_lora_rank + a.rope_head_dim)
    return saved


def mlp_saved(m: Mlp, s: Shape, *, norm: bool = True) -> Saved:
    """One dense feed-forward block with its norm and residual: input, norm output, hidden before and after act.

    Without a fused SwiGLU (``torch`` kernels) the activated gate is one tensor more.
    """
    f = _cut(m.intermediate, s.tp)
    before = s.width * s.tokens * f * (2 if m.gated else 1)
    saved: Saved = {"hidden before activation": before, "hidden": s.linear_width * s.tokens * f}
    if m.gated and s.engine.kernels == "torch":
        saved["activated gate"] = s.width * s.tokens * f
    if norm:
        saved["block input"] = s.width * s.rows * s.hidden
        saved["norm output"] = s.linear_width * s.rows * s.hidden
        saved["norm statistics"] = norm_saved(s)
        if s.dropout:
            saved["dropout mask"] = s.rows * s.hidden
    return saved


def moe_saved(m: Moe, s: Shape, layout: Layout) -> Saved:
    """One mixture of experts, tokens spread evenly: routed tokens of the rank's experts, router, shared experts.

    The rank's experts see R k tokens for each member of the expert tensor group (etp): with etp = tp and sequence
    parallelism that is T k, every one cut to f / etp.
    """
    etp = layout.etp if layout.etp is not None else layout.tp
    routed = s.rows * m.topk * etp
    if not (layout.sp and layout.tp > 1) and layout.tp > 1:
        routed = s.tokens * m.topk * etp // layout.tp
    f = _cut(m.intermediate, etp)
    wide = m.latent or s.hidden
    saved: Saved = {
        "block input": s.width * s.rows * s.hidden,
        "norm output": s.width * s.rows * s.hidden,
        "norm statistics": norm_saved(s),
        "expert input": s.linear_width * routed * wide,
        "expert hidden before activation": s.width * routed * f * (2 if m.gated else 1),
        "expert hidden": s.linear_width * routed * f,
        "router": (4 if s.engine.router_fp32 else s.width) * s.rows * m.experts * 2,
    }
    if m.gated and s.engine.kernels == "torch":
        saved["activated gate"] = s.width * routed * f
    if not s.engine.permute_fusion:
        saved["expert output"] = s.width * routed * wide
    if s.dropout:
        saved["dropout mask"] = s.rows * s.hidden
    if s.engine.dispatcher == "allgather":
        saved["gathered tokens"] = s.width * s.rows * s.hidden * layout.ep * etp
    if m.shared_intermediate:
        shared = mlp_saved(Mlp(m.shared_intermediate, m.gated), s, norm=False)
        saved |= {f"shared {name}": size for name, size in shared.items()}
    return saved


def recurrent_saved(r: Recurrent, s: Shape) -> Saved:
    """One Mamba-2 block (also used for other linear attention): projections, convolution, scan, gated norm.

    The fused kernel keeps the input projection (z, x, B, C, dt) and recomputes the convolution and the scan's
    intermediate (``mamba_split_conv1d_scan_combined``); the states at chunk borders stay.
    """
    heads, groups = _cut(r.heads, s.tp), _cut(r.groups, s.tp)
    inner = heads * r.head_dim
    projected = 2 * inner + 2 * groups * r.state_dim + heads
    masked: Saved = {"dropout mask": s.rows * s.hidden} if s.dropout else {}
    return masked | {
        "block input": s.width * s.rows * s.hidden,
        "norm output": s.linear_width * s.rows * s.hidden,
        "norm statistics": norm_saved(s),
        "projection": s.width * s.tokens * projected,
        "scan output and its copy in token order": 2 * s.width * s.tokens * inner,
        "out projection input": s.width * s.tokens * inner,
    }


def layer_saved(layer: Layer, s: Shape, layout: Layout) -> Mapping[str, Saved]:
    """Everything one layer saves, by block: ``attention``, ``core``, ``recurrent``, ``mlp``, ``moe``."""
    blocks: dict[str, Saved] = {}
    for mixer in layer.mixers:
        if isinstance(mixer, Attention):
            blocks["attention"], blocks["core"] = attention_saved(mixer, s)
        else:
            blocks["recurrent"] = recurrent_saved(mixer, s)
    for ffn in layer.ffns:
        if isinstance(ffn, Mlp):
            blocks["mlp"] = mlp_saved(ffn, s)
        else:
            blocks["moe"] = moe_saved(ffn, s, layout)
    return blocks


def every_second_product(layer: Layer, s: Shape) -> int:
    """Bytes that torchtitan's per-operator checkpointing keeps of a layer: its input, the attention output, and the
    1st, 3rd, 5th and 7th matrix product in order of execution (query, value, gate, down; up to tensor parallel cuts).

    Source: torchtitan ``parallelize_llama.py`` of 2024-12, ``_save_list`` and the counter of ``aten.mm``.
    """  # fmt: skip
    kept = s.rows * s.hidden
    if (a := layer.attention) is not None:
        heads, groups = _cut(a.heads, s.tp), _cut(a.kv_heads, s.tp)
        kept += s.tokens * (heads * (a.head_dim + a.v_head_dim) + groups * a.v_head_dim)
    if (m := layer.mlp) is not None:
        kept += s.tokens * _cut(m.intermediate, s.tp) + s.rows * s.hidden
    return s.width * kept


def backward_extra(layer: Layer, s: Shape) -> int:
    """Gradients and gathered tensors that are alive beside a layer's saved tensors while its backward runs.

    The gradients of the MLP's hidden tensors; with sequence parallelism the gathered inputs of both blocks, the
    gathered output gradient and the unreduced input gradients of gate and up (T h each; three of the five with
    asynchronous TP).
    """
    extra = 0
    if (m := layer.mlp) is not None:
        extra = s.width * s.tokens * _cut(m.intermediate, s.tp) * (2 if m.gated else 1)
    if s.rows < s.tokens:
        extra += (3 if s.engine.async_tp else 5) * s.width * s.tokens * s.hidden
    return extra


def total(blocks: Mapping[str, Saved]) -> int:
    """Bytes of all blocks."""
    return sum(sum(saved.values()) for saved in blocks.values())
