"""Seconds of a collective on a topology, read from measured curves and scaled where nothing was measured.

Every collective of a group is one curve: log bytes -> log seconds, straight between knots (``curve``). So a search
can read it for many sizes at once, and a single call (``collective_seconds``) reads the same numbers.

Inside a node the knots are measured for 2, 4 and 8 ranks of five links (``constants/collectives.json``; NVSwitch
reduction is in them where NCCL used it). Ranks between are interpolated in logarithms, more ranks in one domain and
other links are scaled from the nearest measured one: *modelled*. Across nodes everything rests on one curve (4 nodes
x 8 B200): latency grows with the rounds of a tree over the nodes, the rest with the bytes that leave a node over the
ports of the ranks on it, capped by the link inside (hierarchical: scatter inside, reduce across, gather inside).
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from functools import cache, lru_cache
from math import ceil, exp, log, log2
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from meshwright.errors import InputError
from meshwright.ledger.calibrate import Calibration, Transfer
from meshwright.plan.timing.estimate import Seconds, Word, spread
from meshwright.specs.cluster import Cluster, Link

#: Knots of a modelled curve, in bytes: one byte to 4 TiB.
KNOTS = tuple(2.0**e for e in range(0, 43, 2))
#: Links whose measured curve stands for a technology, first the default.
REFERENCE = {"nvlink": "nvlink4", "nvswitch": "nvlink4", "xgmi": "nvlink4", "c2c": "nvlink4", "pcie": "pcie5"}
#: Measured curves of links that are the same technology under another name.
SAME = {"nvlink-nvl72": "nvlink5"}
#: Launch of a kernel that waits for its peers where no curve says more: intercept of NCCL all_reduces of 512 bytes
#: over 2, 4 and 8 H200 (seconds).
LAUNCH_S = 4.6e-6


class Wiring(NamedTuple):
    """How a group lies in a cluster: its ranks, those on one node, and whether it spans nodes."""

    members: int
    near: int

    @property
    def across(self) -> bool:
        """Whether the group spans nodes."""
        return self.near < self.members

    @property
    def nodes(self) -> int:
        """Nodes that the group spans."""
        return -(-self.members // self.near)


class Curve(NamedTuple):
    """Log payload bytes against log seconds, straight between knots; ``width``: log half-width of the interval."""

    log_bytes: tuple[float, ...]
    log_seconds: tuple[float, ...]
    width: float
    word: Word

    def seconds(self, payload_bytes: float) -> float:
        """Read the curve (an array version: ``exp(interp(log(bytes), log_bytes, log_seconds))``)."""
        x, xs, ys = log(max(payload_bytes, 1.0)), self.log_bytes, self.log_seconds
        i = min(max(bisect_right(xs, x), 1), len(xs) - 1)
        low, high = xs[i - 1], xs[i]
        return exp(ys[i - 1] + (ys[i] - ys[i - 1]) * (x - low) / (high - low))


@cache
def table() -> Mapping[str, Any]:
    """The measured curves; see ``constants/collectives.json``."""
    text = Path(__file__).parents[1].joinpath("constants", "collectives.json").read_bytes()
    data: Mapping[str, Any] = json.loads(text)
    return data


def full_bytes(op: str, members: int, payload_bytes: float) -> float:
    """Bytes of the full buffer: what enters, or ``members`` times that where pieces are gathered."""
    return payload_bytes * members if op in {"all_gather", "gather"} else payload_bytes


def curve(op: str, wiring: Wiring, cluster: Cluster) -> Curve:
    """Seconds of ``op`` (``moves.ring.COLLECTIVES``) by the payload that enters on a rank."""
    return _curve(op, wiring, cluster.intra, cluster.inter, cluster.devices_per_node)


def collective_seconds(op: str, wiring: Wiring, payload_bytes: float, cluster: Cluster) -> Seconds:
    """Seconds of one collective or hand-off of ``payload_bytes`` (the tensor that enters on a rank)."""
    if wiring.members <= 1:
        return Seconds(0.0, 0.0, 0.0, "exact")
    found = curve(op, wiring, cluster)
    return spread(found.seconds(payload_bytes), found.width, found.word)


@lru_cache(maxsize=4096)
def _curve(op: str, wiring: Wiring, intra: Link, inter: Link, per_node: int) -> Curve:
    own = _calibrated(op, wiring.members, inter if wiring.across else intra)
    if own is not None:
        return own
    if op in {"send", "recv"}:
        return _hand_off(intra, inter, per_node, wiring)
    if wiring.across:
        return _across(op, wiring, intra, inter, per_node)
    return _inside(op, wiring.members, intra)


#: Ops that ``calibrate`` measures; a mesh of several kinds is read from the nearest of them.
_OTHER = {"recv": "send", "scatter": "gather", "broadcast": "all_gather", "reduce": "reduce_scatter"}


def is_calibrated(members: int, link: Link, op: str = "all_reduce") -> bool:
    """Whether ``calibrate`` measured ``op`` over so many ranks of the link."""
    return members < 2 or any(m.op == op and m.ranks == members for m in link.measured)


def _calibrated(op: str, members: int, link: Link) -> Curve | None:
    """The curve that was measured over this link, or scaled from another number of its ranks; None without any."""
    if not link.measured:
        return None
    name = _OTHER.get(op, op)
    transfers = tuple(Transfer(*m) for m in link.measured)
    ranks = 2 if name == "send" else members
    known = any((t.op, t.ranks) == (name, ranks) for t in transfers)
    c = Calibration("", 1, {}, 1.0, transfers=transfers)
    sizes = sorted({*KNOTS, *(float(size) for t in transfers if t.op == name for size, _ in t.knots)})
    try:
        times = [c.transfer_s(name, round(size), ranks) for size in sizes]
    except InputError:
        return None
    width = max(_widths()["measured"], median(t.error for t in transfers if t.op == name)) if known else 0.0
    word: Word = "calibrated" if known else "modelled"
    points = tuple(log(size) for size in sizes), tuple(log(max(t, 1e-9)) for t in times)
    return Curve(*points, width or _widths()["scaled"], word)


def _widths() -> Mapping[str, float]:
    widths: Mapping[str, float] = table()["widths"]
    return widths


def _made(op: str, members: int, points: list[tuple[float, float]], width: str, word: Word) -> Curve:
    """A curve over payloads from points (full bytes, seconds); ends are flat (latency) and straight (bandwidth)."""
    scale = members if op in {"all_gather", "gather"} else 1
    first, last = points[0], points[-1]
    points = [(1.0 * scale, first[1]), *points, (last[0] * 2.0**14, last[1] * 2.0**14)]
    xs = tuple(log(size / scale) for size, _ in points)
    return Curve(xs, tuple(log(s) for _, s in points), _widths()[width], word)


def _measured_op(op: str) -> tuple[str, float]:
    """The measured operation that stands for ``op``, and what share of its time it takes."""
    if op in {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}:
        return op, 1.0
    if op in {"gather", "scatter", "barrier"}:
        return ("all_reduce" if op == "barrier" else "all_gather"), 1.0
    return "reduce_scatter", 1.0


def _inside(op: str, members: int, link: Link) -> Curve:
    """A curve of one node or one NVLink domain."""
    name = SAME.get(link.name, link.name)
    reference = name if name in table()["links"] else REFERENCE.get(link.kind)
    if reference is None:
        return _alpha_beta(op, members, link)
    base, share = _measured_op(op)
    points = _ranks(table()["links"][reference][base], members)
    stretch = table()["bandwidth_gb_s"][reference] * 1e9 / link.bandwidth_bytes_s
    known = reference == name and members in (2, 4, 8) and abs(stretch - 1) < 0.01
    points = [(size / stretch, seconds * share) for size, seconds in points]
    if link.per == "node":  # the bandwidth is the node's: every rank has a share
        points = [(size / members, seconds) for size, seconds in points]
    return _made(op, members, points, "measured" if known else "scaled", "calibrated" if known else "modelled")


def _ranks(by_ranks: Mapping[str, list[float]], members: int) -> list[tuple[float, float]]:
    """(full bytes, seconds) for a number of ranks: measured, between measured ones, or beyond them."""
    sizes = [float(s) for s in table()["sizes"]]
    known = sorted(int(n) for n in by_ranks)
    if str(members) in by_ranks:
        return [(s, us * 1e-6) for s, us in zip(sizes, by_ranks[str(members)], strict=True)]
    most = known[-1]
    if members > most:
        # Latency by the rounds of a tree, transfer by the share of the buffer that each rank sends: modelled.
        start = by_ranks[str(most)][0]
        rounds, sent = log2(members) / log2(most), (1 - 1 / members) / (1 - 1 / most)
        return [
            (s, (start * rounds + max(us - start, 0.0) * sent) * 1e-6)
            for s, us in zip(sizes, by_ranks[str(most)], strict=True)
        ]
    low = max(n for n in known if n < members)
    high = min(n for n in known if n > members)
    x = (log(members) - log(low)) / (log(high) - log(low))
    pairs = zip(sizes, by_ranks[str(low)], by_ranks[str(high)], strict=True)
    return [(s, exp(log(a) * (1 - x) + log(b) * x) * 1e-6) for s, a, b in pairs]


def pure_seconds(op: str, wiring: Wiring, full: float, port: float, inside: float) -> float:
    """Bytes that a rank's share of the ports must carry over their bandwidth: a ring that leaves each node once."""
    n = wiring.members
    if op == "all_to_all":
        return full * (n - wiring.near) / n / port
    rounds = 2 if op == "all_reduce" else 1
    ring = min(port * wiring.near, inside)
    return rounds * (n - 1) / n * full / ring


def _port(link: Link, per_node: int) -> float:
    """Bytes a second of one rank's way out of its node when all of them send."""
    return link.device_bandwidth_bytes_s(per_node)


def _across(op: str, wiring: Wiring, intra: Link, inter: Link, per_node: int) -> Curve:
    """A group over several nodes; see the head of the module."""
    if inter.max_devices is not None and wiring.members <= inter.max_devices:
        return _inside(op, wiring.members, inter)
    reference = table()["across"]
    sizes, times = [float(b) for b in reference["bytes"]], [us * 1e-6 for us in reference["us"]]
    n = reference["nodes"] * reference["near"]
    speed = reference["port_gb_s"] * 1e9 * reference["near"]
    transfer = [(2 * (n - 1) / n * s / speed, t - times[0]) for s, t in zip(sizes, times, strict=True)][1:]
    transfer = [(pure, max(beyond, pure)) for pure, beyond in transfer]
    latency = _tree_latency(op, wiring, intra, inter)
    port = _port(inter, per_node)
    points = []
    for size in KNOTS:
        pure = pure_seconds(op, wiring, size, port, intra.bandwidth_bytes_s)
        points.append((size, latency + _transfer(transfer, pure)))
    return _made(op, wiring.members, points[4:], "across", "modelled")


def _transfer(measured: list[tuple[float, float]], pure: float) -> float:
    """Measured seconds beyond the latency for a transfer that takes ``pure`` seconds at the ports' bandwidth."""
    first, last = measured[0], measured[-1]
    if pure <= first[0]:
        return first[1] * pure / first[0]
    if pure >= last[0]:
        return last[1] * pure / last[0]
    i = bisect_right([p for p, _ in measured], pure)
    (x0, y0), (x1, y1) = measured[i - 1], measured[i]
    x = (log(pure) - log(x0)) / (log(x1) - log(x0))
    return exp(log(max(y0, 1e-9)) * (1 - x) + log(max(y1, 1e-9)) * x)


#: Link latencies that one round over the nodes takes in the measured curve: (99.3 us - 25 us inside the node) over
#: 2 x log2(4) rounds of 5 us (``collectives.json``, across).
ROUND_LATENCIES = 3.7


def _tree_latency(op: str, wiring: Wiring, intra: Link, inter: Link) -> float:
    """Seconds of an almost empty collective over nodes: inside the node, then a tree over the nodes."""
    rounds = 2 if op in {"all_reduce", "barrier"} else 1
    inside = _inside(op, wiring.near, intra).seconds(1.0) if wiring.near > 1 else LAUNCH_S
    return inside + rounds * ceil(log2(wiring.nodes)) * ROUND_LATENCIES * inter.latency_s


def _hand_off(intra: Link, inter: Link, per_node: int, wiring: Wiring) -> Curve:
    """A send and its receive: one launch, one latency, the sender's own port."""
    link = inter if wiring.across else intra
    start, rate = LAUNCH_S + link.latency_s, _port(link, per_node)
    points = [(size, start + size / (0.8 * rate)) for size in KNOTS]
    return _made("send", 2, points, "across" if wiring.across else "scaled", "modelled")


def _alpha_beta(op: str, members: int, link: Link) -> Curve:
    """Ring steps of latency, and the bytes of the ring over the bandwidth: for links that nobody measured here."""
    rounds = 2 if op == "all_reduce" else 1
    steps = 1 if op == "all_to_all" else members - 1
    rate = link.device_bandwidth_bytes_s(members)
    start = LAUNCH_S + rounds * steps * link.latency_s
    points = [(s, start + rounds * (members - 1) / members * s / rate) for s in KNOTS]
    return _made(op, members, points, "scaled", "modelled")


def joined(wiring: Wiring, inter: Link) -> bool:
    """Whether the group lies in one node or in one rack-wide NVLink domain."""
    return not wiring.across or (inter.max_devices is not None and wiring.members <= inter.max_devices)


def small_all_reduce_seconds(wiring: Wiring, payload_bytes: float, latency_share: float, cluster: Cluster) -> float:
    """An all_reduce by a serving engine's own kernels below their size limit, else NCCL's.

    Args:
        wiring: the group; outside one node, or on a link without peer access, NCCL's time is returned.
        payload_bytes: the tensor.
        latency_share: what the kernel takes of NCCL's latency (fitted).
        cluster: the links.
    """
    nccl = curve("all_reduce", wiring, cluster)
    seconds = nccl.seconds(payload_bytes)
    if cluster.intra.measured:
        return seconds
    small: Mapping[str, float] = table()["small"]
    peers = joined(wiring, cluster.inter) and cluster.intra.kind in {"nvlink", "nvswitch"}
    if not peers or payload_bytes > small["limit_bytes"]:
        return seconds
    top = 536870912.0
    own = latency_share * nccl.seconds(512.0) + payload_bytes / top * nccl.seconds(top) / small["bandwidth"]
    return min(seconds, own)
