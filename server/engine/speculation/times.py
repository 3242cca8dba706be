"""How long steps and drafts take on this machine: measured at start, corrected by every step."""

from __future__ import annotations

from bisect import insort

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]

FIRST = 4
"""Measurements of which the least counts: the first ones of a shape load kernels and build graphs."""

WEIGHT = 0.1
"""Of a new measurement in the running mean."""

LATE = 1.5
"""A measurement counts for at most so many times the mean: something else held it up."""


class Mean:
    """A running mean that takes the least of its `first` values and is not carried off by late ones."""

    __slots__ = ("count", "first", "value")

    def __init__(self, first: int = FIRST) -> None:
        self.value, self.count, self.first = 0.0, 0, first

    def add(self, value: float) -> None:
        """One more measurement."""
        self.count += 1
        if self.count <= self.first:
            self.value = value if self.count == 1 else min(self.value, value)
        else:
            self.value += WEIGHT * (min(value, LATE * self.value) - self.value)


class StepTimes:
    """Seconds of one pass: `n` sequences with the same number of tokens each, every one of them an output.

    Measured points of one sequence are joined by lines. For several sequences the same number of rows in all
    is taken and corrected by what was measured for about as many sequences (by powers of two).
    """

    def __init__(self) -> None:
        self.building = Mean(first=1)
        """Seconds that a pass takes longer when llama.cpp builds its graph anew."""
        self.capturing = Mean()
        """Seconds that the pass after that takes longer if it finds the graph, which ggml has the device
        capture then (`ggml_backend_cuda_graph_compute`, ggml-cuda.cu)."""
        self._means: dict[int, dict[int, Mean]] = {}
        self._steady: set[tuple[int, int]] = set()
        """Measured when the graph was there already."""
        self._lengths: dict[int, list[int]] = {}
        self._curve: list[float] = []
        """Of one sequence, by its lengths; empty when it has to be drawn anew."""

    @property
    def leaving(self) -> float:
        """Seconds that it costs to leave the graph that there is for a single pass, and come back."""
        return self.building.value + self.moving

    @property
    def moving(self) -> float:
        """Seconds that it costs to go to another graph, and stay."""
        return self.building.value + self.capturing.value

    def add(
        self, n: int, length: int, seconds: float, *, built: bool = False, captured: bool = False
    ) -> None:
        """A pass of `n` sequences with `length` tokens each took so long.

        It `built` its graph, or was the first to find it and had it `captured`, or neither.
        """
        group = group_of(n)
        if captured:
            if (group, length) in self._steady:
                self.capturing.add(max(0.0, seconds - float(self.of(n, length))))
            return
        if built and (group, length) in self._steady:
            self.building.add(max(0.0, seconds - float(self.of(n, length))))
            return
        if built:  # as it always is where a state moves to another cell: the planner counts that apart
            seconds = max(seconds / 2, seconds - self.building.value)
        if n != group:  # what they took stands for what the group's largest would take
            seconds *= self._single(group * length) / self._single(n * length)
        means = self._means.setdefault(group, {})
        if length not in means:
            means[length] = Mean()
            insort(self._lengths.setdefault(group, []), length)
        if not built and (group, length) not in self._steady:
            self._steady.add((group, length))
            means[length] = Mean()  # what it took with a graph to build was better than nothing
        means[length].add(seconds)
        if group == 1:
            self._curve = []

    def of(self, n: int, lengths: npt.ArrayLike) -> Seconds:
        """Expected seconds for `n` sequences with each of `lengths` tokens."""
        wanted = np.asarray(lengths, float)
        base = self._single_all(n * wanted)
        group = group_of(n)
        if group == 1 or group not in self._means:
            return base
        known, means = self._lengths[group], self._means[group]
        factors = [means[length].value / self._single(group * length) for length in known]
        seconds: Seconds = base * np.interp(wanted, known, factors)
        return seconds

    def _single(self, rows: float) -> float:
        return float(self._single_all(np.array(rows, float)))

    def _single_all(self, rows: Seconds) -> Seconds:
        known = self._lengths.get(1)
        if not known:
            return 1.0 + rows / 16  # nothing is known: a shape, no more
        if not self._curve:
            self._curve = _rising([self._means[1][length] for length in known])
        values = self._curve
        seconds: Seconds = np.interp(rows, known, values)
        if len(known) > 1:
            # rows get cheaper by the dozen, so the last stretch tells most; a wrong hope is soon corrected
            middle = min(len(known) // 2, len(known) - 2)
            slope = max(0.0, (values[-1] - values[middle]) / (known[-1] - known[middle]))
            seconds = seconds + slope * np.maximum(0, rows - known[-1])
        return seconds


class DraftTimes:
    """Seconds of a decode of the MTP head, by sequences, and of what drafting takes besides."""

    def __init__(self) -> None:
        self._means: dict[int, Mean] = {}
        self.besides = Mean()
        """Seconds of a draft beyond its decodes: catching up, and forgetting what was guessed."""

    def add(self, n: int, seconds: float) -> None:
        """A draft of one token for each of `n` sequences took so long."""
        self._means.setdefault(group_of(n), Mean()).add(seconds)

    def of(self, n: int) -> float:
        """Expected seconds for one token for each of `n` sequences."""
        if not self._means:
            return 0.0
        group = group_of(n)
        nearest = min(self._means, key=lambda known: abs(known - group))
        return self._means[nearest].value


def _rising(means: list[Mean]) -> list[float]:
    """The values nearest to the means that nowhere fall: more rows take no less time.

    Neighbours that contradict it are pooled (isotonic regression by adjacent violators, Ayer et al. 1955).
    """
    pools: list[tuple[float, int, int]] = []  # sum, weight, points
    for mean in means:
        weight = min(mean.count, 8)
        pool = (mean.value * weight, weight, 1)
        while pools and pools[-1][0] * pool[1] > pool[0] * pools[-1][1]:
            before = pools.pop()
            pool = (before[0] + pool[0], before[1] + pool[1], before[2] + pool[2])
        pools.append(pool)
    return [total / weight for total, weight, points in pools for _ in range(points)]


def group_of(n: int) -> int:
    """The power of two from `n` up."""
    return 1 << (n - 1).bit_length()
