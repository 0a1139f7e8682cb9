"""One training run as a job that can be sent to ranks, and what of it can be refused beforehand. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.errors import IllegalLayoutError, InputError
from meshwright.runtime.folder import Model
from meshwright.runtime.models.settings import check_trainable
from meshwright.runtime.train.corpus import Corpus, corpus_from
from meshwright.runtime.train.folders import STATE
from meshwright.runtime.train.settings import RunSettings
from meshwright.runtime.train.source import Resumed, Source, read_resumed
from meshwright.specs.layout import Layout
from meshwright.specs.placement import Placement, place
from meshwright.specs.profile import EngineProfile


@dataclass(frozen=True, slots=True)
class TrainJob:
    """What every rank is told.

    Attributes:
        model: its tensors are read from its folder, unless ``random`` or ``resume``.
        placement: of the model. settings: numbers of the run. corpus: the data.
        facts: of model and data, for ``state.json``.
        base: folder of the run; None: nothing is kept.
        resume: checkpoint that the run goes on from, with its step and position.
        random: first weights are drawn.
        device: ``cpu`` or ``cuda`` (one device a rank).
        timeout_s: longest time of a step; 0: any.
        ledger: number of the step (the first is 1) of which the ledger is written; 0: none.
        trouble: folder for what a stuck step leaves, where there is no ``base``.
    """

    model: Model
    placement: Placement
    settings: RunSettings
    corpus: Corpus
    facts: Mapping[str, Any]
    base: Path | None = None
    resume: tuple[Path, int, int] | None = None
    random: bool = False
    device: str = "cpu"
    timeout_s: float = 0.0
    ledger: int = 0
    trouble: Path = Path("stuck")

    @property
    def traces(self) -> Path:
        """Where a stuck step's traces go."""
        return self.base or self.trouble

    def from_latest(self) -> TrainJob:
        """The same job, going on from the last checkpoint of its folder where there is one.

        Raises:
            InputError: the pointer names none.
        """
        from meshwright.runtime.train.folders import latest

        found = latest(self.base) if self.base is not None else None
        if found is None:
            return self
        resumed = read_resumed(found)
        return replace(self, resume=(resumed.folder, resumed.step, resumed.position))

    def on_layout(self, layout: Layout) -> TrainJob:
        """The same job under another layout.

        Raises:
            IllegalLayoutError: refused.
        """
        return replace(self, placement=placed(self.placement.spec, layout, self.placement.profile, self.settings))


def placed(spec: Any, layout: Layout, profile: EngineProfile, settings: RunSettings) -> Placement:
    """The placement of a run, after every rule of training.

    Raises:
        InputError, IllegalLayoutError: what the runtime cannot train, or a layout that is against a rule.
    """
    check_trainable(spec, layout)
    for rule in profile.check(spec, layout, None, settings.workload()):
        if rule.severity == "illegal":
            raise IllegalLayoutError(f"{rule.message}; {rule.way_out}")
    return place(spec, layout, profile)


def facts_of(source: Source, corpus: Corpus) -> dict[str, Any]:
    """What a checkpoint says of model and data."""
    return {
        "name": source.model.spec.name,
        "fingerprint": source.fingerprint,
        "config": dict(source.config),
        "data": asdict(corpus),
    }


def corpus_of(resumed: Resumed) -> Corpus:
    """The data of a run that goes on; a stream that moved along with its folder is found there.

    Raises:
        InputError: gone or malformed.
    """
    corpus = corpus_from(resumed.facts.get("data"), str(resumed.folder / STATE))
    beside = resumed.base / "data" / Path(corpus.file).name
    if not Path(corpus.file).is_file() and beside.is_file():
        corpus = replace(corpus, file=str(beside.resolve()))
    corpus.open()
    return corpus


def check_data(resumed: Resumed, corpus: Corpus) -> None:
    """Refuse to go on with other data: the position would mean nothing.

    Raises:
        InputError: with both fingerprints.
    """
    before = corpus_from(resumed.facts.get("data"), str(resumed.folder / STATE))
    if before.fingerprint != corpus.fingerprint:
        raise InputError(
            f"--data: not what {resumed.folder} was trained on (fingerprints {before.fingerprint[:8]} and "
            f"{corpus.fingerprint[:8]}); leave --data out, or start a new run from an export"
        )


def check_steps(settings: RunSettings, step: int) -> None:
    """Refuse numbers that make no run.

    Raises:
        InputError: a run that is over already, or shorter than its warm-up.
    """
    if settings.steps < step:
        raise InputError(f"--steps {settings.steps}: the checkpoint is of step {step} already; ask for more")
    if settings.warmup > settings.steps:
        raise InputError(f"--warmup {settings.warmup}: longer than the run of {settings.steps} steps; lower it")


def fewer(job: TrainJob, ranks: int) -> Layout | None:
    """The layout for at most ``ranks`` ranks with the largest dp that the rules allow; None: there is none.

    Only dp is reduced: it changes how many replicas read the batch, and nothing of what is computed.
    """
    layout = job.placement.layout
    for dp in range(layout.dp, 0, -1):
        smaller = layout.with_(dp=dp)
        if smaller.world > ranks:
            continue
        try:
            job.on_layout(smaller)
        except (InputError, IllegalLayoutError):
            continue
        return smaller
    return None
