"""Model arguments that describe a ModelSpec to ``pretrain_gpt.py``."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.errors import InputError
from meshwright.specs.model import Attention, Layer, Mlp, ModelSpec, Moe
from meshwright.specs.splits import splits

#: Megatron's letters of a hybrid pattern, by the blocks of a layer.
_LETTERS = {("mamba2", ""): "M", ("attention", ""): "*", ("", "mlp"): "-", ("", "moe"): "E"}


def model_words(spec: ModelSpec) -> list[str]:
    """Arguments for the dimensions of a decoder.

    Raises:
        InputError: a block that ``pretrain_gpt.py`` cannot describe by arguments.
    """
    found = splits(spec)
    pattern = "" if not found.recurrents else _pattern(spec)
    if len(found.attentions) > 1 or len(found.mlps) > 1 or len(found.moes) > 1:
        raise InputError(
            f"{spec.name} has layers of different sizes; Megatron's arguments describe one size of attention, MLP and "
            "experts"
        )
    words = ["--hybrid-layer-pattern", pattern] if pattern else ["--num-layers", str(len(spec.layers))]
    words += ["--hidden-size", str(spec.hidden)]
    if not found.attentions:
        raise InputError(f"{spec.name} has no attention layer; pretrain_gpt.py needs --num-attention-heads")
    words += _attention(spec, found.attentions[0])
    words += _ffn(spec, found.mlps, found.moes)
    words += _mamba(spec)
    words += ["--max-position-embeddings", str(spec.learned_positions or spec.max_positions or 1 << 17)]
    if not spec.learned_positions:
        words += ["--position-embedding-type", "none" if pattern else "rope"]
    if not spec.tied:
        words.append("--untie-embeddings-and-output-weights")
    if spec.mtp_layers and not pattern:
        words += ["--mtp-num-layers", str(len(spec.mtp_layers))]
    if not _biased(spec, "norm"):
        words += ["--normalization", "RMSNorm"]
    if not any(_biased(spec, role) for role in ("mlp", "expert")) and not _biased(spec, "attention", "o"):
        words.append("--disable-bias-linear")
        if _biased(spec, "attention", "q"):
            words.append("--add-qkv-bias")
    return words


def _biased(spec: ModelSpec, role: str, op: str = "") -> bool:
    return any(
        f.role == role and f.part == "bias" and (not op or f.op == op) for f in spec.families if f.section == "decoder"
    )


def _attention(spec: ModelSpec, a: Attention) -> list[str]:
    words = ["--num-attention-heads", str(a.heads)]
    if a.kind == "mla":
        words += ["--multi-latent-attention", "--kv-lora-rank", str(a.kv_lora_rank)]
        if a.q_lora_rank:
            words += ["--q-lora-rank", str(a.q_lora_rank)]
        words += ["--qk-head-dim", str(a.head_dim - a.rope_head_dim), "--qk-pos-emb-head-dim", str(a.rope_head_dim)]
        return [*words, "--v-head-dim", str(a.v_head_dim)]
    if a.kind != "gqa":
        raise InputError(f"{spec.name}: attention of kind {a.kind} cannot be described by Megatron's arguments")
    words += ["--kv-channels", str(a.head_dim)]
    if a.kv_heads != a.heads:
        words += ["--group-query-attention", "--num-query-groups", str(a.kv_heads)]
    if any("q_norm" in f.template for f in spec.families):
        words.append("--qk-layernorm")
    return words


def _ffn(spec: ModelSpec, mlps: Sequence[Mlp], moes: Sequence[Moe]) -> list[str]:
    words: list[str] = []
    gated = all(m.gated for m in mlps) and all(m.gated for m in moes)
    width = mlps[0].intermediate if mlps else moes[0].intermediate if moes else 4 * spec.hidden
    words += ["--ffn-hidden-size", str(width)]
    if gated and (mlps or moes):
        words.append("--swiglu")
    for moe in moes:
        words += ["--num-experts", str(moe.experts), "--moe-router-topk", str(moe.topk)]
        words += ["--moe-ffn-hidden-size", str(moe.intermediate), "--moe-grouped-gemm"]
        if moe.shared_intermediate:
            words += ["--moe-shared-expert-intermediate-size", str(moe.shared_intermediate)]
        if moe.latent:
            words += ["--moe-latent-size", str(moe.latent)]
        if mlps and not splits(spec).recurrents:
            words += ["--moe-layer-freq", _frequency(spec.layers)]
        if any(f.role == "router" and f.part == "state" for f in spec.families):
            words += ["--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"]
    return words


def _frequency(layers: Sequence[Layer]) -> str:
    """Runs of dense (0) and mixture (1) layers: ``([0]*3+[1]*58)``."""
    bits = [int(any(isinstance(f, Moe) for f in layer.ffns)) for layer in layers]
    runs: list[list[int]] = []
    for bit in bits:
        if runs and runs[-1][0] == bit:
            runs[-1][1] += 1
        else:
            runs.append([bit, 1])
    return "(" + "+".join(f"[{bit}]*{times}" for bit, times in runs) + ")"


def _pattern(spec: ModelSpec) -> str:
    letters = []
    for layer in spec.layers:
        mixer = layer.mixers[0] if layer.mixers else None
        name = "" if mixer is None else "attention" if isinstance(mixer, Attention) else mixer.kind
        block = "" if not layer.ffns else "moe" if isinstance(layer.ffns[0], Moe) else "mlp"
        pieces = (
            [_LETTERS.get((name, "")), _LETTERS.get(("", block))] if name and block else [_LETTERS.get((name, block))]
        )
        if None in pieces or len(layer.mixers) + len(layer.ffns) > len(pieces):
            raise InputError(f"{spec.name}: a layer of {name or block} cannot be written in a hybrid layer pattern")
        letters += [p for p in pieces if p]
    return "".join(letters)


def _mamba(spec: ModelSpec) -> list[str]:
    for r in splits(spec).recurrents:
        return [
            *("--mamba-num-heads", str(r.heads), "--mamba-head-dim", str(r.head_dim)),
            *("--mamba-state-dim", str(r.state_dim), "--mamba-num-groups", str(r.groups)),
        ]
    return []
