"""What a start spends its time on."""

from __future__ import annotations

from time import perf_counter


class Stages:
    """How long each part of a start took, in the order that they were done."""

    def __init__(self) -> None:
        self._last = perf_counter()
        self.seconds: dict[str, float] = {}

    def done(self, name: str) -> None:
        """The time since the one before was spent on this one."""
        now = perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items())
