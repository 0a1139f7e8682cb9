"""Plan: a layout with what it holds, what it moves, why it was chosen, and what was not chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from meshwright.plan.memory import ServeMemory, TrainMemory
from meshwright.plan.serving_time import ServingTime
from meshwright.specs.cluster import Cluster
from meshwright.specs.command import Command as Command
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import Placement
from meshwright.specs.profile import ServeSettings
from meshwright.specs.rules import Rule
from meshwright.specs.workload import Workload

if TYPE_CHECKING:
    from meshwright.plan.search.serve import ServeFound
    from meshwright.plan.search.train import Found
    from meshwright.plan.training_time import TrainingTime

#: What is predicted: ``ServingTime`` or ``TrainingTime``.
Time = TypeVar("Time")

#: Why the model is split at all. ``capacity``: it does not fit on fewer devices. ``throughput``: it fits on one
#: tensor-parallel group and the rest of the devices serve replicas. ``latency``: split further than capacity
#: asks for, because a target does. ``given``: the user stated the layout. ``none``: no layout works.
Motive = Literal["capacity", "throughput", "latency", "given", "none"]


@dataclass(frozen=True, slots=True)
class Reason:
    """One sentence of the explanation, with the numbers in it by name."""

    code: str
    text: str
    numbers: Mapping[str, float] = field(default_factory=dict)


class Prediction(Generic[Time]):
    """A prediction that is made when it is first asked for: most layouts of a search are never asked."""

    __slots__ = ("_make", "_time")

    def __init__(self, make: Callable[[], Time]) -> None:
        self._make = make
        self._time: Time | None = None

    @property
    def time(self) -> Time:
        """The prediction."""
        if self._time is None:
            self._time = self._make()
        return self._time


@dataclass(frozen=True, slots=True)
class Cost:
    """What the ranking compares, counted from the ledger, and the prediction beside it.

    The seconds are what the counted bytes and FLOPs take at the *peak* of device and links: a lower bound, good
    for comparing layouts of one model on one cluster. What a user will see is in ``predicted``.

    Attributes:
        bytes_read: bytes the busiest rank reads and writes in one decode step (serving) or step (training).
        flops: floating point operations of the busiest rank in it.
        wire_bytes: bytes the busiest rank sends in it.
        messages: collectives and hand-offs it takes part in.
        step_s: lower bound of a decode step (serving) or optimizer step (training).
        prefill_s: lower bound of prefilling one request (serving), 0 in training.
        tokens_per_s: upper bound of the whole cluster's output tokens (serving) or trained tokens a second.
        wire_share: part of ``step_s`` that is communication.
        bubble: part of the step that pipeline stages stand idle (training).
        requests: requests of one replica in the decode step (serving); without a stated concurrency as many as fit.
        later: the prediction behind ``predicted``, or None. step_later: that behind ``predicted_step``.
    """

    bytes_read: float
    flops: float
    wire_bytes: float
    messages: int
    step_s: float
    prefill_s: float
    tokens_per_s: float
    wire_share: float = 0.0
    bubble: float = 0.0
    requests: int = 0
    later: Prediction[ServingTime] | None = field(default=None, compare=False, repr=False)
    step_later: Prediction[TrainingTime] | None = field(default=None, compare=False, repr=False)

    @property
    def predicted(self) -> ServingTime | None:
        """TTFT, TPOT and throughput with their intervals (serving); made when first asked for."""
        return self.later.time if self.later is not None else None

    @property
    def predicted_step(self) -> TrainingTime | None:
        """Seconds of an optimizer step with their interval, rates and parts (training); made when first asked for."""
        return self.step_later.time if self.step_later is not None else None

    @property
    def ttft_s(self) -> float:
        """Predicted mean seconds to the first token; the lower bound of a prefill without a prediction."""
        return self.predicted.ttft.value if self.predicted is not None else self.prefill_s

    @property
    def tpot_s(self) -> float:
        """Predicted mean seconds of a further token; the lower bound of a step without a prediction."""
        return self.predicted.tpot.value if self.predicted is not None else self.step_s


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that was looked at in full.

    ``copies``: equal deployments of it side by side, each with its share of the load in ``workload`` (serving).
    """

    layout: Layout
    placement: Placement
    memory: ServeMemory | TrainMemory
    cost: Cost
    rules: tuple[Rule, ...] = ()
    workload: Workload | None = None
    copies: int = 1

    @property
    def fits(self) -> bool:
        """Whether every rank holds its share of the workload."""
        return self.memory.fits


@dataclass(frozen=True, slots=True)
class Alternative:
    """A layout that works and lost, with what it lost by."""

    candidate: Candidate
    lost_by: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """A layout that does not work, with the number that killed it."""

    layout: Layout
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer of ``plan``.

    Attributes:
        kind: serve or train.
        verdict: the first line of the output.
        motive: why the model is split.
        layout: chosen (or given) layout, None when nothing works.
        legal: no rule of the engine forbids it.
        fits: every rank holds its share of the workload.
        chosen: the layout in full; None when it is illegal (no memory can be counted).
        rules: broken rules of the chosen layout (illegal and unwise).
        reasons: the explanation, most important first.
        alternatives, rejected: what else was looked at.
        fast_enough: neither the predicted means nor the lower bounds of its cost break a target.
        asked: the model as the user named it (a hub id or a path), for commands.
        settings: engine settings the plan was made for (serving), every field resolved.
        notes: assumptions of the model reader, of the cluster, of the memory model.
        searched: the search over arrays (training on many devices): size of the space, front, best points; else None.
        served: the search over layouts and loads (serving): size of the space, front, all that work best first.
    """

    kind: Literal["serve", "train"]
    verdict: str
    motive: Motive
    spec: ModelSpec
    cluster: Cluster
    engine: str
    workload: Workload
    layout: Layout | None
    legal: bool
    fits: bool
    chosen: Candidate | None
    rules: tuple[Rule, ...]
    reasons: tuple[Reason, ...]
    alternatives: tuple[Alternative, ...]
    rejected: tuple[Rejected, ...]
    fast_enough: bool = True
    settings: ServeSettings | None = None
    asked: str = ""
    commands: tuple[Command, ...] = ()
    notes: tuple[str, ...] = ()
    searched: Found | None = field(default=None, compare=False, repr=False)
    served: ServeFound | None = field(default=None, compare=False, repr=False)

    @property
    def ok(self) -> bool:
        """Legal, fits, and no latency target is out of reach."""
        return self.legal and self.fits and self.fast_enough
