"""Small inputs of the serving cases: dimensions of public models, and one call from settings to memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.serving_models import EXTRA

from meshwright.engines import profile
from meshwright.plan.memory import RankMemory, ServeMemory
from meshwright.plan.serve_memory import serve_memory
from meshwright.specs.cluster import parse_cluster
from meshwright.specs.hf.read import model_from_config
from meshwright.specs.layout import parse_layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import place
from meshwright.specs.profile import ServeSettings
from meshwright.specs.tensors import Section
from meshwright.specs.workload import Serve

GIB = 1 << 30


def dense(
    arch: str, hidden: int, layers: int, heads: int, kv: int, inner: int, vocab: int, positions: int, **more: Any
) -> dict[str, Any]:
    """Configuration of a dense decoder (or of the attention of a mixture of experts)."""
    return {
        "architectures": [arch],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        **more,
    }


LLAMA, QWEN2, QWEN3 = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
INT4 = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}


def gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    """gpt-oss: MXFP4 experts of 2880 by 2880, windows of 128 on every other layer."""
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    return dense(
        "GptOssForCausalLM", 2880, layers, 64, 8, 2880, 201088, 131072, model_type="gpt_oss", head_dim=64,
        num_local_experts=experts, num_experts_per_tok=4, sliding_window=128, layer_types=kinds,
        attention_bias=True, quantization_config=MXFP4,
    )  # fmt: skip


CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3-8b": dense(LLAMA, 4096, 32, 32, 8, 14336, 128256, 8192, model_type="llama"),
    "llama-3.1-8b": dense(LLAMA, 4096, 32, 32, 8, 14336, 128256, 131072, model_type="llama"),
    "llama-3.1-70b": dense(LLAMA, 8192, 80, 64, 8, 28672, 128256, 131072, model_type="llama"),
    "deepseek-coder-6.7b": dense(LLAMA, 4096, 32, 32, 32, 11008, 32256, 16384, model_type="llama"),
    "qwen2.5-7b": dense(QWEN2, 3584, 28, 28, 4, 18944, 152064, 32768, model_type="qwen2"),
    "qwen2-72b-int4": dense(
        QWEN2, 8192, 80, 64, 8, 29696, 152064, 32768, model_type="qwen2", quantization_config=INT4
    ),
    "qwen3-0.6b": dense(
        QWEN3, 1024, 28, 16, 8, 3072, 151936, 40960, model_type="qwen3", head_dim=128, tie_word_embeddings=True
    ),
    "qwen3-14b": dense(QWEN3, 5120, 40, 40, 8, 17408, 151936, 40960, model_type="qwen3", head_dim=128),
    "qwen3-32b": dense(QWEN3, 5120, 64, 64, 8, 25600, 151936, 40960, model_type="qwen3", head_dim=128),
    "mistral-small-3.2-24b": EXTRA["mistral-small-3.2-24b"],
    "qwen3-30b-a3b": dense(
        "Qwen3MoeForCausalLM", 2048, 48, 32, 4, 6144, 151936, 40960, model_type="qwen3_moe", head_dim=128,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, decoder_sparse_step=1,
    ),
    "qwen3-coder-480b": dense(
        "Qwen3MoeForCausalLM", 6144, 62, 96, 8, 8192, 151936, 262144, model_type="qwen3_moe", head_dim=128,
        num_experts=160, num_experts_per_tok=8, moe_intermediate_size=2560, decoder_sparse_step=1,
    ),
    "gpt-oss-20b": gpt_oss(24, 32),
    "gpt-oss-120b": gpt_oss(36, 128),
}  # fmt: skip


def model(name: str) -> ModelSpec:
    """The model of one of the configurations above."""
    return model_from_config(CONFIGS[name], name, name)


def serve(
    of: str | ModelSpec,
    layout: str = "tp=1",
    on: str = "1x8xH100-SXM",
    *,
    version: str = "0.19.0",
    context: int = 8192,
    concurrency: int | None = None,
    **settings: Any,
) -> ServeMemory:
    """Memory of one layout under one version of vLLM; ``settings`` are those of ``ServeSettings``."""
    spec = model(of) if isinstance(of, str) else of
    wanted: tuple[Section, ...] = ("decoder",) if settings.get("text_only") else ("decoder", "vision")
    placed = place(spec, parse_layout(layout), replace(profile("vllm"), version=version), sections=wanted)
    workload = Serve(max_model_len=context, concurrency=concurrency)
    return serve_memory(placed, parse_cluster(on), workload, ServeSettings(**settings))


def ledger(memory: ServeMemory, rank: int = 0) -> dict[str, float]:
    """GiB of weights, activations, runtime and pool of the class that begins with ``rank``."""
    r: RankMemory = next(r for r in memory.ranks if r.rank == rank)
    held = r.weights_bytes + r.activations_bytes + r.runtime_bytes
    sizes = {
        "weights": r.weights_bytes,
        "activations": r.activations_bytes,
        "runtime": r.runtime_bytes,
        "pool": r.capacity_bytes - held,
    }
    return {name: size / GIB for name, size in sizes.items()}
