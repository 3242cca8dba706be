"""A simulated GPU and MTP head with a simulated clock, driven by the real speculator."""

import random
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from qwen_serve.server.engine.batch import Batch, Chunk, Placement
from qwen_serve.server.engine.request import Request, RequestStatus
from qwen_serve.server.engine.speculation.base import DraftRequest, Guesses
from qwen_serve.server.engine.speculation.hidden import HiddenDrafter
from qwen_serve.server.engine.speculation.ngram import NgramDrafter
from qwen_serve.server.engine.speculation.policy import Policy
from qwen_serve.server.engine.speculation.speculator import Speculator
from qwen_serve.server.engine.speculation.times import StepTimes
from qwen_serve.server.engine.states import DeferredReads
from qwen_serve.server.engine.verification import SampleResult
from tests.server.engine.speculation.helpers import sequence

Table = Callable[[int, float], float]
"""Seconds of a pass of so many sequences with so many tokens each."""

COPY = 0.65e-3
"""Seconds to copy a state there, as on the H200."""

BUILD = 2.8e-3
"""Seconds that a pass takes longer there where its graph is not there."""

SLOTS = 16
KEEP = 0.06e-3
"""Seconds that a step takes longer there while hidden rows are kept."""

PREFILL = 8e-3
"""Seconds that it takes there to read a short prompt."""

READ = 2e-3
"""Seconds that the head takes longer for its first draft after one."""

ANYONE = 100_000
"""Tokens that there are."""


def h200(n: int, length: float) -> float:
    """Approximate step times of the synthetic 4B at Q4_K_M on an H200, with captured graphs."""
    if n == 1:
        return 1e-3 * float(np.interp(length, (1, 2, 9, 16, 64, 128), (3.6, 3.84, 4.6, 9, 17, 36)))
    plain = float(np.interp(n, (1, 2, 4, 8, 16, 32, 64), (3.6, 4.0, 5.3, 7.5, 9.1, 13.4, 21.3)))
    return 1e-3 * plain * (1 + (23.5 / 7.5 - 1) * (length - 1) / (27 / 8 - 1))


def faster(n: int, length: float) -> float:
    """The same with faster kernels for single rows, so that drafts gain less."""
    if n == 1:
        return 1e-3 * float(np.interp(length, (1, 2, 3, 9, 16, 64, 128), (2.4, 2.75, 3.1, 3.9, 8, 16, 35)))
    return h200(n, length)


def line(n: int, length: float) -> float:
    """Another GPU: 3.4 ms for the weights and 0.2 ms for each row."""
    return 1e-3 * (3.4 + 0.2 * n * length)


class Card:
    """The part of a context that the speculator uses. It keeps the graph of its last pass."""

    def __init__(
        self, table: Table, *, build: float = 0.0, capture: float = 0.0, ragged: bool = False
    ) -> None:
        self.table, self.build, self.ragged = table, build, ragged
        self.held_up = 1.0
        """How many times as long a pass takes because something else has the card, too."""
        self.capture, self._captured = capture, True
        self.graphs_reused = self.graphs_built = 0
        self.now = 0.0
        self._shape: tuple[int, float] = (0, 0)
        self.moved = False
        """A sequence has gone to another cell, for which there is no graph."""
        self.keeps_hidden = True
        self.ring = None

    def clock(self) -> float:
        return self.now

    def keep_hidden(self, keep: bool = True) -> None:
        self.keeps_hidden = keep
        self._shape = (0, 0)  # another graph

    def hidden(self, n: int) -> np.ndarray:
        assert self.keeps_hidden
        return np.zeros((n, 1), np.float32)

    def keeps_rows(self, place: int, n_tokens: int, n_rows: int) -> bool:
        return n_tokens <= place

    def wait(self) -> None:
        pass

    def decode(self, batch: Batch) -> float:
        """Seconds of a step, whose passes each take as many tokens as all sequences have left; if they are
        ragged, it is one."""
        lengths, spent, done = sorted({chunk.n_tokens for chunk in batch.chunks}), 0.0, 0.0
        if self.ragged:
            lengths, self.moved = [lengths[-1]], self.moved and len(batch.chunks) == 1
        for length in lengths:
            n = sum(chunk.n_tokens >= length for chunk in batch.chunks)
            shape = n, length - done
            if self.ragged:
                shape = len(batch.chunks), batch.n_tokens / len(batch.chunks)
            spent += self.table(*shape)
            if shape == self._shape and not self.moved:
                self.graphs_reused += 1
                spent += 0.0 if self._captured else self.capture
                self._captured = True
            else:
                spent += self.build
                self.graphs_built += 1
                self._captured = False
            self._shape, self.moved, done = shape, False, length
        spent *= self.held_up
        self.now += spent
        return spent


class States:
    """Rollbacks: to snapshots, to a copy, or to another cell."""

    def __init__(self, card: Card, snapshots: int, copied: int) -> None:
        self.card, self.snapshots, self.copied = card, snapshots, copied
        self.deferred = DeferredReads(cast("Any", card))
        self.held: dict[int, int] = {}
        self.copies = 0
        self.freed: list[int] = []
        self._way = ""

    def rewinds(self, slot: int, *, alone: bool = True) -> int:
        return self.snapshots if alone else 0

    def keeps_graph(self, slot: int) -> int:
        return max(self.snapshots, self.copied if self.card.build >= COPY else 0)

    def longest_draft(self, chunk: Chunk) -> int:
        return chunk.sequence.limit

    def checkpoint(self, batch: Batch) -> None:
        alone, longest = len(batch.chunks) == 1, max(len(chunk.draft) for chunk in batch.chunks)
        self._way = "snapshot" if alone and longest <= self.rewinds(0) else "copy"
        if self._way == "copy" and not (alone and longest <= self.keeps_graph(0)):
            self._way = "cell"
            for chunk in batch.chunks:
                if chunk.draft and self.held.get(slot := chunk.sequence.slot or 0) != chunk.start:
                    self.held[slot] = chunk.start
                    self.card.moved = True
        elif self._way == "copy":
            self._copy()

    def rollback(self, chunk: Chunk, accepted: int) -> int:
        if self._way == "snapshot":
            return chunk.start + chunk.count + accepted
        if self._way == "copy":
            self._copy()
        else:
            self.card.moved = True
        return chunk.start

    def free(self, slot: int) -> None:
        self.freed.append(slot)

    def _copy(self) -> None:
        self.copies += 1
        self.card.now += COPY


class Head(HiddenDrafter):
    """A head whose drafts are right with probability `right`. It reads no rows."""

    name, most = "mtp", 1

    def __init__(self, card: Card, seconds: float, depth: int) -> None:
        super().__init__(cast("Any", None), 512, SLOTS)
        self.right, self.seconds, self.depth = 1.0, seconds, depth
        self.kinds = {"mtp": 0.7}
        self.rounds = 0
        self.error: Exception | None = None
        self.reads = 0.0
        """Seconds that the next draft takes longer, to read a prompt."""
        self._card = card

    def can_draft(self, request: DraftRequest) -> bool:
        return True

    def begin(self, requests: Sequence[DraftRequest]) -> Guesses:
        if self.error is not None:
            raise self.error
        rounds = max(request.limit for request in requests)
        self.rounds += rounds
        self._card.now += rounds * self.seconds + self.reads
        self.reads = 0.0
        return Guesses(lambda: [[1] * request.limit for request in requests])

    def cost(self, n: int, depth: int) -> float:
        return depth * self.seconds

    def measure(self) -> None:
        pass


class World:
    """Steps of `n` sequences that decode without end. Random numbers decide whether drafts are right."""

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
        held_up: float = 1.0,
        ragged: bool = False,
        slots: int = SLOTS,
        seed: int = 0,
    ) -> None:
        """The start is `held_up`: its passes take so many times as long as later ones."""
        self.card = Card(table, build=build, capture=capture, ragged=ragged)
        self.states = States(self.card, snapshots, deepest if copies else 0)
        self.head, self.rng = Head(self.card, draft, deepest), random.Random(seed)
        self.policy = Policy(StepTimes(ragged=ragged))
        self.ngram = NgramDrafter(63, slots)
        self.speculator = Speculator(
            cast("Any", self.card),
            cast("Any", self.states),
            [*([self.ngram] if ngram else []), self.head],
            self.policy,
            slots=slots,
            most_rows=9 * slots,
            clock=self.card.clock,
        )
        self.card.held_up = held_up
        self.speculator.measure(self.rehearse, 4.0)
        self.card.held_up = 1.0
        self.sequences = [self.newcomer(slot) for slot in range(n)]
        self.card.now, self.tokens = 0.0, 0
        self.rights: dict[int, float] = {}
        """How often drafts are right, by slot; others' are as often as the head's."""
        self.lengths: list[int] = []
        """Tokens drafted, by step."""

    def newcomer(self, slot: int) -> Request:
        """A sequence with its first token."""
        one = sequence([self.rng.randrange(ANYONE) for _ in range(20)], 10**6)
        one.prompt_length -= 1
        one.slot, one.computed = slot, len(one.tokens) - 1
        one.status = RequestStatus.DECODE
        return one

    def admit(self, slot: int) -> None:
        """Replace a request by a new one, whose prompt is read."""
        for other in [other for other in self.sequences if other.slot == slot]:
            self.speculator.forget(other)
        self.sequences = [other for other in self.sequences if other.slot != slot]
        one = self.newcomer(slot)
        one.prompt_length += 1
        one.computed, one.status = 0, RequestStatus.PREFILL
        batch = Batch(draft_room=2000)
        batch.add(one, one.pending)
        batch.placements = [Placement(list(range(one.pending)))]
        self.speculator.propose(batch)
        self.card.now += PREFILL
        [one.computed] = self.speculator.verify(batch, [SampleResult([1])], PREFILL)
        one.tokens.append(1)
        one.status, self.card.moved = RequestStatus.DECODE, True  # there is no graph for one row
        self.sequences.append(one)

    def propose(self) -> Batch:
        """The next batch, with its drafts."""
        batch = Batch(draft_room=2000)
        for one in self.sequences:
            batch.add(one, one.pending)
        self.speculator.propose(batch)
        batch.placements = [Placement([]) for _ in batch.chunks]
        return batch

    @property
    def drafted_by(self) -> str:
        """The drafter of the batch's drafts."""
        proposal = self.speculator._proposal  # noqa: SLF001 - a batch does not say who drafted
        return "" if proposal is None else proposal.health.drafter.name

    def step(self) -> int:
        """Run a step. Returns the number of drafted tokens."""
        batch, sampled = self.propose(), []
        for chunk in batch.chunks:
            right, slot = 0, chunk.sequence.slot or 0
            chance = self.rights.get(slot, self.head.right)
            while right < len(chunk.draft) and self.rng.random() < chance:
                right += 1
            sampled.append([*chunk.draft[:right], self.rng.randrange(ANYONE)])
        held = self.speculator.verify(batch, [*map(SampleResult, sampled)], self.card.decode(batch))
        for chunk, new, length in zip(batch.chunks, sampled, held, strict=True):
            chunk.sequence.tokens += new
            chunk.sequence.computed = length
        self.tokens += sum(map(len, sampled))
        self.lengths.append(sum(len(chunk.draft) for chunk in batch.chunks))
        return self.lengths[-1]

    def answer(self, n_tokens: int) -> float:
        """A request comes after another: the gain over no speculation until it has so many tokens."""
        self.sequences = []
        self.admit(0)
        self.head.reads, started, tokens = READ, self.card.now, self.tokens
        while self.tokens < tokens + n_tokens:
            self.step()
            self.card.now += KEEP if self.card.keeps_hidden else 0.0
        spent = (self.card.now - started) / (self.tokens - tokens) * n_tokens
        return (n_tokens * self.card.table(1, 1) + self.card.build + self.card.capture) / spent

    def gain(self, steps: int) -> float:
        """Tokens a second over so many steps, beside those of no speculation."""
        started, tokens = self.card.now, self.tokens
        for _ in range(steps):
            self.step()
        n = len(self.sequences)
        return (self.tokens - tokens) / (self.card.now - started) * self.card.table(n, 1) / n

    def best(self, right: float, depths: range) -> tuple[float, int]:
        """The gain of a lone sequence at the best of fixed depths, and that depth; graphs are there."""
        plain, draft = self.card.table(1, 1), self.head.seconds
        gains = [
            (sum(right**i for i in range(d + 1)) * plain / (self.card.table(1, 1 + d) + d * draft), d)
            for d in depths
        ]
        return max(gains)

    def rehearse(self, n: int, rows: int) -> float:
        batch = Batch(draft_room=2000)
        for slot in range(n):
            one = sequence([0], 10**6)
            one.slot, one.status = slot, RequestStatus.DECODE
            batch.add(one, 1)
            batch.add_draft(batch.chunks[-1], [0] * (rows - 1))
        return self.card.decode(batch)


def on_h200(n: int = 1, **changes: Any) -> World:
    """A world where a graph takes time to build, and there may be snapshots."""
    return World(n, **{"table": h200, "build": BUILD, "snapshots": 8, "deepest": 16, **changes})
