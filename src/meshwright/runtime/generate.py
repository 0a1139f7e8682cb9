"""Generate text under a layout: prefill, then decode, with the micro-batches of a pipeline in flight.

All ranks of a replica walk the same list of passes. A pass of one micro-batch is: tokens in (first stage), hidden
states from the stage before, own layers, hidden states to the next stage or logits and sampling (last stage, tp place
0). While the last stage works on one micro-batch the first works on the next.

Sampled token ids travel beside the tensors, through the rendezvous store, as a scheduler's messages do; they are a few
bytes a sequence, and no collective.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.moves.context import pieces_of, slots
from meshwright.runtime.job import DEFAULT_BLOCK_SIZE, Sampling, check_request
from meshwright.runtime.loads import Load
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.models.decoder import Decoder
from meshwright.runtime.replicas import Replicas
from meshwright.runtime.sampling import Sampler
from meshwright.runtime.scope import scope
from meshwright.runtime.serve.cache import Batch, PagedCache, blocks_for
from meshwright.runtime.serve.stage import StageRunner
from meshwright.specs.shares import part


@dataclass(slots=True)
class Generation:
    """What one rank knows at the end.

    Attributes:
        tokens: new token ids by number of the prompt, for the prompts of this rank's replica.
        logits: by number of the prompt ``(new tokens, V)``, on the rank that samples when they were asked for.
        kv_cache_bytes: pool of this rank.
        loads: rows of this rank's experts, by layer and pass.
        first_token_s, total_s: seconds from the call to the first token, and to the end, on the rank that samples.
    """

    tokens: dict[int, list[int]]
    logits: dict[int, Tensor] = field(default_factory=dict)
    kv_cache_bytes: int = 0
    loads: list[Load] = field(default_factory=list)
    first_token_s: float = 0.0
    total_s: float = 0.0


@dataclass(slots=True)
class _MicroBatch:
    """Sequences that move through the pipeline together.

    Attributes:
        rest: prompt tokens that are not in the cache yet, by sequence.
        new: tokens generated, by sequence.
        alive: sequences that go on.
        passed: passes done.
        due: sequences whose sampled tokens have not been taken in yet.
    """

    index: int
    rest: dict[int, list[int]]
    new: dict[int, list[int]]
    alive: list[int]
    passed: int = 0
    due: list[int] = field(default_factory=list)

    def next_batch(self, cache: PagedCache, chunk: int | None) -> Batch:
        """The next chunk of every prompt, or one new token of every sequence once all prompts are in."""
        filling = [s for s in self.alive if self.rest[s]]
        if not filling:
            self.due = list(self.alive)
            parts = [(s, self.new[s][-1:]) for s in self.alive]
            return cache.batch(parts, [True] * len(parts), "decode")
        parts = [(s, self.rest[s][:chunk]) for s in filling]
        for s, tokens in parts:
            self.rest[s] = self.rest[s][len(tokens) :]
        self.due = [s for s in filling if not self.rest[s]]
        return cache.batch(parts, [not self.rest[s] for s in filling], "prefill")


class _Tokens:
    """Sampled ids from the rank that samples to all ranks of its replica, by way of the store.

    Message ``n`` of a micro-batch replaces message ``n - 1``: every rank of the replica has read that one before it
    joins the pass from which message ``n`` comes.
    """

    def __init__(self, mesh: Mesh, source: bool) -> None:
        layout = mesh.placement.layout
        self.members = layout.tp * layout.pp * layout.cp
        self.store = mesh.store if self.members > 1 else None
        self.base = f"tokens/{mesh.coordinate.dp}"
        self.source = source
        self.own: dict[int, list[int]] = {}
        self.sent: dict[int, int] = {}

    def publish(self, microbatch: int, number: int, tokens: list[int]) -> None:
        """Hand out the tokens of pass ``number`` of a micro-batch."""
        self.own[microbatch] = tokens
        if self.store is None:
            return
        self.store.set(f"{self.base}/{microbatch}/{number}", ",".join(map(str, tokens)))
        if microbatch in self.sent:
            self.store.delete_key(f"{self.base}/{microbatch}/{self.sent[microbatch]}")
        self.sent[microbatch] = number

    def take(self, microbatch: int, number: int) -> list[int]:
        """Wait for the tokens of pass ``number`` of a micro-batch."""
        if self.source or self.store is None:
            return self.own.pop(microbatch)
        return [int(token) for token in self.store.get(f"{self.base}/{microbatch}/{number}").split(b",")]

    def close(self) -> None:
        """Wait until every rank of the replica has read the last messages, and remove them."""
        if self.store is None:
            return
        if self.store.add(f"{self.base}/left", 1) == self.members:
            self.store.set(f"{self.base}/empty", "1")
        if self.source:
            self.store.wait([f"{self.base}/empty"])
            for microbatch, number in self.sent.items():
                self.store.delete_key(f"{self.base}/{microbatch}/{number}")
            self.store.delete_key(f"{self.base}/left")
            self.store.delete_key(f"{self.base}/empty")


def generate(
    mesh: Mesh,
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    eos: Sequence[int] = (),
    micro_batches: int | None = None,
    chunk: int | None = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
    keep_logits: bool = False,
) -> Generation:
    """Generate up to ``max_new_tokens`` tokens for every prompt. Collective: every rank of the mesh calls it alike.

    Args:
        mesh, decoder: this rank's.
        prompts: token ids; dealt over dp in runs, a replica takes its own.
        max_new_tokens: at most so many new tokens a prompt, at least 1.
        sampling: greedy when None.
        eos: ids that end a text (they are its last token).
        micro_batches: groups in which the prompts move through the stages; None: as many as stages.
        chunk: most prompt tokens of one sequence in a pass; None: the whole prompt at once.
        block_size: tokens of a cache block.
        keep_logits: return the logits of every sampled token.

    Raises:
        InputError: an empty prompt, an id outside the vocabulary, more positions than the model has, a bad size.
    """
    began = time.perf_counter()
    check_request(mesh.placement.spec, prompts, max_new_tokens, micro_batches, chunk, block_size)
    layout = mesh.placement.layout
    low, high = part(len(prompts), layout.dp, mesh.coordinate.dp)
    held = (slots(pieces_of(len(prompts[i]), chunk), max_new_tokens - 1, layout.cp) for i in range(low, high))
    blocks = sum(blocks_for(count, block_size) for count in held)
    cache = decoder.cache(blocks, block_size)
    replicas = Replicas(mesh, list(map(len, prompts)), max_new_tokens, micro_batches or layout.pp, chunk, bool(eos))
    groups = _deal(prompts, replicas)
    for block in decoder.sparse:
        block.log.loads.clear()
    source = decoder.last and mesh.group("tp").index == mesh.group("cp").index == 0
    out = Generation({i: [] for i in range(low, high)}, kv_cache_bytes=cache.nbytes)
    tokens, kept = _Tokens(mesh, source), {i: list[Tensor]() for i in range(low, high)}
    pipeline = StageRunner(mesh, decoder, cache, len(groups))
    sampler = Sampler(sampling or Sampling())
    turn = deque(groups)
    with torch.inference_mode():
        while turn:
            m = turn.popleft()
            if m.due:
                _take_in(m, tokens.take(m.index, m.passed), cache, max_new_tokens, eos)
            if not replicas.goes_on(m.index, m.passed, len(m.alive)):
                continue
            batch = m.next_batch(cache, chunk) if m.alive else None
            with scope(phase=batch.phase if batch else "decode", step=m.passed, microbatch=m.index):
                logits = pipeline.run(batch) if batch else pipeline.idle()
            m.passed += 1
            if logits is not None:
                if source:
                    tokens.publish(m.index, m.passed, sampler.choose(logits, m.due))
                out.first_token_s = out.first_token_s or time.perf_counter() - began
                if keep_logits:
                    for i, row in zip(m.due, logits.float().cpu(), strict=True):
                        kept[i].append(row)
            turn.append(m)
    pipeline.drain()
    tokens.close()
    out.tokens = {i: new for m in groups for i, new in m.new.items()}
    out.logits = {i: torch.stack(rows) for i, rows in kept.items() if rows}
    out.loads = [load for block in decoder.sparse for load in block.log.loads]
    out.total_s = time.perf_counter() - began
    return out


def _deal(prompts: Sequence[Sequence[int]], replicas: Replicas) -> list[_MicroBatch]:
    """The replica's prompts by micro-batch; some may be empty where replicas walk in step."""
    groups = []
    for index in range(replicas.count):
        sequences = list(replicas.sequences(replicas.mine, index))
        rest = {s: list(prompts[s]) for s in sequences}
        groups.append(_MicroBatch(index, rest, {s: [] for s in sequences}, sequences))
    return groups


def _take_in(m: _MicroBatch, tokens: list[int], cache: PagedCache, max_new_tokens: int, eos: Sequence[int]) -> None:
    """Append sampled tokens to their sequences; those that end give their blocks back."""
    for s, token in zip(m.due, tokens, strict=True):
        m.new[s].append(token)
        if token in eos or len(m.new[s]) == max_new_tokens:
            m.alive.remove(s)
            cache.tables.release(s)
    m.due = []
