"""A scheduler over a pretend model: what the tests of its policies share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from server.engine.prefix_cache import PrefixCache, Saved, Spans
from server.engine.sampling import Sampler
from server.engine.scheduler import Scheduler, Step
from server.engine.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

NO_SAMPLER = cast("Sampler", None)


def sequence(prompt: int, max_tokens: int = 10) -> Sequence:
    return Sequence(list(range(prompt)), max_tokens, NO_SAMPLER)


class NoMemory:
    """There is nothing to copy where nothing is computed."""

    def copy(self, source: int, target: int) -> None:
        pass

    def remove(self, sequence: int) -> None:
        pass

    def save(self, sequence: int) -> Saved:
        raise AssertionError

    def restore(self, sequence: int, saved: Saved) -> None:
        raise AssertionError


def scheduler(
    slots: int = 4,
    cells: int = 1000,
    batch: int = 64,
    budget: int = 16,
    release: Callable[[int], None] = lambda slot: None,
    **options: Any,
) -> Scheduler:
    """A scheduler without a prefix cache."""
    cache = PrefixCache(NoMemory(), Spans(slots, cells), ids=(), total_cells=cells, cells=0)
    return Scheduler(
        slots=slots, batch_size=batch, prefill_budget=budget, cache=cache, release=release, **options
    )


def slots_of(step: Step) -> npt.NDArray[np.int32]:
    """The slot of each token."""
    slots = [chunk.sequence.slot or 0 for chunk in step.chunks for _ in range(chunk.n_tokens)]
    return np.array(slots, np.int32)


def advance(s: Scheduler) -> Step:
    """One step of a model that answers every sampled row with token 7, up to the sequence's limit."""
    step = s.schedule()
    s.postprocess(step, slots_of(step))
    for chunk in step.chunks:
        if chunk.samples:
            chunk.sequence.tokens.append(7)
            if len(chunk.sequence.tokens) == chunk.sequence.limit:
                s.remove(chunk.sequence)
    return step


def counts(step: Step) -> list[int]:
    return [chunk.count for chunk in step.chunks]
