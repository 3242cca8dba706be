"""Progress of long work: a bar with rate and remaining time on a terminal, plain lines elsewhere."""

import sys
import time
from collections import deque
from types import TracebackType
from typing import NoReturn, Self, TextIO

from tqdm import tqdm

LINE_INTERVAL_S = 10.0
RECENT_LINES = 3
"""Lines over which the rate is averaged, so that a slow start does not distort the estimate."""

BEFORE_ESTIMATE = 0.05
"""Share of the work done before a remaining time is shown."""

BYTES = "B"
BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
BAR_WITH_ESTIMATE = (
    "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
)


class Progress:
    """Counts units of work towards `total`; use as a context manager.

    On a terminal this is a tqdm bar. Elsewhere (a log, a pipe) it prints a line when it starts, one every
    `LINE_INTERVAL_S` seconds with rate and remaining time, and one when it ends.
    """

    def __init__(self, what: str, total: int, unit: str, stream: TextIO | None = None) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._stream = stream if stream is not None else sys.stderr
        self._done = 0
        self._note = ""
        self._bar: tqdm[NoReturn] | None = None

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        self._recent = deque([(self._start, 0)], maxlen=RECENT_LINES)
        try:
            self._begin()
        except BaseException as error:  # an interrupt while the start is printed: print the end, too
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def _begin(self) -> None:
        if self._stream.isatty():
            self._bar = tqdm(
                desc=self._what,
                total=self._total,
                unit=self._unit if self._unit == BYTES else f" {self._unit}",
                unit_scale=True,
                file=self._stream,
                dynamic_ncols=True,
                bar_format=BAR,
            )
        else:
            self._line(f"{self._what}: {quantity(self._total, self._unit)}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
            return
        seconds = time.monotonic() - self._start
        done = quantity(self._done, self._unit)
        if kind is None:
            self._line(f"{self._what}: done, {done} in {duration(seconds)}{self._suffix()}")
        else:
            self._line(f"{self._what}: stopped after {done}")

    def advance(self, count: int = 1) -> None:
        """Adds `count` units of finished work."""
        self._done += count
        estimated = self._done >= BEFORE_ESTIMATE * self._total
        if self._bar is not None:
            if estimated:
                self._bar.bar_format = BAR_WITH_ESTIMATE
            self._bar.update(count)
            return
        now = time.monotonic()
        if now - self._recent[-1][0] < LINE_INTERVAL_S:
            return
        then, before = self._recent[0]
        self._recent.append((now, self._done))
        line = f"{self._what}: {of(self._done, self._total, self._unit)}"
        rate = (self._done - before) / (now - then)
        if estimated and rate > 0:
            remaining = (self._total - self._done) / rate
            line += f", {quantity(rate, self._unit)}/s, {duration(remaining)} left"
        self._line(line + self._suffix())

    def note(self, text: str) -> None:
        """Shows `text` next to the count, such as the name of the current tensor."""
        self._note = text
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)

    def _suffix(self) -> str:
        return f" ({self._note})" if self._note else ""

    def _line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def quantity(count: float, unit: str) -> str:
    """`count` with its unit, as a reader would write it: 1.27 GB, 512 chunks."""
    if unit == BYTES:
        return size(count)
    return f"{count:,.0f} {unit}" if count >= 10 else f"{count:.3g} {unit}"


def of(done: int, total: int, unit: str) -> str:
    """Progress as text: 1 MB of 4 MB, 12 of 118 chunks."""
    start = size(done) if unit == BYTES else f"{done:,}"
    return f"{start} of {quantity(total, unit)}"


def size(n_bytes: float) -> str:
    """A byte count in decimal units: 8.42 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:,.3g} TB" if n_bytes < 1000 else f"{n_bytes:,.0f} TB"


def duration(seconds: float) -> str:
    """Seconds as a reader would write them: 4.2 s, 3 min 20 s, 2 h 5 min."""
    if seconds == float("inf"):
        return "unknown time"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
