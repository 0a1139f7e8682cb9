"""Small random models of every family the runtime runs, and what transformers computes for them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from meshwright import engines
from meshwright.runtime.checkpoint import write_random
from meshwright.runtime.folder import read_folder
from meshwright.runtime.generate import Generation
from meshwright.runtime.job import GenerateJob, merged, run_job
from meshwright.runtime.launch.local import run_local
from meshwright.specs.layout import parse_layout
from meshwright.specs.placement import Placement, place

#: Sizes are odd on purpose: 9 heads over 3 KV heads, an odd vocabulary, an odd MLP width.
BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 72,
    "intermediate_size": 101,
    "num_hidden_layers": 5,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "float32",
}

EVEN = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}

#: Windows of 5 tokens on three layers of five, scaled embedding, norms around one, its own scale of the scores.
GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_act": None,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "query_pre_attn_scalar": 24,
    "sliding_window": 5,
    "sliding_window_pattern": 3,
    "tie_word_embeddings": True,
}

#: Latent attention with dense layers only: 9 heads of 6 + 4 (turned), values of 5, a latent of 16.
LATENT: dict[str, Any] = {
    "num_key_value_heads": 9,
    "head_dim": 4,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "first_k_dense_replace": 5,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "even": EVEN,
    "biased": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 7},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "gemma3": GEMMA3,
    "deepseek_v2": {**LATENT, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"},
    "deepseek_v3": {
        **LATENT,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "q_lora_rank": 20,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 0.7,
            "mscale_all_dim": 0.9,
        },
    },
}

#: Unequal prompts; lengths around the block boundaries of blocks of 4.
PROMPTS: tuple[tuple[int, ...], ...] = (
    (5, 99, 17, 3, 64, 120, 7),
    (1, 2, 3, 4),
    (77,),
    (11, 12, 13, 14, 15, 16, 17, 18, 19),
)


def config(name: str, **changes: Any) -> dict[str, Any]:
    """Configuration of a small model."""
    return {**BASE, **MODELS[name], **changes}


def write(folder: Path, name: str, **changes: Any) -> Path:
    """Write a random checkpoint; returns its folder."""
    write_random(config(name, **changes), folder, seed=3)
    return folder


def placement(folder: Path, layout: str) -> Placement:
    """Placement of a checkpoint under a layout of our own runtime."""
    return place(read_folder(folder).spec, parse_layout(layout), engines.profile("meshwright"))


def job(
    folder: Path, layout: str, prompts: Sequence[Sequence[int]] = PROMPTS, new: int = 6, **options: Any
) -> GenerateJob:
    """A generation that keeps its logits, in blocks of 4."""
    dtype = options.pop("dtype", "f32")
    model = read_folder(folder)
    return GenerateJob(
        model,
        place(model.spec, parse_layout(layout), engines.profile("meshwright")),
        tuple(map(tuple, prompts)),
        new,
        {"keep_logits": True, "block_size": 4, **options},
        dtype,
    )


@functools.cache
def oracle(
    folder: Path, prompts: tuple[tuple[int, ...], ...] = PROMPTS, new: int = 6
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Greedy tokens and the logits they were chosen from, by transformers, each prompt alone, without a cache."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    tokens, logits = [], []
    with torch.inference_mode():
        for prompt in prompts:
            ids = list(prompt)
            rows = []
            for _ in range(new):
                row = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
                rows.append(row)
                ids.append(int(row.argmax()))
            tokens.append(ids[len(prompt) :])
            logits.append(torch.stack(rows))
    return tokens, logits


def alone(job: GenerateJob) -> Generation:
    """Run a job of one rank in this process."""
    assert job.placement.layout.world == 1
    torch.set_num_threads(1)
    return run_job(0, job)


def on_ranks(job: GenerateJob, timeout_s: float = 60.0) -> tuple[dict[int, list[int]], dict[int, torch.Tensor]]:
    """Run a job on local ranks: tokens and logits of all prompts."""
    results = run_local(run_job, job.placement.layout.world, (job,), timeout_s)
    return merged(results), {i: x for r in results for i, x in r.logits.items()}


def assert_same(
    found: tuple[dict[int, list[int]], dict[int, torch.Tensor]], want: tuple[list[list[int]], list[torch.Tensor]]
) -> None:
    """Greedy tokens are identical, and logits agree within 1e-4."""
    tokens, logits = found
    assert list(tokens.values()) == want[0]
    assert sorted(logits) == sorted(tokens)
    worst = max(float((logits[i] - row).abs().max()) for i, row in enumerate(want[1]))
    assert worst < 1e-4, worst
