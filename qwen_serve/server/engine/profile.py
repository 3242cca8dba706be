"""Measures time: of the stages of a start, and of steps by phase and number of rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import add
from time import perf_counter
from typing import Literal, get_args

from .batch import Batch


class StartProfile:
    """Seconds of each stage of a start, in order."""

    def __init__(self) -> None:
        self._last = perf_counter()
        self.seconds: dict[str, float] = {}

    def done(self, stage: str) -> None:
        """Record that `stage` took the time since the last stage."""
        now = perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        return ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in self.seconds.items())


Phase = Literal[
    "receive",
    "schedule",
    "propose",
    "fill",
    "decode",
    "reserve",
    "flush",
    "wait",
    "sample",
    "verify",
    "commit",
    "overlapped",
]
"""The phases in the order of a step: receive requests; choose the step's tokens; draft; write llama.cpp's
batch; llama_decode; count cells; deliver the previous step's tokens; wait for the device; sample; roll back
wrong drafts; record results and end complete sequences. All of these that run while the device computes count
as overlapped, except llama_decode and the waiting."""

PHASES: tuple[Phase, ...] = get_args(Phase)

Kind = Literal["decode", "verify", "prefill"]
"""decode: one token of each sequence; verify: drafts, too; prefill: prompt tokens."""


@dataclass(frozen=True)
class StepTotals:
    """Totals of the steps of one kind that have `rows` rows, rounded up to a power of two."""

    kind: Kind
    rows: int
    steps: int
    tokens: int
    """Tokens in the batches, drafts included."""
    seconds: tuple[float, ...]
    """One for each of PHASES."""


class StepProfile:
    """A stopwatch for the engine's thread; any thread may read `times`."""

    def __init__(self) -> None:
        self._totals: Mapping[tuple[Kind, int], StepTotals] = {}
        """Replaced as a whole, since other threads iterate over it."""
        self.overlaps = False
        """Whether the device computes a step meanwhile."""
        self._laps = [0.0] * len(PHASES)
        self._index = {phase: index for index, phase in enumerate(PHASES)}
        self._last = perf_counter()

    def start(self) -> None:
        """Begin to measure a step."""
        self._laps = [0.0] * len(PHASES)
        self._last = perf_counter()

    def lap(self, phase: Phase) -> None:
        """Add the time since the last lap to `phase`, or to overlapped."""
        now = perf_counter()
        if self.overlaps and phase not in ("decode", "wait"):
            phase = "overlapped"
        self._laps[self._index[phase]] += now - self._last
        self._last = now

    def finish(self, batch: Batch) -> None:
        """Add the laps since `start` to the totals of steps like that of `batch`."""
        kind: Kind = "prefill" if batch.prompt_tokens else "decode" if batch.is_decode else "verify"
        key = kind, 1 << max(0, batch.n_rows - 1).bit_length()
        before = self._totals.get(key) or StepTotals(*key, 0, 0, (0.0,) * len(PHASES))
        seconds = tuple(map(add, before.seconds, self._laps))
        totals = StepTotals(*key, before.steps + 1, before.tokens + batch.n_tokens, seconds)
        self._totals = {**self._totals, key: totals}
        self.start()

    def times(self) -> tuple[StepTotals, ...]:
        """All steps so far, by kind and rows."""
        return tuple(totals for _, totals in sorted(self._totals.items()))
