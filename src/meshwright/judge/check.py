"""``check``: find out whose command or file it is, understand it, judge it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from meshwright import engines
from meshwright.engines.base import Completes, Engine, Invocation
from meshwright.errors import InputError
from meshwright.judge.context import longer_than_the_model
from meshwright.judge.verdict import Verdict, judge, with_lengths
from meshwright.judge.words import Folder, Words, split
from meshwright.specs.cluster import Cluster
from meshwright.specs.hf.read import read_model
from meshwright.specs.model import ModelSpec
from meshwright.specs.rules import Rule
from meshwright.specs.workload import Train

#: Bytes of a file that are searched for signs of an engine.
MAX_SIGNS = 1 << 16

#: Engine -> words that its commands contain; only folders that may be meant are imported.
HINTS: dict[str, tuple[str, ...]] = {
    "vllm": ("vllm",),
    "sglang": ("sglang",),
    "trtllm": ("trtllm", "tensorrt"),
    "megatron": ("pretrain_", "megatron"),
    "torchtitan": ("torchtitan",),
    "deepspeed": ("deepspeed",),
    "accelerate": ("accelerate",),
    "transformers": ("transformers", "distributed_config", "tp_plan", "--fsdp", "tp_size", "fsdp_size"),
    "meshwright": ("meshwright\nrun", "meshwright.cli.main"),
    "torchrun": ("torchrun", "torch.distributed"),
}

#: Engine -> what stands in its configuration files; these engines are asked first, so that no other is imported.
FILE_SIGNS: dict[str, tuple[bytes, ...]] = {
    "deepspeed": (b'"zero_optimization"', b'"train_micro_batch_size_per_gpu"', b'"train_batch_size"'),
    "accelerate": (b"distributed_type", b"fsdp_config"),
    "transformers": (b'"tp_size"', b'"fsdp_size"', b'"tp_plan"'),
}


def readers(data: bytes) -> Iterator[Engine]:
    """Engines that may know a configuration file: those whose signs it has, then the others, one at a time."""
    head = data[:MAX_SIGNS]
    signed = [e for e, signs in FILE_SIGNS.items() if any(sign in head for sign in signs)]
    for name in dict.fromkeys([*signed, *HINTS]):
        yield engines.load(name)


def candidates(argv: Sequence[str]) -> list[str]:
    """Engines whose hint stands in the command, in the order of ``HINTS``; all of them when none does."""
    text = "\n".join(argv).lower()
    return [e for e, hints in HINTS.items() if any(h in text for h in hints)] or list(HINTS)


def whose(argv: Sequence[str], engine: str | None) -> tuple[Engine, str | None]:
    """The engine that a command starts, and the version that the user named.

    Raises:
        InputError: no engine recognises the command.
    """
    if engine is not None:
        _, version = engines.split_name(engine)
        return engines.load(engine), version
    for name in candidates(argv):
        found = engines.load(name)
        if found.recognises(argv):
            return found, None
    known = ", ".join(engines.FOLDERS)
    raise InputError(f"no engine starts with {' '.join(argv)[:60]!r}; known engines: {known}; name one with --engine")


def unexpanded(words: Words) -> tuple[Rule, ...]:
    """A finding a word that only a shell could have resolved."""
    return tuple(
        Rule(
            "unexpanded",
            "unwise",
            f"{word[:60]!r} is not expanded here and is taken as it stands",
            "write its value in the command",
        )
        for word in words.unexpanded[:4]
    )


def model_of(engine: Engine, invocation: Invocation, model: str | None) -> ModelSpec:
    """The model that the user or the command names, or that the command describes by its sizes.

    Raises:
        InputError: neither.
    """
    if model is not None:
        return read_model(model)
    describe = getattr(engine, "model_spec", None)
    described: ModelSpec | None = describe(invocation) if describe is not None else None
    if described is not None:
        return described
    if invocation.model is not None:
        return read_model(invocation.model)
    raise InputError("the command names no model that is known here; name one with --model")


def completed(engine: Engine, invocation: Invocation, spec: ModelSpec, cluster: Cluster) -> Invocation:
    """The invocation with what it leaves to the model and to the machine (``engines.base.Completes``)."""
    return engine.complete(invocation, spec, cluster) if isinstance(engine, Completes) else invocation


def runnable(invocation: Invocation, spec: ModelSpec) -> Invocation:
    """The invocation with a finding where it starts our own runtime, which does not run the model or the layout."""
    if invocation.engine != "meshwright":
        return invocation
    from meshwright.runtime.refusal import refusal

    layouts = filter(None, (invocation.prefill, invocation.layout))
    why = refusal(spec, *layouts, trains=isinstance(invocation.workload, Train))
    if not why:
        return invocation
    rule = Rule("not_run", "illegal", why, "take another layout, or plan with another --engine", "runtime/refusal.py")
    return replace(invocation, findings=(*invocation.findings, rule))


def check_words(
    words: Sequence[str],
    cluster: Cluster,
    *,
    model: str | None = None,
    engine: str | None = None,
    base: Path | None = None,
    isl: int | None = None,
    osl: int | None = None,
    concurrency: int | None = None,
) -> Verdict:
    """Judge a pasted command. Nothing is run, and only files inside ``base`` are read.

    Raises:
        InputError: it cannot be read, no engine recognises it, or the model is not known.
    """
    pasted = split(words)
    found, version = whose(pasted.argv, engine)
    invocation = found.parse(pasted.argv, dict(pasted.env), Folder(base or Path.cwd()), version)
    invocation = replace(
        invocation,
        findings=(*invocation.findings, *unexpanded(pasted)),
        notes=(*invocation.notes, *pasted.notes),
    )
    spec = model_of(found, invocation, model)
    invocation = runnable(completed(found, invocation, spec, cluster), spec)
    said = (*(f"{name}={value}" for name, value in pasted.env), *pasted.argv)
    invocation = longer_than_the_model(invocation, spec, said)
    workload = with_lengths(invocation.workload, spec, isl, osl, concurrency)
    return judge(found, invocation, spec, cluster, workload)


def check_config(
    path: Path,
    cluster: Cluster,
    *,
    model: str | None = None,
    engine: str | None = None,
    isl: int | None = None,
    osl: int | None = None,
    concurrency: int | None = None,
) -> Verdict | None:
    """Judge a configuration file of an engine; None when no engine knows it.

    Raises:
        InputError: it cannot be read, or it names no model and the user named none.
    """
    real = path.resolve()
    data = Folder(real.parent)(real.name)
    if data is None:
        raise InputError(f"{path}: no such file")
    for found in [engines.load(engine)] if engine else readers(data):
        invocation = found.parse_file(path.name, data)
        if invocation is not None:
            spec = model_of(found, invocation, model)
            invocation = longer_than_the_model(completed(found, invocation, spec, cluster), spec, ())
            workload = with_lengths(invocation.workload, spec, isl, osl, concurrency)
            return judge(found, invocation, spec, cluster, workload)
    return None
