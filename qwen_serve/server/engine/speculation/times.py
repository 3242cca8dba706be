"""Step times on this machine: a table measured at start, and how many times as long real steps take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, NonNegativeFloat, PositiveFloat, PositiveInt

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

WINDOW, LATE = 64, 3.0
"""Values that a mean remembers, about; and how many times the mean a value counts as at most, since other
work may have delayed it. Two results that are collected together are 0 and twice the mean."""

HELD_UP = 0.8
"""If steps take less than this share of the time by the table, the start was held up by other work."""

DOUBT = 4
"""What was expected counts as this many values of what is measured."""

OVERHEAD = 1.1
"""How many times as long as in the table a round takes before any was measured: the host's share."""

STALE = 0.998
"""Share of what is known of plain steps that is kept in each round with drafts."""

CACHED = 1024
"""Rows up to which the table's times are worked out at once."""

ROWS = (1, 2, 3, 5, 9, 17, 33, 65, 129, 256)
"""Rows of a lone sequence that the warm-up times."""

MANY, FEW_ROWS = (2, 4, 8, 16, 32, 64), (1, 2, 5)
"""Numbers of sequences that it times, and rows of each."""

TURNS, STEADY = 2, 5
"""Turns of each shape, so that one delay does not affect all of its times; and steps in a turn, of which the
first may build a graph, and the second may have it captured."""


class Mean:
    """A running mean of about the last WINDOW values, which begins as `weight` values of `value`."""

    __slots__ = ("count", "total")

    def __init__(self, value: float = 0.0, weight: float = 0.0) -> None:
        self.total, self.count = weight * value, weight

    @property
    def value(self) -> float:
        """The mean; 0 of nothing."""
        return self.total / self.count if self.count else 0.0

    def add(self, value: float) -> None:
        """Add a value."""
        if self.count >= DOUBT:
            value = min(value, LATE * self.value)
        if self.count >= WINDOW:
            self.fade(0.5)
        self.total += value
        self.count += 1

    def fade(self, share: float) -> None:
        """Keep this share of what is known."""
        self.total, self.count = share * self.total, share * self.count


class StepTimesRecord(BaseModel):
    """The table of step times, kept for the next start."""

    table: dict[PositiveInt, dict[PositiveInt, PositiveFloat]]
    """Seconds by number of sequences, then by rows of each."""
    change: NonNegativeFloat = 0.0
    """Seconds that the first passes of another shape take longer."""


class StepTimes:
    """Seconds of plain steps and of rounds: drafts and their verification.

    The table gives the seconds of a pass. Real steps give the factor by which they take longer or shorter:
    one for plain steps of about as many sequences, one for rounds of a drafter at each depth. A factor that
    was not measured is that of the nearest depth or number of sequences that was.
    """

    def __init__(self, *, ragged: bool = False) -> None:
        """`ragged`: a pass takes sequences with different numbers of rows."""
        self.ragged = ragged
        self.known = StepTimesRecord(table={})
        self._totals: dict[int, npt.NDArray[np.float64]] = {}
        self.factors: dict[tuple[int, str, int], Mean] = {}
        """By group of sequences, drafter and depth; "" and 0 for plain steps."""

    # --- the table -----------------------------------------------------------------------------------------

    def add(self, n: int, rows: int, seconds: float) -> None:
        """Enter a pass of `n` sequences with as many rows each."""
        self.known.table.setdefault(n, {})[rows] = seconds
        self._totals.clear()

    def take(self, known: StepTimesRecord) -> None:
        """Replace the table by one of an earlier start."""
        self.known = known.model_copy(deep=True)
        self._totals.clear()

    def of(self, n: int, rows: int) -> float:
        """Seconds of a pass in which `n` sequences have `rows` rows together, by the table."""
        return float(self.totals(n)[rows] if rows <= CACHED else self._work_out(n, np.array(rows)))

    def totals(self, n: int) -> npt.NDArray[np.float64]:
        """Those of 0 to CACHED rows. Fewer than `n` count as `n`."""
        if n not in self._totals:
            self._totals[n] = self._work_out(n, np.maximum(n, np.arange(CACHED + 1)))
        return self._totals[n]

    def _work_out(self, n: int, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Several sequences that are not in the table are taken for one with as many rows."""
        table = self.known.table
        plain = {known: each[1] for known, each in sorted(table.items()) if 1 in each}
        if not plain:
            return 1e-3 * (1 + (rows - 1) / 16)  # nothing is measured
        if n in plain or (n < max(plain) and len(plain) > 1):
            one = float(np.interp(n, [*plain], [*plain.values()]))
        else:
            nearest = max(plain)
            one = plain[nearest] * float(self._shape(1, n) / self._shape(1, nearest))
        like = min(
            (known for known, each in table.items() if len(each) > 1),
            key=lambda known: abs(float(np.log2(known / n))),
            default=1,
        )
        if like == 1:
            return one * self._shape(1, rows) / self._shape(1, n)
        return one * self._shape(like, rows / n)

    def _shape(self, n: int, rows: float | npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """The seconds of `n` sequences with so many rows each, as multiples of a plain step of theirs."""
        known = sorted(self.known.table.get(n, {}).items())
        if len(known) < 2 or known[0][0] != 1:
            return 1 + (np.asarray(rows, np.float64) - 1) / 16
        at = np.array([row for row, _ in known], np.float64)
        times = np.maximum.accumulate([seconds for _, seconds in known]) / known[0][1]
        middle = min(len(at) // 2, len(at) - 2)
        slope = (times[-1] - times[middle]) / (at[-1] - at[middle])
        return np.asarray(np.interp(rows, at, times) + slope * np.maximum(0, np.asarray(rows) - at[-1]))

    def passes(self, lengths: list[int]) -> float:
        """Seconds of a call whose sequences have these numbers of rows, by the table.

        Without ragged passes llama.cpp repeatedly takes as many rows of each sequence as the shortest one has
        left (`split_equal` in llama-batch.cpp), so there is a pass for each distinct number.
        """
        if self.ragged:
            return self.of(len(lengths), sum(lengths))
        seconds, done = 0.0, 0
        for length in sorted(set(lengths)):
            n = sum(other >= length for other in lengths)
            seconds += self.of(n, n * (length - done))
            done = length
        return seconds

    # --- real steps ----------------------------------------------------------------------------------------

    def plain(self, n: int) -> float:
        """Seconds of a plain step of `n` sequences, launched behind another if the machine can."""
        return self.of(n, n) * self._plain(n).value

    def factor(self, n: int, drafter: str, depth: int) -> float:
        """How many times as long as in the table a round of `n` sequences takes."""
        key = group_of(n), drafter, depth
        if (mean := self.factors.get(key)) is not None:
            return mean.value
        like = [known for known in self.factors if known[1] == drafter]
        if not like:
            plain = self._plain(n).value
            return OVERHEAD * (plain if plain < HELD_UP else 1.0)
        bits = key[0].bit_length()
        nearest = min(like, key=lambda one: (abs(one[0].bit_length() - bits), abs(one[2] - depth)))
        return self.factors[nearest].value

    def took(self, n: int, drafter: str, depth: int, seconds: float, expected: float) -> None:
        """Record a step of `n` sequences. `seconds` is the time since the step before it was done, `expected`
        the time by the table. Plain steps have the drafter "" and depth 0."""
        if expected <= 0:
            return
        if not drafter:
            self._plain(n).add(seconds / expected)
            return
        key = group_of(n), drafter, depth
        if key not in self.factors:
            self.factors[key] = Mean(self.factor(n, drafter, depth), 1)
        self.factors[key].add(seconds / expected)
        self._plain(n).fade(STALE)

    def __str__(self) -> str:
        measured = sorted((key, mean) for key, mean in self.factors.items() if mean.count > 1)
        return ", ".join(
            f"{n} at once {drafter or 'plain'}{f' of {depth}' if depth else ''} x{mean.value:.2f}"
            for (n, drafter, depth), mean in measured
        )

    def _plain(self, n: int) -> Mean:
        """The factor of plain steps; while little is known of them, that of a start that was held up, or
        1."""
        key = group_of(n), "", 0
        if (mean := self.factors.get(key)) is None or mean.count < DOUBT:
            rounds = [one.value for known, one in self.factors.items() if known[0] == key[0] and known[1]]
            least = min(rounds, default=1.0)
            mean = self.factors[key] = Mean(least if least < HELD_UP else 1.0, DOUBT)
        return mean

    # --- the start -----------------------------------------------------------------------------------------

    def rehearse(
        self,
        step: Callable[[int, int], float],
        pace: Callable[[int], float | None],
        fits: Callable[[int, int], bool],
        seconds: float,
        clock: Callable[[], float],
        prompt: tuple[int, float] | None = None,
    ) -> None:
        """Time steps of more and more rows, those that `fits` allows, in about `seconds`.

        `step(n, rows)` computes a step of `n` sequences with `rows` rows each, and returns its seconds.
        `pace(n)` returns the seconds of a plain step behind another, or None if steps wait for each other.
        `prompt` is the number of tokens of a prompt, and its seconds. If there is time for only a few shapes,
        the prompt predicts the cost of many rows better than these shapes do.
        """
        shapes = [(1, 1), (1, 2), (1, 5), *((n, rows) for n in MANY for rows in FEW_ROWS)]
        shapes += [(1, rows) for rows in ROWS if rows not in (1, 2, 5)]
        shapes = [shape for shape in shapes if fits(*shape)]
        deadline = clock() + seconds
        took: dict[tuple[int, int], list[list[float]]] = {}
        for turn in range(TURNS):
            for shape in shapes:
                if clock() <= deadline or (not turn and shape[1] <= 2):
                    took.setdefault(shape, []).append([step(*shape) for _ in range(STEADY)])
        for (n, rows), turns in took.items():
            self.add(n, rows, min(map(min, turns)))
        if prompt is not None:
            self.add(1, *prompt)
        later = [sum(one[:2]) - 2 * min(one[2:]) for turns in took.values() for one in turns[1:]]
        self.known.change = max(0.0, float(np.median(later or [0.0])))
        for n in (shape[0] for shape in shapes if shape[1] == 1):
            if n in self.known.table and (each := pace(n)) is not None:
                self.add(n, 1, min(each, self.known.table[n][1]))


def group_of(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()
