"""How long steps take on this machine: measured at start, corrected by every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel, NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable

    from qwen_serve.llamacpp import Context

FIRST = 8
"""Measurements of which the least counts: the first ones of a shape load kernels and build graphs."""

WEIGHT = 0.1
"""Of a new measurement in the running mean."""

LATE, OFTEN = 1.5, 3
"""How many times the mean a measurement counts for at most, since something else held it up, unless so many
in a row were late."""

HELD_UP = 0.8
"""A step below this share of what was known shows that something else held up those before."""

REFRESH, CHANGED = 16, 0.02
"""Steps after which answers are worked out anew, or at once where something changed by that share: to ask for
one takes 20 us, and a plan asks for a hundred."""

MEASURED = (1, 2, 4, 3, 5, 6, 8, 9, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows that the warm-up times: around the sizes at which kernels change."""

MANY = (2, 4, 8, 16)
"""Sequences that it times besides one, with few rows each."""

TURNS, STEADY = 3, 4
"""How often each shape has its turn, so that a hold-up spoils the least time of none; and its steps in a
turn: the first builds the graph, the second may have it captured."""


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
    plain: dict[PositiveInt, Mean]
    ratios: dict[PositiveInt, dict[PositiveInt, Mean]]


class StepTimes:
    """Seconds of a pass of `n` sequences with the same number of rows each, every row an output.

    What a plain step takes, by sequences, and how many times as long one with more rows takes. So plain
    steps, which there always are, correct a start that was held up. What was not measured for several
    sequences is taken from one with as many rows.
    """

    def __init__(self) -> None:
        self.building, self.capturing = Mean(), Mean()
        """Seconds that a pass takes longer when llama.cpp builds its graph anew, and the one after it, when
        ggml has the device capture that (`ggml_backend_cuda_graph_compute`, ggml-cuda.cu)."""
        self.unconfirmed = False
        """No step came since the start: all that it measured may have been held up."""
        self._plain: dict[int, Mean] = {}
        self._ratios: dict[int, dict[int, Mean]] = {}
        """By group of sequences and rows of each."""
        self._known: dict[tuple[int, int], float] = {}
        """Answers of `of`, for a while."""
        self._age = 0

    def dump(self) -> StepTimesRecord:
        """A copy of all that is known; `take` brings it back."""
        return StepTimesRecord(
            building=self.building, capturing=self.capturing, plain=self._plain, ratios=self._ratios
        ).model_copy(deep=True)

    def take(self, record: StepTimesRecord) -> None:
        """What `dump` gave, in place of what is known."""
        record = record.model_copy(deep=True)
        self.building, self.capturing = record.building, record.capturing
        self._plain, self._ratios = record.plain, record.ratios
        self.unconfirmed = True
        self._known.clear()

    @property
    def moving(self) -> float:
        """Seconds that it costs to go to another graph, and stay."""
        return self.building.value + self.capturing.value

    @property
    def leaving(self) -> float:
        """Seconds that it costs to leave the graph that there is for a single pass, and come back."""
        return self.building.value + self.moving

    def add(self, n: int, rows: int, seconds: float, *, built: bool = False, captured: bool = False) -> None:
        """A pass took so long; it `built` its graph, or was the first to find it and had it `captured`."""
        ratios = self._ratios.setdefault(group_of(n), {})
        known = n in self._plain if rows == 1 else rows in ratios
        if (built and n == 1) or captured:
            if known:
                once = self.building if built else self.capturing
                once.add(max(0.0, seconds - self.of(n, rows)))
            return
        if built:  # as it always is where a state moves to another cell
            seconds = max(seconds / 2, seconds - self.building.value)
        elif self.unconfirmed:
            self._confirm(seconds / self.of(n, rows))
        if rows == 1:
            mean = self._plain.setdefault(n, Mean())
        else:
            mean, seconds = ratios.setdefault(rows, Mean()), seconds / self._plain_step(n)
        if seconds < HELD_UP * mean.value:
            mean.count = 0  # it begins anew
        before, self._age = mean.value, self._age + 1
        mean.add(seconds)
        if self._age % REFRESH == 0 or abs(mean.value - before) > CHANGED * before:
            self._known.clear()

    def _confirm(self, ratio: float) -> None:
        """The first step after the start takes so many times as long as expected."""
        self.unconfirmed = False
        if ratio < HELD_UP:
            for mean in (self.building, self.capturing, *self._plain.values()):
                mean.value *= ratio
            self._known.clear()

    def of(self, n: int, rows: int) -> float:
        """Expected seconds for `n` sequences with `rows` rows each."""
        if (seconds := self._known.get((n, rows))) is None:
            seconds = self._known[n, rows] = self._work_out(n, rows)
        return seconds

    def _work_out(self, n: int, rows: int) -> float:
        plain = self._plain_step(n)
        if rows == 1:
            return plain
        ratio, group = self._curve(n * rows) / self._curve(n), group_of(n)
        if group > 1 and (ratios := self._ratios.get(group)):
            known = [1, *sorted(ratios)]
            factors = [
                1.0,
                *(ratios[r].value * self._curve(group) / self._curve(group * r) for r in known[1:]),
            ]
            ratio *= float(np.interp(rows, known, factors))
        return plain * ratio

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

    def _plain_step(self, n: int) -> float:
        if (mean := self._plain.get(n)) is not None:
            return mean.value
        if not self._plain:
            return self._curve(n)
        nearest = min(self._plain, key=lambda known: abs(known - n))
        return self._plain[nearest].value * self._curve(n) / self._curve(nearest)

    def _curve(self, rows: int) -> float:
        """How many times a plain step of one sequence so many rows of it take."""
        ratios = self._ratios.get(1)
        if not ratios:
            return 1.0 + (rows - 1) / 16  # nothing is known: a shape, no more
        known = [1, *sorted(ratios)]
        values = np.maximum.accumulate([1.0, *(ratios[r].value for r in known[1:])])
        ratio = float(np.interp(rows, known, values))
        if rows > known[-1]:  # rows get cheaper by the dozen, so the last stretch tells most
            middle = min(len(known) // 2, len(known) - 2)
            slope = (values[-1] - values[middle]) / (known[-1] - known[middle])
            ratio += float(max(0.0, slope)) * (rows - known[-1])
        return ratio


class StepTimer:
    """Books steps of `context` in `times`, and tells those that needed a graph from those that found one."""

    def __init__(self, context: Context, times: StepTimes) -> None:
        self.times = times
        self.shape = (0, 0)
        """Sequences and rows of the last step, for which there is a graph; (0, 0) where there is none."""
        self._context = context
        self._graphs_reused, self._skipped, self._built = context.graphs_reused, 0, False
        """As of the last step that was booked; steps since; and whether that one built a graph."""

    def skip(self) -> None:
        """A step is not booked, which found its graph."""
        self._skipped += 1

    def book(self, shape: tuple[int, int], seconds: float | None) -> tuple[bool, bool]:
        """A step of a shape, (0, 0) where it has none; `seconds` is None where they are not known. Whether it
        built a graph, or had one captured."""
        built, captured = self._graph(shape)
        if shape != (0, 0) and seconds is not None:
            self.times.add(*shape, seconds, built=built, captured=captured)
        return built, captured

    def _graph(self, shape: tuple[int, int]) -> tuple[bool, bool]:
        reused, self._graphs_reused = self._graphs_reused, self._context.graphs_reused
        built = self._graphs_reused - reused < self._skipped + 1
        captured = self._built and not (built or self._skipped)  # else a step between had it captured
        self._built, self._skipped = built, 0
        self.shape = shape
        return built, captured

    def start(self) -> None:
        """What was computed before says nothing."""
        self._graphs_reused, self._skipped = self._context.graphs_reused, 0

    def rehearse(
        self,
        step: Callable[[int, int], float],
        fits: Callable[[int, int], bool],
        seconds: float,
        clock: Callable[[], float],
        prompt: tuple[int, float] | None = None,
    ) -> None:
        """Time steps of more and more rows, those that `fits` allows, in about so many seconds.

        `step(n, rows)` computes one of `n` sequences with so many rows each, and says how long it took. A
        `prompt` of so many tokens took so long: where the time is up after a few shapes, that says more of
        what many rows take than the difference of two.
        """
        shapes = [(1, rows) for rows in MEASURED] + [(n, rows) for n in MANY for rows in MEASURED[:3]]
        shapes = [shape for shape in shapes if fits(*shape)]
        deadline = clock() + seconds
        took: dict[tuple[int, int], list[tuple[float, bool, bool]]] = {}
        for turn in range(TURNS):
            for shape in shapes:
                if clock() <= deadline or (not turn and shape[1] <= MEASURED[1]):
                    took.setdefault(shape, []).extend(
                        (step(*shape), *self._graph(shape)) for _ in range(STEADY)
                    )
        steady = {
            shape: min(found)
            for shape, steps in took.items()
            if (found := [seconds for seconds, built, captured in steps if not (built or captured)])
        }
        for index, once in ((1, self.times.building), (2, self.times.capturing)):
            extra = [one[0] - least for shape, least in steady.items() for one in took[shape] if one[index]]
            once.add(max(0.0, float(np.median(extra or [0.0]))))
        for shape in took:
            if shape in steady:
                self.times.add(*shape, steady[shape])
            else:  # each needs a graph, as where a state moves to another cell
                self.times.add(*shape, min(took[shape])[0], built=True)
        if prompt is not None:
            self.times.add(1, *prompt)
        self.times.unconfirmed = True


def group_of(n: int) -> int:
    """The power of two from `n` up."""
    return 1 << (n - 1).bit_length()
