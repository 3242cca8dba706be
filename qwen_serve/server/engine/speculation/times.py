"""Step times on this machine: measured at start, corrected by every step."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from qwen_serve.llamacpp import Context

FIRST = 8
"""Of this many first measurements the minimum counts, since the first ones of a shape load kernels and build
graphs."""

WEIGHT = 0.1
"""Weight of a new measurement in the running mean."""

LATE, OFTEN = 1.5, 3
"""A measurement counts as at most LATE times the mean, since other work may have delayed it. If OFTEN in a
row are late, they count in full."""

HELD_UP = 0.8
"""If a step takes less than this share of the known time, other work has delayed the earlier measurements."""

REFRESH, CHANGED = 16, 0.02
"""Cached expectations are computed again after REFRESH steps, or at once after a change by the share CHANGED.
Computing those of a number of sequences takes 0.1 ms."""

PARTS = 4
"""Rows a sequence are counted in parts, if passes are ragged."""

CACHED = 1024
"""Up to this many rows expectations are cached."""

MEASURED = (1, 2, 4, 3, 5, 6, 8, 9, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of rows that the warm-up times, around the sizes at which kernels change."""

MANY = (2, 4, 8, 16, 32, 64)
"""Numbers of sequences above 1 that are timed, with few rows each."""

TURNS, STEADY = 3, 4
"""Turns of each shape; there are several, so that one delay does not affect all of its times. And steps in a
turn: the first one builds the graph, and the second may capture it."""


@dataclass(slots=True)
class Mean:
    """A running mean that starts with the minimum of its first values and limits single late ones."""

    value: NonNegativeFloat = 0.0
    count: NonNegativeInt = 0
    late: NonNegativeInt = 0
    """Late values in a row."""

    def add(self, value: float) -> None:
        """Add a value."""
        self.count += 1
        if self.count <= FIRST:
            self.value = value if self.count == 1 else min(self.value, value)
            return
        self.late = self.late + 1 if value > LATE * self.value else 0
        if self.late < OFTEN:
            value = min(value, LATE * self.value)
        self.value += WEIGHT * (value - self.value)


class GroupMeans:
    """A mean for each group of sequence counts, and for others that of the nearest group."""

    def __init__(self) -> None:
        self._means: dict[int, Mean] = {}

    def add(self, n: int, value: float) -> None:
        """Add a value for `n` sequences."""
        self._means.setdefault(group_of(n), Mean()).add(value)

    def of(self, n: int) -> float:
        """The mean for `n` sequences; 0 before there is any."""
        if not self._means:
            return 0.0
        return self._means[min(self._means, key=lambda known: abs(known - group_of(max(1, n))))].value


class StepTimesRecord(BaseModel):
    """Step times kept for the next start; see StepTimes."""

    building: Mean
    capturing: Mean
    plain: dict[PositiveInt, Mean]
    ratios: dict[PositiveInt, dict[PositiveFloat, Mean]]


class StepTimes:
    """Seconds of a pass of `n` sequences with the same number of rows each; every row is an output.

    It keeps the time of a plain step by number of sequences, and for steps with more rows the ratio to it. So
    plain steps, which always occur, correct the times of a start-up that was delayed. If a shape of several
    sequences was not measured, the ratio of one sequence with the same total of rows is used.
    """

    def __init__(self, *, ragged: bool = False) -> None:
        """`ragged`: a pass takes sequences with different numbers of rows."""
        self.ragged = ragged
        self.building, self.capturing = Mean(), Mean()
        """Extra seconds of a pass for which llama.cpp builds its graph again, and of the next pass, in which
        the device captures it (`ggml_backend_cuda_graph_compute`, ggml-cuda.cu)."""
        self.unconfirmed = False
        """Whether no step followed the start-up yet, whose measurements may all have been delayed."""
        self._plain: dict[int, Mean] = {}
        self._ratios: dict[int, dict[float, Mean]] = {}
        """By group of sequences, then by rows of each, on average: multiples of 1 / PARTS."""
        self._known: dict[int, npt.NDArray[np.float64]] = {}
        """Recent results of `_work_out` for 0 to CACHED rows, by number of sequences."""
        self._age = 0
        self._undrafted: dict[int, Mean] = {}
        """Seconds of a plain step behind another, when nobody drafts, by number of sequences: on a GPU less,
        since it is launched before the last one's tokens are read."""

    def undrafted(self, n: int, seconds: float) -> None:
        """Record a plain step of `n` sequences at a time when nobody drafts."""
        self._undrafted.setdefault(n, Mean()).add(seconds)

    def without_drafts(self, n: int) -> float:
        """Expected seconds of a plain step of `n` sequences if nobody drafts."""
        seconds = self.of(n, 1)
        return min(seconds, self._undrafted[n].value) if n in self._undrafted else seconds

    def dump(self) -> StepTimesRecord:
        """A copy of all times; `take` restores it."""
        return StepTimesRecord(
            building=self.building, capturing=self.capturing, plain=self._plain, ratios=self._ratios
        ).model_copy(deep=True)

    def take(self, record: StepTimesRecord) -> None:
        """Replace all times by what `dump` gave."""
        record = record.model_copy(deep=True)
        self.building, self.capturing = record.building, record.capturing
        self._plain, self._ratios = record.plain, record.ratios
        self.unconfirmed = True
        self._known.clear()

    @property
    def moving(self) -> float:
        """Seconds to change to another graph and keep it."""
        return self.building.value + self.capturing.value

    @property
    def leaving(self) -> float:
        """Seconds to leave the current graph for a single pass and come back."""
        return self.building.value + self.moving

    def add(
        self, n: int, rows: float, seconds: float, *, built: bool = False, captured: bool = False
    ) -> None:
        """Record a pass that took `seconds`, with `rows` rows a sequence. It `built` its graph, or was the
        first to reuse it and had it `captured`."""
        exact, rows = rows, round(PARTS * rows) / PARTS
        if rows == 1 < exact:
            return
        ratios = self._ratios.setdefault(group_of(n), {})
        known = n in self._plain if rows == 1 else rows in ratios
        if (built and n == 1) or captured:
            if known:
                once = self.building if built else self.capturing
                once.add(max(0.0, seconds - self.of(n, rows)))
            return
        if built:  # always so if a state moves to another cell
            seconds = max(seconds / 2, seconds - self.building.value)
        elif self.unconfirmed:
            self._confirm(seconds / self.of(n, rows))
        if rows == 1:
            mean = self._plain.setdefault(n, Mean())
        else:
            mean, seconds = ratios.setdefault(rows, Mean()), seconds / self._plain_step(n)
        if seconds < HELD_UP * mean.value:
            mean.count = 0  # the mean starts again
        before, self._age = mean.value, self._age + 1
        mean.add(seconds)
        if self._age % REFRESH == 0 or abs(mean.value - before) > CHANGED * before:
            self._known.clear()

    def _confirm(self, ratio: float) -> None:
        """Use the first step after the start-up, which took `ratio` times as long as expected."""
        self.unconfirmed = False
        if ratio < HELD_UP:
            for mean in (self.building, self.capturing, *self._plain.values()):
                mean.value *= ratio
            self._known.clear()

    def of(self, n: int, rows: float) -> float:
        """Expected seconds for `n` sequences with `rows` rows each."""
        return self.total(n, round(n * rows))

    def total(self, n: int, rows: int) -> float:
        """Expected seconds of a pass in which `n` sequences have `rows` rows together."""
        if rows > CACHED:
            return float(self._work_out(n, np.array([rows]))[0])
        return float(self.totals(n)[rows])

    def totals(self, n: int) -> npt.NDArray[np.float64]:
        """Expected seconds of passes of `n` sequences, by their rows together, from 0 to CACHED. Fewer than
        `n` count as `n`."""
        if (known := self._known.get(n)) is None:
            known = self._known[n] = self._work_out(n, np.maximum(n, np.arange(CACHED + 1)))
        return known

    def _work_out(self, n: int, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        result = self._plain_step(n) / self._curve(n) * self._curves(rows)
        group = group_of(n)
        if group > 1 and (ratios := self._ratios.get(group)):
            known = [1.0, *sorted(ratios)]
            factors = [
                1.0,
                *(ratios[r].value * self._curve(group) / self._curve(group * r) for r in known[1:]),
            ]
            result *= np.interp(rows / n, known, factors)
        return result

    def passes(self, lengths: list[int]) -> float:
        """Seconds of a call whose sequences have these numbers of rows.

        Without ragged passes llama.cpp repeatedly takes as many rows of each sequence as the shortest one has
        left (`split_equal` in llama-batch.cpp), so there is a pass for each distinct number.
        """
        if self.ragged:
            return self.total(len(lengths), sum(lengths))
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

    def _curve(self, rows: float) -> float:
        return float(self._curves(np.array([rows]))[0])

    def _curves(self, rows: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """The times of `rows` rows of one sequence as multiples of its plain step."""
        ratios = self._ratios.get(1)
        if not ratios:
            return 1.0 + (rows - 1) / 16  # a placeholder while nothing is measured
        known = [1.0, *sorted(ratios)]
        values = np.maximum.accumulate([1.0, *(ratios[r].value for r in known[1:])])
        middle = min(len(known) // 2, len(known) - 2)  # further rows cost less: extrapolate from here
        slope = (values[-1] - values[middle]) / (known[-1] - known[middle])
        beyond = np.maximum(0, rows - known[-1])
        return np.asarray(np.interp(rows, known, values) + max(0.0, slope) * beyond)


class StepTimer:
    """Records steps of `context` in `times`, and detects which built a graph and which reused one."""

    def __init__(self, context: Context, times: StepTimes) -> None:
        self.times = times
        self.shape = (0, 0)
        """Sequences and rows of all of them together in the last step, which llama.cpp has a graph for;
        (0, 0) if it has none."""
        self._context = context
        self._graphs_reused, self._skipped, self._built = context.graphs_reused, 0, False
        """`graphs_reused` at the last recorded step; steps skipped since; whether that step built a graph."""

    def skip(self) -> None:
        """Count a step that is not recorded, which reused its graph."""
        self._skipped += 1

    def book(self, shape: tuple[int, int], seconds: float | None) -> tuple[bool, bool]:
        """Record a step of a shape, or of (0, 0) if it has none. `seconds` is None if unknown. Return whether
        the step built a graph, and whether it had one captured."""
        built, captured = self._graph(shape)
        if shape != (0, 0) and seconds is not None:
            n, rows = shape
            self.times.add(n, rows / n, seconds, built=built, captured=captured)
        return built, captured

    def _graph(self, shape: tuple[int, int]) -> tuple[bool, bool]:
        reused, self._graphs_reused = self._graphs_reused, self._context.graphs_reused
        built = self._graphs_reused - reused < self._skipped + 1
        captured = self._built and not (built or self._skipped)  # a skipped step would have captured it
        self._built, self._skipped = built, 0
        self.shape = shape
        return built, captured

    def start(self) -> None:
        """Ignore the graphs of everything computed before."""
        self._graphs_reused, self._skipped = self._context.graphs_reused, 0

    def rehearse(
        self,
        step: Callable[[int, int], float],
        fits: Callable[[int, int], bool],
        seconds: float,
        clock: Callable[[], float],
        prompt: tuple[int, float] | None = None,
    ) -> None:
        """Time steps of more and more rows, those that `fits` allows, in about `seconds`.

        `step(n, rows)` computes a step of `n` sequences with `rows` rows each, and returns its seconds.
        `prompt` is the number of tokens of a prompt, and its seconds. If there is time for only a few shapes,
        the prompt predicts the cost of many rows better than these shapes do.
        """
        shapes = [(1, rows) for rows in MEASURED] + [(n, rows) for n in MANY for rows in MEASURED[:3]]
        shapes = [shape for shape in shapes if fits(*shape)]
        deadline = clock() + seconds
        took: dict[tuple[int, int], list[tuple[float, bool, bool]]] = {}
        for turn in range(TURNS):
            for shape in shapes:
                if clock() <= deadline or (not turn and shape[1] <= MEASURED[1]):
                    took.setdefault(shape, []).extend(
                        (step(*shape), *self._graph((shape[0], shape[0] * shape[1]))) for _ in range(STEADY)
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
            else:  # each of its steps built a graph, as after a state has moved to another cell
                self.times.add(*shape, min(took[shape])[0], built=True)
        if prompt is not None:
            self.times.add(1, *prompt)
        self.times.unconfirmed = True


def group_of(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()
