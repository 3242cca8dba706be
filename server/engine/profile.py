"""Where the time goes: of a start, and since then of steps, by phase and by the number of rows."""

from __future__ import annotations

from dataclasses import dataclass
from operator import add
from time import perf_counter
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .batch import Batch


def kind_of(batch: Batch) -> Kind:
    """What to book a step under."""
    if batch.prompt_tokens:
        return "prefill"
    return "decode" if batch.is_decode else "verify"


class StartProfile:
    """How long each stage of a start took, in the order that they were done."""

    def __init__(self) -> None:
        self._last = perf_counter()
        self.seconds: dict[str, float] = {}

    def done(self, stage: str) -> None:
        """The time since the one before was spent on this one."""
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
]
"""In the order of a step: take in requests; choose its tokens; draft; write llama.cpp's batch; llama_decode;
count cells; send off the tokens of the step before; wait for the device; sample; take wrong drafts back;
account and end what is complete. Reserve and flush cost a device that runs alone no time."""

PHASES: tuple[Phase, ...] = get_args(Phase)

Kind = Literal["decode", "verify", "prefill"]
"""A token of each sequence; drafts among them; prompt tokens among them."""


@dataclass(frozen=True)
class StepTotals:
    """All steps of a kind whose rows, rounded up to a power of two, are `rows`."""

    kind: Kind
    rows: int
    steps: int
    tokens: int
    """In the batches, drafts included."""
    seconds: tuple[float, ...]
    """One for each of PHASES."""


class StepProfile:
    """A stop watch for the engine's thread; `times` may be read from any."""

    def __init__(self) -> None:
        self._totals: Mapping[tuple[Kind, int], StepTotals] = {}
        """Replaced whole: other threads go through it."""
        self._laps = [0.0] * len(PHASES)
        self._index = {phase: index for index, phase in enumerate(PHASES)}
        self._last = perf_counter()

    def start(self) -> None:
        """Begin to measure a step: what went before does not count."""
        self._laps = [0.0] * len(PHASES)
        self._last = perf_counter()

    def lap(self, phase: Phase) -> None:
        """The time since the last lap went into `phase`."""
        now = perf_counter()
        self._laps[self._index[phase]] += now - self._last
        self._last = now

    def finish(self, kind: Kind, rows: int, tokens: int) -> None:
        """Book the laps since `start`."""
        key = kind, 1 << max(0, rows - 1).bit_length()
        before = self._totals.get(key) or StepTotals(*key, 0, 0, (0.0,) * len(PHASES))
        seconds = tuple(map(add, before.seconds, self._laps))
        totals = StepTotals(*key, before.steps + 1, before.tokens + tokens, seconds)
        self._totals = {**self._totals, key: totals}
        self.start()

    def times(self) -> tuple[StepTotals, ...]:
        """All steps so far, by kind and rows."""
        return tuple(totals for _, totals in sorted(self._totals.items()))
