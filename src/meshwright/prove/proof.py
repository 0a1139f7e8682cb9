"""A proof: legality, a prediction made without torch, one process, the layout with every rank recorded, the verdict.

::

    rules ──> one process (reference logits) ────────┐
              prediction (a process without torch) ──┼──> verdict
              the layout, every rank recorded ───────┘

Where tokens go in a mixture of experts depends on numbers: the one process writes the experts that every token chose,
and the prediction takes them as an input.

What is proven is said by ``Proof.scope``: this model, this layout, these prompts, on this machine, in fp32. Both sides
share ``specs`` and ``moves``: that the reference itself is right is checked against transformers by the tests.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from meshwright import engines
from meshwright.errors import IllegalLayoutError, InputError
from meshwright.ledger import store
from meshwright.ledger.compare import Comparison, compare, compare_holdings, merged
from meshwright.ledger.schema import Ledger
from meshwright.prove.predict import ENGINE, Request, predict_apart
from meshwright.prove.timing import Timing, timing_of
from meshwright.runtime.folder import read_folder
from meshwright.runtime.launch.local import MAX_LOCAL_RANKS, RankError, run_local, start_server
from meshwright.runtime.loads import LayerLoad, as_plain, load_table
from meshwright.runtime.models.settings import check_runnable
from meshwright.runtime.mutate import mutation
from meshwright.runtime.proof import Farthest, ProofJob, RankProof, routing_of, run_proof
from meshwright.specs.layout import Layout, parse_layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import Placement, place

#: Largest distance of a logit from that of one process, fp32.
TOLERANCE = 1e-4
TOKENS = 12
NEW_TOKENS = 4
MAX_PROMPTS = 256
#: What a rank holds that is compared to the byte.
TERMS = ("weights", "kv_cache")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was compared.

    Attributes:
        what: name of it. compared: how many, in words. differs: how many are not equal.
        worst: the largest difference, in words.
        first: the first difference named, None without one.
    """

    what: str
    compared: str
    differs: int
    worst: str
    first: str | None = None

    @property
    def ok(self) -> bool:
        """Nothing differs."""
        return self.differs == 0


@dataclass(slots=True)
class Proof:
    """The verdict on one layout.

    Attributes:
        model, layout, world: what was run. mutation: the planted mistake, if any.
        scope: over what the verdict holds, in a line.
        checks: what was compared.
        seconds: how long each part took.
        comparison: of the ledgers, with all differences.
        predicted, recorded: the ledgers; None where a rank did not come to its end.
        timing: measured against predicted seconds, or why there are none; no part of the verdict.
        experts: how busy the experts of every sparse layer were; no part of the verdict.
    """

    model: str
    layout: Layout
    world: int
    scope: str
    mutation: str | None = None
    checks: list[Check] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    comparison: Comparison | None = None
    predicted: Ledger | None = None
    recorded: Ledger | None = None
    timing: Timing | str | None = None
    experts: list[LayerLoad] = field(default_factory=list)

    @property
    def proven(self) -> bool:
        """Everything that was compared is equal."""
        return bool(self.checks) and all(check.ok for check in self.checks)

    @property
    def first(self) -> str | None:
        """The first difference: of the ledgers where these differ, because it names a place in the program."""
        rank = {"collectives, hand-offs": 0, "matrix products": 1, "run": 0}
        failed = sorted((c for c in self.checks if not c.ok), key=lambda c: rank.get(c.what, 2))
        return failed[0].first if failed else None

    @property
    def verdict(self) -> str:
        """One line."""
        said = "proven" if self.proven else "NOT proven"
        return f"{said}: {self.model} under {self.layout} on {self.world} rank{'s' * (self.world > 1)}, {self.scope}"


Say = Callable[[str], None]
#: What a rank reports.
R = TypeVar("R")


def prove(
    model: str | Path,
    layout: str | Layout,
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    tokens: int = TOKENS,
    new_tokens: int = NEW_TOKENS,
    seed: int = 0,
    micro_batches: int | None = None,
    chunk: int | None = None,
    block_size: int = 16,
    mutate: str | None = None,
    timing: bool = False,
    timeout_s: float = 600.0,
    say: Say = lambda _: None,
) -> Proof:
    """Run a checkpoint under a layout and hold it against one process and against its prediction.

    Args:
        model: folder with config.json and safetensors weights.
        layout: degrees.
        prompts: token ids; dealt over dp in runs. None: random ids, as many prompts as there are stages on every
            replica.
        tokens, seed: length and seed of the random prompts.
        new_tokens: greedy tokens for every prompt; the first comes from the prefill, the others from decode steps.
        micro_batches: groups of prompts in flight; None: as many as stages.
        chunk: most prompt tokens of one sequence in a pass; None: the whole prompt at once.
        block_size: tokens of a cache block.
        mutate: name of a planted mistake (``runtime.mutate``), with which the proof must fail.
        timing: also calibrate this machine, and time the layout when it is proven.
        timeout_s: bound on each of the runs.
        say: is told what is being done.

    Raises:
        IllegalLayoutError: the own engine refuses the layout; nothing was started.
        InputError: a model, prompt or mutation that cannot be run.
    """
    folder = str(model)
    wanted = parse_layout(layout) if isinstance(layout, str) else layout
    spec = read_folder(folder).spec
    placement = legal(spec, wanted)
    ids = _prompts(spec, wanted, prompts, tokens, seed)
    if chunk is not None and chunk < 1:
        raise InputError(f"--chunk {chunk}; at least 1 is needed")
    lengths = tuple(map(len, ids))
    few, tokens = min(lengths), max(lengths)
    check_length(spec, tokens, new_tokens)
    mistake = mutation(mutate, placement, new_tokens) if mutate else None
    many = "s" * (len(ids) > 1)
    long = f"{few} to {tokens}" if few < tokens else str(tokens)
    scope = f"{len(ids)} prompt{many} of {long} tokens and {new_tokens} new, f32, gloo on this machine"
    proof = Proof(spec.name, wanted, wanted.world, scope, mutate)
    request = Request(folder, str(wanted), len(ids), tokens, new_tokens, "f32", block_size, micro_batches, chunk=chunk)
    request = replace(request, lengths=lengths if few < tokens else ())
    with tempfile.TemporaryDirectory(prefix="meshwright-prove-") as scratch:
        numbers = f"{scratch}/numbers"
        job = ProofJob(folder, placement, ids, new_tokens, numbers, "f32", block_size, micro_batches, mutation=mutate)
        alone = replace(job, placement=place(spec, Layout(), placement.profile), reference=True, mutation=None)
        job = replace(job, chunk=chunk)
        say("one process")
        with timed(proof, "one process"):
            reference = run_local(run_proof, 1, (alone,), timeout_s)[0]
        if spec.moe is not None:
            request = replace(request, routing=routing_of(numbers))
        ranks: list[RankProof] | None = predicted_and_run(
            proof,
            partial(predict_apart, request, Path(scratch) / "predicted.jsonl", timeout_s),
            partial(run_local, run_proof, wanted.world, (job,), timeout_s),
            mistake.says if mistake else None,
            say,
        )
        if ranks is None:
            return proof
    say("comparing")
    with timed(proof, "comparison"):
        judge(proof, reference, ranks)
    if timing and proof.proven and (chunk or few < tokens or len(ids) % wanted.dp):
        proof.timing = "not timed: only equal prompts that enter whole, as many on every replica, are"
    elif timing and proof.proven:
        assert proof.predicted is not None
        say("timing, on a calibration of this machine")
        with timed(proof, "timing"):
            proof.timing = timing_of(job, proof.predicted, timeout_s)
    return proof


def predicted_and_run(
    proof: Proof, predict: Callable[[], Ledger], run: Callable[[], list[R]], mistake: str | None, say: Say
) -> list[R] | None:
    """Predict, then run the layout; both are timed in the proof, which takes the prediction.

    Args:
        predict: makes the ledger apart from torch. run: results of all ranks. mistake: what was planted, in words.

    Returns:
        What the ranks said; None where one of them did not come to its end, which the proof then says.
    """
    start_server()
    say("predicting, in a process that cannot import torch")
    with timed(proof, "prediction"):
        proof.predicted = predict()
    say(f"{proof.world} ranks, recorded" + (f", with a mistake: {mistake}" if mistake else ""))
    try:
        with timed(proof, "the layout"):
            return run()
    except RankError as error:
        proof.checks.append(Check("run", f"{proof.world} ranks", 1, "no result", str(error)))
        return None


def legal(spec: ModelSpec, layout: Layout, check: Callable[[ModelSpec, Layout], None] = check_runnable) -> Placement:
    """The placement, when the rules of the own engine and what the runtime computes (``check``) allow it.

    Raises:
        IllegalLayoutError: both numbers and the way out. InputError: a model that the runtime does not compute.
    """
    placement = place(spec, layout, engines.profile(ENGINE))
    check(spec, layout)
    if layout.world > MAX_LOCAL_RANKS:
        raise IllegalLayoutError(
            f"layout {layout} has {layout.world} ranks; a proof starts at most {MAX_LOCAL_RANKS} processes on this "
            "machine; choose smaller degrees"
        )
    return placement


def _prompts(
    spec: ModelSpec, layout: Layout, given: Sequence[Sequence[int]] | None, tokens: int, seed: int
) -> tuple[tuple[int, ...], ...]:
    """The prompts of all replicas."""
    if given is None:
        if tokens < 1:
            raise InputError(f"--tokens {tokens}; at least 1 is needed")
        chance = random.Random(seed)
        count = layout.dp * layout.pp
        return tuple(tuple(chance.randrange(spec.vocab) for _ in range(tokens)) for _ in range(count))
    if not given or len(given) > MAX_PROMPTS or not all(given):
        raise InputError(f"{len(given)} prompts; 1 to {MAX_PROMPTS} are needed, none empty")
    return tuple(map(tuple, given))


def check_length(spec: ModelSpec, tokens: int, new_tokens: int) -> None:
    """Refuse more positions than the model has.

    Raises:
        InputError: both numbers.
    """
    if new_tokens < 1:
        raise InputError(f"{new_tokens} new tokens; at least 1 is needed")
    if spec.max_positions and tokens + new_tokens > spec.max_positions:
        raise InputError(
            f"{tokens} tokens and {new_tokens} new ones exceed the {spec.max_positions} positions of {spec.name}; "
            "ask for fewer"
        )


class timed:
    """Notes how long a part took."""

    def __init__(self, proof: Proof, part: str) -> None:
        self.proof, self.part = proof, part

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.proof.seconds[self.part] = round(time.perf_counter() - self.began, 3)


def judge(proof: Proof, reference: RankProof, ranks: Sequence[RankProof]) -> None:
    """Fill in the checks of a proof whose prediction is made: ``reference`` of one process, ``ranks`` of the layout."""
    assert proof.predicted is not None
    proof.recorded = merged(rank.ledger for rank in ranks if rank.ledger is not None)
    proof.checks.append(_numbers("logits", [(r.rank, r.logits) for r in ranks], "rows"))
    proof.checks.append(_tokens(reference, ranks))
    proof.checks.append(_numbers("keys and values", [(r.rank, r.cache) for r in ranks], "tensors"))
    proof.comparison = compare(proof.predicted, proof.recorded)
    proof.checks += ledger_checks(proof.comparison)
    for term in TERMS:
        proof.checks.append(bytes_check(proof.predicted, proof.recorded, term))
    proof.experts = load_table((rank.rank, rank.whole, rank.loads) for rank in ranks)


def _numbers(what: str, found: Sequence[tuple[int, Farthest]], unit: str) -> Check:
    """Logits, or keys and values, of all ranks against one process; ``found``: rank and its largest distance."""
    count = sum(f.count for _, f in found)
    rank, worst = max(found, key=lambda pair: pair[1].distance)
    if not count:
        return Check(what, f"0 {unit}", 1, "none", f"no rank has any {what}")
    far = sum(f.distance > TOLERANCE for _, f in found)
    text = f"{worst.distance:.2g} apart (at most {TOLERANCE:g})"
    return Check(what, f"{count} {unit}", far, text, f"rank {rank}, {what} of {worst.where}: {text}" if far else None)


def _tokens(reference: RankProof, ranks: Sequence[RankProof]) -> Check:
    """Greedy tokens of every rank against one process."""
    total, differs = 0, 0
    first: str | None = None
    seen: set[int] = set()
    for rank in ranks:
        for prompt, tokens in sorted(rank.tokens.items()):
            seen.add(prompt)
            other = reference.tokens[prompt]
            wrong = [i for i, pair in enumerate(zip(tokens, other, strict=False)) if pair[0] != pair[1]]
            bad = len(wrong) + abs(len(tokens) - len(other))
            total += len(other)
            if bad and first is None:
                at = wrong[0] if wrong else min(len(tokens), len(other))
                first = f"rank {rank.rank}, prompt {prompt}: new token {at} is {tokens[at : at + 1]}, not {other[at]}"
            differs += bad
    missing = reference.tokens.keys() - seen
    if missing and first is None:
        first = f"prompt {min(missing)} has no tokens"
    return Check(
        "greedy tokens", f"{total} on {len(ranks)} ranks", differs + len(missing), f"{differs} of {total}", first
    )


def ledger_checks(comparison: Comparison) -> list[Check]:
    """Entries and products as two rows."""
    products = [d for d in comparison.differences if d.stream == "compute"]
    entries = [d for d in comparison.differences if d.stream != "compute"]
    total = comparison.total
    rows = []
    for what, count, found in (
        ("collectives, hand-offs", comparison.entries, entries),
        ("matrix products", comparison.products, products),
    ):
        differs = len(found) if total == len(comparison.differences) else (total if found else 0)
        first = str(found[0]) if found else None
        rows.append(Check(what, f"{count} on {comparison.ranks} ranks", differs, f"{differs} values", first))
    return rows


def bytes_check(predicted: Ledger, recorded: Ledger, term: str) -> Check:
    """Bytes resident against bytes predicted, rank by rank."""
    result = compare_holdings(predicted, recorded, (term,))
    held = sum(h.bytes for h in recorded.holdings if h.term == term)
    far = max((abs(int(d.recorded) - int(d.predicted)) for d in result.differences if d.stream == term), default=0)
    name = {"kv_cache": "bytes of KV cache", "optimizer": "bytes of optimizer state"}.get(term, f"bytes of {term}")
    first = str(result.first) if result.first else None
    return Check(name, f"{held:,} on {result.ranks} ranks", result.total, f"{far:,} bytes", first)


def write_ledgers(proof: Proof, folder: Path) -> None:
    """Write both ledgers as JSON lines: ``predicted.jsonl`` and ``recorded.jsonl``.

    Raises:
        InputError: the folder cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made ({error.strerror})") from None
    for name, ledger in (("predicted", proof.predicted), ("recorded", proof.recorded)):
        if ledger is not None:
            store.write(ledger, folder / f"{name}.jsonl")


def as_json(proof: Proof) -> Mapping[str, Any]:
    """Verdict, checks and the kept differences as plain values."""
    return {
        "proven": proof.proven,
        "verdict": proof.verdict,
        "model": proof.model,
        "layout": str(proof.layout),
        "world": proof.world,
        "scope": proof.scope,
        "mutation": proof.mutation,
        "first": proof.first,
        "checks": [
            {"what": c.what, "compared": c.compared, "differs": c.differs, "worst": c.worst, "first": c.first}
            for c in proof.checks
        ],
        "differences": [str(d) for d in proof.comparison.differences] if proof.comparison else [],
        "ledger_scope": proof.comparison.scope if proof.comparison else None,
        "predicted_without_torch": proof.predicted.meta.get("torch") if proof.predicted else None,
        "seconds": proof.seconds,
        "experts": as_plain(proof.experts),
        "time": proof.timing.as_json() if isinstance(proof.timing, Timing) else proof.timing,
    }
