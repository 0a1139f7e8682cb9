"""What every layout of a serving search shares, and how one is placed, counted and timed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil

from meshwright.plan.calibration import Calibration, booted_terms
from meshwright.plan.cost import serve_cost
from meshwright.plan.memory import ServeMemory
from meshwright.plan.plan import Candidate
from meshwright.plan.search.serve import Probe
from meshwright.plan.serve_memory import serve_memory
from meshwright.plan.serving_time import ServingTime, serving_time
from meshwright.plan.serving_time_steps import stage_ranks
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import Placement, place
from meshwright.specs.profile import EngineProfile, ServeSettings
from meshwright.specs.rules import Rule
from meshwright.specs.tensors import Section
from meshwright.specs.units import GIB
from meshwright.specs.workload import Serve

#: Rounds of the fixed point between requests in flight and the time each takes.
LITTLE_STEPS = 4
#: Rounds in which a load is lowered until the steps timed for it alone keep the targets, and the factor of each.
ROUNDS, LOWER = 12, 0.985


@dataclass(frozen=True, slots=True)
class ServeContext:
    """What every candidate of one search shares; ``settings`` have every field resolved.

    ``rate_bounds``: requests a second by placement, counted once (placements live as long as the search).
    """

    spec: ModelSpec
    cluster: Cluster
    workload: Serve
    profile: EngineProfile
    settings: ServeSettings
    calibration: Calibration | None = None
    rate_bounds: dict[int, float] = field(default_factory=dict, compare=False, repr=False)

    @property
    def sections(self) -> tuple[Section, ...]:
        """Parts of the checkpoint that are loaded."""
        extra: list[Section] = []
        if not self.settings.text_only:
            extra.append("vision")
        if self.settings.speculative:
            extra.append("mtp")
        return ("decoder", *extra)

    @property
    def budget_bytes(self) -> float:
        """What the engine may take of one device."""
        assert self.settings.utilization is not None
        return self.cluster.device.memory_bytes * self.settings.utilization

    @property
    def judged(self) -> bool:
        """Whether there is a latency target."""
        return self.workload.tpot_s is not None or self.workload.ttft_s is not None

    def copies_of(self, layout: Layout) -> int:
        """Deployments side by side that use the cluster: of a mixture of experts as many as there is room and work
        for; replicas of a dense model are ``dp``."""
        if self.spec.moe is None:
            return 1
        return max(1, min(self.cluster.devices // layout.world, self.workload.concurrency or self.cluster.devices))

    def probe(self, layout: Layout, rules: tuple[Rule, ...] = (), copies: int = 1) -> Probe:
        """Place and count the memory.

        Raises:
            IllegalLayoutError: the engine refuses the layout.
        """
        placement = place(self.spec, layout, self.profile, sections=self.sections)
        memory = self.memory(placement, self.share(copies))
        return Probe(self, layout, placement, memory, rules, copies)

    def share(self, copies: int) -> Serve:
        """The load of one of equal deployments."""
        w = self.workload
        if copies == 1:
            return w
        inside = None if w.concurrency is None else ceil(w.concurrency / copies)
        return replace(w, concurrency=inside, rate=None if w.rate is None else w.rate / copies)

    def evaluate(self, layout: Layout, rules: tuple[Rule, ...] = (), copies: int = 1) -> Candidate:
        """Place, count the memory, predict and bound the time.

        Raises:
            IllegalLayoutError: the engine refuses the layout.
        """
        return self.candidate(self.probe(layout, rules, copies))

    def candidate(self, probe: Probe) -> Candidate:
        """A probed layout in full, at its load."""
        placement = probe.placement
        workload = self.at_rate(placement, self.share(probe.copies))
        if self.judged and workload.concurrency is None:
            workload = replace(workload, concurrency=probe.settled().best.requests)
        memory = self.memory(placement, workload) if workload != self.workload else probe.memory
        cost = serve_cost(placement, self.cluster, workload, memory.max_requests, self.settings)
        return Candidate(probe.layout, placement, memory, cost, probe.rules, workload, probe.copies)

    def memory(self, placement: Placement, workload: Serve) -> ServeMemory:
        """Memory of a layout, with the terms that an earlier start of it printed; those of this model come first."""
        found, engine, layout = self.calibration, self.profile.engine, placement.layout
        booted = booted_terms(self.cluster.device, layout, engine)
        terms = found.terms_for(layout, engine) if found is not None else {}
        memory = serve_memory(placement, self.cluster, workload, self.settings, measured={**booted, **terms})
        if booted and "non_torch" not in terms:
            size = f"{booted['non_torch'] / GIB:.2f} GiB"
            note = f"memory outside torch: {size}, as {engine} printed it here with tp {layout.tp}, pp {layout.pp}"
            memory = replace(memory, notes=(*memory.notes, note))
        return memory

    def late(self, time: ServingTime) -> bool:
        """Whether the predicted means break a latency target."""
        w = self.workload
        slow = w.tpot_s is not None and time.tpot.value > w.tpot_s
        return slow or (w.ttft_s is not None and time.ttft.value > w.ttft_s)

    def exact(self, probe: Probe) -> tuple[int, ServingTime]:
        """The requests in flight that a layout is judged at, and its times by steps timed for just this load.

        The search reads steps between timed loads, so a load that it found is lowered until its own steps keep the
        targets.
        """
        inside, least, share = probe.best.requests, probe.layout.dp, self.share(probe.copies)
        most, ranks = probe.memory.max_requests, stage_ranks(probe.placement)
        open_load = share.concurrency is None and share.rate is None
        for _ in range(ROUNDS):
            trial = share if share.rate is not None else replace(share, concurrency=inside)
            time = serving_time(probe.placement, self.cluster, trial, most, self.settings, ranks=ranks)
            if not open_load or not self.judged or inside <= least or not self.late(time):
                break
            inside = max(least, min(inside - 1, int(inside * LOWER)))
        return inside, time

    def at_rate(self, placement: Placement, workload: Serve) -> Serve:
        """The workload with the requests in flight that its rate implies, by Little's law: rate x time inside.

        The time is the lower bound of ``serve_cost``, so this is the least concurrency that the rate can mean.
        """
        if workload.rate is None or workload.concurrency is not None:
            return workload
        inside, limit = 1, 1 << 20
        for _ in range(LITTLE_STEPS):
            trial = replace(workload, concurrency=inside)
            cost = serve_cost(placement, self.cluster, trial, inside, self.settings)
            inside = min(limit, max(1, ceil(workload.rate * (cost.prefill_s + workload.osl * cost.step_s))))
        return replace(workload, concurrency=inside)
