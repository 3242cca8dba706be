"""A progress bar on a terminal, a line now and then in a log."""

import sys
from time import monotonic
from types import TracebackType
from typing import Self

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 15.0


class Progress:
    """``with Progress("long, official", total=50, unit="run") as bar: bar.advance()``; all on stderr."""

    def __init__(self, description: str, *, total: int, unit: str = "request") -> None:
        self.description = description
        self.total = total
        self.unit = unit
        self.done = 0
        self._bar = (
            tqdm(total=total, desc=description, unit=unit, leave=False, dynamic_ncols=True)
            if sys.stderr.isatty()
            else None
        )
        self._started = self._printed = monotonic()

    def advance(self, count: int = 1, note: str = "") -> None:
        """``count`` more are done; ``note`` is shown behind the bar."""
        self.done += count
        if self._bar is not None:
            if note:
                self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(count)
        elif monotonic() - self._printed > SECONDS_BETWEEN_LINES and self.done < self.total:
            self._line(note)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        else:
            self._line("done" if kind is None else "stopped")

    def _line(self, note: str) -> None:
        self._printed = monotonic()
        spent = self._printed - self._started
        rate = self.done / spent if spent else 0.0
        left = f", {(self.total - self.done) / rate:.0f} s left" if rate and self.done < self.total else ""
        done = f"{self.done}/{self.total} {self.unit}s in {spent:.0f} s"
        print(f"{self.description}: {done}{left} {note}".rstrip(), file=sys.stderr, flush=True)
