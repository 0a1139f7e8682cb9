"""TTFT, TPOT and throughput of separate prefill and decode pools, and how many workers each should have.

Prompts go first come first served to the prefill lanes (one an attention replica of every worker), their caches move
over the link between the pools, decode workers share the requests. See ``timing.closed_loop.pools``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from meshwright.plan.serving_time import ServingTime, interval
from meshwright.plan.serving_time_steps import PROMPT_BUDGET, Conditions, StepSet, stage_ranks, timed_steps, word_of
from meshwright.plan.timing.closed_loop import Host, PoolTimes, Steps, pools
from meshwright.plan.timing.compute import constants
from meshwright.plan.timing.estimate import Seconds, weakest
from meshwright.plan.timing.step_time import PARTS, StepTime, engine_time
from meshwright.specs.cluster import Cluster
from meshwright.specs.placement import Placement
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve

#: Prompts a lane of a prefill worker has waiting or running when all lanes of it count as busy.
FULL_LANES = 8.0


@dataclass(frozen=True, slots=True)
class Pool:
    """Equal workers of one side: where one lies, on which devices, and how many there are."""

    placement: Placement
    cluster: Cluster
    workers: int

    @property
    def devices(self) -> int:
        """Devices of all workers."""
        return self.placement.layout.world * self.workers


@dataclass(frozen=True, slots=True)
class _Timed:
    """Steps of both sides for one number of requests a decode replica."""

    steps: Steps
    decode: StepTime
    solo: float
    transfer_s: float


def cache_bytes(placement: Placement, tokens: int) -> float:
    """Bytes of cache that move for one prompt: keys and values (or latents) of every layer at 16 bits."""
    layers = (layer.attention for layer in placement.spec.layers)
    return 2.0 * tokens * sum(a.cached_values_per_token for a in layers if a is not None)


def transfer_rate(devices: int, cluster: Cluster) -> float:
    """Bytes a second of one prompt's cache between workers: the fitted rate of the engines' connectors (over InfiniBand
    and NVLink), or one device's port of the link between the workers where that is less.

    ``devices``: of one worker of each side; the link between nodes counts where they do not share one.
    """
    link = cluster.intra if devices <= cluster.devices_per_node else cluster.inter
    port = link.device_bandwidth_bytes_s(cluster.devices_per_node)
    return min(constants()["transfer_gb_s"] * 1e9, port)


def prompt_seconds(before: StepSet, dp: int) -> tuple[float, float]:
    """Seconds of a prompt on a lane of a prefill worker: with all its lanes busy, and alone; experts work for the
    prompts of all ``dp`` lanes."""
    full = before.steps.prompt + before.steps.fill
    return full, full - before.prompt.of("experts") * (1 - 1 / dp)


def pool_time(
    prefill: Pool,
    decode: Pool,
    workload: Serve,
    settings: ServeSettings,
    conditions: Conditions | None = None,
) -> ServingTime:
    """Predict two pools under ``workload.concurrency`` users (1 where it names none).

    The requests of a decode replica are taken to fit its caches.
    """
    conditions = conditions or Conditions()
    engine = engine_time(decode.placement.profile.engine, decode.cluster.device.driver)
    users = workload.concurrency or 1
    replicas = decode.placement.layout.dp * decode.workers
    lanes = prefill.placement.layout.dp * prefill.workers
    timed = _timed(prefill, decode, workload, settings, conditions, max(1, ceil(users / replicas)))
    full = timed.steps.prompt
    prompt = timed.solo + (full - timed.solo) * min(users / lanes / FULL_LANES, 1.0)
    host = Host(engine.request_s, 0.5, constants()["queue"])
    burst = 1.0 / max(conditions.prompts_per_user, 1.0)
    t = pools(timed.steps._replace(prompt=prompt), users, lanes, replicas, workload.osl, timed.transfer_s, host, burst)
    rate = users / (t.ttft + max(workload.osl - 1, 1) * t.tpot)
    word = weakest(word_of(p.placement, p.cluster, engine) for p in (prefill, decode))
    moe = decode.placement.spec.moe is not None
    own = max(prompt, timed.steps.floor)
    parts = (
        ("prefill", own),
        ("transfer", timed.transfer_s),
        ("request", t.ttft - own - timed.transfer_s - t.prompt_wait),
        ("queue for prefill", t.prompt_wait),
    )
    of = timed.decode
    tokens = rate * workload.osl
    width = interval(1.0, "tpot", "disaggregated", moe, word)
    return ServingTime(
        ttft=interval(t.ttft, "ttft", "disaggregated", moe, word),
        tpot=interval(t.tpot, "tpot", "disaggregated", moe, word),
        tokens_per_s=Seconds(tokens, tokens * width.low, tokens * width.high, word),
        requests_per_s=rate,
        running=max(1, round(t.running)),
        asked=users / replicas,
        capacity=max(1, ceil(users / replicas)),
        ttft_parts=parts,
        tpot_parts=tuple((name, of.of(name) * t.tpot / of.seconds) for name in PARTS),
        utilization=t.busy,
        ttft_points=_points(t),
    )


def _timed(
    prefill: Pool, decode: Pool, workload: Serve, settings: ServeSettings, conditions: Conditions, running: int
) -> _Timed:
    engine = engine_time(decode.placement.profile.engine, decode.cluster.device.driver)
    own = timed_steps(
        decode.placement, decode.cluster, settings, workload, running, conditions, stage_ranks(decode.placement),
        quarter=True,
    )  # fmt: skip
    before = timed_steps(
        prefill.placement, prefill.cluster, replace(settings, speculative=False), workload, 1, conditions,
        stage_ranks(prefill.placement),
    )  # fmt: skip
    prompt, solo = prompt_seconds(before, prefill.placement.layout.dp)
    rate = transfer_rate(prefill.placement.layout.world + decode.placement.layout.world, decode.cluster)
    move = engine.transfer_s + cache_bytes(decode.placement, workload.isl) / rate
    floor = before.prompt.launches * engine.eager_s * ceil(workload.isl / PROMPT_BUDGET)
    return _Timed(own.steps._replace(prompt=prompt, floor=floor), own.decode, solo, move)


def _points(t: PoolTimes) -> tuple[float, ...]:
    """Equally likely TTFTs: a wait that grows evenly to twice its mean."""
    fixed = t.ttft - t.prompt_wait
    return tuple(fixed + 2 * t.prompt_wait * (i + 0.5) / 100 for i in range(100))


@dataclass(frozen=True, slots=True)
class Ratio:
    """Workers of both pools, their devices, and what they reach."""

    prefill_workers: int
    decode_workers: int
    devices: int
    time: ServingTime

    @property
    def tokens_per_s_device(self) -> float:
        """Output tokens a second and device."""
        return self.time.tokens_per_s.value / self.devices


def best_ratio(
    prefill: Pool,
    decode: Pool,
    workload: Serve,
    settings: ServeSettings,
    devices: int,
    conditions: Conditions | None = None,
) -> list[Ratio]:
    """All splits of ``devices`` into workers of both pools, the best first.

    Splits that keep the workload's TTFT and TPOT targets (predicted means) come first, then most tokens a second and
    device. At most 64 splits are looked at: with more, the numbers of prefill workers are spread evenly.
    """
    per = prefill.placement.layout.world, decode.placement.layout.world
    most = (devices - per[1]) // per[0]
    stride = max(1, ceil(most / 64))
    found = []
    for count in range(1, most + 1, stride):
        rest = (devices - count * per[0]) // per[1]
        if rest < 1:
            break
        sides = replace(prefill, workers=count), replace(decode, workers=rest)
        time = pool_time(*sides, workload, settings, conditions)
        found.append(Ratio(count, rest, sides[0].devices + sides[1].devices, time))

    def order(r: Ratio) -> tuple[bool, float]:
        late = workload.ttft_s is not None and r.time.ttft.value > workload.ttft_s
        slow = workload.tpot_s is not None and r.time.tpot.value > workload.tpot_s
        return late or slow, -r.tokens_per_s_device

    return sorted(found, key=order)
