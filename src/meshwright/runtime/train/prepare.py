"""What a user asks for becomes a job, or is refused in one line, before any rank is started. No torch."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.runtime.launch.torchrun import started_by_torchrun
from meshwright.runtime.train.corpus import BYTES, Corpus, read_corpus
from meshwright.runtime.train.folders import STATE, latest
from meshwright.runtime.train.job import TrainJob, check_data, check_steps, corpus_of, facts_of, placed
from meshwright.runtime.train.settings import RunSettings, settings_from
from meshwright.runtime.train.source import (
    Resumed,
    Source,
    check_same,
    from_scratch,
    keep_model,
    read_resumed,
    read_source,
    source_of,
)
from meshwright.specs.layout import Fsdp, Layout, parse_layout
from meshwright.specs.profile import EngineProfile

#: How long a rank of torchrun waits for the first one to tokenise the data.
OTHERS_S = 3600.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What a user asks for; None: as it is usual, or as the run that goes on was told.

    Attributes:
        model: folder with weights. scratch: configuration whose weights are drawn. resume: checkpoint or run.
        data: corpus. tokenizer: folder of another tokenizer, or ``bytes``. eos: token that closes a document.
        layout: as text. schedule, micro_batch: of it. checkpoint: folder of the run.
        settings: values of ``RunSettings``.
    """

    model: Path | None = None
    scratch: Path | None = None
    resume: Path | None = None
    data: Sequence[Path] = ()
    tokenizer: str | None = None
    eos: int | None = None
    layout: str | None = None
    schedule: str | None = None
    micro_batch: int | None = None
    checkpoint: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def prepare(asked: Asked, profile: EngineProfile, scratch_folder: Path, **rest: Any) -> TrainJob:
    """The job.

    Args:
        asked: see there. profile: of our own runtime. scratch_folder: for tokens, where nothing is kept.
        rest: further fields of the job.

    Raises:
        InputError, IllegalLayoutError: what cannot be done, in one line.
    """
    if sum(x is not None for x in (asked.model, asked.scratch, asked.resume)) == 0:
        raise InputError("a model is needed: a folder with weights, --from-scratch CONFIG, or --resume RUN")
    if asked.model is not None and asked.scratch is not None:
        raise InputError("--from-scratch with a model folder: leave one of the two out")
    resumed = _resumed(asked)
    base = asked.checkpoint or (resumed.base if resumed is not None else None)
    source = _source(asked, resumed)
    settings = _settings(asked, resumed, source)
    layout = _layout(asked, resumed, settings)
    placement = placed(source.model.spec, layout, profile, settings)
    corpus = _corpus(asked, resumed, source, base or scratch_folder)
    if not corpus.samples(settings.seq):
        raise InputError(
            f"{corpus.tokens} tokens of data; one sequence of {settings.seq} needs {settings.seq + 1}: lower --seq"
        )
    if base is not None and _first():
        _prepare_folder(base, source)
    return TrainJob(
        source.model,
        placement,
        settings,
        corpus,
        facts_of(source, corpus),
        base,
        (resumed.folder, resumed.step, resumed.position) if resumed is not None else None,
        random=asked.scratch is not None and resumed is None,
        **rest,
    )


def _resumed(asked: Asked) -> Resumed | None:
    """The checkpoint to go on from; a run of torchrun goes on from its own, because a restart is the same command."""
    found = latest(asked.checkpoint) if asked.checkpoint is not None else None
    resumed = read_resumed(asked.resume) if asked.resume is not None else None
    if found is None or (resumed is not None and found.parent.resolve() == resumed.base.resolve()):
        return resumed
    if not started_by_torchrun():
        raise InputError(
            f"--checkpoint {asked.checkpoint}: holds {found.name} of a run; go on with --resume {asked.checkpoint}, or "
            "name another folder"
        )
    return read_resumed(found)


def _source(asked: Asked, resumed: Resumed | None) -> Source:
    """The model, which is that of the checkpoint where there is one."""
    if resumed is None:
        return read_source(asked.model) if asked.model is not None else from_scratch(asked.scratch or Path())
    source = source_of(resumed)
    if asked.model is not None or asked.scratch is not None:
        named = read_source(asked.model) if asked.model is not None else from_scratch(asked.scratch or Path())
        check_same(resumed, named, str(asked.model or asked.scratch))
    return source


def _settings(asked: Asked, resumed: Resumed | None, source: Source) -> RunSettings:
    """Numbers of the run, with what was given now."""
    if resumed is not None:
        settings = settings_from(resumed.facts.get("settings"), str(resumed.folder / STATE)).changed(asked.settings)
        fixed = {"seq", "seed"} & {name for name, value in asked.settings.items() if value is not None}
        before = settings_from(resumed.facts.get("settings"), "")
        for name in sorted(fixed):
            if getattr(before, name) != getattr(settings, name):
                raise InputError(
                    f"--{name} {getattr(settings, name)}: the run has {getattr(before, name)}, by which its data is "
                    "dealt; leave it out, or start a new run from an export"
                )
    else:
        settings = RunSettings().changed(asked.settings)
    check_steps(settings, resumed.step if resumed is not None else 0)
    longest = source.model.spec.max_positions
    if longest and settings.seq > longest:
        if asked.settings.get("seq") is not None or resumed is not None:
            raise InputError(f"--seq {settings.seq}: the model has {longest} positions; ask for at most as many")
        settings = replace(settings, seq=longest)
    return settings


def _layout(asked: Asked, resumed: Resumed | None, settings: RunSettings) -> Layout:
    """The layout, by default that of the run; ZeRO-3 computes in the run's dtype unless its own knob says otherwise."""
    text = asked.layout
    if text is None:
        text = str(resumed.facts.get("layout", "tp=1")) if resumed is not None else "tp=1"
    layout = parse_layout(text)
    if asked.schedule is not None:
        layout = layout.with_(schedule=parse_layout(f"schedule={asked.schedule}").schedule)
    if layout.zero == 3 and "param_dtype" not in text:
        layout = layout.with_(fsdp=replace(layout.fsdp or Fsdp(), param_dtype=settings.dtype))
    return layout if asked.micro_batch is None else layout.with_(micro_batch=asked.micro_batch)


def _corpus(asked: Asked, resumed: Resumed | None, source: Source, folder: Path) -> Corpus:
    """The data: what was given, or that of the run."""
    if not asked.data:
        if resumed is None:
            raise InputError(
                'data is needed: --data FILE (text, .jsonl with "text", .npy or .bin of token ids) or folder'
            )
        return corpus_of(resumed)
    spec = source.model.spec
    end: int | None = 256
    tokenizer: Path | None = None
    if asked.tokenizer == BYTES and spec.vocab <= 256:
        raise InputError(f"--tokenizer bytes needs a vocabulary of at least 257, the model has {spec.vocab}")
    if asked.tokenizer != BYTES:
        tokenizer = Path(asked.tokenizer) if asked.tokenizer is not None else source.folder
        end = source.model.settings.eos[0] if source.model.settings.eos else None
    end = asked.eos if asked.eos is not None else end
    if end is not None and not 0 <= end < spec.vocab:
        raise InputError(f"end token {end} is outside the vocabulary of {spec.vocab}; give --eos")
    corpus = _first_reads(asked.data, spec.vocab, end, tokenizer, folder / "data")
    if resumed is not None:
        check_data(resumed, corpus)
    return corpus


def _first_reads(data: Sequence[Path], vocab: int, end: int | None, tokenizer: Path | None, folder: Path) -> Corpus:
    """Tokens of the data; of several ranks of torchrun on one disk the first makes them, the others wait for it."""
    if not _first() and data[0].suffix not in {".npy", ".bin"}:
        due = time.monotonic() + OTHERS_S
        while not list(folder.glob("tokens-*.json")) and time.monotonic() < due:
            time.sleep(0.1)
    return read_corpus(data, vocab, end, tokenizer, folder)


def _first() -> bool:
    """Whether this process is the one that prepares, of several that torchrun started."""
    return not started_by_torchrun() or os.environ["RANK"] == "0"


def _prepare_folder(base: Path, source: Source) -> None:
    """The run's folder with what an export needs."""
    try:
        keep_model(source, base)
    except OSError as error:
        raise InputError(f"--checkpoint {base}: cannot be written ({error.strerror})") from None
