"""A scheduler and a prefix cache with a memory that records only the tokens of each sequence id."""

from collections.abc import Sequence
from typing import Any

from qwen_serve.server.engine.batch import Batch
from qwen_serve.server.engine.prefix_cache import PrefixCache
from qwen_serve.server.engine.request import ANYBODY, Request, SchedulingParams
from qwen_serve.server.engine.scheduler import Scheduler
from qwen_serve.server.engine.scheduling_policy import SchedulingPolicy
from qwen_serve.server.engine.verification import SampleResult
from tests.server.engine.fake_context import FakeContext
from tests.server.engine.scheduling import NO_SAMPLER, fixed, store

ANSWER = 7
"""The first token that the pretend model answers; the others count on."""


class World:
    """Advances step by step, and checks in each step that every sequence continues from the tokens that it
    holds."""

    def __init__(
        self,
        *,
        slots: int = 4,
        ids: int = 8,
        total_cells: int = 1000,
        batch: int = 64,
        budget: int = 64,
        draft_rows: int = 0,
        policy: SchedulingPolicy = "fcfs",
        ends: frozenset[int] = frozenset(),
        **cache: Any,
    ) -> None:
        self.context = FakeContext(total_cells)
        self.states = store(self.context, slots)
        self.cells = self.states.cells
        self.cache = PrefixCache(
            self.states, ids=range(slots, slots + ids), **{"max_cells": total_cells, **cache}
        )
        self.scheduler = Scheduler(
            slots=slots,
            batch_size=batch,
            ubatch_size=batch,
            prefill_budget=fixed(budget),
            states=self.states,
            cache=self.cache,
            draft_rows=draft_rows,
            policy=policy,
            ends=ends,
        )
        self.computed = 0
        """Tokens decoded so far, prompts and answers."""

    def add(
        self,
        prompt: Sequence[int],
        answer: int = 1,
        salt: str = "",
        scheduling: SchedulingParams = ANYBODY,
    ) -> Request:
        sequence = Request(list(prompt), answer, NO_SAMPLER, salt=salt, scheduling=scheduling)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Batch:
        batch = self.scheduler.schedule()
        for chunk in batch.chunks:
            sequence = chunk.sequence
            held = self.context.held.get(chunk.slot, ())
            assert held == tuple(sequence.tokens[: chunk.start]), "it would go on from something else"
            self.context.held[chunk.slot] = (*held, *sequence.tokens[len(held) : len(held) + chunk.count])
        self.computed += batch.n_tokens
        self.scheduler.launched(batch)
        self.scheduler.commit(
            batch,
            [
                SampleResult([ANSWER + chunk.sequence.generated] if chunk.samples else [])
                for chunk in batch.chunks
            ],
            [chunk.start + chunk.count for chunk in batch.chunks],
        )
        self.check()
        return batch

    def check(self) -> None:
        """Check that counts agree with the memory, nothing is lost, and budgets are kept."""
        assert self.cells.used <= self.cells.total
        for sequence, held in self.context.held.items():
            assert self.states.length(sequence) == len(held)
        stats = self.cache.stats()
        slots = {sequence.slot for sequence in self.scheduler.running}
        assert stats.resident == len([id_ for id_ in self.context.held if id_ not in slots])

    def finish(self) -> int:
        """Run until no request is left. Returns the number of steps."""
        steps = 0
        while self.scheduler.running or self.scheduler.waiting:
            assert self.step().chunks, "there is work, but nothing was scheduled"
            steps += 1
        return steps

    def serve(self, prompt: Sequence[int], answer: int = 1, salt: str = "") -> Request:
        """One request alone, to its end."""
        sequence = self.add(prompt, answer, salt)
        self.finish()
        return sequence
