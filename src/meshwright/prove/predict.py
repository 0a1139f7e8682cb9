"""The prediction of a proof: what every rank will send, multiply and hold. Made where torch cannot be imported.

``predict_apart`` runs it in a fresh Python process in which importing torch raises, so that nothing of the run can
leak into the prediction; the ledger comes back as a file.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from meshwright import engines
from meshwright.errors import InputError, MeshwrightError
from meshwright.ledger import store
from meshwright.ledger.compare import HAND_OFFS
from meshwright.ledger.schema import Entry, Holding, Ledger, Rank
from meshwright.moves.context import neighbours, pieces_of, slots
from meshwright.moves.expert import replicas_meet
from meshwright.plan.forward import forward_entries, rank_entries
from meshwright.plan.products import Kind, held
from meshwright.prove.passes import batch_of, passes
from meshwright.prove.routing import Routes, read_routing, walks
from meshwright.specs.dtypes import size_bytes
from meshwright.specs.hf.read import model_from_config
from meshwright.specs.hf.resolve import resolve
from meshwright.specs.layout import parse_layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import AXES, Placement, place
from meshwright.specs.profile import ServeSettings
from meshwright.specs.shares import part

ENGINE = "meshwright"
#: Names in a configuration that hold its element type, and what they are called there.
DTYPE_FIELDS = ("dtype", "torch_dtype")
#: What a configuration says of quantized weights; converted ones are not.
QUANT_FIELDS = ("quantization_config", "compression_config")
LONG_NAMES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}

#: Program of the process apart: the finder comes first and refuses torch, then the prediction is made.
APART = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("a prediction must not import torch")
sys.meta_path.insert(0, NoTorch())
from meshwright.prove.predict import main
main()
"""


@dataclass(frozen=True, slots=True)
class Request:
    """One generation, as far as a prediction needs to know it.

    Attributes:
        model: folder of the checkpoint. layout: text form.
        prompts: how many. tokens: length of each. new_tokens: generated for each.
        dtype: of weights, activations and cache.
        block_size: tokens of a cache block.
        micro_batches: groups in flight on a replica; None: as many as stages.
        ranks: that are named; None: every one of the world.
        lengths: of every prompt, where they are not all ``tokens`` long.
        chunk: most prompt tokens of one sequence in a pass; None: the whole prompt.
        routing: file with the experts of every token (``prove.routing``); None: an even choice.
    """

    model: str
    layout: str
    prompts: int
    tokens: int
    new_tokens: int
    dtype: str = "f32"
    block_size: int = 16
    micro_batches: int | None = None
    ranks: tuple[int, ...] | None = None
    lengths: tuple[int, ...] = ()
    chunk: int | None = None
    routing: str | None = None

    def lengths_of(self, replica: int) -> tuple[int, ...]:
        """Tokens of every prompt of a replica."""
        low, high = part(self.prompts, parse_layout(self.layout).dp, replica)
        return self.lengths[low:high] or (self.tokens,) * (high - low)


def converted_spec(model: str, dtype: str) -> ModelSpec:
    """The model as it is when all its weights are converted to ``dtype``.

    Raises:
        InputError: no such model, or an unreadable configuration.
    """
    found = resolve(model, allow_online=False)
    return model_from_config(converted(found.config, dtype), found.name, found.where, source=found.source)


def converted(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A configuration whose weights are all of ``dtype`` and not quantized; of one with images the text part."""
    text = config.get("text_config")
    dropped = {*DTYPE_FIELDS, *QUANT_FIELDS}
    whole = text if isinstance(text, Mapping) else config
    return {k: v for k, v in whole.items() if k not in dropped} | {"dtype": LONG_NAMES[dtype]}


def predict(request: Request) -> Ledger:
    """The ledger of the whole run: entries of every rank class, weights and KV cache, a row for every rank.

    Where ranks of one class do not do the same they are classes of their own: replicas whose prompts differ in length,
    and places on the ring of context parallelism, which have other neighbours. With a mixture of experts every rank is,
    because it sends and receives what the routing says.

    Raises:
        InputError: an unreadable model. IllegalLayoutError: the own engine refuses the layout.
    """
    layout = parse_layout(request.layout)
    spec = converted_spec(request.model, request.dtype)
    placement = place(spec, layout, engines.profile(ENGINE))
    ledger = Ledger(meta={**{k: str(v) for k, v in asdict(request).items()}, "kind": "prove"})
    if spec.moe is not None:
        return rank_by_rank(placement, request, ledger)
    lengths = [request.lengths_of(replica) for replica in range(layout.dp)]
    unequal, ring = any(other != lengths[0] for other in lengths), layout.cp > 1 and layout.cp_kind != "ulysses"

    def name(rank_class: str, dp: int, cp: int) -> str:
        return rank_class + (f".dp{dp}" if unequal else "") + (f".cp{cp}" if ring else "")

    for rank in range(layout.world) if request.ranks is None else request.ranks:
        at = placement.coordinate(rank)
        where = {axis: getattr(at, axis) for axis in (*AXES, "ep")}
        ledger.ranks.append(Rank(rank, where, name(placement.class_of(rank).name, at.dp, at.cp)))
    places = sorted({row.coordinate["cp"] for row in ledger.ranks}) if ring else [0]
    for dp in range(layout.dp) if unequal else (0,):
        entries = list(replica_entries(placement, request, lengths[dp]))
        for cp in places:
            ledger.entries += (
                replace(e, rank_class=name(e.rank_class, dp, cp)) for e in numbered(entries, cp, layout.cp)
            )
            for c in placement.classes:
                own, sizes = name(c.name, dp, cp), placement.weight_bytes_by_role(c.coordinate)
                ledger.holdings += [Holding(own, "weights", role, size, "exact") for role, size in sizes.items()]
                cache = kv_bytes(placement, c.first_rank, request, lengths[dp])
                ledger.holdings.append(Holding(own, "kv_cache", None, cache, "exact"))
    return ledger


def rank_by_rank(placement: Placement, request: Request, ledger: Ledger) -> Ledger:
    """The ledger of a mixture of experts: a class for every rank, exact for the routing of the request."""
    layout, kinds = placement.layout, dict[object, Kind]()
    settings = ServeSettings(dtype=request.dtype, kv_dtype=request.dtype)
    chosen = read_routing(request.routing) if request.routing is not None else None
    lengths = [n for replica in range(layout.dp) for n in request.lengths_of(replica)]
    wanted, together = request.micro_batches or layout.pp, replicas_meet(placement)
    walked: dict[int, list[Routes]] = {}
    for rank in range(layout.world) if request.ranks is None else request.ranks:
        at, name = placement.coordinate(rank), f"rank{rank}"
        key = -1 if together else at.dp
        if key not in walked:
            replicas = range(layout.dp) if together else (at.dp,)
            walked[key] = walks(placement, replicas, lengths, request.new_tokens, wanted, request.chunk, chosen)
        entries: list[Entry] = []
        for routes in walked[key]:
            enters, decodes = routes.entering[at.dp], routes.decoding[at.dp]
            sampled = sum(decodes or start + count == lengths[prompt] for prompt, start, count in enters)
            each = [(count, start) for _, start, count in enters]
            batch = batch_of("decode" if decodes else "prefill", each, sampled, request.chunk)
            moved = partial(routes.of, rank)
            for entry in rank_entries(placement, rank, batch, settings, moved, kinds):
                entries.append(replace(entry, step=routes.step, microbatch=routes.microbatch))
        ledger.entries += numbered(entries, at.cp, layout.cp)
        sizes = placement.weight_bytes_by_role(at)
        ledger.holdings += [Holding(name, "weights", role, size, "exact") for role, size in sizes.items()]
        cache = kv_bytes(placement, rank, request, request.lengths_of(at.dp))
        ledger.holdings.append(Holding(name, "kv_cache", None, cache, "exact"))
        ledger.ranks.append(Rank(rank, {axis: getattr(at, axis) for axis in (*AXES, "ep")}, name))
    return ledger


def replica_entries(placement: Placement, request: Request, lengths: Sequence[int]) -> Iterator[Entry]:
    """Entries of all passes of a replica with prompts of these lengths, for every rank class."""
    settings = ServeSettings(dtype=request.dtype, kv_dtype=request.dtype)
    groups = request.micro_batches or placement.layout.pp
    for step, microbatch, batch in passes(lengths, request.new_tokens, groups, request.chunk):
        for entry in forward_entries(placement, batch, settings):
            yield replace(entry, step=step, microbatch=microbatch)


def numbered(entries: Iterable[Entry], place: int, cp: int) -> Iterator[Entry]:
    """Entries as of one place on cp: numbered within their streams, with its neighbours on the ring as peers."""
    seq: dict[tuple[str, str], int] = {}
    for entry in entries:
        key = entry.rank_class, entry.stream or ""
        number = seq.get(key, 0)
        seq[key] = number + 1
        peer = entry.peer
        if entry.group == "cp" and entry.op in HAND_OFFS:
            peer = neighbours(cp, place)[entry.op == "recv"]
        yield replace(entry, seq=number, peer=peer)


def kv_bytes(placement: Placement, rank: int, request: Request, lengths: Sequence[int]) -> int:
    """Bytes of a rank's cache: whole blocks for every sequence, keys and values of the KV heads it holds.

    Of latent attention every rank of tp holds the whole latent and the turned key. Layers with a sliding window keep
    all tokens, as the others. Over cp every rank has slots for its rows of the prompt, filled up to equal shares, and
    its share of the decoded tokens. The last token generated is never read again and needs no slot.
    """
    at = placement.coordinate(rank)
    size, cp = size_bytes(request.dtype), placement.layout.cp
    held_slots = (slots(pieces_of(length, request.chunk), request.new_tokens - 1, cp) for length in lengths)
    blocks = sum(-(-count // request.block_size) for count in held_slots)
    total = 0
    for kind in held(placement, at, {}).kinds.values():
        a = kind.layer.attention
        if a is not None:
            own = kind.units["kv_heads"] * (a.head_dim + a.v_head_dim) if a.kind == "gqa" else a.cached_values_per_token
            total += own * size
    return total * blocks * request.block_size


def predict_apart(request: Request, path: Path, timeout_s: float = 120.0) -> Ledger:
    """``predict`` in a process of its own that cannot import torch; the ledger lies at ``path`` afterwards.

    Raises:
        InputError: the prediction failed; its message. IllegalLayoutError does not come here: judge legality before.
    """
    return run_apart(APART, asdict(request), path, timeout_s)


def run_apart(program: str, request: Mapping[str, Any], path: Path, timeout_s: float) -> Ledger:
    """Run a program that begins as ``APART`` does on a request, and read the ledger that it wrote.

    Raises:
        InputError: it failed or was too late.
    """
    job = json.dumps({"request": request, "path": str(path)})
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], input=job, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"the prediction took longer than {timeout_s:g} s; give it more with --timeout") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1][:300]
        raise InputError(f"the prediction failed: {said}")
    return store.read(path)


def main() -> None:
    """Body of the process apart: the job comes as JSON on the standard input."""
    answer(lambda given: predict(Request(**{**given, "lengths": tuple(given["lengths"])})))


def answer(make: Callable[[Mapping[str, Any]], Ledger]) -> None:
    """Read a request, make its ledger, write it and say whether torch was there; a refusal is one line and exit 1."""
    job = json.load(sys.stdin)
    try:
        ledger = make(job["request"])
        ledger.meta["torch"] = "imported" if "torch" in sys.modules else "could not be imported"
        store.write(ledger, job["path"])
    except MeshwrightError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)
