"""Small blocks that several hybrid families share: experts, ends with other names, layer-type lists."""

from __future__ import annotations

from meshwright.errors import InputError
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.model import Attention


def expert_tensors(
    t: Table,
    hidden: int,
    intermediate: int,
    experts: int,
    layers: tuple[int, ...],
    *,
    name: str,
    leaves: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
) -> None:
    """One tensor an expert and matrix under ``name.{expert}``: gate, up, down, or up, down where not gated."""
    if not layers:
        return
    inner = seg("expert_mlp", intermediate)
    ops = ("gate", "up", "down")[-len(leaves) :]
    for leaf, op in zip(leaves, ops, strict=True):
        out_dim, in_dim = (hidden, inner) if op == "down" else (inner, hidden)
        t.linear(f"{name}.{{expert}}.{leaf}", out_dim, in_dim, role="expert", op=op, layers=layers, experts=experts)


def shared_tensors(
    t: Table,
    hidden: int,
    intermediate: int,
    layers: tuple[int, ...],
    *,
    name: str,
    leaves: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
    bias: bool = False,
) -> None:
    """The shared expert of a layer under ``name``."""
    if not layers:
        return
    inner = seg("shared_mlp", intermediate)
    ops = ("gate", "up", "down")[-len(leaves) :]
    for leaf, op in zip(leaves, ops, strict=True):
        out_dim, in_dim = (hidden, inner) if op == "down" else (inner, hidden)
        t.linear(f"{name}.{leaf}", out_dim, in_dim, role="shared_expert", op=op, layers=layers, bias=bias)


def text_ends(
    t: Table, hidden: int, vocab: int, tied: bool, *, embed: str = "model.embed_tokens", norm: str = "model.norm"
) -> None:
    """Embedding, final norm and head where one of them has another name than usual."""
    rows = seg("vocab", vocab)
    t.add(f"{embed}.weight", rows, hidden, role="embedding")
    t.norm(norm, hidden)
    if not tied:
        t.add("lm_head.weight", rows, hidden, role="head", op="head")


def layer_types(f: Fields, n: int, *names: str, known: dict[str, str]) -> tuple[str, ...]:
    """The list of layer types, each mapped by ``known`` to our own word; empty when the list is absent.

    Raises:
        InputError: an entry is not in ``known``, or the list has not ``n`` entries.
    """
    listed = f.texts(*names, length=n)
    for item in listed:
        if item not in known:
            raise InputError(f"{f.where}: layer type {item[:30]!r} is unknown; known: {', '.join(sorted(known))}")
    return tuple(known[item] for item in listed)


def of(types: tuple[str, ...], *wanted: str) -> tuple[int, ...]:
    """Indices of the layers whose type is one of ``wanted``."""
    return tuple(i for i, kind in enumerate(types) if kind in wanted)


def qkvo_tensors(
    t: Table,
    hidden: int,
    a: Attention,
    layers: tuple[int, ...],
    *,
    name: str = "self_attn",
    bias: bool = False,
    out_bias: bool = False,
    out: str = "o_proj",
    value: bool = True,
) -> None:
    """Separate projections under ``name``; a gated attention's q also makes the gate, head by head.

    ``value=False``: no value projection is stored (the keys are the values).
    """
    if not layers:
        return
    dot = f"{name}." if name else ""
    q, kv = seg("heads", a.heads, a.head_dim), seg("kv_heads", a.kv_heads, a.head_dim)
    wide = seg("heads", a.heads, 2 * a.head_dim) if a.gated else q
    t.linear(f"{dot}q_proj", wide, hidden, role="attention", op="q", layers=layers, bias=bias)
    t.linear(f"{dot}k_proj", kv, hidden, role="attention", op="k", layers=layers, bias=bias)
    if value:
        t.linear(f"{dot}v_proj", kv, hidden, role="attention", op="v", layers=layers, bias=bias)
    t.linear(f"{dot}{out}", hidden, q, role="attention", op="o", layers=layers, bias=out_bias)


def mlp3_tensors(
    t: Table,
    hidden: int,
    intermediate: int,
    layers: tuple[int, ...],
    *,
    name: str,
    leaves: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
    bias: bool = False,
) -> None:
    """A dense feed-forward block under ``name``: gate, up, down, or up, down where not gated."""
    if not layers:
        return
    inner = seg("mlp", intermediate)
    ops = ("gate", "up", "down")[-len(leaves) :]
    for leaf, op in zip(leaves, ops, strict=True):
        out_dim, in_dim = (hidden, inner) if op == "down" else (inner, hidden)
        t.linear(f"{name}.{leaf}", out_dim, in_dim, role="mlp", op=op, layers=layers, bias=bias)
