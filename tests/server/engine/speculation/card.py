"""A made-up card and head with a clock of their own, and the real speculator on them: nothing is timed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from server.engine.scheduler import Step
from server.engine.sequence import Sequence
from server.engine.speculation.base import Floors, Order
from server.engine.speculation.ngram import NgramDrafter
from server.engine.speculation.plan import Planner
from server.engine.speculation.rollback import Rollback
from server.engine.speculation.speculator import Speculator
from server.engine.speculation.times import DraftTimes, StepTimes
from tests.server.engine.speculation.helpers import sequence

Table = Callable[[int, int], float]
"""Seconds of a pass of so many sequences with so many tokens each."""

COPY = 0.65e-3
"""Seconds to copy a state there, as on the H200."""

SLOTS = 16
ANYONE = 100_000
"""Tokens that there are."""


def h200(n: int, length: int) -> float:
    """About what the synthetic 4B at Q4_K_M took there, graphs being there already (bench/README.md)."""
    if n == 1:
        return 1e-3 * float(np.interp(length, (1, 2, 9, 16, 64, 128), (3.6, 3.84, 4.6, 9, 17, 36)))
    plain = float(np.interp(n, (1, 2, 4, 8, 16, 32, 64), (3.6, 4.0, 5.3, 7.5, 9.1, 13.4, 21.3)))
    return 1e-3 * plain * (1 + (23.5 / 7.5 - 1) * (length - 1) / (27 / 8 - 1))


def line(n: int, length: int) -> float:
    """Another one: 3.4 ms for the weights and 0.2 for each row."""
    return 1e-3 * (3.4 + 0.2 * n * length)


class Card:
    """What the speculator sees of a context. It keeps the graph of its last pass."""

    n_ubatch = 512

    def __init__(
        self, table: Table, *, build: float = 0.0, capture: float = 0.0, n_snapshots: int = 0
    ) -> None:
        self.table, self.build, self.n_snapshots = table, build, n_snapshots
        self.capture, self._captured = capture, True
        self.graphs_reused = self.graphs_built = 0
        self.now = 0.0
        self._shape = (0, 0)
        self._moved = False
        self.keeps_hidden = True

    def clock(self) -> float:
        return self.now

    def keep_hidden(self, keep: bool = True) -> None:
        self.keeps_hidden = keep
        self._shape = (0, 0)  # another graph

    def hidden(self, n: int) -> np.ndarray:
        assert self.keeps_hidden
        return np.zeros((n, 1), np.float32)

    def copy(self, *_: int) -> None:
        self._moved = True  # who shares a state writes to another cell, for which there is no graph

    def stash(self, _: int) -> None:
        self.now += COPY

    def unstash(self, _: int) -> None:
        self.now += COPY

    def remove(self, *_: int) -> bool:
        return True

    def decode(self, step: Step) -> float:
        """Seconds of a step: a pass for as many tokens as all have left, and so on."""
        lengths, spent, done = sorted({chunk.n_tokens for chunk in step.chunks}), 0.0, 0
        for length in lengths:
            n = sum(chunk.n_tokens >= length for chunk in step.chunks)
            shape = n, length - done
            spent += self.table(*shape)
            if shape == self._shape and not self._moved:
                self.graphs_reused += 1
                spent += 0.0 if self._captured else self.capture
                self._captured = True
            else:
                spent += self.build
                self.graphs_built += 1
                self._captured = False
            self._shape, self._moved, done = shape, False, length
        self.now += spent
        return spent


class Head:
    """Drafts that are right with a chance of `right`, each as sure of itself as the others."""

    name = "mtp"
    read_a_prompt = False

    def __init__(self, card: Card, times: DraftTimes, seconds: float) -> None:
        self.right, self.sure = 1.0, 1.0
        self.rounds = 0
        self._card, self._times, self._seconds = card, times, seconds

    def can_draft(self, one: Sequence) -> bool:
        return True

    def wants(self, one: Sequence, end: int) -> bool:
        return False

    def measure(self, most: int) -> None:
        n = 1
        while n <= most:
            self._times.add(n, self._seconds)
            n *= 2

    def propose(self, orders: list[Order], floors: Floors | None = None) -> None:
        rounds = max(order.limit for order in orders)
        for order in orders:
            order.tokens, order.sure = [1] * order.limit, [self.sure] * order.limit
            order.drafter = self.name
        self.rounds += rounds
        self._card.now += rounds * self._seconds

    def ahead(self, slot: int, depth: int) -> None:
        pass

    def forget(self, one: Sequence) -> None:
        pass

    def remove(self, sequence_id: int) -> None:
        pass


class World:
    """Steps of `n` sequences that decode for ever; whether a draft is right is up to a die."""

    def __init__(
        self,
        n: int = 1,
        *,
        table: Table = line,
        build: float = 0.0,
        capture: float = 0.0,
        snapshots: int = 0,
        draft: float = 0.6e-3,
        deepest: int = 8,
        ngram: bool = False,
        copies: bool = True,
        seed: int = 0,
    ) -> None:
        self.card = Card(table, build=build, capture=capture, n_snapshots=snapshots)
        times, draft_times = StepTimes(), DraftTimes()
        self.head, self.rng = Head(self.card, draft_times, draft), random.Random(seed)
        context = cast("Any", self.card)
        self.speculator = Speculator(
            context,
            Rollback(context, times, SLOTS, alone=2, copied=deepest if copies else 0, clock=self.card.clock),
            Planner(times, draft_times),
            times,
            ngram=NgramDrafter() if ngram else None,
            mtp=cast("Any", self.head),
            slots=SLOTS,
            longest=64,
            deepest=deepest,
            most_rows=144,
            clock=self.card.clock,
        )
        self.speculator.measure(self._rehearse, 4.0)
        self.sequences = [self.newcomer(slot) for slot in range(n)]
        self.card.now, self.tokens = 0.0, 0
        self.lengths: list[int] = []
        """Tokens drafted, by step."""

    def newcomer(self, slot: int) -> Sequence:
        one = sequence([self.rng.randrange(ANYONE) for _ in range(20)], 10**6)
        one.slot, one.cached = slot, len(one.tokens) - 1
        return one

    def step(self) -> int:
        """Tokens drafted."""
        drafts = self.speculator.propose(self.sequences, 2000)
        step, sampled = Step(), []
        for one, draft in zip(self.sequences, drafts, strict=True):
            step.add(one, one.pending, list(draft))
            right = 0
            while right < len(draft) and self.rng.random() < self.head.right:
                right += 1
            sampled.append([*draft[:right], self.rng.randrange(ANYONE)])
        self._take(step, sampled)
        self.tokens += sum(map(len, sampled))
        self.lengths.append(sum(map(len, drafts)))
        return self.lengths[-1]

    def gain(self, steps: int) -> float:
        """Tokens a second over so many steps, beside those of no speculation."""
        started, tokens = self.card.now, self.tokens
        for _ in range(steps):
            self.step()
        n = len(self.sequences)
        return (self.tokens - tokens) / (self.card.now - started) * self.card.table(n, 1) / n

    def best(self, right: float, depths: range) -> tuple[float, int]:
        """The gain of a lone sequence at the best of fixed depths, and that depth; graphs are there."""
        plain, draft = self.card.table(1, 1), self.head._seconds
        gains = [
            (sum(right**i for i in range(d + 1)) * plain / (self.card.table(1, 1 + d) + d * draft), d)
            for d in depths
        ]
        return max(gains)

    def _take(self, step: Step, sampled: list[list[int]]) -> None:
        self.speculator.prepare(step)
        held = [chunk.sequence.cached for chunk in step.chunks]
        drafted = [len(chunk.draft) for chunk in step.chunks]
        spent = self.card.decode(step)
        places = [[0] * chunk.n_tokens for chunk in step.chunks]
        self.speculator.conclude(step, places, sampled, spent)
        for chunk, new, before, n in zip(step.chunks, sampled, held, drafted, strict=True):
            one = chunk.sequence
            one.tokens += new
            if len(new) > n or len(chunk.draft) < n:  # all of it stays, or what was right
                one.cached = before + chunk.count + len(new) - 1

    def _rehearse(self, n: int, length: int) -> None:
        step = Step()
        for slot in range(n):
            one = sequence([0], 10**6)
            one.slot = slot
            step.add(one, 1, [0] * (length - 1))
        self._take(step, [[1] for _ in range(n)])
        for slot in range(n):
            self.speculator.empty(slot)
