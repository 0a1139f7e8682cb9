"""Many proofs in one launch: what the tests of prove share, importable by the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.ledger.schema import Ledger
from meshwright.prove.predict import Request, predict
from meshwright.prove.proof import Proof, judge, legal
from meshwright.runtime.folder import read_folder
from meshwright.runtime.launch.local import run_local
from meshwright.runtime.proof import ProofJob, RankProof, routing_of, run_proof
from meshwright.specs.layout import Layout, parse_layout


def run_proofs(rank: int, jobs: Sequence[ProofJob]) -> list[RankProof]:
    """Body of a rank: one proof after the other."""
    return [run_proof(rank, job) for job in jobs]


@dataclass(frozen=True, slots=True)
class Case:
    """One layout to prove: text form, a planted mistake, and options that the job and the prediction share."""

    layout: str
    mutation: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def proofs(
    folder: Path,
    layout: str,
    mutations: Sequence[str | None],
    *,
    new_tokens: int = 4,
    tokens: int = 6,
    lengths: Sequence[int] = (),
    timeout_s: float = 100.0,
    numbers: Path,
    **options: Any,
) -> list[Proof]:
    """The verdict on a layout, once for every mutation; one reference and one launch of the ranks for all."""
    wanted = parse_layout(layout)
    each = lengths or (tokens,) * (wanted.dp * wanted.pp)
    cases = [Case(layout, name, options) for name in mutations]
    return prove_cases(folder, cases, each, numbers=numbers, new_tokens=new_tokens, timeout_s=timeout_s)


def prove_cases(
    folder: Path, cases: Sequence[Case], lengths: Sequence[int], *, numbers: Path, new_tokens: int, timeout_s: float
) -> list[Proof]:
    """The verdicts on layouts of equally many ranks, all with the same prompts: one reference, one launch."""
    spec = read_folder(folder).spec
    prompts = tuple(tuple((7 * p + 5 * t + 3) % spec.vocab for t in range(n)) for p, n in enumerate(lengths))
    alone = ProofJob(str(folder), legal(spec, Layout()), prompts, new_tokens, str(numbers), reference=True)
    reference = run_local(run_proof, 1, (alone,), timeout_s)[0]
    jobs = [
        replace(alone, placement=legal(spec, parse_layout(c.layout)), reference=False, mutation=c.mutation, **c.options)
        for c in cases
    ]
    ranks = run_local(run_proofs, jobs[0].placement.layout.world, (jobs,), timeout_s)
    routing = routing_of(str(numbers)) if spec.moe is not None else None
    unequal = tuple(lengths) if len(set(lengths)) > 1 else ()
    predicted: dict[str, Ledger] = {}
    out = []
    for number, case in enumerate(cases):
        request = Request(
            str(folder),
            case.layout,
            len(lengths),
            lengths[0],
            new_tokens,
            lengths=unequal,
            routing=routing,
            **case.options,
        )
        if str(request) not in predicted:
            predicted[str(request)] = predict(request)
        wanted = parse_layout(case.layout)
        known = predicted[str(request)]
        proof = Proof(spec.name, wanted, wanted.world, "a test", case.mutation, predicted=known)
        judge(proof, reference, [rank[number] for rank in ranks])
        out.append(proof)
    return out
