"""What steps take, by their shapes: booked as they come, and rehearsed at start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .times import Mean, StepTimes

if TYPE_CHECKING:
    from collections.abc import Callable

    from qwen_serve.llamacpp import Context

    Rehearse = Callable[[int, int], float]

MEASURED = (1, 2, 4, 3, 5, 6, 8, 9, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows that the warm-up times: around the sizes at which kernels change."""

MANY = (2, 4, 8, 16)
"""Sequences that it times besides one, with few rows each."""

TURNS = 3
"""How often each of these has its turn, so that whatever holds the machine up for a while (another program,
a clock that has yet to rise) spoils the least time of none."""

STEADY = 4
"""Rehearsals of a shape in a row: the first builds the graph, the second may have it captured, the others
are what it takes."""


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

    def forget_graph(self) -> None:
        """The step could not be computed: there may be no graph any more."""
        self.shape = (0, 0)

    def book(self, shape: tuple[int, int], seconds: float | None) -> tuple[bool, bool]:
        """A step of a shape, (0, 0) where it has none; `seconds` is None where they are not known. Whether it
        built a graph, or had one captured."""
        reused, self._graphs_reused = self._graphs_reused, self._context.graphs_reused
        built = self._graphs_reused - reused < self._skipped + 1
        captured, self._built, self._skipped = self._built and not built, built, 0
        self.shape = shape
        if shape != (0, 0) and seconds is not None:
            self.times.add(*shape, seconds, built=built, captured=captured)
        return built, captured

    def start(self) -> None:
        """What was computed before says nothing."""
        self._graphs_reused, self._skipped = self._context.graphs_reused, 0

    def rehearse(
        self,
        step: Rehearse,
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
        deadline = clock() + seconds
        if prompt is not None:
            self.times.add(1, *prompt)
        self._rehearse_building(step, fits)
        for turn in range(TURNS):
            for n, rows in shapes:
                late = clock() > deadline and (turn or rows > MEASURED[1])
                if not late and fits(n, rows):
                    for _ in range(STEADY):
                        self.book((n, rows), step(n, rows))
        self._rehearse_building(step, fits)
        self.times.begin()

    def _rehearse_building(self, step: Rehearse, fits: Callable[[int, int], bool]) -> None:
        """What a graph costs: steps each of which needs another than the last.

        At first, so that it can be taken off what is measured then; and again when the machine is warm.
        """
        self.times.building = Mean()
        for _ in range(STEADY):
            self.book((1, 1), step(1, 1))
        for rows in MEASURED[1::-1] * STEADY:
            if fits(1, rows):
                self.book((1, rows), step(1, rows))
