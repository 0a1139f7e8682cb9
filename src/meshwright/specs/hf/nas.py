"""DeciLM (Llama-Nemotron): every layer has its own attention and MLP, or one matrix instead, or neither."""

from __future__ import annotations

from collections import defaultdict

from meshwright.errors import InputError
from meshwright.specs.hf.dense import attention_tensors, ends, mlp_tensors
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.registry import Parts, architecture
from meshwright.specs.hf.table import Table
from meshwright.specs.model import Attention, Ffn, Layer, Mixer, Mlp


def width_of(hidden: int, multiple: float) -> int:
    """MLP width of ``ffn_mult``: two thirds of it, up to the next multiple of 256.

    Source: ``_ffn_mult_to_intermediate_size`` of the published ``modeling_decilm.py``.
    """
    size = int(2 * multiple * hidden / 3)
    return size if size % 256 == 0 else size + 256 - size % 256


def _blocks(f: Fields, n: int) -> list[Fields]:
    _, value = f.get("block_configs")
    if not isinstance(value, list) or len(value) != n or not all(isinstance(b, dict) for b in value):
        found = len(value) if isinstance(value, list) else type(value).__name__
        raise InputError(f"{f.where}: block_configs is {found}; a list of {n} objects is needed, one a layer")
    return [Fields(b, f"{f.where}: block_configs[{i}]", f.assumed) for i, b in enumerate(value)]


def _multiple(block: Fields) -> float:
    _, value = block.get("ffn_mult")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1024:
        raise InputError(f"{block.where}: ffn_mult is {str(value)[:40]!r}; a number above 0 is needed")
    return float(value)


@architecture("DeciLMForCausalLM", "nemotron-nas", "deci")
def decilm(f: Fields, dtype: str) -> Parts:
    """Llama-Nemotron Super and Ultra: ``block_configs`` gives each layer's KV groups and MLP width."""
    hidden, vocab, n = f.integer("hidden_size"), f.integer("vocab_size"), f.layers()
    heads = f.integer("num_attention_heads", high=1 << 14)
    width = f.integer("head_dim", default=max(1, hidden // heads))
    attentions: dict[Attention, list[int]] = defaultdict(list)
    mlps: dict[int, list[int]] = defaultdict(list)
    squares: dict[str, list[int]] = defaultdict(list)
    layers: list[Layer] = []
    for i, block in enumerate(_blocks(f, n)):
        attention, ffn = block.sub("attention"), block.sub("ffn")
        mixers: tuple[Mixer, ...] = ()
        ffns: tuple[Ffn, ...] = ()
        if attention.flag("replace_with_linear"):
            squares["self_attn.linear_attn"].append(i)
        elif not attention.flag("no_op"):
            a = _attention(attention, heads, width)
            attentions[a].append(i)
            mixers = (a,)
        if ffn.flag("replace_with_linear"):
            squares["mlp.linear_mlp"].append(i)
        elif not ffn.flag("no_op"):
            inter = ffn.maybe("intermediate_size") or width_of(hidden, _multiple(ffn))
            mlps[inter].append(i)
            ffns = (Mlp(inter),)
        layers.append(Layer(mixers, ffns))
    t = Table(dtype)
    tied = f.flag("tie_word_embeddings")
    ends(t, hidden, vocab, tied)
    bias = f.flag("attention_bias")
    for a, where in attentions.items():
        attention_tensors(t, hidden, a, tuple(where), bias=bias, out_bias=bias)
    for inter, where in mlps.items():
        mlp_tensors(t, hidden, inter, tuple(where), bias=f.flag("mlp_bias"))
    for name, where in squares.items():
        role = "attention" if name.startswith("self_attn") else "mlp"
        t.linear(name, hidden, hidden, role=role, op="linear", layers=tuple(where))  # type: ignore[arg-type]
    _norms(t, hidden, layers, squares)
    positions = f.integer("max_position_embeddings", default=2048)
    return Parts(hidden, vocab, tuple(layers), tuple(t.families), tied, positions)


def _attention(block: Fields, heads: int, width: int) -> Attention:
    group = block.integer("n_heads_in_group", default=1, high=1 << 14)
    if heads % group:
        raise InputError(f"{block.where}: {heads} heads are not a multiple of n_heads_in_group {group}")
    window = block.maybe("window_length")
    return Attention("gqa", heads, heads // group, width, width, window=window)


def _norms(t: Table, hidden: int, layers: list[Layer], squares: dict[str, list[int]]) -> None:
    """A block that does nothing has no norm before it."""
    before = [i for i, x in enumerate(layers) if x.mixers or i in squares["self_attn.linear_attn"]]
    after = [i for i, x in enumerate(layers) if x.ffns or i in squares["mlp.linear_mlp"]]
    for name, where in (("input_layernorm", before), ("post_attention_layernorm", after)):
        if where:
            t.norm(name, hidden, layers=tuple(where))
