"""Models of the published training measurements, by dimensions (public configurations of the same names)."""

from __future__ import annotations

import re
from dataclasses import replace

from meshwright.errors import InputError
from meshwright.specs.build import decoder
from meshwright.specs.hf.read import read_model
from meshwright.specs.model import ModelSpec

#: Llama 3: hidden, layers, heads, ffn.
LLAMA3 = {"8b": (4096, 32, 32, 14336), "70b": (8192, 80, 64, 28672), "405b": (16384, 126, 128, 53248)}


def llama3(size: str, layers: int | None = None) -> ModelSpec:
    """Llama 3 (8b, 70b, 405b), optionally cut to some layers."""
    hidden, depth, heads, ffn = LLAMA3[size]
    return decoder(
        name=f"llama3-{size}", hidden=hidden, layers=layers or depth, heads=heads, kv_heads=8, ffn=ffn, vocab=128256
    )  # fmt: skip


def deepseek(version: str, layers: int) -> ModelSpec:
    """DeepSeek-V2 or V3 cut to some layers, the first one dense (SimuMax's runs)."""
    if version == "v2":
        hidden, ffn, moe_ffn, shared, experts, topk, vocab = 5120, 12288, 1536, 3072, 160, 6, 102400
    else:
        hidden, ffn, moe_ffn, shared, experts, topk, vocab = 7168, 18432, 2048, 2048, 256, 8, 129280
    return decoder(
        name=f"deepseek-{version}", hidden=hidden, layers=layers, heads=128, head_dim=192, v_head_dim=128,
        q_lora_rank=1536, kv_lora_rank=512, rope_head_dim=64, ffn=ffn, moe_ffn=moe_ffn, shared_ffn=shared,
        experts=experts, topk=topk, moe_layers=range(1, layers), vocab=vocab,
    )  # fmt: skip


def cut(spec: ModelSpec, layers: int) -> ModelSpec:
    """The first layers of a model, its ends kept; without prediction layers."""
    kept = tuple(
        replace(f, layers=tuple(i for i in f.layers if i < layers))
        for f in spec.families
        if f.section == "decoder" and (not f.layers or min(f.layers) < layers)
    )
    return replace(spec, layers=spec.layers[:layers], families=kept, mtp_layers=())


def named(text: str) -> ModelSpec:
    """A model as the tables call it: ``llama3_70b cut to 12 layers``, ``Llama-3.1-8B``, else an atlas name.

    Raises:
        InputError: no such model.
    """
    found = re.search(r"cut to (\d{1,3}) layers", text)
    layers = int(found[1]) if found else None
    name = text.partition(" cut to")[0].strip().lower().replace("_", "-")
    size = re.fullmatch(r"(?:llama-?3(?:\.1)?)-(8b|70b|405b)", name)
    if size:
        return llama3(size[1], layers)
    version = re.fullmatch(r"deepseek-?(v2|v3)", name)
    if version and layers:
        return deepseek(version[1], layers)
    spec = read_model(name, allow_online=False)
    return cut(spec, layers) if layers else spec


#: Korthikanti et al., Table 3: layers, hidden, heads, sequence.
KORTHIKANTI: dict[str, tuple[int, int, int, int]] = {
    "megatron-22B": (48, 6144, 64, 2048),
    "gpt3-175B": (96, 12288, 96, 2048),
    "turing-530B": (105, 20480, 128, 2048),
    "gpt-1T": (128, 25600, 160, 2048),
}


def korthikanti(name: str) -> ModelSpec:
    """A model of Korthikanti et al. without embedding and biases (the paper's 12 L h^2 parameters)."""
    if name not in KORTHIKANTI:
        raise InputError(f"{name[:40]!r} is none of {', '.join(KORTHIKANTI)}")
    layers, hidden, heads, _ = KORTHIKANTI[name]
    return decoder(name=name, hidden=hidden, layers=layers, heads=heads, gated=False, vocab=0, norm_bias=True)
