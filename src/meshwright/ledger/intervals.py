"""Stretches of time as arrays: unions, never sums, and who covers what when several things go on at once.

A set of stretches is a pair of int64 arrays (starts, ends) in nanoseconds. ``union`` makes them disjoint and sorted,
which everything else takes for granted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Times: TypeAlias = NDArray[np.int64]
Stretches: TypeAlias = tuple[Times, Times]


def empty() -> Stretches:
    """No stretch."""
    return np.zeros(0, np.int64), np.zeros(0, np.int64)


def union(starts: Times, ends: Times) -> Stretches:
    """Disjoint stretches that cover the same time, sorted; those that touch become one, empty ones vanish."""
    keep = ends > starts
    starts, ends = starts[keep], ends[keep]
    if not len(starts):
        return empty()
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    first = np.concatenate(([True], starts[1:] > ends[:-1]))
    last = np.concatenate((first[1:], [True]))
    return starts[first], ends[last]


def clip(stretches: Stretches, low: int, high: int) -> Stretches:
    """What lies between two times."""
    starts, ends = np.maximum(stretches[0], low), np.minimum(stretches[1], high)
    keep = ends > starts
    return starts[keep], ends[keep]


def length(stretches: Stretches) -> int:
    """Nanoseconds covered."""
    return int((stretches[1] - stretches[0]).sum())


def intersection(a: Stretches, b: Stretches) -> Stretches:
    """Time that both cover."""
    segments = layers([a, b], both=True)
    keep = segments.label == 1
    return segments.start[keep], segments.end[keep]


def subtract(a: Stretches, b: Stretches) -> Stretches:
    """Time that the first covers and the second does not."""
    segments = layers([b, a])
    keep = segments.label == 1
    return segments.start[keep], segments.end[keep]


@dataclass(frozen=True, slots=True)
class Segments:
    """Disjoint stretches with a label each, in the order of time.

    Attributes:
        start, end: nanoseconds. label: place in a list of names that the maker knows.
    """

    start: Times
    end: Times
    label: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.start)

    def by_label(self, labels: int) -> list[Stretches]:
        """The stretches of every label."""
        return [(self.start[self.label == n], self.end[self.label == n]) for n in range(labels)]

    def sums(self, times: Times, labels: int) -> NDArray[np.int64]:
        """Nanoseconds of every label (columns) up to each of some times (rows)."""
        out = np.zeros((len(times), labels), np.int64)
        for n in range(labels):
            starts, ends = self.start[self.label == n], self.end[self.label == n]
            if not len(starts):
                continue
            before = np.concatenate(([0], np.cumsum(ends - starts)))
            at = np.searchsorted(starts, times, side="right")
            inside = np.where(at > 0, np.minimum(times, ends[at - 1]) - starts[at - 1], 0)
            out[:, n] = np.where(at > 0, before[np.maximum(at - 1, 0)] + np.maximum(inside, 0), 0)
        return out


def layers(order: Sequence[Stretches], both: bool = False) -> Segments:
    """Every moment gets the label of the first set that covers it (with ``both``, of how many do, less one)."""
    if not any(len(s[0]) for s in order):
        return Segments(*empty(), np.zeros(0, np.int8))
    edges = np.unique(np.concatenate([part for s in order for part in s]))
    label = np.full(len(edges) - 1, -1, np.int8)
    for number, (starts, ends) in enumerate(order):
        if not len(starts):
            continue
        step = np.zeros(len(edges), np.int32)
        step[np.searchsorted(edges, starts)] += 1
        step[np.searchsorted(edges, ends)] -= 1
        covered = np.cumsum(step)[:-1] > 0
        if both:
            label[covered] += 1
        else:
            label[covered & (label < 0)] = number
    keep = label >= 0
    starts, ends, label = edges[:-1][keep], edges[1:][keep], label[keep]
    if not len(label):
        return Segments(starts, ends, label)
    first = np.concatenate(([True], (label[1:] != label[:-1]) | (starts[1:] != ends[:-1])))
    last = np.concatenate((first[1:], [True]))
    return Segments(starts[first], ends[last], label[first])
