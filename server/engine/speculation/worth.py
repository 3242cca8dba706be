"""Whether drafting has paid lately: what it gave beside what the same time gives without.

Plans rest on times of shapes that repeat and of one pass; real steps are ragged after rejections, and build
their graphs anew. So what a drafter does for so many sequences is also judged by its results: where they stay
below those of plain steps it rests, longer each time, before it is tried again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .rest import Rest
from .times import Mean, StepTimes, group_of

DECAY = 0.95
"""What a step's result counts for with each step after it."""

PATIENCE = ((12, 1.0), (6, 0.7), (4, 0.45))
"""Steps that are looked at before a drafter is judged, and what their tokens must be worth beside the time
that they took: the less, the sooner it rests. Drafts from the text are long and come now and then: one pays
for several, so the last does not hold for them."""

TRIALS = PATIENCE[0][0]
"""Steps after which it is judged however little it loses."""

REST_FIRST, REST_LAST, REST_GROWTH = 512, 8_192, 4
"""Steps that a drafter rests at first and at most, and how many times as many it is each time: a trial loses
some ten milliseconds, little beside the longest rest, and a text that it suits should not wait for long."""


@dataclass(slots=True)
class Trial:
    """One drafter with about so many sequences."""

    seconds: float = 0.0
    plain: float = 0.0
    """What its tokens would have taken without drafts."""
    steps: int = 0
    fresh: bool = True
    """Nobody has drafted for so many yet: the first time, kernels are loaded."""
    rest: Rest = field(default_factory=lambda: Rest(REST_FIRST, REST_LAST, REST_GROWTH))


class Worth:
    """Judges by drafter (see `Order.judged`) and by number of sequences, in powers of two. `times` stands in
    for plain steps."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._plain: dict[int, Mean] = {}
        self._trials: dict[tuple[str, int], Trial] = {}

    def allows(self, drafter: str, n: int) -> bool:
        """Whether it may draft for `n` sequences. To be asked once a step: rests are counted in questions."""
        return self._trial(drafter, n).rest.over()

    def left(self, drafter: str, n: int) -> int:
        """Steps that it rests from now on."""
        return self._trial(drafter, n).rest.left

    def add_plain(self, n: int, seconds: float) -> None:
        """A step without drafts, after another one, gave each of `n` sequences a token."""
        self._plain.setdefault(n, Mean()).add(seconds)

    def add(self, drafter: str, n: int, tokens: int, seconds: float) -> None:
        """A step with drafts, or one that catches up after them, gave `n` sequences so many tokens."""
        trial = self._trial(drafter, n)
        if trial.fresh:
            trial.fresh = False
            return
        mean = self._plain.get(n)
        plain = mean.value if mean is not None else float(self._times.of(n, 1))
        trial.seconds = DECAY * trial.seconds + seconds
        trial.plain = DECAY * trial.plain + tokens * plain / n
        trial.steps += 1
        patience = PATIENCE if drafter == "mtp" else PATIENCE[:-1]
        if any(trial.steps >= steps and trial.plain < share * trial.seconds for steps, share in patience):
            trial.rest.begin()
            trial.seconds, trial.plain, trial.steps = 0.0, 0.0, 0
        elif trial.steps >= 20 * TRIALS:
            trial.rest.end()

    def _trial(self, drafter: str, n: int) -> Trial:
        key = drafter, group_of(n)
        if (trial := self._trials.get(key)) is None:
            trial = self._trials[key] = Trial()
        return trial
