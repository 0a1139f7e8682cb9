"""Timed steps of a serving layout: decoding, a prompt alone, a prompt beside the decoding requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import NamedTuple

from meshwright.plan.cores import Batch
from meshwright.plan.products import Held, Kind, held
from meshwright.plan.timing.closed_loop import Steps
from meshwright.plan.timing.collective import Wiring, is_calibrated, joined
from meshwright.plan.timing.compute import calibrated, constants
from meshwright.plan.timing.estimate import Word
from meshwright.plan.timing.step import StepContexts, contexts, step_work, together
from meshwright.plan.timing.step_time import OWN, EngineTime, StepTime, engine_time, step_seconds
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.placement import Coordinate, Placement
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve

#: Prompt tokens of a step where the settings do not say (the engines' usual default).
PROMPT_BUDGET = 8192
#: Least share of its own time that a prompt adds to a step, whatever the difference of two timed steps says.
LEAST_ADDED = 0.1


@dataclass(frozen=True, slots=True)
class Conditions:
    """How the requests come, beyond what a workload says.

    Attributes:
        prompts_per_user: requests that a user sends one after the other in the time looked at; the first ones come
            all at once, so that their share of the mean is its inverse (10: what serving benchmarks send).
        equal_lengths: all requests have the same lengths, so that those admitted together stay together.
        poll_steps: steps between two looks of the scheduler at its inbox (SGLang ``--scheduler-recv-interval``).
        dp_wait_steps: steps that attention replicas wait for each other's prompts (TensorRT-LLM).
        accepted: tokens a step with speculative decoding; None: from the fitted acceptance.
    """

    prompts_per_user: float = 10.0
    equal_lengths: bool = False
    poll_steps: float = 1.0
    dp_wait_steps: float = 0.0
    accepted: float | None = None


class StageRank(NamedTuple):
    """A pipeline stage: what its first rank class multiplies, and where that rank is."""

    stage: int
    own: Held
    at: Coordinate


class StepSet(NamedTuple):
    """Seconds of the steps for the formulas, and the parts of a decode step and of a prompt on the busiest stage."""

    steps: Steps
    decode: StepTime
    prompt: StepTime


def stage_ranks(placement: Placement) -> list[StageRank]:
    """The first rank class of every stage."""
    kinds: dict[object, Kind] = {}
    found: dict[int, StageRank] = {}
    for rank_class in placement.classes:
        at = rank_class.coordinate
        if at.pp not in found:
            found[at.pp] = StageRank(at.pp, held(placement, at, kinds), at)
    return [found[stage] for stage in sorted(found)]


def accepted_tokens(settings: ServeSettings, stated: float | None = None) -> float:
    """Tokens of a step with speculative decoding: 1 + a + a^2 + ... over the drafted ones; a from the fitted two."""
    if not settings.speculative:
        return 1.0
    if stated is not None:
        return stated
    a = (sqrt(1 + 4 * (constants()["accepted"] - 1)) - 1) / 2
    return sum(a**i for i in range(settings.speculative_tokens + 1))


class StepTimer:
    """Times single steps of one replica, each when it is first asked for.

    A pipeline of p stages decodes p batches in turn: a token takes p passes of the slowest stage.

    Args:
        placement, cluster, settings, workload, conditions: what runs where, requests in the middle of their outputs.
        ranks: see ``stage_ranks``.
    """

    def __init__(
        self,
        placement: Placement,
        cluster: Cluster,
        settings: ServeSettings,
        workload: Serve,
        conditions: Conditions,
        ranks: Sequence[StageRank],
    ) -> None:
        self.placement, self.cluster, self.settings, self.workload = placement, cluster, settings, workload
        self.ranks = ranks
        self.engine = engine_time(placement.profile.engine, cluster.device.driver)
        self.gain = accepted_tokens(settings, conditions.accepted)
        self.stages = placement.layout.pp
        self._text: StepContexts | None = None
        self._prompts: list[StepTime] = []

    def decoding(self, requests: int) -> StepContexts:
        """A decode step of a stage's share of ``requests``."""
        drafted = self.settings.speculative_tokens if self.settings.speculative else 0
        past = self.workload.isl + self.workload.osl // 2
        batch = Batch("decode", -(-requests // self.stages), 1 + drafted, past)
        return contexts(self.placement, self.settings, batch)

    @property
    def text(self) -> StepContexts:
        """One prompt."""
        if self._text is None:
            self._text = contexts(self.placement, self.settings, Batch("prefill", 1, self.workload.isl))
        return self._text

    @property
    def prompts(self) -> list[StepTime]:
        """One prompt alone on every stage."""
        if not self._prompts:
            self._prompts = [self.timed(rank, self.text) for rank in self.ranks]
        return self._prompts

    def timed(self, rank: StageRank, step: StepContexts) -> StepTime:
        """One step of a stage's rank."""
        node = self.cluster.devices_per_node
        work = step_work(self.placement, node, rank.own, rank.stage, rank.at, step)
        return step_seconds(work, self.cluster, self.engine)

    def mixed(self, rank: StageRank, requests: int) -> StepTime:
        """A step of ``requests`` decoding requests with a prompt."""
        return self.timed(rank, together(self.decoding(requests), self.text))

    def assembled(self, slowest: int, decode: StepTime, low: StepTime, more: float, launches: float) -> StepSet:
        """The numbers that the formulas take.

        Args:
            slowest: index of the stage that the others wait for.
            decode, low: its decode steps of all running requests and of a quarter of them.
            more: seconds that a prompt adds to its decode step. launches: kernels of a step with a prompt.
        """
        settings, prompt = self.settings, self.prompts[slowest]
        others = sum(p.seconds for i, p in enumerate(self.prompts) if i != slowest)
        budget = settings.max_num_batched_tokens or PROMPT_BUDGET
        least = decode.launches * self.engine.eager_decode_s if settings.enforce_eager else 0.0
        steps = Steps(
            dec=self.stages * max(decode.seconds, least) / self.gain,
            low=self.stages * max(low.seconds, least) / self.gain,
            prompt=prompt.seconds,
            each=max(more, LEAST_ADDED * prompt.seconds),
            floor=launches * self.engine.eager_s * ceil(self.workload.isl / budget),
            fill=others,
        )
        return StepSet(steps, decode, prompt)

    def at(self, running: int, *, quarter: bool = False) -> StepSet:
        """Steps of ``running`` requests; ``quarter``: see ``timed_steps``."""
        all_of_them = self.decoding(running)
        decodes = [self.timed(rank, all_of_them) for rank in self.ranks]
        slowest = max(range(len(self.ranks)), key=lambda i: decodes[i].seconds)
        decode, rank = decodes[slowest], self.ranks[slowest]
        low = self.timed(rank, self.decoding(max(1, running // 4))) if quarter else decode
        mixed = self.mixed(rank, running)
        return self.assembled(slowest, decode, low, mixed.seconds - decode.seconds, mixed.launches)


def timed_steps(
    placement: Placement,
    cluster: Cluster,
    settings: ServeSettings,
    workload: Serve,
    running: int,
    conditions: Conditions,
    ranks: Sequence[StageRank],
    *,
    quarter: bool = False,
) -> StepSet:
    """Time the steps of one replica with ``running`` requests in the middle of their outputs.

    ``quarter``: also the step of a quarter of them, which only pools need (else ``low`` is ``dec``).
    """
    return StepTimer(placement, cluster, settings, workload, conditions, ranks).at(running, quarter=quarter)


def word_of(placement: Placement, cluster: Cluster, engine: EngineTime) -> Word:
    """``calibrated`` where engine and device generation were fitted and the layout stays on measured links."""
    device, layout = cluster.device, placement.layout
    members = layout.tp * layout.pp * (layout.dp if placement.spec.moe is not None else 1)
    wiring = Wiring(members, min(members, cluster.devices_per_node))
    if device.measured:
        return _measured_word(layout, cluster, engine, wiring)
    near = joined(wiring, cluster.inter)
    return "calibrated" if engine.fitted and calibrated(device) and near and layout.pp == 1 else "modelled"


def _measured_word(layout: Layout, cluster: Cluster, engine: EngineTime, wiring: Wiring) -> Word:
    """``calibrated`` on a measured machine: an engine whose host side was measured, or fitted on devices of the same
    kind, and groups of sizes that were measured."""
    link = cluster.inter if wiring.across else cluster.intra
    host = engine.fitted and (cluster.device.kind == "gpu" or engine is engine_time(OWN, cluster.device.driver))
    known = all(is_calibrated(n, link) for n in (layout.tp, layout.cp, layout.ep))
    handed = layout.pp == 1 or is_calibrated(2, link, "send")
    return "calibrated" if host and known and handed else "modelled"
