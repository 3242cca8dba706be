"""Chooses how many prompt tokens a step reads while answers are running, so that it takes about the allowed
time."""

MIN_PREFILL = 16
"""Minimum prompt tokens of a step."""


class PrefillBudget:
    """As many prompt tokens as take about `seconds`, at most `most`; or `fixed`, if that is set.

    The budget uses the shortest time a token so far, from the measurement at start and every full step since.
    If other work delayed the measurement at start, the first step without delay corrects it. Other work that
    delays steps later does not lower the budget.
    """

    def __init__(self, seconds: float, ubatch: int, most: int, *, fixed: int = 0) -> None:
        self._seconds, self._ubatch, self._most, self._fixed = seconds, ubatch, most, fixed
        self.each = 0.0
        """Minimum seconds of a prompt token so far; 0 if the start measured none."""
        self.reading, self._since = 0, 0.0
        """Prompt tokens of steps that were not waited for, and the time when the first was launched."""

    @property
    def tokens(self) -> int:
        """Maximum prompt tokens between two decode steps.

        If it is more than a ubatch, it is rounded to whole ubatches: a partial one has as many kernel
        launches.
        """
        if self._fixed or not self.each:
            return self._fixed or self._most
        tokens = self._seconds / self.each
        if tokens > self._ubatch:
            tokens = self._ubatch * round(tokens / self._ubatch)
        return min(max(int(tokens), MIN_PREFILL), self._most)

    def start(self, each: float) -> None:
        """Set the first `each`, which was measured at start or by an earlier server."""
        self.each = each

    def add(self, tokens: int, launched: float, done: float | None) -> None:
        """Record a step with `tokens` prompt tokens, and the times in seconds at which it was launched and
        done.

        `done` is None if the engine did not wait for the step, as for most steps of a prompt. Its tokens then
        count with those of the next step that the engine waits for. That may be a decode, so the time is an
        upper bound. Only a ubatch or a full step counts, since fewer tokens use the device less well.
        """
        if not self.reading:
            self._since = launched
        self.reading += tokens
        if done is None:
            return
        if self.reading >= min(self._ubatch, self.tokens):
            self.each = min(self.each, (done - self._since) / self.reading)
        self.reading = 0
