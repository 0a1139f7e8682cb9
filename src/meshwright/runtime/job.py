"""One generation as a job that can be sent to ranks: load, mesh, generate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.specs.placement import Placement


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """What every rank is told.

    Attributes:
        folder: checkpoint. placement: of its model.
        prompts: token ids. options: keyword arguments of ``generate``.
        dtype: of weights and activations. device: ``cpu`` or ``cuda`` (one device a rank).
    """

    folder: str
    placement: Placement
    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    options: dict[str, Any] = field(default_factory=dict)
    dtype: str = "f32"
    device: str = "cpu"


def run_job(rank: int, job: GenerateJob) -> Any:
    """Body of a rank; returns its ``Generation``."""
    from meshwright.runtime.checkpoint import TORCH_DTYPES, load, read_folder
    from meshwright.runtime.generate import generate
    from meshwright.runtime.mesh import build_mesh
    from meshwright.runtime.models.decoder import Decoder

    device = job.device
    if device == "cuda":
        import torch

        device = f"cuda:{rank % max(1, torch.cuda.device_count())}"
        torch.cuda.set_device(device)
    dtype = TORCH_DTYPES[job.dtype]
    model = read_folder(job.folder)
    weights = load(model, job.placement, job.placement.coordinate(rank), dtype, device)
    mesh = build_mesh(job.placement, rank, device)
    decoder = Decoder(mesh, weights, model.settings, dtype)
    return generate(mesh, decoder, job.prompts, job.max_new_tokens, **job.options)


def merged(results: Sequence[Any]) -> dict[int, list[int]]:
    """New tokens of all prompts, from the results of all ranks."""
    out: dict[int, list[int]] = {}
    for generation in results:
        out |= generation.tokens
    return dict(sorted(out.items()))
