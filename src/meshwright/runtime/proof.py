"""What a rank does for a proof: one recorded generation, with what it holds; its logits and cache against a reference.

The reference of one process lies in a file: logits of prompt p as ``p``, keys and values that the cache holds of it in
a layer as ``p/layer/k`` and ``p/layer/v``.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from meshwright.ledger.schema import Ledger
from meshwright.moves.context import NOWHERE, Piece, decoded_at, keys, pieces_of
from meshwright.runtime.loads import Load, write_choices
from meshwright.specs.placement import Coordinate, Placement
from meshwright.specs.shares import part

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from meshwright.runtime.models.decoder import Decoder
    from meshwright.runtime.serve.cache import PagedCache


@dataclass(frozen=True, slots=True)
class ProofJob:
    """What every rank is told.

    Attributes:
        folder: checkpoint. placement: of its model.
        prompts: token ids. new_tokens, block_size, micro_batches, dtype: of the generation.
        chunk: most prompt tokens of one sequence in a pass; None: the whole prompt.
        numbers: file of the reference. A run with ``reference`` writes it, the others hold theirs against it; beside it
            (``routing_of``) the experts that every token chose.
        reference: one process, not recorded.
        mutation: name of a planted mistake.
    """

    folder: str
    placement: Placement
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    numbers: str
    dtype: str = "f32"
    block_size: int = 16
    micro_batches: int | None = None
    reference: bool = False
    mutation: str | None = None
    chunk: int | None = None


@dataclass(slots=True)
class Farthest:
    """The largest distance of a number from its reference.

    Attributes:
        distance: how far; infinite where shapes differ or a value is no number.
        where: prompt and token, or prompt and layer, in words.
        count: rows of logits, or tensors of the cache, that were held against the reference.
    """

    distance: float = 0.0
    where: str = ""
    count: int = 0

    def hold(self, ours: Tensor, reference: Tensor, where: str) -> None:
        """Hold one tensor against its reference."""
        self.count += 1
        if ours.shape != reference.shape:
            distance = float("inf")
        else:
            distance = float((ours - reference).abs().nan_to_num(nan=float("inf")).max()) if ours.numel() else 0.0
        if distance > self.distance:
            self.distance, self.where = distance, where


@dataclass(slots=True)
class RankProof:
    """What one rank brings back.

    Attributes:
        logits: counts nothing on ranks that do not sample.
        loads: rows of its experts. whole: its experts count in a table of all experts: no other rank of those that
            share each of them does.
    """

    rank: int
    tokens: dict[int, list[int]]
    ledger: Ledger | None = None
    logits: Farthest = field(default_factory=Farthest)
    cache: Farthest = field(default_factory=Farthest)
    seconds: float = 0.0
    loads: list[Load] = field(default_factory=list)
    whole: bool = True


def routing_of(numbers: str) -> str:
    """File of the routing beside the file of the reference."""
    return f"{numbers}.routing.json"


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
    kept = keep_cache(decoder)
    for block in decoder.sparse:
        block.log.keep = job.reference
    recorder = None if job.reference else Recorder(job.placement, rank, matmuls=True)
    with mistake.at_work(mesh, decoder) if mistake else nullcontext(), recorder or nullcontext():
        out = generate(
            mesh,
            decoder,
            job.prompts,
            job.new_tokens,
            micro_batches=job.micro_batches,
            chunk=job.chunk,
            block_size=job.block_size,
            keep_logits=True,
        )
    result = RankProof(rank, out.tokens, seconds=out.total_s, loads=out.loads, whole=placement.place(at).etp == 0)
    if recorder is None:
        logits = {str(i): rows.contiguous() for i, rows in out.logits.items()}
        save_file(logits | kept, job.numbers)
        if decoder.sparse:
            write_choices({block.layer: block.log.chosen for block in decoder.sparse}, routing_of(job.numbers))
        return result
    recorder.hold("weights", None, resident_bytes(weights))
    recorder.hold("kv_cache", None, out.kv_cache_bytes)
    result.ledger = recorder.ledger()
    reference = load_file(job.numbers)
    for prompt, rows in sorted(out.logits.items()):
        for token, (row, other) in enumerate(zip(rows, reference[str(prompt)], strict=False)):
            result.logits.hold(row, other, f"prompt {prompt}, new token {token}")
    hold_cache(result.cache, job, at, kept, reference)
    return result


def keep_cache(decoder: Decoder) -> dict[str, Tensor]:
    """Copy the keys and values of every sequence when its blocks are given back; filled while the decoder runs."""
    import torch

    kept: dict[str, Tensor] = {}
    make = decoder.cache

    def cache(blocks: int, block_size: int) -> PagedCache:
        made = make(blocks, block_size)
        release = made.tables.release

        def keep(sequence: int) -> None:
            table = torch.tensor(made.tables.tables[sequence])
            for layer in made.k:
                pair = made.read(layer, table, made.tables.lengths[sequence])
                for name, x in zip("kv", pair, strict=True):
                    kept[f"{sequence}/{layer}/{name}"] = x[made.filled(sequence)].float().cpu().clone()
            release(sequence)

        made.tables.release = keep  # type: ignore[method-assign]
        return made

    decoder.cache = cache  # type: ignore[method-assign]
    return kept


def hold_cache(
    out: Farthest, job: ProofJob, at: Coordinate, kept: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> None:
    """Hold a rank's keys and values against the reference: of its layers by the placement, its KV heads of each, and
    of the tokens those that ``moves.context`` deals it.
    """
    low, high = part(len(job.prompts), job.placement.layout.dp, at.dp)
    heads = kv_heads(job.placement, at)
    for prompt in range(low, high):
        tokens = cached_positions(len(job.prompts[prompt]), job, at.cp)
        for layer in job.placement.stages[at.pp].layers:
            for name in "kv":
                other = reference[f"{prompt}/{layer}/{name}"][tokens][:, slice(*heads)]
                ours = kept.get(f"{prompt}/{layer}/{name}", other[:0])
                out.hold(ours, other, f"prompt {prompt}, layer {layer}, {'keys' if name == 'k' else 'values'}")


def cached_positions(length: int, job: ProofJob, place: int) -> list[int]:
    """Positions of a prompt and its new tokens whose keys a place of cp caches, in the order of its cache."""
    cp, end = job.placement.layout.cp, length + job.new_tokens - 1
    if cp == 1:
        return list(range(end))
    lengths = pieces_of(length, job.chunk)
    pieces = [Piece(start - n, n) for n, start in zip(lengths, accumulate(lengths), strict=True)]
    prompt = [at for at in keys(pieces, cp, place) if at != NOWHERE]
    return prompt + [at for at in range(length, end) if decoded_at(at, cp) == place]


def kv_heads(placement: Placement, at: Coordinate) -> tuple[int, int]:
    """First and one past the last KV head that a rank holds (the same in all layers); a latent is one, held by all."""
    if any(a.kind == "mla" for layer in placement.spec.layers if (a := layer.attention)):
        return 0, 1
    for shard in placement.shards(at):
        if shard.family.op == "k" and shard.family.part == "weight":
            width = shard.family.dims[0][0].width
            return shard.intervals[0][0][0] // width, shard.intervals[0][-1][1] // width
    return 0, 0


def resident_bytes(weights: Mapping[str, Tensor]) -> int:
    """Bytes of the memory behind some tensors, each stretch of it once; a view keeps the whole alive."""
    stores = {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in weights.values()}
    return sum(stores.values())
