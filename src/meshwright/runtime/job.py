"""One generation as a job that can be sent to ranks, and what of it can be refused beforehand. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meshwright.errors import InputError
from meshwright.runtime.folder import Model
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import Placement

if TYPE_CHECKING:
    from meshwright.runtime.generate import Generation

DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0 is greedy.
        top_k: only the k likeliest; 0: all.
        top_p: only the likeliest that together reach this probability.
        seed: of the random numbers; every prompt has its own stream.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        right = 0 <= self.temperature <= 100 and self.top_k >= 0 and 0 < self.top_p <= 1 and 0 <= self.seed < 1 << 32
        if not right:
            raise InputError(
                f"sampling: temperature {self.temperature:g}, top_k {self.top_k}, top_p {self.top_p:g}, "
                f"seed {self.seed}; needed: temperature 0 to 100, top_k from 0, top_p in (0, 1], seed of 32 bits"
            )


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """What every rank is told.

    Attributes:
        model: checkpoint. placement: of its model.
        prompts: token ids. options: keyword arguments of ``generate``.
        dtype: of weights and activations. device: ``cpu`` or ``cuda`` (one device a rank).
    """

    model: Model
    placement: Placement
    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    options: dict[str, Any] = field(default_factory=dict)
    dtype: str = "f32"
    device: str = "cpu"


def run_job(rank: int, job: GenerateJob) -> Generation:
    """Body of a rank: load, mesh, generate."""
    from meshwright.runtime.checkpoint import TORCH_DTYPES, load
    from meshwright.runtime.generate import generate
    from meshwright.runtime.mesh import build_mesh
    from meshwright.runtime.models.decoder import Decoder

    device = own_device(job.device, rank)
    dtype = TORCH_DTYPES[job.dtype]
    weights = load(job.model, job.placement, job.placement.coordinate(rank), dtype, device)
    mesh = build_mesh(job.placement, rank, device)
    decoder = Decoder(mesh, weights, job.model.settings, dtype)
    return generate(mesh, decoder, job.prompts, job.max_new_tokens, **job.options)


def own_device(kind: str, rank: int) -> str:
    """``cpu``, or this rank's CUDA device, which becomes the current one.

    Raises:
        InputError: CUDA is asked for and there is none.
    """
    if kind == "cpu":
        return kind
    import torch

    if not torch.cuda.is_available():
        raise InputError("device cuda: no CUDA device is usable here; use --device cpu")
    device = f"cuda:{rank % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
    return device


def merged(results: Sequence[Generation]) -> dict[int, list[int]]:
    """New tokens of all prompts, from the results of all ranks."""
    out: dict[int, list[int]] = {}
    for generation in results:
        out |= generation.tokens
    return dict(sorted(out.items()))


def check_request(
    spec: ModelSpec,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    micro_batches: int | None = None,
    chunk: int | None = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
) -> None:
    """Refuse what ``generate`` cannot do with a model.

    Raises:
        InputError: an empty prompt, an id outside the vocabulary, more positions than the model has, a bad size.
    """
    sizes = {"max_new_tokens": max_new_tokens, "chunk": chunk, "micro_batches": micro_batches, "block_size": block_size}
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}; at least 1 is needed")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise InputError(f"prompt {number} is empty; at least one token is needed")
        bad = next((t for t in prompt if not 0 <= t < spec.vocab), None)
        if bad is not None:
            raise InputError(f"prompt {number}: token id {bad} is outside the vocabulary of {spec.vocab}")
        if spec.max_positions and len(prompt) + max_new_tokens > spec.max_positions:
            raise InputError(
                f"prompt {number}: {len(prompt)} tokens and {max_new_tokens} new ones exceed the {spec.max_positions} "
                f"positions of {spec.name}; ask for fewer"
            )
