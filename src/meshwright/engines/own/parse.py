"""A ``meshwright run serve`` or ``run train`` command as an ``Invocation``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import cast

from meshwright.engines.base import FileReader, FlagTable, Invocation
from meshwright.engines.flagtable import split_words
from meshwright.engines.flagwords import Words, shown
from meshwright.engines.launcher import Launch, read_launch
from meshwright.engines.own.emit import MODULE
from meshwright.engines.own.flags import SERVE, TRAIN
from meshwright.engines.own.profile import OWN
from meshwright.engines.serving import lengths
from meshwright.engines.training import from_launch
from meshwright.errors import InputError
from meshwright.specs.checks import broken
from meshwright.specs.layout import Fsdp, Layout, parse_layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import ServeSettings
from meshwright.specs.rules import Rule
from meshwright.specs.workload import Recompute, Serve, Train

#: Defaults of ``run serve`` and ``run train`` (cli/serve.py; runtime/train/settings.py).
SEQUENCES, BATCH_TOKENS, BLOCK = 64, 512, 16
SEQ, GLOBAL_BATCH = 512, 8
#: Positions of a model that says none (runtime/serve/setup.py).
MAX_LENGTH = 4096


def program(argv: Sequence[str]) -> tuple[str, tuple[str, ...], Launch | None] | None:
    """``serve`` or ``train``, its words, and the launcher in front; None: the words start neither."""
    launch = None
    if argv and PurePath(argv[0]).name == "meshwright":
        words = tuple(argv[1:])
    else:
        launch = read_launch(argv)
        if launch is None or not launch.module or launch.script != MODULE:
            return None
        words = launch.arguments
    if words[:1] != ("run",) or words[1:2] not in {("serve",), ("train",)}:
        return None
    return words[1], words[2:], launch if launch is not None and launch.launcher == "torchrun" else None


def parse(argv: Sequence[str], env: Mapping[str, str], read: FileReader) -> Invocation:
    """Read a command line.

    Raises:
        InputError: it starts neither, hands off to another engine, or a layout or number is malformed.
    """
    found = program(argv)
    if found is None:
        raise InputError("no meshwright run serve or run train in this command")
    command, rest, launch = found
    if command == "serve":
        return _serving(split_words(rest, SERVE))
    invocation = _training(split_words(rest, TRAIN))
    if launch is None:
        return replace(invocation, devices=invocation.layout.world)
    known = read_launch(argv, env, read)
    assert known is not None
    invocation = from_launch(invocation, known)
    return replace(invocation, findings=(*invocation.findings, *_world(invocation.layout, known)))


def complete(invocation: Invocation, spec: ModelSpec) -> Invocation:
    """The invocation with the length of a request that the model allows, where the command names none."""
    work = invocation.workload
    if isinstance(work, Train) or work.max_model_len is not None:
        return invocation
    return replace(invocation, workload=lengths(spec.max_positions or MAX_LENGTH))


def _serving(words: Words) -> Invocation:
    engine = words.text("--engine")
    if engine not in {None, "meshwright"}:
        raise InputError(f"--engine {shown(engine or '')} starts that engine: check the command that it prints")
    sides = words.text("--prefill"), words.text("--decode")
    if (sides[0] is None) != (sides[1] is None) or (sides[0] is not None and words.text("--layout") is not None):
        raise InputError("--prefill and --decode go together and replace --layout")
    layout = parse_layout(sides[1] or words.text("--layout") or "tp=1")
    settings = ServeSettings(
        max_num_seqs=words.whole("--max-sequences", 1) or SEQUENCES,
        max_num_batched_tokens=words.whole("--max-batch-tokens", 1) or BATCH_TOKENS,
        block_size=words.whole("--block-size", 1) or BLOCK,
        dtype=_choice(words, "--dtype", "") or None,
        as_typed=True,
    )
    tokens = words.whole("--cache-tokens", 1)
    notes = () if tokens is None else (f"--cache-tokens {tokens}: what would fit is shown, the cache is as told",)
    length = words.whole("--max-len", 1)
    found = _invocation(words, SERVE, layout, lengths(length) if length is not None else Serve())
    ray = words.text("--launch") == "ray"
    return replace(
        found,
        prefill=parse_layout(sides[0]) if sides[0] is not None else None,
        settings=settings,
        deployment="ray" if ray else "pools" if sides[0] is not None else "single",
        notes=notes,
    )


def _training(words: Words) -> Invocation:
    text, dtype = words.text("--layout") or "tp=1", _choice(words, "--dtype", "f32")
    layout = parse_layout(text)
    if (schedule := words.text("--schedule")) is not None:
        layout = layout.with_(schedule=parse_layout(f"schedule={schedule}").schedule)
    if layout.zero == 3 and "param_dtype" not in text:
        layout = layout.with_(fsdp=replace(layout.fsdp or Fsdp(), param_dtype=dtype))
    if (micro := words.whole("--micro-batch", 1)) is not None:
        layout = layout.with_(micro_batch=micro)
    work = Train(
        seq=words.whole("--seq", 1) or SEQ,
        global_batch=words.whole("--global-batch", 1) or GLOBAL_BATCH,
        optimizer="sgd" if words.text("--optimizer") == "sgd" else "adamw",
        recompute=cast(Recompute, _choice(words, "--recompute", "none")),
        param_dtype=dtype,
    )
    found = _invocation(words, TRAIN, layout, work)
    scratch = words.text("--from-scratch")
    ray = words.text("--launch") == "ray"
    return replace(
        found,
        model=found.model or scratch,
        train_options={"preset": "torch"},
        deployment="ray" if ray else "single",
    )


def _choice(words: Words, name: str, usual: str) -> str:
    """Its value; what the flag does not take is a finding and leaves the usual one."""
    found = words.find(name)
    return found.value if found is not None and found.value in found.flag.choices else usual


def _invocation(words: Words, table: FlagTable, layout: Layout, work: Serve | Train) -> Invocation:
    """What both commands have in common: model, flags, and what the command line would refuse."""
    return Invocation(
        engine=OWN.engine,
        version=OWN.version,
        model=words.positional[0] if words.positional else None,
        layout=layout,
        workload=work,
        given=tuple((g.name, g.value) for g in words.given),
        unknown=words.unknown,
        findings=tuple(_refused(words, table)),
    )


def _refused(words: Words, table: FlagTable) -> list[Rule]:
    extra = [f"{shown(w)} stands alone; one model is taken" for w in words.positional[1:]]
    rules = [broken("flag_value", "illegal", text, "correct it", table.source) for text in (*words.problems, *extra)]
    return rules + [
        broken("flag_unknown", "illegal", f"meshwright run has no flag {shown(w)}", "leave it out", table.source)
        for w in words.unknown
    ]


def _world(layout: Layout, launch: Launch) -> tuple[Rule, ...]:
    """More processes than the layout has ranks stop the run; fewer reduce dp (runtime/train/launch.py)."""
    started = launch.devices
    if started is None or started == layout.world or (started < layout.world and layout.dp > 1):
        return ()
    message = f"torchrun starts {started} processes, layout {layout} has {layout.world} ranks"
    way_out = f"start {layout.world} processes, or name a layout of {started} ranks"
    return (broken("world_over_degrees", "illegal", message, way_out, started=started, ranks=layout.world),)
