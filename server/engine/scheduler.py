"""Which tokens go into the next step: continuous batching with chunked prefill and lossless preemption.

The policy, in a paragraph. Requests are admitted first come, first served: up to `slots` at once, the rest
wait in the order they came. Every step takes what is pending of every sequence that decodes, so nothing ever
holds a running stream up longer than one step of at most `prefill_budget` prompt tokens. When nobody decodes,
nobody is held up, and a step takes a whole batch; where a pace is set, it bounds these steps as well, since
whoever comes meanwhile waits for them. Half of those tokens go to the prompt that came first, so that a flood
of short ones never starves it; the other half to whichever prompts are closest to their first token, so that
a flood of long ones never starves a short one. A prompt that shares a beginning with one before it,
which is just being computed, keeps its place and waits for that beginning instead of computing it too; if
the other goes away, it computes it itself. The cache is a pool of cells, one a token, that all sequences
share. A sequence is admitted when its tokens fit beside those running and a little room remains for everyone
to grow; it does not reserve cells for an answer it may never give. When cells run short, checkpoints of the
prefix cache go first. When that is not enough, the youngest running sequence is preempted: its cells are
freed, it waits at the head of the queue, and reads its tokens again, the generated ones included, when there
is room. Its sampler stays as it was, so nothing is lost but time. The oldest sequence is never preempted,
and one sequence always fits into the cache alone, so every request gets its turn and ends.

On a hybrid model a step reads the weights once for each distinct number of tokens that its sequences bring:
the recurrent layers take all sequences of a pass with the same number. So a step of decodes and a chunk of a
prompt costs two passes, mixed or not. Mixed, they are one call; apart (`mixed_steps` off, and always where
drafts are verified), the decodes of many steps have one shape, and their tokens leave before the chunk runs.

No llama.cpp here: the scheduler counts cells, the runner fills them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as ListLike

    import numpy as np
    import numpy.typing as npt

    from .prefix_cache import PrefixCache
    from .sequence import Sequence

Sampled = list[int] | Exception | None
"""What a step gave one chunk: new tokens, what its sampler raised, or nothing, where the prompt goes on."""

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
    is_prompt: bool = field(default=False, compare=False)
    """The pending tokens are read for the first time, or again after a preemption."""

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
    n_rows: int = 0

    def add(self, sequence: Sequence, count: int, draft: list[int] | None = None) -> None:
        """Put the next `count` pending tokens of `sequence` into the step, and `draft` behind the last."""
        samples = count == sequence.pending
        chunk = Chunk(sequence, count, samples, draft or [], is_prompt=not sequence.decoding)
        self.chunks.append(chunk)
        self.n_tokens += chunk.n_tokens
        self.n_rows += chunk.n_rows

    @property
    def is_decode(self) -> bool:
        """Whether it takes one generated token of each of its sequences, and nothing else."""
        return self.n_tokens == self.n_rows == len(self.chunks) and not any(c.is_prompt for c in self.chunks)


def no_drafts(sequences: ListLike[Sequence], rows: int) -> list[list[int]]:
    """Proposes nothing."""
    return [[] for _ in sequences]


def lowest(sequence: Sequence, free: ListLike[int]) -> int:
    """The first free slot."""
    return free[0]


class Scheduler:
    """Queues, slots and cells. `release` is called with a slot whose cells are no longer needed.

    The cache's cells must hold the longest sequence there can be. `propose` is asked for a draft for each
    sequence that decodes in a step, and told how many tokens the step has room for; `place` chooses among
    the free slots, in ascending order, for a sequence that is admitted.
    """

    def __init__(
        self,
        *,
        slots: int,
        batch_size: int,
        prefill_budget: int,
        cache: PrefixCache,
        release: Callable[[int], None],
        mixed_steps: bool = True,
        propose: Callable[[list[Sequence], int], list[list[int]]] = no_drafts,
        place: Callable[[Sequence, ListLike[int]], int] = lowest,
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In order of arrival."""
        self.cache = cache
        self.preemptions = 0
        self._free_slots = list(range(slots))
        self._batch_size = batch_size
        self._prefill_budget, self._most_prefill = prefill_budget, batch_size
        self._release = release
        self._mixed_steps = mixed_steps
        self._propose = propose
        self._place = place
        self._prefill_is_due = False
        self._last: Step | None = None
        """The step before, if everybody only decoded in it, and nobody has gone since."""

    @property
    def cells(self) -> int:
        """Cells that there are."""
        return self.cache.total_cells

    @property
    def cells_used(self) -> int:
        """Occupied cells, those of checkpoints included."""
        return self.cache.spans.used

    def pace(self, tokens: int) -> None:
        """From now on, no step takes more prompt tokens, whether somebody decodes or not."""
        self._prefill_budget = self._most_prefill = tokens

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence behind all others."""
        self.waiting.append(sequence)
        self.cache.track(sequence)

    def remove(self, sequence: Sequence, *, failed: bool = False) -> None:
        """Take a sequence out, wherever it is; its slot and cells are free for the next step.

        Its state stays in the prefix cache, unless it `failed`: then there may be something wrong with it.
        """
        if sequence.slot is not None:
            self._last = None
            self.running.remove(sequence)
            if not failed:
                self.cache.leave(sequence)
            self._vacate(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.cache.forget(sequence)
        self.cache.trim()

    def preempt_youngest(self) -> None:
        """Put the sequence that came last back at the head of the queue; it will read its tokens again."""
        self._last = None
        sequence = self.running.pop()
        self._vacate(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def schedule(self) -> Step:
        """Choose the tokens of the next step. Empty only when there is nothing to do.

        It may be the very object of the step before: the same sequences, each a token further.
        """
        return self._again() or self._anew()

    def _again(self) -> Step | None:
        """The step before once more: what a device that decodes would otherwise wait for."""
        step = self._last
        if step is None or (self.waiting and self._free_slots) or not self.cache.make_room(step.n_tokens):
            return None
        self._prefill_is_due = not self._mixed_steps
        drafts = self._drafts(self.running, step.n_tokens)
        if any(drafts):
            step, self._last = Step(), None
            self._add_decodes(step, self.running, [1] * len(self.running), drafts)
        return step

    def _anew(self) -> Step:
        step = Step()
        self._admit()
        self.cache.running = len(self.running)
        self._begin()
        if not self._prefill_is_due:
            self._schedule_decodes(step)
        apart = not self._mixed_steps or any(chunk.n_tokens > 1 for chunk in step.chunks)
        if not (apart and step.chunks):
            self._schedule_prefills(step)
        if self._prefill_is_due and not step.chunks:
            self._schedule_decodes(step)
        while not step.chunks and self.running:  # no cell is left for any prompt
            self.preempt_youngest()
            self._schedule_decodes(step)
            self._schedule_prefills(step)
        self._prefill_is_due = apart and not self._prefill_is_due
        self._last = step if step.is_decode and len(step.chunks) == len(self.running) else None
        return step

    def postprocess(self, step: Step, slots: npt.NDArray[np.int32]) -> None:
        """Account for a step that llama.cpp has computed, or has begun to; `slots` is each token's slot."""
        self.cache.spans.append_batch(slots)
        for chunk in step.chunks:
            sequence = chunk.sequence
            sequence.cached += chunk.count
            if chunk.samples:
                sequence.decoding = True
            else:
                self.cache.reached(sequence)

    def settle(self, chunk: Chunk, accepted: int) -> None:
        """Account for a draft: it stays as a whole, or the slot was taken back to before the chunk."""
        sequence = chunk.sequence
        assert sequence.slot is not None
        if accepted == len(chunk.draft):
            sequence.cached += accepted
        else:
            sequence.cached -= chunk.count
            self.cache.spans.truncate(sequence.slot, sequence.cached)

    # --- the parts of schedule -----------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give slots to those who have waited longest, while there is room; nobody overtakes."""
        spans = self.cache.spans
        while self.waiting and self._free_slots:
            sequence = self.waiting[0]
            reused, idle = self.cache.reusable(sequence)
            promised = sum(other.pending + _growth(other) for other in self.running)
            needed = len(sequence.tokens) - reused + idle + _growth(sequence)
            if self.running and spans.used - spans.idle + promised + needed > self.cells:
                return
            self.waiting.popleft()
            sequence.slot = self._place(sequence, self._free_slots)
            self._free_slots.remove(sequence.slot)
            self.running.append(sequence)

    def _begin(self) -> None:
        """Start those from the cache who do not wait for somebody else to compute their beginning."""
        for index, sequence in enumerate(self.running):
            if not sequence.begun and not self.cache.waits(sequence, self.running[:index]):
                sequence.begun = True
                self.cache.start(sequence)

    def _schedule_decodes(self, step: Step) -> None:
        """What is pending of every sequence that decodes; the youngest are preempted until it fits."""
        while True:
            ready = [sequence for sequence in self.running if sequence.ready]
            counts = self._shares(ready)
            taken = sum(counts)
            if not ready or self.cache.make_room(taken):
                break
            self.preempt_youngest()
        if ready:
            self._add_decodes(step, ready, counts, self._drafts(ready, taken))

    def _drafts(self, ready: list[Sequence], taken: int) -> list[list[int]]:
        """What may follow the `taken` pending tokens, if there are cells for all of it."""
        drafts = self._propose(ready, self._batch_size - taken)
        return drafts if self.cache.make_room(taken + sum(map(len, drafts))) else no_drafts(ready, 0)

    def _add_decodes(
        self, step: Step, ready: list[Sequence], counts: list[int], drafts: list[list[int]]
    ) -> None:
        rows = self._batch_size - sum(counts)
        for sequence, count, draft in zip(ready, counts, drafts, strict=True):
            if draft and (len(draft) > rows or count < sequence.pending):
                draft = []
            rows -= len(draft)
            step.add(sequence, count, draft)

    def _shares(self, ready: list[Sequence]) -> list[int]:
        """Pending tokens of each, as far as they fit into a batch; at least one."""
        counts = [sequence.pending for sequence in ready]
        room = self._batch_size - len(ready)
        if sum(counts) <= self._batch_size:
            return counts
        for i, count in enumerate(counts):
            counts[i] = 1 + min(count - 1, room)
            room -= counts[i] - 1
        return counts

    def _schedule_prefills(self, step: Step) -> None:
        """Chunks of prompts: up to where a checkpoint is wanted, as far as budget and cells go."""
        prompts = [sequence for sequence in self.running if sequence.begun and not sequence.ready]
        if not prompts:
            return
        alone = len(prompts) == sum(sequence.begun for sequence in self.running)
        most = self._most_prefill if alone else self._prefill_budget
        budget = min(self._batch_size - step.n_tokens, most)
        for sequence, count in self._divide(budget, prompts).items():
            fitting = min(count, self.cache.available - step.n_tokens)
            if fitting > 0:
                self.cache.make_room(step.n_tokens + fitting)
                step.add(sequence, fitting)

    def _divide(self, budget: int, prompts: list[Sequence]) -> dict[Sequence, int]:
        """How many tokens of each prompt: half for the oldest, half for those with less to go.

        Every other length is another pass, so at most one prompt beside the oldest gets a part of what it
        has to go, and none gets only a few tokens.
        """
        oldest, least = prompts[0], budget // 8
        wanted = {sequence: self._until_cut(sequence) for sequence in prompts}
        counts = dict.fromkeys(prompts, 0)
        counts[oldest] = min(wanted[oldest], -(-budget // 2))
        budget -= counts[oldest]
        shorter = sorted((p for p in prompts if p.pending < oldest.pending), key=lambda p: p.pending)
        for i, sequence in enumerate(shorter):
            if budget < wanted[sequence] and (i or budget < least):
                break
            counts[sequence] = min(wanted[sequence], budget)
            budget -= counts[sequence]
        more = min(wanted[oldest] - counts[oldest], budget)
        counts[oldest] += more
        budget -= more
        for sequence in prompts[1:]:
            if not counts[sequence] and (budget >= wanted[sequence] or budget > least):
                counts[sequence] = min(wanted[sequence], budget)
                budget -= counts[sequence]
        return counts

    def _until_cut(self, sequence: Sequence) -> int:
        cut = self.cache.cut(sequence)
        return sequence.pending if cut is None else min(sequence.pending, cut - sequence.cached)

    def _vacate(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self._release(sequence.slot)
        self.cache.spans.drop(sequence.slot)
        self._free_slots = sorted([*self._free_slots, sequence.slot])
        sequence.slot = None
        sequence.cached = 0
        sequence.begun = sequence.decoding = False


def _growth(sequence: Sequence) -> int:
    return min(GROWTH, sequence.limit - len(sequence.tokens))
