"""Which tokens go into the next step: continuous batching with chunked prefill and lossless preemption.

Up to `slots` requests run at once, the rest wait in a queue, whose policy says who is next: first come, first
served, by priority, or fairly by tenant (`scheduling_policy.py`). One that waits and has the better claim
takes the slot of one that runs, if the prefix cache can keep that one's state until it has a slot again.

Steps that decode take what is pending of every sequence that decodes; while there are prompts to read, they
take turns with steps of at most `prefill_budget` prompt tokens, so that no running answer waits longer than
one of those. Half of these tokens go to the prompt that came first, so that a flood of short ones never
starves it; the other half to whichever prompts are closest to their first token, each tenant's closest one
before anybody's second, so that a flood of long ones never starves a short one. A prompt that shares a
beginning with one before it, which is just being computed, keeps its place and waits for that beginning
instead of computing it too; if the other goes away, it computes it itself.

The KV cache is a pool of cells, one a token, that all sequences share. A sequence is admitted when its tokens
fit beside those running and a little room remains for everyone to grow; it does not reserve cells for an
answer it may never give. When cells run short, checkpoints of the prefix cache are evicted first. When that
is not enough, the youngest running sequence is preempted, of those with the worst claim: its cells are freed,
it waits in its place of the queue, and reads its tokens again, the generated ones included, when there is
room. Its sampler stays as it was, so nothing is lost but time. The oldest sequence is never preempted for
cells that others need to grow, and one sequence always fits into the cache alone, so every request gets its
turn and ends.

Attention multiplies what others have in their cells, and what is left in free ones, by 0, which a value that
is not finite survives. So where logits are no use, nobody knows whose values are to blame: the cells are
cleared, and the running sequences run again, each alone until it has a token. One that has none is to blame.

On a hybrid model a step reads the weights once for each distinct number of tokens that its sequences bring,
since the recurrent layers take all sequences of a ubatch with the same number. So mixing decodes with a chunk
of a prompt would save nothing: both cost a pass, mixed or not.

No llama.cpp here: the scheduler counts cells, the runner fills them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from .adapters import Turns
from .batch import Batch
from .request_queue import RequestQueue
from .sequence import DECODE, PREFILL, SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as ListLike

    from .prefill_budget import PrefillBudget
    from .prefix_cache import PrefixCache
    from .reproducible import Reproducible
    from .sampling import SampleResult
    from .scheduling_policy import SchedulingPolicy
    from .sequence import Adapters, FinishReason, Sequence
    from .states import StateStore

log = logging.getLogger(__name__)

GROWTH = 64
"""Cells that admission leaves free for each running sequence: fewer would invite preemption at once."""


@dataclass(slots=True)
class Output:
    """What a step gave one sequence; not frozen, which takes twice as long to make."""

    sequence: Sequence
    tokens: list[int]
    done: FinishReason | Exception | None
    """Why it has ended, if it has; a sampler's exception where that failed."""


def lowest(sequence: Sequence, free: ListLike[int]) -> int:
    """The first free slot, whichever sequence it is for."""
    return free[0]


class Scheduler:
    """Owns queue and slots, and is the only writer of what sequences have computed.

    The cells must hold the longest sequence there can be; with `reproducible` they must be each sequence's
    own. `place` chooses among the free slots, in ascending order, for a sequence that is admitted.
    `draft_rows` is the most draft tokens of a step, `scored_rows` the most tokens of prompts that leave their
    rows in one.
    """

    def __init__(
        self,
        *,
        slots: int,
        batch_size: int,
        prefill_budget: PrefillBudget,
        ubatch_size: int,
        states: StateStore,
        cache: PrefixCache,
        ends: frozenset[int] = frozenset(),
        draft_rows: int = 0,
        scored_rows: int = 1,
        reproducible: Reproducible | None = None,
        place: Callable[[Sequence, ListLike[int]], int] = lowest,
        policy: SchedulingPolicy = "fcfs",
    ) -> None:
        self.running: list[Sequence] = []
        """In order of admission."""
        self.waiting = RequestQueue(policy, self.running)
        self.prefill_budget = prefill_budget
        self.preemptions = 0
        self._states, self._cells = states, states.cells
        self._cache = cache
        self._ends = ends
        self._free_slots = list(range(slots))
        self._batch_size, self._ubatch_size, self._draft_rows = batch_size, ubatch_size, draft_rows
        self._scored_rows = scored_rows
        self._decode_size = batch_size if reproducible is None else max(slots, reproducible.together)
        self._place = place
        self.reproducible = reproducible
        self._prefill_is_due = self._oldest_is_due = False
        self._turns = Turns()
        self._last: Batch | None = None
        """The batch before, if everybody only decoded in it, and nobody has come or gone since."""

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        if self.waiting.crowded(sequence):
            sequence.timings.waited_for = "its tenant's others"
        elif len(self._free_slots) <= len(self.waiting):
            sequence.timings.waited_for = "a slot"
        self.waiting.add(sequence)
        self._cache.track(sequence)

    def remove(self, sequence: Sequence, *, failed: bool = False) -> None:
        """Take a sequence out, wherever it is; its slot and cells are free for the next step.

        Its state stays in the prefix cache, unless it `failed`: then there may be something wrong with it.
        """
        self.waiting.discard(sequence)
        if sequence.slot is not None:
            self._last = None
            self.running.remove(sequence)
            if not failed:
                try:
                    self._cache.cache_finished(sequence)
                except Exception:  # what is kept for others is worth nobody's place
                    log.warning("a finished sequence was not cached", exc_info=True)
            self._vacate(sequence)
            if sequence.suspect and not self.running:  # what it leaves is not to spoil the next one
                self._clear()
        self._cache.forget(sequence)
        self._cache.trim()

    def preempt_youngest(self) -> None:
        """Put the sequence that came last, of those with the worst claim, back into the queue; it will read
        its tokens again."""
        self._preempt(self.waiting.policy.youngest())

    def _preempt(self, sequence: Sequence) -> None:
        self._last = None
        self.running.remove(sequence)
        self._vacate(sequence)
        self.waiting.add(sequence)
        sequence.timings.preempted += 1
        self.preemptions += 1

    def _suspect(self) -> None:
        """Restart each running sequence alone, in cells with nothing left of others."""
        log.warning("logits were no use: whoever ran begins anew, one after the other")
        for sequence in reversed(self.running.copy()):
            sequence.suspect = True
            self._preempt(sequence)
        self._clear()

    def _clear(self) -> None:
        """Nobody runs: nothing is left in any cell."""
        self._cache.clear()
        self._states.clear()

    def schedule(self) -> Batch:
        """Choose the tokens of the next step. Empty only when there is nothing to do.

        It may be the very object of the step before: the same sequences, each a token further.
        """
        batch = self._again() or self._anew()
        batch.draft_room = min(self._decode_size - batch.n_tokens, self._cells.free - batch.n_tokens)
        if self.reproducible is not None and self.reproducible.alone:
            batch.draft_room = 0
        return batch

    def decoded(self, batch: Batch, seconds: float) -> None:
        """A step that decoded took so long: what a written token costs its tenant."""
        self.waiting.policy.decoded(batch.n_tokens, seconds, self.prefill_budget.each)

    def reserve(self, batch: Batch) -> None:
        """llama.cpp has begun to compute the batch: count its cells."""
        self._states.appended(batch)

    def commit(self, batch: Batch, results: ListLike[SampleResult], held: ListLike[int]) -> list[Output]:
        """Account for a step: what each sequence has computed, gained, and whether it has ended.

        `held` is what each chunk's slot holds now. Sequences that ended are removed.
        """
        now = perf_counter()
        self.waiting.steps += 1
        outputs: list[Output] = []
        finished: list[Output] = []
        again: list[Sequence] = []
        alone, usable = True, True
        for chunk, result, computed in zip(batch.chunks, results, held, strict=True):
            sequence = chunk.sequence
            sequence.computed = computed
            if result.error is not None:
                if sequence.suspect or not result.recompute:
                    finished.append(Output(sequence, [], result.error))
                    continue
                sequence.suspect, usable = True, False
            elif not chunk.samples:
                self._cache.cache_unfinished(sequence)
                if (progress := sequence.progress) is not None:
                    progress.cached, progress.processed = sequence.reused or 0, computed
                    outputs.append(Output(sequence, [], None))
                continue
            # where taking a draft back failed, it reads everything again
            sequence.status = DECODE if computed else PREFILL
            if result.recompute:  # it comes back, to a slot whose rows come back whole or to cleared cells
                again.append(sequence)
            elif sequence.suspect:
                sequence.suspect = False
                if any(other.suspect for other in self.waiting):
                    again.append(sequence)
            if not result.tokens:
                continue
            if not sequence.timings.first_token:
                sequence.timings.first_token = now
            new = [*result.tokens, *result.forced] if result.forced else result.tokens
            new, done = sequence.extend(new, self._ends)
            alone = alone and len(new) == 1  # nothing was forced beside
            (finished if done else outputs).append(Output(sequence, new, done))
        steady = alone and not finished and batch.is_decode and len(batch.chunks) == len(self.running)
        self._last = batch if steady else None
        for output in finished:
            self.remove(output.sequence, failed=isinstance(output.done, Exception))
        for sequence in again:
            if sequence in self.running:
                self._preempt(sequence)
        if not usable:
            self._suspect()
        return outputs + finished

    # --- the parts of schedule -----------------------------------------------------------------------------

    def _again(self) -> Batch | None:
        """The batch before once more: what a device that decodes would otherwise wait for."""
        batch = self._last
        if batch is None or (self.waiting and (self._free_slots or self.waiting.contended)):
            return None
        if not self._make_room(batch.n_tokens):
            return None
        self._prefill_is_due = True
        return batch

    def _anew(self) -> Batch:
        batch = Batch()
        self._last = None
        self._admit()
        self._begin()
        self._choose(batch, prefill_first=self._prefill_is_due)
        while not batch.chunks and self.running:  # no cell is left for any prompt
            self.preempt_youngest()
            self._choose(batch)
        self._prefill_is_due = not self._prefill_is_due
        return batch

    def _choose(self, batch: Batch, *, prefill_first: bool = False) -> None:
        """Something of those whose turn it is, by their adapters, or of the next who have what fits."""
        for adapters in self._turns.order(self.running):
            if prefill_first:
                self._schedule_prefills(batch, adapters)
            if not batch.chunks:
                self._schedule_decodes(batch, adapters)
            if not batch.chunks:
                self._schedule_prefills(batch, adapters)
            if batch.chunks:
                self._turns.took(adapters)
                return

    def _admit(self) -> None:
        """Give slots to those who are next, while there is room; where it is lacking, to those for whom
        another has to make room. Nobody overtakes one that is next and waits for cells."""
        while self.waiting:
            head = self.waiting.peek() if self._free_slots else None
            if head is not None and self.running and (head.suspect or self.running[0].suspect):
                return
            if head is None or not self._fits(head):
                found = self.waiting.preemption(self._cache.can_suspend, head)
                if found is None or not self._fits(*found):
                    if head is not None and not head.timings.started:
                        head.timings.waited_for = "KV cells"
                    return
                head, victim = found
                self._cache.suspend(victim)
                self._preempt(victim)
            slot = self._place(head, self._free_slots)
            self.waiting.pop(head, slot)
            head.status = SequenceStatus.WAITING_FOR_PREFIX
            self._free_slots.remove(slot)
            self.running.append(head)

    def _fits(self, sequence: Sequence, victim: Sequence | None = None) -> bool:
        """Whether there are cells for one that waits, were the victim suspended."""
        others = [other for other in self.running if other is not victim]
        reused, idle = self._cache.reusable(sequence)
        promised = sum(other.pending + _growth(other) for other in others)
        needed = len(sequence.tokens) - reused + idle + _growth(sequence)
        freed = 0 if victim is None or victim.slot is None else self._cells.run_by(victim.slot)
        return not others or promised + needed <= self._cells.available + freed

    def _begin(self) -> None:
        """Start those from the cache who do not wait for somebody else to compute their beginning."""
        for index, sequence in enumerate(self.running):
            if sequence.begun:
                continue
            if self._cache.waits(sequence, self.running[:index]):
                if not sequence.timings.started:
                    sequence.timings.waited_for = "a prefix"
            else:
                sequence.status = PREFILL
                sequence.timings.started = sequence.timings.started or perf_counter()
                self._cache.match_prefix(sequence)

    def _make_room(self, cells: int) -> bool:
        """Evict checkpoints until so many cells are free and, if that can be, those that drafts may take."""
        return self._cache.make_room(cells + self._draft_rows) or self._cache.make_room(cells)

    def _schedule_decodes(self, batch: Batch, adapters: Adapters) -> None:
        """What is pending of every sequence that decodes; the youngest are preempted until it fits."""
        while True:
            ready = [one for one in self.running if one.ready and one.adapters == adapters]
            counts = self._shares(ready)
            if not ready or self._make_room(sum(counts)):
                break
            self.preempt_youngest()
        shares = [*zip(ready, counts, strict=True)]
        if self.reproducible is not None:
            # llama.cpp computes neighbouring ids in one pass, and those in descending order each in its own
            shares.sort(key=lambda share: share[0].slot or 0, reverse=self.reproducible.alone)
        for sequence, count in shares:
            batch.add(sequence, count)

    def _shares(self, ready: list[Sequence]) -> list[int]:
        """Pending tokens of each, as far as they fit into a batch; at least one."""
        counts = [sequence.pending for sequence in ready]
        room = self._decode_size - len(ready)
        if sum(counts) <= self._decode_size:
            return counts
        for i, count in enumerate(counts):
            counts[i] = 1 + min(count - 1, room)
            room -= counts[i] - 1
        return counts

    def _schedule_prefills(self, batch: Batch, adapters: Adapters) -> None:
        """Chunks of prompts: up to where a checkpoint is wanted, as far as budget and cells go.

        Where nobody decodes, they may fill a ubatch.
        """
        prompts = [one for one in self.running if one.begun and not one.ready and one.adapters == adapters]
        if not prompts:
            return
        prompts = [one for one in prompts if one.reads_picture is prompts[0].reads_picture]
        budget = self.prefill_budget.tokens
        if not any(sequence.ready for sequence in self.running):
            budget = max(budget, self._ubatch_size)
        if self.reproducible is not None and self.reproducible.chunk > 1:
            self._schedule_pieces(batch, prompts, self.reproducible, min(budget, self._ubatch_size))
            return
        most = self._batch_size if self.reproducible is None else self.reproducible.together - 1
        rows = self._scored_rows
        for sequence, count in self._divide(min(most, budget), prompts).items():
            fitting = min(count, self._cells.available - batch.n_tokens, _with_rows(sequence, rows))
            if fitting > 0:
                self._cache.make_room(batch.n_tokens + fitting)
                batch.add(sequence, fitting)
                rows -= len(batch.chunks[-1].scored)

    def _schedule_pieces(self, batch: Batch, prompts: list[Sequence], how: Reproducible, budget: int) -> None:
        """The next piece of the oldest prompt or, in turn, of the shortest, and those that it can have
        beside."""
        self._oldest_is_due = not self._oldest_is_due
        first = prompts[0] if self._oldest_is_due else min(prompts, key=lambda one: one.pending)
        pieces = {one: min(one.pending_alike, how.chunk - one.computed % how.chunk) for one in prompts}
        for one in sorted(how.group(first, pieces, budget), key=lambda one: one.slot or 0):
            batch.add(one, pieces[one])

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
        nearest = self.waiting.policy.nearest(prompts[1:])
        shorter = [sequence for sequence in nearest if sequence.pending < oldest.pending]
        for i, sequence in enumerate(shorter):
            if budget < wanted[sequence] and (i or budget < least):
                break
            counts[sequence] = min(wanted[sequence], budget)
            budget -= counts[sequence]
        more = min(wanted[oldest] - counts[oldest], budget)
        counts[oldest] += more
        budget -= more
        for sequence in nearest:
            if not counts[sequence] and (budget >= wanted[sequence] or budget > least):
                counts[sequence] = min(wanted[sequence], budget)
                budget -= counts[sequence]
        return counts

    def _until_cut(self, sequence: Sequence) -> int:
        cut = self._cache.next_checkpoint(sequence)
        until = sequence.pending_alike
        until = until if cut is None else min(until, cut - sequence.computed)
        return min(until, _with_rows(sequence, self._scored_rows))

    def _vacate(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self._states.free(sequence.slot)
        self._free_slots = sorted([*self._free_slots, sequence.slot])
        sequence.slot = None
        sequence.computed = 0
        sequence.status = SequenceStatus.WAITING


def _with_rows(sequence: Sequence, rows: int) -> int:
    """Most pending tokens that leave no more than so many rows of a prompt that is scored."""
    scored = sequence.unscored(sequence.computed, sequence.pending)
    return sequence.pending if len(scored) <= rows else scored.start + rows - sequence.computed


def _growth(sequence: Sequence) -> int:
    return min(GROWTH, sequence.limit - len(sequence.tokens))
