"""Many proofs in one launch: what the tests of prove share, importable by the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.prove.predict import Request, predict
from meshwright.prove.proof import Proof, judge, legal
from meshwright.runtime.folder import read_folder
from meshwright.runtime.launch.local import run_local
from meshwright.runtime.proof import ProofJob, RankProof, routing_of, run_proof
from meshwright.specs.layout import Layout, parse_layout


def run_proofs(rank: int, jobs: Sequence[ProofJob]) -> list[RankProof]:
    """Body of a rank: one proof after the other."""
    return [run_proof(rank, job) for job in jobs]


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
    wanted, spec = parse_layout(layout), read_folder(folder).spec
    placement = legal(spec, wanted)
    count = len(lengths) or wanted.dp * wanted.pp
    each = lengths or (tokens,) * count
    prompts = tuple(tuple((7 * p + 5 * t + 3) % spec.vocab for t in range(n)) for p, n in enumerate(each))
    job = ProofJob(str(folder), placement, prompts, new_tokens, str(numbers), **options)
    alone = replace(job, placement=legal(spec, Layout()), reference=True, chunk=None)
    reference = run_local(run_proof, 1, (alone,), timeout_s)[0]
    jobs = [replace(job, mutation=name) for name in mutations]
    ranks = run_local(run_proofs, wanted.world, (jobs,), timeout_s)
    if spec.moe is not None:
        options["routing"] = routing_of(str(numbers))
    request = Request(str(folder), layout, count, tokens, new_tokens, lengths=tuple(lengths), **options)
    predicted = predict(request)
    out = []
    for number, name in enumerate(mutations):
        proof = Proof(spec.name, wanted, wanted.world, "a test", name, predicted=predicted)
        judge(proof, reference, [rank[number] for rank in ranks])
        out.append(proof)
    return out
