"""Steps of arbitrary tokens, which are timed before the first request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .batch import Batch
from .request import Request, RequestStatus
from .sampling import Sampler, SamplingParams
from .verification import sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from qwen_serve.llamacpp import Context

    from .runner import Launched, Runner
    from .vocab import Vocab


class Rehearsal:
    """Steps of new sequences in the first slots, which are empty again afterwards."""

    def __init__(self, context: Context, runner: Runner, vocab: Vocab, clock: Callable[[], float]) -> None:
        self._context, self._runner, self._vocab, self._clock = context, runner, vocab, clock

    def verification(self, n: int, rows: int) -> float:
        """Seconds to verify `rows` - 1 draft tokens for each of `n` sequences."""
        batch = self._batch(n, rows)
        started = self._clock()
        step = self._runner.launch(batch)
        self._runner.sample(step)
        self._collect(step)
        seconds = self._clock() - started
        self._leave(n)
        return seconds

    def _batch(self, n: int, rows: int) -> Batch:
        sampler, batch = Sampler(SamplingParams(), self._vocab, []), Batch()
        for slot in range(n):
            sequence = Request([0], rows, sampler)
            sequence.slot, sequence.status = slot, RequestStatus.DECODE
            batch.add(sequence, 1)
            if rows > 1:
                batch.add_draft(batch.chunks[-1], [0] * (rows - 1))
        return batch

    def _collect(self, step: Launched) -> None:
        sample(step.batch, self._runner.collect(step), self._vocab.eog_ids)

    def _leave(self, n: int) -> None:
        for slot in range(n):
            self._context.remove(slot)
