"""A scheduler and a prefix cache over a memory that only remembers which tokens each sequence id holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from server.engine.prefix_cache import PrefixCache, Spans
from server.engine.scheduler import Scheduler, Step
from server.engine.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Sequence as ListLike

    from server.engine.sampling import Sampler

ANSWER = 7
"""The first token that the pretend model answers; the others count on."""


@dataclass(frozen=True)
class Copy:
    """A sequence on the host; a token takes a byte."""

    tokens: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return len(self.tokens)


class FakeMemory:
    """What `llama.cpp` would hold. Fails where a sequence would be written over."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[int, ...]] = {}
        self.copies: list[tuple[int, int]] = []

    def copy(self, source: int, target: int) -> None:
        assert target not in self.held
        self.held[target] = self.held[source]
        self.copies.append((source, target))

    def remove(self, sequence: int) -> None:
        self.held.pop(sequence, None)

    def save(self, sequence: int) -> Copy:
        return Copy(self.held[sequence])

    def restore(self, sequence: int, saved: Any) -> None:
        assert sequence not in self.held
        self.held[sequence] = saved.tokens


class World:
    """Advances step by step, and checks at each that every sequence computes on from what it really holds."""

    def __init__(
        self,
        *,
        slots: int = 4,
        ids: int = 8,
        total_cells: int = 1000,
        batch: int = 64,
        budget: int = 64,
        mixed_steps: bool = True,
        **cache: Any,
    ) -> None:
        self.memory = FakeMemory()
        self.spans = Spans(slots, total_cells)
        self.cache = PrefixCache(
            self.memory,
            self.spans,
            ids=range(slots, slots + ids),
            total_cells=total_cells,
            **{"cells": total_cells, **cache},
        )
        self.scheduler = Scheduler(
            slots=slots,
            batch_size=batch,
            prefill_budget=budget,
            cache=self.cache,
            release=self.memory.remove,
            mixed_steps=mixed_steps,
        )
        self.computed = 0
        """Tokens decoded so far, prompts and answers."""

    def add(self, prompt: ListLike[int], answer: int = 1) -> Sequence:
        sequence = Sequence(list(prompt), answer, cast("Sampler", None))
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Step:
        step = self.scheduler.schedule()
        for chunk in step.chunks:
            sequence = chunk.sequence
            assert sequence.slot is not None
            held = self.memory.held.get(sequence.slot, ())
            assert held == tuple(sequence.tokens[: sequence.cached]), "it would go on from something else"
            self.memory.held[sequence.slot] = (*held, *sequence.tokens[len(held) : len(held) + chunk.count])
        self.computed += step.n_tokens
        slots = [chunk.sequence.slot or 0 for chunk in step.chunks for _ in range(chunk.n_tokens)]
        self.scheduler.postprocess(step, np.array(slots, np.int32))
        for chunk in step.chunks:
            if chunk.samples:
                chunk.sequence.tokens.append(ANSWER + chunk.sequence.generated)
                if len(chunk.sequence.tokens) == chunk.sequence.limit:
                    self.scheduler.remove(chunk.sequence)
        self.check()
        return step

    def check(self) -> None:
        """The counts are those of the memory, nothing is lost, and the budgets hold."""
        assert self.spans.used <= self.scheduler.cells
        for sequence, held in self.memory.held.items():
            assert self.spans.length(sequence) == len(held)
        stats = self.cache.stats()
        slots = {sequence.slot for sequence in self.scheduler.running}
        assert stats.resident == len([id_ for id_ in self.memory.held if id_ not in slots])

    def finish(self) -> int:
        """Run until nothing is left; returns the number of steps."""
        steps = 0
        while self.scheduler.running or self.scheduler.waiting:
            assert self.step().chunks, "there is work, but nothing was scheduled"
            steps += 1
        return steps

    def serve(self, prompt: ListLike[int], answer: int = 1) -> Sequence:
        """One request alone, to its end."""
        sequence = self.add(prompt, answer)
        self.finish()
        return sequence
