"""An emission read back: a layout that a configuration cannot state is refused, not changed on the way."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields, replace

from meshwright.engines.base import Emission, Engine, Request
from meshwright.errors import InputError
from meshwright.specs.layout import Fsdp, Layout
from meshwright.specs.workload import Train

#: What must be exactly as asked, and what is only said when it differs.
_STRICT = ("seq", "global_batch", "recompute", "optimizer")
_TOLD = ("param_dtype", "grad_dtype", "master_weights", "state_dtype", "attention", "fused_cross_entropy", "dropout")
#: Our own variables and Slurm's, as a shell on node 0 would put them in.
_VARIABLES = re.compile(r"\$(HEAD_IP|NODE_RANK|SLURM_PROCID|SLURM_JOB_ID)\b")


def words_of(emission: Emission) -> list[str]:
    """Words of the command that starts the training on node 0: typed, or in the Slurm script."""
    text = emission.commands[0].text
    if text.startswith("sbatch "):
        script = next(f.text for f in emission.files if f.path == text.removeprefix("sbatch "))
        text = next(line for line in script.splitlines() if line.startswith("srun "))
    return shlex.split(_VARIABLES.sub(lambda m: "10.0.0.1" if m[1] == "HEAD_IP" else "0", text))


def verified(engine: Engine, request: Request, emission: Emission) -> Emission:
    """The emission, with a note where precision differs from what was asked.

    Raises:
        InputError: the files and the command state another layout, batch or length than asked.
    """
    work = request.workload
    assert isinstance(work, Train)
    files = {f.path: f.text.encode() for f in emission.files}
    found = engine.parse(words_of(emission), {}, files.get)
    assert isinstance(found.workload, Train)
    asked, made = _plain(request.layout, found.layout), found.layout
    pairs = [(f.name, getattr(asked, f.name), getattr(made, f.name)) for f in fields(Layout)]
    pairs += [(name, getattr(work, name), getattr(found.workload, name)) for name in _STRICT]
    for name, wanted, stated in pairs:
        if wanted != stated:
            raise InputError(
                f"{engine.name} cannot be started with {_said(name, wanted)}: its configuration gives "
                f"{_said(name, stated)}; ask for that, or name another --engine"
            )
    other = [n for n in _TOLD if getattr(work, n) != getattr(found.workload, n)]
    if not other:
        return emission
    text = ", ".join(f"{n} {getattr(found.workload, n)} (asked: {getattr(work, n)})" for n in other)
    return replace(emission, notes=(*emission.notes, f"as {engine.name} runs it: {text}"))


def _plain(asked: Layout, made: Layout) -> Layout:
    """What was asked, with what the engine does by itself where nothing was named."""
    if asked.etp is None:
        asked = replace(asked, etp=made.etp)
    if asked.zero < 3:
        return replace(asked, fsdp=made.fsdp)
    if asked.fsdp is None or made.fsdp is None:
        return replace(asked, fsdp=made.fsdp) if _usual(asked.fsdp) else asked
    knobs = replace(asked.fsdp, prefetch=made.fsdp.prefetch, reduce_dtype=made.fsdp.reduce_dtype)
    return replace(asked, fsdp=knobs)


def _usual(knobs: Fsdp | None) -> bool:
    """Layer by layer, freed after the forward, no replicas: what every engine does."""
    return knobs is None or (knobs.wrap == "layer" and knobs.reshard_after_forward and knobs.replicas == 1)


def _said(name: str, value: object) -> str:
    if isinstance(value, Fsdp):
        return ", ".join(f"{f.name} {getattr(value, f.name)}" for f in fields(Fsdp))
    return f"{name} {value}"
