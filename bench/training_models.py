"""Models of the published training measurements, by dimensions (public configurations of the same names)."""

from __future__ import annotations

from meshwright.specs.build import decoder
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


def qwen3_30b_a3b() -> ModelSpec:
    """Qwen3-30B-A3B."""
    return decoder(
        name="qwen3-30b-a3b", hidden=2048, layers=48, heads=32, kv_heads=4, head_dim=128, ffn=6144, moe_ffn=768,
        experts=128, topk=8, vocab=151936, qk_norm=True,
    )  # fmt: skip


def moonlight() -> ModelSpec:
    """Moonlight-16B-A3B."""
    return decoder(
        name="moonlight-16b-a3b", hidden=2048, layers=27, heads=16, head_dim=192, v_head_dim=128, kv_lora_rank=512,
        rope_head_dim=64, ffn=11264, moe_ffn=1408, shared_ffn=2816, experts=64, topk=6, moe_layers=range(1, 27),
        vocab=163840, router_bias=True,
    )  # fmt: skip


#: Korthikanti et al., Table 3: layers, hidden, heads, sequence.
KORTHIKANTI: dict[str, tuple[int, int, int, int]] = {
    "megatron-22B": (48, 6144, 64, 2048),
    "gpt3-175B": (96, 12288, 96, 2048),
    "turing-530B": (105, 20480, 128, 2048),
}


def korthikanti(name: str) -> ModelSpec:
    """A model of Korthikanti et al. without embedding and biases (the paper's 12 L h^2 parameters)."""
    layers, hidden, heads, _ = KORTHIKANTI[name]
    return decoder(name=name, hidden=hidden, layers=layers, heads=heads, gated=False, vocab=0, norm_bias=True)
