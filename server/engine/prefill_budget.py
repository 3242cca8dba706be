"""How many prompt tokens a step reads beside running answers, so that it takes about as long as it may."""

from __future__ import annotations

MIN_PREFILL = 16
"""Prompt tokens that a step reads in any case."""


class PrefillBudget:
    """As many prompt tokens as take about `seconds`, at most `most`; or `fixed`, where somebody says.

    What counts is the least time a token so far, by what the start measured and by every full step since. So
    a card that was busy with something else at start lowers it until the first step that is not held up, and
    one that is busy now does not.
    """

    def __init__(self, seconds: float, ubatch: int, most: int, *, fixed: int = 0) -> None:
        self._seconds, self._ubatch, self._most, self._fixed = seconds, ubatch, most, fixed
        self.each = 0.0
        """Seconds of a prompt token, the least so far; 0 where the start measured none."""
        self._reading, self._since = 0, 0.0
        """Prompt tokens of steps that nobody has waited for, and when the first of these was launched."""

    @property
    def tokens(self) -> int:
        """Most prompt tokens in a step while somebody decodes.

        More than a ubatch is rounded to whole ones: a part of one takes as many launches.
        """
        if self._fixed or not self.each:
            return self._fixed or self._most
        tokens = self._seconds / self.each
        if tokens > self._ubatch:
            tokens = self._ubatch * round(tokens / self._ubatch)
        return min(max(int(tokens), MIN_PREFILL), self._most)

    def start(self, each: float) -> None:
        """A token took so many seconds by the start's measurement, or in the server before."""
        self.each = each

    def add(self, tokens: int, launched: float, done: float | None) -> None:
        """A step with so many prompt tokens was launched and done at these times, in seconds.

        `done` is None where nobody waited for it, as for most of a prompt. Its tokens are counted with those
        of the next step that somebody waits for, which may decode: so no token takes longer than is found. A
        ubatch counts, or a full step: with fewer tokens the device is used less well.
        """
        if not self._reading:
            self._since = launched
        self._reading += tokens
        if done is None:
            return
        if self._reading >= min(self._ubatch, self.tokens):
            self.each = min(self.each, (done - self._since) / self._reading)
        self._reading = 0
