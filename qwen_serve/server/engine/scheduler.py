"""Which tokens go into the next step: continuous batching with chunked prefill and lossless preemption.

Up to `slots` requests run at once and the rest wait in a queue. Its policy picks the next one: first come,
first served, by priority, or fairly by tenant (`scheduling_policy.py`). A waiting request with a better claim
takes the slot of a running one if the prefix cache can keep the latter's state until it has a slot again.

A decode step takes the pending tokens of every decoding sequence. While there are prompts to read, prefill
steps of a ubatch each come between decode steps, together at most `prefill_budget` prompt tokens, which
limits the delay of running answers. The host prepares each while the device computes the one before. Half of
a step's tokens go to the prompt that arrived first, so that many short prompts cannot starve it. The other
half goes to the prompts closest to their first token, so that many long prompts cannot starve a short one;
the closest of each tenant comes before the second of any tenant. If a prompt shares a prefix with an earlier
one that is being computed, it keeps its place and waits for that prefix, unless the earlier request ends
before.

A step may be chosen while the one before it is computed. A launched batch counts as computed, and a
placeholder stands for each token that it samples, so known tokens and those in flight are scheduled alike.
Only what depends on results waits for them, such as preemption. If a sequence turns out to have ended, the
step that is being computed drops it.

The KV cache is a pool of cells, one a token, that all sequences share. A sequence is admitted when there are
cells for its tokens and each running sequence keeps a little room to grow. No cells are reserved for its
whole answer. When cells run short, checkpoints of the prefix cache are evicted first. If that is not enough,
the youngest running sequence of those with the worst claim is preempted: its cells are freed, it returns to
its place in the queue, and later it reads its tokens again, the generated ones included. Its sampler is kept,
so preemption costs only time. The oldest sequence is never preempted for others' cells, and one sequence
alone always fits into the cache, so every request finishes.

Attention multiplies other sequences' cells and free cells by 0, and a value that is not finite survives that.
So unusable logits do not tell which sequence caused them. The cells are cleared, and the running sequences
start again, each alone until it has a token. A sequence that gets none even alone is the cause and fails.

A step whose sequences have different token counts is one pass with the patch ragged-passes, else one for each
count. Decodes have steps of their own: beside a chunk of a prompt, attention would read a mask of all cells.
"""

import logging
from collections.abc import Callable, Sequence
from time import perf_counter

from .adapters import AdapterRotation
from .batch import Batch, shares
from .prefill_budget import PrefillBudget
from .prefix_cache import PrefixCache
from .prompt_chunks import PromptChunks
from .reproducible import Reproducible
from .request import DECODE, PREFILL, Adapters, Request, RequestStatus
from .request_queue import RequestQueue
from .scheduling_policy import SchedulingPolicy
from .states import StateStore
from .ubatches import usual_pass
from .verification import SampleResult

log = logging.getLogger(__name__)


def lowest(sequence: Request, free: Sequence[int]) -> int:
    """The lowest free slot, for any sequence."""
    return free[0]


class Scheduler:
    """Owns the queue and the slots, and alone writes each sequence's computed length.

    The cells must hold the longest possible sequence; with `reproducible` each sequence must own its cells.
    `place` chooses a slot for an admitted sequence from the free ones, which are in ascending order. A step
    has at most `draft_rows` draft tokens, and at most `scored_rows` prompt tokens whose rows of logits are
    kept.
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
        place: Callable[[Request, Sequence[int]], int] = lowest,
        policy: SchedulingPolicy = "fcfs",
    ) -> None:
        self.running: list[Request] = []
        """In order of admission."""
        self.waiting = RequestQueue(policy, self.running)
        self.prefill_budget = prefill_budget
        self.preemptions = self.generated_tokens = 0
        self._states, self._cells = states, states.cells
        self._cache = cache
        self._ends = ends
        self._free_slots = list(range(slots))
        self._usual_pass, self._draft_rows = usual_pass(ubatch_size), draft_rows
        self._prompts = PromptChunks(
            self.running,
            self.waiting.policy,
            cache,
            self._cells,
            batch_size=batch_size,
            ubatch_size=ubatch_size,
            scored_rows=scored_rows,
        )
        self._decode_size = batch_size if reproducible is None else max(slots, reproducible.together)
        self._place = place
        self.reproducible = reproducible
        self._prefills_left = 0
        """Prefill steps before the next decode step."""
        self._rotation = AdapterRotation()
        self._in_flight: list[Batch] = []
        """Batches that are being computed and not committed yet, the oldest first: at most two."""
        self._last: Batch | None = None
        """The previous batch, if all running sequences decoded in it and none joined or left since."""
        self._repeats = 0
        """How often it may be launched again before the first of its sequences has all its tokens."""

    def add(self, sequence: Request) -> None:
        """Queue a new sequence."""
        if self.waiting.crowded(sequence):
            sequence.timings.waited_for = "its tenant's others"
        elif len(self._free_slots) <= len(self.waiting):
            sequence.timings.waited_for = "a slot"
        self.waiting.add(sequence)
        self._cache.track(sequence)

    def remove(self, sequence: Request, *, failed: bool = False, beyond: Sequence[int] = ()) -> None:
        """Remove a waiting or running sequence; its slot and cells are free for the next step.

        Its state stays in the prefix cache unless it `failed`, since its state may then be wrong. `beyond`:
        computed tokens behind its own.
        """
        self.waiting.discard(sequence)
        if sequence.slot is not None:
            self._last = None
            self.running.remove(sequence)
            if not failed:
                try:
                    self._cache.cache_finished(sequence, beyond)
                except Exception:  # caching is optional: its failure must not fail a request
                    log.warning("a finished sequence was not cached", exc_info=True)
            self._vacate(sequence)
            if sequence.quarantined and not self.running:  # the next sequence must not get its values
                self._clear()
        self._cache.forget(sequence)
        self._cache.trim()

    def preempt_youngest(self) -> None:
        """Put the youngest sequence of those with the worst claim back into the queue; it will read its
        tokens again."""
        self._preempt(self.waiting.policy.youngest())

    def _preempt(self, sequence: Request) -> None:
        self._last = None
        self.running.remove(sequence)
        self._vacate(sequence)
        self.waiting.add(sequence)
        sequence.timings.preempted += 1
        self.preemptions += 1

    def _quarantine(self) -> None:
        """Restart each running sequence alone, in cleared cells."""
        log.warning("unusable logits: the running requests start again, one at a time")
        for sequence in reversed(self.running.copy()):
            sequence.quarantined = True
            self._preempt(sequence)
        self._clear()

    def _clear(self) -> None:
        """Clear all cells; no sequence may be running."""
        self._cache.clear()
        self._states.clear()

    def schedule(self) -> Batch:
        """Choose the tokens of the next step. The batch before may still be computed: then the next token of
        each of its sequences is a placeholder, which the step reads on the device.

        Empty if the choice depends on results of that batch. If the same sequences continue by one token
        each, it is the same object as before.
        """
        if self._in_flight and len(self.running) == 1:
            [alone] = self.running  # forced tokens behind its own are computed together
            if alone.quarantined or (alone.sampler.may_force and not self.waiting):
                return Batch()
        batch = self._again() or self._anew()
        batch.draft_room = min(self._decode_size - batch.n_tokens, self._cells.free - batch.n_tokens)
        if self.reproducible is not None and self.reproducible.alone:
            batch.draft_room = 0
        return batch

    def launched(self, batch: Batch) -> None:
        """llama.cpp has begun to compute a batch: count its cells, its tokens, and a placeholder for each
        token that it samples."""
        self._in_flight.append(batch)
        for chunk in batch.chunks:
            sequence, count = chunk.sequence, chunk.count + len(chunk.draft)
            self._cells.append(chunk.slot, count)
            sequence.computed += count
            if chunk.samples:
                sequence.placeholders += 1
                sequence.status = DECODE
        if batch is self._last and batch.is_decode:
            self._repeats -= 1
            return
        self._rotation.took(batch)
        reads = self._prefills_left and batch.chunks[0].is_prompt and not batch.chunks[0].decodes
        self._prefills_left = self._prefills_left - 1 if reads else self._passes
        self._last = None
        if batch.is_decode and len(batch.chunks) == len(self.running):
            self._last, self._repeats = batch, min(one.room for one in self.running)

    def commit(self, batch: Batch, results: Sequence[SampleResult], held: Sequence[int]) -> list[Request]:
        """Record the results of the batch that was launched first: new tokens in place of placeholders, which
        tokens were taken back, and which sequences ended. Return those with news for their listeners.

        `held` is the number of tokens that each chunk's slot holds behind it. Sequences that ended are
        removed; a batch behind this one, which is already being computed, drops them.
        """
        now = perf_counter()
        self._in_flight.pop(0)
        self.waiting.steps += 1
        news: list[Request] = []
        recomputed: list[Request] = []
        steady, usable = True, True
        for chunk, result, kept in zip(batch.chunks, results, held, strict=True):
            sequence = chunk.sequence
            if sequence in batch.dropped:
                continue
            if chunk.draft:
                sequence.computed += kept - chunk.start - chunk.n_tokens
            sequence.placeholders -= chunk.samples
            if result.error is not None:
                if sequence.quarantined or not result.recompute:
                    sequence.done, steady = result.error, False
                    news.append(sequence)
                    self.remove(sequence, failed=True)
                    continue
                sequence.quarantined, usable = True, False
            elif not chunk.samples:
                self._cache.cache_unfinished(sequence)
                if sequence.reports_progress:
                    news.append(sequence)
                continue
            # if a rollback failed, nothing is computed and the sequence reads all its tokens again
            if not sequence.computed:
                sequence.status = PREFILL
            if result.recompute:  # perhaps in cleared cells
                recomputed.append(sequence)
            elif sequence.quarantined:
                sequence.quarantined = False
                if any(other.quarantined for other in self.waiting):
                    recomputed.append(sequence)
            if not result.tokens:
                continue
            if not sequence.timings.first_token:
                sequence.timings.first_token = now
            new = [*result.tokens, *result.forced] if result.forced else result.tokens
            new = sequence.extend(new, self._ends)
            self.generated_tokens += len(new)
            news.append(sequence)
            steady = steady and len(new) == 1  # no forced tokens
            if sequence.done:
                self.remove(sequence, beyond=result.tokens[len(new) :])
        if not steady:
            self._last = None
        for sequence in recomputed:
            if sequence in self.running:
                self._preempt(sequence)
        if not usable:
            self._quarantine()
        return news

    # --- the parts of schedule -----------------------------------------------------------------------------

    def _again(self) -> Batch | None:
        """Return the previous batch again, if possible: building a new one would keep the device waiting."""
        batch = self._last
        if batch is None or self._repeats < 1:
            return None
        if self.waiting and (self._free_slots or self.waiting.contended):
            return None
        n = batch.n_tokens
        if n + self._draft_rows > self._cells.free and not self._make_room(n):
            return None
        for chunk in batch.chunks:
            chunk.start = chunk.sequence.computed
        return batch

    def _anew(self) -> Batch:
        batch = Batch()
        self._last = None
        for launched in self._in_flight:  # their prompts may go on before they are committed
            for chunk in launched.chunks:
                if not chunk.samples:
                    self._cache.cache_unfinished(chunk.sequence)
        self._admit()
        self._begin()
        self._choose(batch)
        while not (batch.chunks or self._in_flight):  # no free cell for any prompt
            self.preempt_youngest()
            self._choose(batch)
        return batch

    @property
    def _passes(self) -> int:
        """Prefill steps in a row: passes of the budget."""
        how = self.reproducible
        each = self._usual_pass if how is None or how.chunk == 1 else how.chunk * how.abreast
        return max(1, self.prefill_budget.tokens // each)

    def _choose(self, batch: Batch) -> None:
        """Fill the batch for one set of adapters: the first, in the order of turns, that has work that
        fits."""
        for adapters in self._rotation.order(self.running):
            if self._prefills_left:
                self._prompts.add(batch, adapters, self.prefill_budget, self.reproducible)
            if not batch.chunks:
                self._schedule_decodes(batch, adapters)
            if not batch.chunks:
                self._prompts.add(batch, adapters, self.prefill_budget, self.reproducible)
            if batch.chunks:
                return

    def _admit(self) -> None:
        """Admit waiting sequences in the policy's order while there is room. Without room admit one that may
        preempt a running sequence, unless that is being computed. While the next one waits for cells, admit
        no other."""
        while self.waiting:
            head = self.waiting.peek() if self._free_slots else None
            if head is not None and self.running and (head.quarantined or self.running[0].quarantined):
                return
            if head is None or not self._fits(head):
                found = None
                if not self._in_flight:
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
            head.status = RequestStatus.WAITING_FOR_PREFIX
            self._free_slots.remove(slot)
            self.running.append(head)

    def _fits(self, sequence: Request, victim: Request | None = None) -> bool:
        """Whether there are cells for a waiting sequence if `victim` were suspended."""
        others = [other for other in self.running if other is not victim]
        reused, idle = self._cache.reusable(sequence)
        promised = sum(other.pending + other.growth for other in others)
        needed = len(sequence.tokens) - reused + idle + sequence.growth
        freed = 0 if victim is None or victim.slot is None else self._cells.run_by(victim.slot)
        return not others or promised + needed <= self._cells.available + freed

    def _begin(self) -> None:
        """Start admitted sequences from the prefix cache, except those that wait for another to compute their
        prefix."""
        for index, sequence in enumerate(self.running):
            if sequence.begun:
                continue
            if self._cache.waits(sequence, self.running[:index]):
                if not sequence.timings.started:
                    sequence.timings.waited_for = "a prefix"
            else:
                sequence.status = PREFILL
                sequence.timings.started = sequence.timings.started or perf_counter()
                sequence.computed = self._cache.match_prefix(sequence)

    def _make_room(self, cells: int) -> bool:
        """Evict checkpoints until `cells` are free and, if possible, the cells that drafts may take, too."""
        return self._cache.make_room(cells + self._draft_rows) or self._cache.make_room(cells)

    def _schedule_decodes(self, batch: Batch, adapters: Adapters) -> None:
        """Add the pending tokens of every decoding sequence; preempt the youngest until they fit. Behind a
        batch that is being computed nothing is preempted."""
        if self._in_flight and self.waiting and self.waiting.contended:
            return
        while True:
            ready = [one for one in self.running if one.ready and one.adapters == adapters]
            ready = [one for one in ready if one.room > 0 or not one.placeholders]  # others end in any case
            counts = shares([one.pending for one in ready], self._decode_size)
            if not ready or self._make_room(sum(counts)):
                break
            if self._in_flight:
                return
            self.preempt_youngest()
        counted = dict(zip(ready, counts, strict=True))
        for sequence in self._in_order(ready):
            batch.add(sequence, counted[sequence])

    def _in_order(self, sequences: list[Request]) -> list[Request]:
        """Sequences that decode together, in the batch's order."""
        if self.reproducible is None:
            return sequences
        # llama.cpp computes neighbouring ids in one pass; ids in descending order get a pass each
        return sorted(sequences, key=lambda one: one.slot or 0, reverse=self.reproducible.alone)

    def _vacate(self, sequence: Request) -> None:
        assert sequence.slot is not None
        self._states.free(sequence.slot)
        self._free_slots = sorted([*self._free_slots, sequence.slot])
        for batch in self._in_flight:
            batch.drop(sequence)
        sequence.slot = None
        sequence.computed = sequence.placeholders = 0
        sequence.status = RequestStatus.WAITING
