"""Seconds of whole steps of a decoder: of a real one, and of one too small for anything but its driver to matter."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from meshwright.specs.placement import AXES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from meshwright.runtime.mesh import Mesh
    from meshwright.runtime.models.decoder import Decoder
    from meshwright.runtime.proof import ProofJob
    from meshwright.specs.profile import EngineProfile

#: The small model.
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "float32",
}


#: Tokens of the small model's prompt.
PROMPT = 64


def together(mesh: Mesh) -> None:
    """Wait for all ranks."""
    import torch.distributed as dist

    if mesh.placement.layout.world > 1:
        dist.barrier()


def small_steps(
    layers: int, steps: int, profile: EngineProfile, dtype: torch.dtype, device: torch.device, sequences: int = 1
) -> tuple[float, float]:
    """Seconds of a decode step of the small model with so many layers, a median of ``steps``, and of its prefill of
    ``PROMPT`` tokens, a median of three."""
    import torch

    from meshwright.runtime.checkpoint import own
    from meshwright.runtime.mesh import Group, Mesh
    from meshwright.runtime.models.decoder import Decoder
    from meshwright.runtime.models.settings import read_settings
    from meshwright.specs.hf.read import model_from_config
    from meshwright.specs.layout import Layout
    from meshwright.specs.placement import Coordinate, place

    config = {**SMALL, "num_hidden_layers": layers}
    placement = place(model_from_config(config, "small", "small"), Layout(), profile)
    weights = {n: torch.full(s.shape, 0.01, dtype=dtype, device=device) for n, s in own(placement, Coordinate())}
    alone = {axis: Group(axis, (0,), 0, None) for axis in (*AXES, "ep")}
    mesh = Mesh(placement, 0, Coordinate(), device, alone)
    decoder = Decoder(mesh, weights, read_settings(config, "small"), dtype)
    prompt = (tuple(1 + i % 31 for i in range(PROMPT)),) * sequences
    step_seconds(mesh, decoder, prompt, 2)
    prefills = [step_seconds(mesh, decoder, prompt, 1)[0] for _ in range(3)]
    return median(step_seconds(mesh, decoder, prompt, steps)[1:]), median(prefills)


def bare_steps(
    rank: int, profile: EngineProfile, device: str, layers: int, steps: int, counts: Sequence[int]
) -> list[float]:
    """Body of a rank: seconds of decode steps of the small model with so many sequences, in f32."""
    import torch

    from meshwright.runtime.job import own_device

    where = torch.device(own_device(device, rank))
    with torch.inference_mode():
        return [small_steps(layers, steps, profile, torch.float32, where, count)[0] for count in counts]


def step_seconds(
    mesh: Mesh, decoder: Decoder, prompts: Sequence[Sequence[int]], new_tokens: int, micro_batches: int | None = None
) -> list[float]:
    """Seconds of the prefill and of every decode step after it, as the first micro-batch sees them.

    On ranks that compute no logits the list is empty. The clock starts when all ranks of the mesh have come.
    """
    from meshwright.runtime.generate import generate
    from meshwright.runtime.scope import where

    seen: list[float] = []
    compute = decoder.logits

    def logits(x_SD: Tensor) -> Tensor | None:
        out = compute(x_SD)
        if not where().microbatch:
            seen.append(time.perf_counter())
        return out

    decoder.logits = logits  # type: ignore[method-assign]
    try:
        together(mesh)
        began = time.perf_counter()
        generate(mesh, decoder, prompts, new_tokens, micro_batches=micro_batches)
    finally:
        decoder.logits = compute  # type: ignore[method-assign]
    return [b - a for a, b in zip([began, *seen], seen, strict=False)]


def run_steps(rank: int, job: ProofJob) -> list[float]:
    """Body of a rank: the generation of a proof, unrecorded, timed the second time."""
    import torch

    from meshwright.runtime.checkpoint import TORCH_DTYPES, load
    from meshwright.runtime.folder import read_folder
    from meshwright.runtime.mesh import build_mesh
    from meshwright.runtime.models.decoder import Decoder

    model, dtype = read_folder(job.folder), TORCH_DTYPES[job.dtype]
    weights = load(model, job.placement, job.placement.coordinate(rank), dtype)
    mesh = build_mesh(job.placement, rank)
    decoder = Decoder(mesh, weights, model.settings, dtype)
    with torch.inference_mode():
        step_seconds(mesh, decoder, job.prompts, 2, job.micro_batches)
        return step_seconds(mesh, decoder, job.prompts, job.new_tokens, job.micro_batches)
