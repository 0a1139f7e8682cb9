"""State-space models: Mamba, Mamba-2 and Falcon-Mamba, and the mixer tensors that hybrids share.

Mamba (Gu and Dao 2023) and Mamba-2 (Dao and Gu 2024). One projection makes everything a mixer needs; Mamba-2 lays it
out as gate, x, B, C, dt, and its short convolution runs over x, B and C.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from meshwright.specs.dtypes import canonical
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.registry import Parts, architecture
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Layer, Recurrent
from meshwright.specs.tensors import Dim


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Sizes of a Mamba-2 mixer: ``heads`` of ``head_dim``, ``groups`` of B and C with ``state`` columns."""

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int
    conv_bias: bool
    proj_bias: bool
    norm: bool = True

    @property
    def inner(self) -> int:
        """Channels of x."""
        return self.heads * self.head_dim

    def recurrent(self, state_dtype: str) -> Recurrent:
        """State of one sequence: heads x head_dim x state, and kernel - 1 columns of x, B and C."""
        channels = self.inner + 2 * self.groups * self.state
        return Recurrent(
            "mamba2", self.heads, self.head_dim, self.state, self.groups, self.kernel, channels, state_dtype
        )


def taps(kernel: int) -> tuple[Dim, Dim]:
    """The two trailing dimensions of a depthwise convolution's weight: one input channel, ``kernel`` taps."""
    return (seg("fixed", 1),), (seg("fixed", kernel),)


def ssm_dtype(f: Fields, default: str) -> str:
    """Element type of the recurrent state: what the configuration says, else ``default``.

    vLLM keeps the state in the model's dtype where neither the flag nor the configuration asks for another
    (``MambaStateDtypeCalculator``); Nemotron-H defaults to float32 (``NemotronHForCausalLMConfig``).
    """
    text = f.text("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
    return canonical(text) if text and text != "auto" else default


def mamba2_tensors(
    t: Table, name: str, hidden: int, m: Mamba2, layers: tuple[int, ...], *, out_bias: bool | None = None
) -> None:
    """Tensors of a Mamba-2 mixer under ``name`` in the given layers; ``out_bias``: None as ``m.proj_bias``."""
    if not layers:
        return
    x = seg("ssm_heads", m.heads, m.head_dim)
    bc = seg("ssm_groups", m.groups, m.state)
    one = seg("ssm_heads", m.heads)
    base = f"{t.prefix}{name}."
    for leaf in ("A_log", "D", "dt_bias"):
        t.add(base + leaf, one, role="recurrent", layers=layers)
    t.add(base + "conv1d.weight", (x, bc, bc), *taps(m.kernel), role="recurrent", layers=layers)
    if m.conv_bias:
        t.add(base + "conv1d.bias", (x, bc, bc), role="recurrent", part="bias", layers=layers)
    t.linear(f"{name}.in_proj", (x, x, bc, bc, one), hidden, role="recurrent", op="in", layers=layers, bias=m.proj_bias)
    if m.norm:
        t.norm(f"{name}.norm", x, layers=layers, role="recurrent")
    out = m.proj_bias if out_bias is None else out_bias
    t.linear(f"{name}.out_proj", hidden, x, role="recurrent", op="out", layers=layers, bias=out)


@dataclass(frozen=True, slots=True)
class Mamba1:
    """Sizes of a Mamba mixer: ``inner`` channels with ``state`` columns each, time steps of rank ``dt_rank``."""

    inner: int
    state: int
    dt_rank: int
    kernel: int
    conv_bias: bool
    proj_bias: bool
    norms: bool = False

    def recurrent(self, state_dtype: str) -> Recurrent:
        """State of one sequence: inner x state, and kernel - 1 columns of the inner channels."""
        return Recurrent("mamba1", self.inner, 1, self.state, 1, self.kernel, self.inner, state_dtype)


def mamba1_tensors(t: Table, name: str, hidden: int, m: Mamba1, layers: tuple[int, ...]) -> None:
    """Tensors of a Mamba mixer under ``name``; ``norms``: Jamba's norms over dt, B and C."""
    if not layers:
        return
    x, state = seg("ssm_heads", m.inner), seg("fixed", m.state)
    base = f"{t.prefix}{name}."
    t.add(base + "A_log", x, state, role="recurrent", layers=layers)
    t.add(base + "D", x, role="recurrent", layers=layers)
    t.add(base + "conv1d.weight", x, *taps(m.kernel), role="recurrent", layers=layers)
    if m.conv_bias:
        t.add(base + "conv1d.bias", x, role="recurrent", part="bias", layers=layers)
    if m.norms:
        for leaf, size in (("dt", m.dt_rank), ("b", m.state), ("c", m.state)):
            t.norm(f"{name}.{leaf}_layernorm", seg("fixed", size), layers=layers, role="recurrent")
    t.linear(f"{name}.in_proj", (x, x), hidden, role="recurrent", op="in", layers=layers, bias=m.proj_bias)
    ranks = (seg("fixed", m.dt_rank), state, state)
    t.linear(f"{name}.x_proj", ranks, x, role="recurrent", op="x", layers=layers)
    t.linear(f"{name}.dt_proj", x, seg("fixed", m.dt_rank), role="recurrent", op="dt", layers=layers, bias=True)
    t.linear(f"{name}.out_proj", hidden, x, role="recurrent", op="out", layers=layers, bias=m.proj_bias)


def dt_rank(f: Fields, hidden: int, *names: str) -> int:
    """Rank of the time step: a number, or ``auto`` for hidden / 16 rounded up."""
    _, value = f.get(*names)
    return ceil(hidden / 16) if value is None or value == "auto" else f.integer(*names)


def backbone_ends(t: Table, hidden: int, vocab: int, tied: bool, norm: str = "backbone.norm_f") -> None:
    """Embedding, final norm and head as Mamba names them."""
    rows = seg("vocab", vocab)
    t.add("backbone.embeddings.weight", rows, hidden, role="embedding")
    t.norm(norm, hidden)
    if not tied:
        t.add("lm_head.weight", rows, hidden, role="head", op="head")


@architecture("MambaForCausalLM", "mamba", "FalconMambaForCausalLM", "falcon_mamba")
def mamba(f: Fields, dtype: str) -> Parts:
    """Mamba and Falcon-Mamba (the same tensors; its extra norms have no weight)."""
    hidden, vocab, n = f.integer("hidden_size", "d_model"), f.integer("vocab_size"), f.layers("num_hidden_layers")
    inner = f.integer("intermediate_size", default=f.integer("expand", default=2) * hidden)
    m = Mamba1(
        inner,
        f.integer("state_size", default=16),
        dt_rank(f, hidden, "time_step_rank"),
        f.integer("conv_kernel", default=4),
        f.flag("use_conv_bias", default=True),
        f.flag("use_bias"),
    )
    tied = f.flag("tie_word_embeddings", default=True)
    every = tuple(range(n))
    t = Table(dtype, prefix="backbone.layers.{layer}.")
    backbone_ends(t, hidden, vocab, tied)
    mamba1_tensors(t, "mixer", hidden, m, every)
    t.norm("norm", hidden, layers=every)
    layer = Layer((m.recurrent(ssm_dtype(f, dtype)),), ())
    return Parts(hidden, vocab, (layer,) * n, tuple(t.families), tied, f.integer("max_seq_len", default=1 << 20))


@architecture("Mamba2ForCausalLM", "mamba2")
def mamba2(f: Fields, dtype: str) -> Parts:
    """Mamba-2 (also Codestral Mamba)."""
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    m = Mamba2(
        f.integer("num_heads", default=128),
        f.integer("head_dim", default=64),
        f.integer("n_groups", default=8),
        f.integer("state_size", default=128),
        f.integer("conv_kernel", default=4),
        f.flag("use_conv_bias", default=True),
        f.flag("use_bias"),
    )
    tied = f.flag("tie_word_embeddings")
    every = tuple(range(n))
    t = Table(dtype, prefix="backbone.layers.{layer}.")
    backbone_ends(t, hidden, vocab, tied)
    mamba2_tensors(t, "mixer", hidden, m, every)
    t.norm("norm", hidden, layers=every)
    layer = Layer((m.recurrent(ssm_dtype(f, dtype)),), ())
    return Parts(hidden, vocab, (layer,) * n, tuple(t.families), tied, f.integer("max_seq_len", default=1 << 20))
