"""A mistake on one rank and layer: ``python docs/demo/hang.py MODEL FOLDER`` runs a model on three ranks, and it hangs.

Rank 1 leaves out one sum over tp, the one behind attention in layer 3 of the second token. All shapes agree, so nothing
fails at once: the rank is one call ahead from there on, and at the end the others wait for a call that never comes.
What the recorder kept is left in FOLDER, for ``meshwright doctor FOLDER``. Exit 0: it hung, as it should.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from meshwright import engines
from meshwright.runtime.folder import read_folder
from meshwright.runtime.job import GenerateJob, Sampling
from meshwright.runtime.launch.local import RankError, run_local
from meshwright.specs.layout import parse_layout
from meshwright.specs.placement import place

LAYOUT = "tp=3"
RANK, LAYER, SKIPPED = 1, 3, 2
#: Longest wait of a rank for another, and bound on the whole.
PATIENCE_S, LIMIT_S = 3.0, 60.0


def body(rank: int, job: GenerateJob, folder: str) -> None:
    """One rank under the recorder; every sum over tp goes through the function below, which rank 1 leaves once."""
    from meshwright.runtime import mesh
    from meshwright.runtime.job import run_job
    from meshwright.runtime.ledger_file import LedgerFile
    from meshwright.runtime.parallel import tensor
    from meshwright.runtime.record import Recorder
    from meshwright.runtime.scope import where

    mesh.WAIT_S = PATIENCE_S
    module: Any = tensor
    honest, seen = module.all_reduce, 0

    def all_reduce(x: Any, group: Any) -> Any:
        nonlocal seen
        here = where()
        if rank == RANK and here.layer == LAYER and here.name == "mixer output":
            seen += 1
            if seen == SKIPPED:
                return x
        return honest(x, group)

    module.all_reduce = all_reduce
    recorder = Recorder(job.placement, rank)
    recorder.meta["world"] = str(job.placement.layout.world)
    file = LedgerFile(recorder, Path(folder) / f"rank{rank}.jsonl")
    try:
        with recorder:
            run_job(rank, job)
    finally:
        file.close()


def main() -> None:
    """Run it and say that it hung."""
    model, folder = Path(sys.argv[1]), Path(sys.argv[2])
    shutil.rmtree(folder, ignore_errors=True)
    found = read_folder(model)
    placement = place(found.spec, parse_layout(LAYOUT), engines.profile("meshwright"))
    prompt = (504, 3575, 282, 4649, 314)
    job = GenerateJob(found, placement, (prompt,), 4, {"sampling": Sampling(), "eos": ()}, found.spec.dtype)
    try:
        run_local(body, placement.layout.world, (job, str(folder)), LIMIT_S)
    except RankError as error:
        print(f"the run hangs, as planted: {error}")
    else:
        sys.exit("the run came to its end, though a rank left out a sum")


if __name__ == "__main__":
    main()
