"""Which tokens go into the next step: continuous batching with chunked prefill and lossless preemption.

The policy, in a paragraph. Requests run first come, first served: up to `slots` at once, the rest wait in
the order they came. Every step takes one token of every sequence that decodes, so nothing ever holds a
running stream up longer than one step; what room is left goes to prompts, the oldest first, in chunks of at
most `prefill_budget` tokens together (or a whole batch, when nobody decodes and nobody can be held up). The
cache is a pool of cells, one a token, that all sequences share. A sequence is admitted when its tokens fit
beside those running and a little room remains for everyone to grow; it does not reserve cells for an answer
it may never give. When cells run out all the same, the youngest running sequence is preempted: its cells
are freed, it waits at the head of the queue, and reads its tokens again, the generated ones included, when
there is room. Its sampler stays as it was, so nothing is lost but time. The oldest sequence is never
preempted, and one sequence always fits into the cache alone, so every request gets its turn and ends.

The budget matters twice on a hybrid model: its recurrent layers take all sequences of a pass with the same
number of tokens, so a step of decodes and a chunk reads the weights once for each distinct length.

No llama.cpp here: the scheduler counts cells, the runner fills them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from .sequence import Sequence

GROWTH = 64
"""Cells that admission leaves free for each running sequence: fewer would invite preemption at once."""


@dataclass(slots=True)
class Chunk:
    """The next `count` pending tokens of a sequence, then a `draft` of what may follow them.

    With `samples`, they are all that is pending; then, and only then, there may be a draft.
    """

    sequence: Sequence
    count: int
    samples: bool
    draft: list[int] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        """What it adds to the batch."""
        return self.count + len(self.draft)

    @property
    def n_rows(self) -> int:
        """Rows of logits it needs: one after the last pending token, one after each token of the draft."""
        return 1 + len(self.draft) if self.samples else 0


@dataclass(slots=True)
class Step:
    """What one call of llama_decode computes; decodes come first."""

    chunks: list[Chunk] = field(default_factory=list)
    n_tokens: int = 0

    def add(self, sequence: Sequence, count: int, draft: list[int] | None = None) -> None:
        """Put the next `count` pending tokens of `sequence` into the step, and `draft` behind the last."""
        chunk = Chunk(sequence, count, count == sequence.pending, draft or [])
        self.chunks.append(chunk)
        self.n_tokens += chunk.n_tokens


class Scheduler:
    """Queues, slots and cells. `release` is called with a slot whose cells are no longer needed.

    `cells` is the size of the cache in tokens and must hold the longest sequence there can be.
    """

    def __init__(
        self,
        *,
        slots: int,
        cells: int,
        batch_size: int,
        prefill_budget: int,
        release: Callable[[int], None],
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In order of arrival."""
        self.cells = cells
        self.cells_used = 0
        self.preemptions = 0
        self._free_slots = list(range(slots - 1, -1, -1))  # taken from the end: low ids first
        self._batch_size = batch_size
        self._prefill_budget = prefill_budget
        self._release = release

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence behind all others."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is; its slot and cells are free for the next step."""
        if sequence.slot is not None:
            self.running.remove(sequence)
            self._vacate(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def preempt_youngest(self) -> None:
        """Put the sequence that came last back at the head of the queue; it will read its tokens again."""
        sequence = self.running.pop()
        self._vacate(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def schedule(self) -> Step:
        """Choose the tokens of the next step. Empty only when there is nothing to do."""
        step = Step()
        self._schedule_decodes(step)
        decoding = len(step.chunks)
        room = self._batch_size - decoding
        budget = min(room, self._prefill_budget) if decoding else room
        budget -= self._schedule_prefills(step, budget)
        while budget > 0 and (sequence := self._admit()):
            budget -= self._schedule_prefill(step, sequence, budget)
        return step

    def postprocess(self, step: Step) -> None:
        """Account for a step that llama.cpp has computed."""
        for chunk in step.chunks:
            chunk.sequence.cached += chunk.count
        self.cells_used += step.n_tokens

    # --- the parts of schedule -----------------------------------------------------------------------------

    def _schedule_decodes(self, step: Step) -> None:
        """One token of every sequence that decodes, preempting the youngest until there are cells for it."""
        while True:
            decodes = [sequence for sequence in self.running if sequence.pending == 1]
            if len(decodes) <= self.cells - self.cells_used:
                break
            self.preempt_youngest()
        for sequence in decodes:
            step.add(sequence, 1)

    def _schedule_prefills(self, step: Step, budget: int) -> int:
        """Chunks of prompts that are already running, the oldest first; returns the tokens taken."""
        taken = 0
        for sequence in self.running:
            if sequence.pending > 1 and taken < budget:
                taken += self._schedule_prefill(step, sequence, budget - taken)
        while not step.chunks and self.running:  # all of them prefill, and there is no cell left
            self.preempt_youngest()
            taken = self._schedule_prefill(step, self.running[0], budget)
        return taken

    def _schedule_prefill(self, step: Step, sequence: Sequence, budget: int) -> int:
        count = min(sequence.pending, budget, self.cells - self.cells_used - step.n_tokens)
        if count > 0:
            step.add(sequence, count)
        return max(count, 0)

    def _admit(self) -> Sequence | None:
        """Start the sequence that has waited longest, if there is a slot and room; nobody overtakes it."""
        if not self.waiting or not self._free_slots:
            return None
        sequence = self.waiting[0]
        promised = sum(other.pending + _growth(other) for other in self.running)
        needed = len(sequence.tokens) + _growth(sequence)
        if self.running and self.cells_used + promised + needed > self.cells:
            return None
        self.waiting.popleft()
        sequence.slot = self._free_slots.pop()
        self.running.append(sequence)
        return sequence

    def _vacate(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self._release(sequence.slot)
        self._free_slots.append(sequence.slot)
        self.cells_used -= sequence.cached
        sequence.slot = None
        sequence.cached = 0


def _growth(sequence: Sequence) -> int:
    return min(GROWTH, sequence.limit - len(sequence.tokens))
