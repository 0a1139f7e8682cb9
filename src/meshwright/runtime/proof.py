"""What a rank does for a proof: one recorded generation, with what it holds, and its logits against a reference."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshwright.ledger.schema import Ledger
from meshwright.specs.placement import Placement

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ProofJob:
    """What every rank is told.

    Attributes:
        folder: checkpoint. placement: of its model.
        prompts: token ids. new_tokens, block_size, micro_batches, dtype: of the generation.
        logits: file of the reference. A run with ``reference`` writes it, the others hold theirs against it.
        reference: one process, not recorded.
        mutation: name of a planted mistake.
    """

    folder: str
    placement: Placement
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    logits: str
    dtype: str = "f32"
    block_size: int = 16
    micro_batches: int | None = None
    reference: bool = False
    mutation: str | None = None


@dataclass(slots=True)
class Farthest:
    """The largest distance of a logit from the reference: how far, of which prompt and new token; how many rows of
    logits were held against it. ``distance`` is infinite where shapes differ or a value is no number."""

    distance: float = 0.0
    prompt: int = 0
    token: int = 0
    rows: int = 0


@dataclass(slots=True)
class RankProof:
    """What one rank brings back. ``farthest`` is None on ranks that do not sample."""

    rank: int
    tokens: dict[int, list[int]]
    ledger: Ledger | None = None
    farthest: Farthest | None = None
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


def run_proof(rank: int, job: ProofJob) -> RankProof:
    """Body of a rank.

    Raises:
        InputError: a checkpoint that does not load.
    """
    from safetensors.torch import load_file, save_file

    from meshwright.runtime.checkpoint import TORCH_DTYPES, load
    from meshwright.runtime.folder import read_folder
    from meshwright.runtime.generate import generate
    from meshwright.runtime.mesh import build_mesh
    from meshwright.runtime.models.decoder import Decoder
    from meshwright.runtime.mutate import mutation
    from meshwright.runtime.record import Recorder

    placement, at = job.placement, job.placement.coordinate(rank)
    mistake = mutation(job.mutation, placement, job.new_tokens) if job.mutation else None
    if mistake and mistake.place:
        placement = mistake.place(placement, at)
    model = read_folder(job.folder)
    dtype = TORCH_DTYPES[job.dtype]
    weights = load(model, placement, at, dtype)
    if mistake and mistake.weights:
        mistake.weights(placement, at, weights)
    mesh = build_mesh(placement, rank)
    decoder = Decoder(mesh, weights, model.settings, dtype)
    recorder = None if job.reference else Recorder(job.placement, rank, matmuls=True)
    with mistake.at_work(mesh, decoder) if mistake else nullcontext(), recorder or nullcontext():
        out = generate(
            mesh,
            decoder,
            job.prompts,
            job.new_tokens,
            micro_batches=job.micro_batches,
            block_size=job.block_size,
            keep_logits=True,
        )
    result = RankProof(rank, out.tokens, seconds=out.total_s)
    if recorder is None:
        save_file({str(i): rows.contiguous() for i, rows in out.logits.items()}, job.logits)
        return result
    recorder.hold("weights", None, resident_bytes(weights))
    recorder.hold("kv_cache", None, out.kv_cache_bytes)
    result.ledger = recorder.ledger()
    if out.logits:
        result.farthest = farthest(out.logits, load_file(job.logits))
    return result


def resident_bytes(weights: Mapping[str, Tensor]) -> int:
    """Bytes of the memory behind some tensors, each stretch of it once; a view keeps the whole alive."""
    stores = {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in weights.values()}
    return sum(stores.values())


def farthest(logits: Mapping[int, Tensor], reference: Mapping[str, Tensor]) -> Farthest:
    """The logit that is farthest from its reference."""
    worst = Farthest(rows=sum(rows.shape[0] for rows in logits.values()))
    for prompt, rows in sorted(logits.items()):
        other = reference[str(prompt)]
        if rows.shape != other.shape:
            return Farthest(float("inf"), prompt, 0, worst.rows)
        by_token = (rows - other).abs().nan_to_num(nan=float("inf")).amax(dim=1)
        token = int(by_token.argmax())
        if float(by_token[token]) > worst.distance:
            worst = Farthest(float(by_token[token]), prompt, token, worst.rows)
    return worst
