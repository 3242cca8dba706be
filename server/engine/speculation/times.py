"""How long steps take on this machine, by their rows: measured at start, corrected by every step.

Steps correct what they measure and, where they show that the start was held up, what it measured besides.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
from pydantic import BaseModel, NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

FIRST = 8
"""Measurements of which the least counts: the first ones of a shape load kernels and build graphs."""

WEIGHT = 0.1
"""Of a new measurement in the running mean."""

LATE, OFTEN = 1.5, 3
"""A measurement counts for at most so many times the mean: something else held it up, unless that many in a
row were late. On a machine that is busy with other things, too, all of them are."""

HELD_UP = 0.8
"""Share of a start's seconds below which something else must have held the start up. On a made-up H200 whose
start took three times as long as what came after, a head that is right in nine of ten made answers 1.28 to
1.38 times as fast; with what was not measured since corrected by what was, 1.61 to 1.70, as after a quiet
start."""

REFRESH = 16
"""Measurements after which answers are worked out anew, if they have not changed by more than 2% before."""


@dataclass(slots=True)
class Mean:
    """A running mean that takes the least of its first values and is not carried off by single late ones."""

    value: NonNegativeFloat = 0.0
    count: NonNegativeInt = 0
    late: NonNegativeInt = 0
    """Late values in a row."""

    def add(self, value: float) -> None:
        """Take in a value."""
        self.count += 1
        if self.count <= FIRST:
            self.value = value if self.count == 1 else min(self.value, value)
            return
        self.late = self.late + 1 if value > LATE * self.value else 0
        if self.late < OFTEN:
            value = min(value, LATE * self.value)
        self.value += WEIGHT * (value - self.value)


class StepTimesRecord(BaseModel):
    """What is known of steps, for the next start; see StepTimes."""

    building: Mean
    capturing: Mean
    means: dict[PositiveInt, dict[PositiveInt, Mean]]
    steady: set[tuple[PositiveInt, PositiveInt]]


class StepTimes:
    """Seconds of one pass: `n` sequences with the same number of rows each, every one of them an output.

    Measured points of one sequence are joined by lines. For several sequences the same number of rows in all
    is taken and corrected by what was measured for about as many sequences (by powers of two).
    """

    def __init__(self) -> None:
        self.building = Mean()
        """Seconds that a pass takes longer when llama.cpp builds its graph anew."""
        self.capturing = Mean()
        """Seconds that the pass after that takes longer if it finds the graph, which ggml has the device
        capture then (`ggml_backend_cuda_graph_compute`, ggml-cuda.cu)."""
        self._means: dict[int, dict[int, Mean]] = {}
        """By group of sequences, and rows of each."""
        self._steady: set[tuple[int, int]] = set()
        """Measured when the graph was there already."""
        self._known: dict[tuple[int, int], float] = {}
        """Answers of `of`, for a while."""
        self._age = 0
        self._curve: tuple[list[int], list[float]] = [], []
        """Rows and seconds of one sequence."""
        self._start: dict[int, tuple[Mean, float]] = {}
        """By id: what was known at start, and its seconds then."""
        self._since: set[int] = set()
        """Ids of those of them that were measured since."""

    def dump(self) -> StepTimesRecord:
        """A copy of all that is known; `take` brings it back."""
        return StepTimesRecord(
            building=self.building, capturing=self.capturing, means=self._means, steady=self._steady
        ).model_copy(deep=True)

    def take(self, record: StepTimesRecord) -> None:
        """What `dump` gave, in place of what is known."""
        record = record.model_copy(deep=True)
        self.building, self.capturing = record.building, record.capturing
        self._means, self._steady = record.means, record.steady
        self.begin()
        self._work_out()

    def begin(self) -> None:
        """What is known now is what the start has measured, or the server before."""
        every = [self.building, self.capturing, *chain(*(means.values() for means in self._means.values()))]
        self._start, self._since = {id(mean): (mean, mean.value) for mean in every}, set()

    def _correct(self) -> None:
        """If the start was held up, what was not measured since took as many times too long as what was.

        That is the plain step, of one sequence and row, or else the others' median.
        """
        ratios = {
            i: mean.value / seconds
            for i, (mean, seconds) in self._start.items()
            if seconds and i in self._since
        }
        if not ratios:
            return
        plain = self._means.get(1, {}).get(1)
        ratio = ratios.get(id(plain), float(np.median([*ratios.values()])))
        if ratio < HELD_UP:
            for i, (mean, seconds) in self._start.items():
                if i not in self._since:
                    mean.value = ratio * seconds

    def _work_out(self) -> None:
        self._known.clear()
        self._correct()
        alone = self._means.get(1, {})
        rows = sorted(alone)
        # more rows take no less time
        self._curve = rows, np.maximum.accumulate([alone[n].value for n in rows] or [0.0]).tolist()

    @property
    def moving(self) -> float:
        """Seconds that it costs to go to another graph, and stay."""
        return self.building.value + self.capturing.value

    @property
    def leaving(self) -> float:
        """Seconds that it costs to leave the graph that there is for a single pass, and come back."""
        return self.building.value + self.moving

    def add(self, n: int, rows: int, seconds: float, *, built: bool = False, captured: bool = False) -> None:
        """A pass of `n` sequences with `rows` rows each took so long.

        It `built` its graph, or was the first to find it and had it `captured`, or neither.
        """
        point = group, _ = group_of(n), rows
        if (built or captured) and point in self._steady:
            once = self.building if built else self.capturing
            self._start.pop(id(once), None)
            once.add(max(0.0, seconds - self.of(n, rows)))
            return
        if captured:
            return
        if built:  # as it always is where a state moves to another cell: that is counted apart
            seconds = max(seconds / 2, seconds - self.building.value)
        if n != group:  # what they took stands for what the group's largest would take
            seconds *= self._single(group * rows) / self._single(n * rows)
        means = self._means.setdefault(group, {})
        if rows not in means or (not built and point not in self._steady):
            means[rows] = Mean()  # what it took with a graph to build was better than nothing
        if not built:
            self._steady.add(point)
        mean = means[rows]
        before = mean.value
        if not built and id(mean) in self._start and id(mean) not in self._since:
            self._since.add(id(mean))
            if seconds < HELD_UP * before:
                mean.count = 0  # it begins anew
        mean.add(seconds)
        self._age += 1
        if self._age % REFRESH == 0 or abs(mean.value - before) > 0.02 * before:
            self._work_out()

    def of(self, n: int, rows: int) -> float:
        """Expected seconds for `n` sequences with `rows` rows each."""
        if (seconds := self._known.get((n, rows))) is None:
            seconds, group = self._single(n * rows), group_of(n)
            if group > 1 and (means := self._means.get(group)):
                known = sorted(means)
                seconds *= float(
                    np.interp(rows, known, [means[r].value / self._single(group * r) for r in known])
                )
            self._known[n, rows] = seconds
        return seconds

    def passes(self, lengths: list[int]) -> float:
        """Seconds of a call whose sequences bring these numbers of rows.

        llama.cpp takes as many of each as the shortest has left, again and again (`split_equal` in
        llama-batch.cpp): a pass over the weights for each distinct number.
        """
        seconds, done = 0.0, 0
        for length in sorted(set(lengths)):
            seconds += self.of(sum(other >= length for other in lengths), length - done)
            done = length
        return seconds

    def _single(self, rows: int) -> float:
        known, values = self._curve
        if not known:
            return 1.0 + rows / 16  # nothing is known: a shape, no more
        seconds = float(np.interp(rows, known, values))
        if rows > known[-1] and len(known) > 1:
            # rows get cheaper by the dozen, so the last stretch tells most; a wrong hope is soon corrected
            middle = min(len(known) // 2, len(known) - 2)
            slope = (values[-1] - values[middle]) / (known[-1] - known[middle])
            seconds += max(0.0, slope) * (rows - known[-1])
        return seconds


def group_of(n: int) -> int:
    """The power of two from `n` up."""
    return 1 << (n - 1).bit_length()
