"""A proof without weights: the same model code, run for every kind of rank of a layout of any size, sends and
multiplies what was predicted.

::

    rules ──> prediction (a process without torch) ──────────────┐
              one process a kind of rank, tensors without data ────┴──> verdict

Both ledgers are compared entry by entry as in ``prove.proof``. Numbers are not: there are none.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright import engines
from meshwright.errors import IllegalLayoutError, InputError
from meshwright.ledger.compare import compare, merged
from meshwright.moves.expert import replicas_meet
from meshwright.prove import proof as proofs
from meshwright.prove.predict import ENGINE, Request, converted, predict_apart
from meshwright.prove.proof import Check, Proof, bytes_check, ledger_checks, timed
from meshwright.runtime.dryrun import MAX_WORLD, MODULES, DryJob, DryRank, run_dry
from meshwright.runtime.launch.local import RankError, run_local, start_server
from meshwright.runtime.models.settings import Settings, check_runnable, read_settings
from meshwright.runtime.mutate import mutation
from meshwright.specs.hf.read import model_from_config
from meshwright.specs.hf.resolve import resolve
from meshwright.specs.layout import Layout, parse_layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import Placement, place

#: Of weights, activations and cache; checkpoints of other types are taken as converted.
DTYPE = "bf16"
NEW_TOKENS = 2
#: Micro-batches in flight where there are stages, and sequences of each.
MICRO_BATCHES, SEQUENCES = 2, 2
#: Coordinates that run at once.
WORKERS = 2


@dataclass(slots=True)
class DryProof(Proof):
    """The verdict on one layout, from its dry-run.

    Attributes:
        classes: rank classes, each of which was run. ran: ranks that were run.
        peak_bytes: most memory that the process of a coordinate had.
    """

    classes: int = 0
    ran: tuple[int, ...] = ()
    peak_bytes: int = 0

    @property
    def note(self) -> str | None:
        """What to know of a mistake that was planted and not seen."""
        if not self.mutation or not self.proven:
            return None
        return f"{self.mutation} changes only numbers, of which a dry-run has none; plant it without --dry"

    @property
    def verdict(self) -> str:
        """One line."""
        said = "equals" if self.proven else "does NOT equal"
        entries = self.comparison.entries + self.comparison.products if self.comparison else 0
        kinds, ran = f"{self.classes} rank class{'es' * (self.classes > 1)}", len(self.ran)
        return (
            f"dry-run {said} prediction: {self.model} under {self.layout}, {self.world:,} ranks, {kinds}, {ran} "
            f"rank{'s' * (ran > 1)} run, {entries:,} entries; {self.scope}"
        )


def dry_run(
    model: str | Path,
    layout: str | Layout,
    *,
    tokens: int = proofs.TOKENS,
    new_tokens: int = NEW_TOKENS,
    micro_batches: int | None = None,
    block_size: int = 16,
    ranks: Sequence[int] | None = None,
    mutate: str | None = None,
    timeout_s: float = 600.0,
    workers: int = WORKERS,
    say: proofs.Say = lambda _: None,
) -> DryProof:
    """Run every rank class of a layout without weights and hold it against its prediction.

    Args:
        model: name of the atlas, or folder with a config.json.
        layout: degrees, up to ``MAX_WORLD`` ranks.
        tokens, new_tokens: length of the prompts, and how many are generated for each.
        micro_batches: groups of ``SEQUENCES`` prompts in flight on a replica; None: ``MICRO_BATCHES`` with stages,
            else one.
        block_size: tokens of a cache block.
        ranks: to run; None: as few as do everything that any does (``distinct``).
        mutate: name of a planted mistake. Those that change only numbers are not seen.
        timeout_s: bound on the prediction, and on every coordinate.
        workers: coordinates at once.
        say: is told what is being done.

    Raises:
        IllegalLayoutError: the own engine refuses the layout, or it is larger than ``MAX_WORLD``.
        InputError: a model or mutation that cannot be run.
    """
    name = str(model)
    wanted = parse_layout(layout) if isinstance(layout, str) else layout
    spec, settings = read_model(name)
    placement = legal(spec, wanted)
    proofs.check_length(spec, tokens, new_tokens)
    mistake = mutation(mutate, placement, new_tokens) if mutate else None
    groups = micro_batches or (MICRO_BATCHES if wanted.pp > 1 else 1)
    prompts = wanted.dp * groups * SEQUENCES
    scope = f"{prompts:,} prompts of {tokens} tokens and {new_tokens} new, {DTYPE}, no numbers"
    proof = DryProof(spec.name, wanted, wanted.world, scope, mutate, classes=len(placement.classes))
    proof.ran = distinct(placement) if ranks is None else _checked(ranks, wanted)
    request = Request(name, str(wanted), prompts, tokens, new_tokens, DTYPE, block_size, groups, ranks=proof.ran)
    with tempfile.TemporaryDirectory(prefix="meshwright-dry-") as scratch:
        start_server(MODULES)
        say("predicting, in a process that cannot import torch")
        with timed(proof, "prediction"):
            proof.predicted = predict_apart(request, Path(scratch) / "predicted.jsonl", timeout_s)
    say(f"{len(proof.ran)} of {wanted.world:,} ranks" + (f", with a mistake: {mistake.says}" if mistake else ""))
    job = DryJob(placement, 0, settings, prompts, tokens, new_tokens, DTYPE, block_size, groups, mutate)
    try:
        with timed(proof, "dry-run"):
            found = run_ranks(job, proof.ran, timeout_s, workers)
    except RankError as error:
        proof.checks.append(Check("run", f"{len(proof.ran)} ranks", 1, "no result", str(error)))
        return proof
    proof.peak_bytes = max(rank.peak_bytes for rank in found)
    say("comparing")
    with timed(proof, "comparison"):
        proof.recorded = merged(rank.ledger for rank in found)
        proof.comparison = compare(proof.predicted, proof.recorded)
        proof.checks += ledger_checks(proof.comparison)
        proof.checks += [bytes_check(proof.predicted, proof.recorded, term) for term in proofs.TERMS]
    return proof


def read_model(name: str) -> tuple[ModelSpec, Settings]:
    """The model with all weights of ``DTYPE``, and the numbers that no tensor holds.

    Raises:
        InputError: no such model, or one that the runtime does not compute.
    """
    found = resolve(name, allow_online=False)
    config = converted(found.config, DTYPE)
    spec = model_from_config(config, found.name, found.where, source=found.source)
    return spec, read_settings(config, found.where)


def legal(spec: ModelSpec, layout: Layout) -> Placement:
    """The placement, when the rules of the own engine and what the runtime computes allow it.

    Raises:
        IllegalLayoutError: both numbers and the way out. InputError: a model that the runtime does not compute.
    """
    if layout.world > MAX_WORLD:
        raise IllegalLayoutError(
            f"layout {layout} has {layout.world:,} ranks; a dry-run knows worlds of up to {MAX_WORLD:,}; choose "
            "smaller degrees"
        )
    placement = place(spec, layout, engines.profile(ENGINE))
    check_runnable(spec, layout)
    return placement


def distinct(placement: Placement) -> tuple[int, ...]:
    """Ranks that together do what any rank of the world does.

    The first of every rank class; where tokens travel to experts also the last of its group, which other rows reach;
    with a ring of context parallelism every place on it, because neighbours differ.
    """
    layout, out = placement.layout, set[int]()
    for c in placement.classes:
        ring = placement.group("cp", c.coordinate) if layout.cp > 1 and layout.cp_kind != "ulysses" else (c.first_rank,)
        out |= {c.first_rank, *ring}
        if replicas_meet(placement):
            out.add(placement.group("ep", c.coordinate)[-1])
    return tuple(sorted(out))


def _checked(ranks: Sequence[int], layout: Layout) -> tuple[int, ...]:
    wrong = [rank for rank in ranks if not 0 <= rank < layout.world]
    if wrong or not ranks:
        raise InputError(f"rank {wrong[0] if wrong else 'none'}; layout {layout} has ranks 0 to {layout.world - 1}")
    return tuple(sorted(set(ranks)))


def run_ranks(job: DryJob, ranks: Sequence[int], timeout_s: float, workers: int) -> list[DryRank]:
    """Every rank in a process of its own, ``workers`` at a time.

    Raises:
        RankError: one failed or was too late; it names the rank.
    """

    def run(rank: int) -> DryRank:
        try:
            out: DryRank = run_local(run_dry, 1, (replace(job, rank=rank),), timeout_s)[0]
        except RankError as error:
            said = str(error).removeprefix("rank 0 of 1 ")
            raise RankError(f"rank {rank}: {said}", error.trace) from None
        return out

    if workers < 1:
        raise InputError(f"{workers} workers; at least 1 is needed")
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(run, ranks))


def as_json(proof: DryProof) -> Mapping[str, Any]:
    """As of a proof, with the rank classes and the memory."""
    return {
        **proofs.as_json(proof),
        "classes": proof.classes,
        "ran": proof.ran,
        "peak_bytes": proof.peak_bytes,
        "note": proof.note,
    }
