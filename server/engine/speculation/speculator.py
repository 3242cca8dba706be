"""Speculative decoding as the engine sees it: drafts for a step, checkpoints around it, lessons after it."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

from .base import Order
from .choice import Choice
from .counts import DraftCounts
from .times import FIRST, Mean

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as ListLike

    from server.engine.llama import Context
    from server.engine.prefix_cache import Spans
    from server.engine.scheduler import Chunk, Sampled, Step
    from server.engine.sequence import Sequence

    from .eager import Eager
    from .mtp import MtpDrafter, SavedReading
    from .ngram import NgramDrafter
    from .plan import Plan, Planner
    from .rollback import Rollback
    from .times import StepTimes

MEASURED = (1, 2, 4, 3, 5, 6, 8, 9, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows that the warm-up times: around the sizes at which kernels change."""

TURNS = 3
"""How often each of these has its turn, so that whatever holds the machine up for a while (another program,
a clock that has yet to rise) spoils the least time of none."""

STEADY = 4
"""Rehearsals of a shape in a row: the first builds the graph, the second may have it captured, the others
are what it takes."""

LOOK = 8
"""Of steps that only decode, one after the other, the first ones and then every so many are learnt from."""


class Speculator:
    """Asks the drafters, chooses by cost, keeps the way back open, and learns from what comes out.

    The engine's thread calls, step by step: `propose` while the step is made, `prepare` before it is decoded,
    `conclude` when its tokens are known. The cache's copies of sequence ids go through `copy` and `remove`.
    """

    def __init__(
        self,
        context: Context,
        rollback: Rollback,
        planner: Planner | Eager,
        times: StepTimes,
        *,
        ngram: NgramDrafter | None,
        mtp: MtpDrafter | None,
        slots: int,
        longest: int,
        deepest: int,
        most_rows: int,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Sequences in the first `slots` draft, at most `longest` tokens, by the head at most `deepest`."""
        self._context, self._rollback, self._planner, self.times = context, rollback, planner, times
        self._ngram, self._mtp = ngram, mtp
        self._slots, self._longest, self._most_rows = slots, longest, most_rows
        self._choice = Choice(
            planner, times, rollback, ngram=ngram, mtp=mtp, deepest=deepest, most_rows=most_rows
        )
        self.totals: dict[str, DraftCounts] = {d.name: DraftCounts() for d in (ngram, mtp) if d is not None}
        """By drafter."""
        self._orders: dict[Sequence, Order] = {}
        """What was proposed for the step being made."""
        self.spans: Spans | None = None
        """The scheduler's count of cells, from which drafts that were wrong are taken again."""
        self._in_flight = False
        self._clock, self._overhead = clock, 0.0
        self._graphs_reused = self._passes = 0
        """At the last look; and steps since."""
        self._built = False
        """Whether there was a graph built then."""
        self._plain_steps = 0
        """In a row, after another for as many sequences."""
        self._n = 0
        """Sequences that decode."""
        self._listening = mtp is not None
        """Whether the context keeps the hidden rows that the head reads."""
        self._starts: list[int] = []
        self._copies: list[tuple[int, int]] = []
        self._proposing = 0.0
        """Seconds that the drafts of the step took."""
        self._drafting = ""
        """Who drafted last, as long as the consequences last."""

    def reads(self, step: Step) -> bool:
        """Whether `conclude` will read hidden rows of a step of prompts alone, and so wait for the device."""
        mtp = self._mtp
        return (
            mtp is not None
            and self._listening
            and any(
                mtp.wants(chunk.sequence, start + chunk.count)
                for chunk, start in zip(step.chunks, self._starts, strict=True)
            )
        )

    def stats(self) -> dict[str, DraftCounts]:
        """The totals so far; they do not change later."""
        return {drafter: replace(counts) for drafter, counts in self.totals.items()}

    # --- warming up ----------------------------------------------------------------------------------------

    def measure(self, rehearse: Callable[[int, int], None], seconds: float) -> None:
        """Time verifications of more and more rows, and drafts of the head, in about so many seconds.

        `rehearse(n, length)` verifies `length` rows of each of `n` sequences; `conclude` learns from it.
        """
        shapes = [(1, length) for length in MEASURED]
        shapes += [(n, length) for n in (2, 4, 8, 16) for length in MEASURED[:3] if n <= self._slots]
        deadline = self._clock() + seconds
        self._graphs_reused, self._passes = self._context.graphs_reused, 0
        self._measure_building(rehearse)
        for turn in range(TURNS):
            for n, length in shapes:
                late = self._clock() > deadline and (turn or length > MEASURED[1])
                if not late and length <= self._longest + 1 and n * length <= self._most_rows:
                    for _ in range(STEADY):
                        rehearse(n, length)
        self._measure_building(rehearse)
        if self._mtp is not None:
            self._mtp.measure(self._slots)

    def _measure_building(self, rehearse: Callable[[int, int], None]) -> None:
        """What a graph costs: steps each of which needs another than the last.

        At first, so that it can be taken off what is measured then; and again when the machine is warm.
        """
        self.times.building = Mean(first=1)
        for _ in range(STEADY):
            rehearse(1, 1)
        for length in MEASURED[1::-1] * FIRST:
            if length <= self._longest + 1:
                rehearse(1, length)

    # --- making a step -------------------------------------------------------------------------------------

    def propose(self, sequences: ListLike[Sequence], rows: int) -> list[list[int]]:
        """A draft, perhaps empty, for each of the sequences that decode; at most `rows` tokens in all."""
        started = self._clock()
        drafts = self._propose(sequences, rows)
        self._proposing = self._clock() - started
        return drafts

    def _propose(self, sequences: ListLike[Sequence], rows: int) -> list[list[int]]:
        self._orders.clear()
        n = self._n = len(sequences)
        if n <= self._slots and self._choice.is_due(n):
            orders = [Order(sequence, self._limit(sequence)) for sequence in sequences]
            if self._ngram is not None:
                self._ngram.propose(orders)
            if (plan := self._choice.plan(orders, rows)) is not None:
                return self._carry_out(plan, orders)
        return [[] for _ in sequences]

    def _limit(self, sequence: Sequence) -> int:
        """Tokens that a draft for it may have: the one after the last is sampled too."""
        if sequence.slot is None or sequence.slot >= self._slots:
            return 0
        return max(0, min(self._longest, sequence.limit - len(sequence.tokens) - 1))

    def _carry_out(self, plan: Plan, orders: list[Order]) -> list[list[int]]:
        """Have the head draft where the plan says so, and cut what the n-gram drafter has to length."""
        chosen: list[Order] = []
        for order, source, length in zip(orders, plan.sources, plan.lengths, strict=True):
            if source == "mtp":
                order = Order(order.sequence, length, *self._choice.record(order.sequence, length))
            else:
                order.tokens = order.tokens[:length]
            chosen.append(order)
        if self._mtp is not None and "mtp" in plan.sources:
            by_head = [order for order, source in zip(chosen, plan.sources, strict=True) if source == "mtp"]
            pending = [order.sequence.pending for order in orders]
            self._mtp.propose(by_head, self._choice.floors(plan, chosen))
            drafted = zip(pending, chosen, plan.sources, strict=True)
            cut = max(own + len(order.tokens) for own, order, source in drafted if source == "mtp")
            for own, order, source in zip(pending, chosen, plan.sources, strict=True):
                if source == "ngram":  # the head may have stopped early: one length, one pass
                    order.tokens = order.tokens[: max(0, cut - own)]
        self._orders = {order.sequence: order for order in chosen if order.tokens}
        return [order.tokens for order in chosen]

    # --- around a step -------------------------------------------------------------------------------------

    def prepare(self, step: Step) -> None:
        """Before the step is decoded: hold on to the states that drafts may spoil."""
        started = self._clock()
        self._in_flight = True
        if self._mtp is not None:
            self._listen(max(self._n, len(step.chunks)))
        self._starts = [chunk.sequence.cached for chunk in step.chunks]
        if step.n_tokens > len(step.chunks):
            self._rollback.prepare(step.chunks)
        self._overhead = self._clock() - started

    def meanwhile(self, step: Step) -> None:
        """For while the device computes: the texts of those who may be asked for drafts soon are read."""
        if self._ngram is not None and len(step.chunks) <= self._slots:
            self._ngram.read([chunk.sequence for chunk in step.chunks if self._limit(chunk.sequence)])

    def _listen(self, n: int) -> None:
        """Have the rows that the head reads kept, or not where `n` sequences will do without it for long:
        their copies to the host take a part of every step."""
        listens = n <= self._slots and self._choice.listens(n, self._listening)
        if listens is not self._listening:
            self._listening = listens
            self._context.keep_hidden(listens)

    def conclude(
        self, step: Step, places: ListLike[list[int]], sampled: ListLike[Sampled], seconds: float
    ) -> None:
        """After its tokens are known: go back where a draft was wrong, and learn.

        `places` are the indices in the batch of each chunk's tokens; `seconds` is the time from the call of
        decode to the last token. If the step failed, `abandon`. A draft of which a part stays is cut to it.
        """
        started = self._clock()
        if self._mtp is not None and self._listening:
            self._collect(self._mtp, step, places, sampled)
        self.abandon()
        n = len(step.chunks)
        even = step.n_tokens % n == 0 and all(chunk.samples for chunk in step.chunks)
        plain = even and step.n_tokens == n
        self._plain_steps = self._plain_steps + 1 if plain and self._planner.shape == (n, 1) else 0
        self._passes += 1
        if self._plain_steps > 2 and self._plain_steps % LOOK:
            return  # there is nothing to learn from the hundredth of a kind
        if not plain:
            even = even and len({chunk.n_tokens for chunk in step.chunks}) == 1
            for chunk, start, new in zip(step.chunks, self._starts, sampled, strict=True):
                if chunk.draft:
                    self._judge(chunk, start, len(new) - 1 if isinstance(new, list) else 0)
        seconds += self._overhead + self._clock() - started
        reused, self._graphs_reused = self._graphs_reused, self._context.graphs_reused
        built = self._graphs_reused - reused < self._passes
        captured, self._built, self._passes = self._built and not built, built, 0
        self._learn_worth(step, sampled, seconds, built=built, captured=captured)
        self._planner.shape = (n, step.n_tokens // n) if even else (0, 0)
        if even:
            self.times.add(n, step.n_tokens // n, seconds, built=built, captured=captured)

    def _collect(
        self, mtp: MtpDrafter, step: Step, places: ListLike[list[int]], sampled: ListLike[Sampled]
    ) -> None:
        """Give the head the hidden rows of what was right. Waits for the device if there are any to give."""
        if step.n_tokens == 1:
            slot, [start] = step.chunks[0].sequence.slot, self._starts
            if slot is not None and slot < self._slots and mtp.wants(step.chunks[0].sequence, start + 1):
                mtp.collect(slot, start, self._context.hidden(1))
            return
        wanted = []
        for chunk, start, mine, new in zip(step.chunks, self._starts, places, sampled, strict=True):
            slot, right = chunk.sequence.slot, chunk.count + (len(new) - 1 if isinstance(new, list) else 0)
            if slot is not None and slot < self._slots and mtp.wants(chunk.sequence, start + right):
                wanted.append((slot, start, mine, right))
        if not wanted:
            return
        hidden = self._context.hidden(step.n_tokens)
        for slot, start, mine, right in wanted:
            together = mine[right - 1] - mine[0] == right - 1
            rows = hidden[mine[0] : mine[0] + right] if together else hidden[mine[:right]]
            mtp.collect(slot, start, rows)

    def _learn_worth(
        self, step: Step, sampled: ListLike[Sampled], seconds: float, *, built: bool, captured: bool
    ) -> None:
        """Book the whole step, drafting included, under who drafted, or as plain if its graph was there.

        What it takes once is no sign of what it will take: to read a prompt for the head; and to come to a
        graph that lasts, as those of a lone sequence do.
        """
        plain = all(chunk.n_tokens == 1 for chunk in step.chunks)
        if self._orders:
            kinds = {order.judged for order in self._orders.values()}
            self._drafting = next((kind for kind in ("mtp", "copy") if kind in kinds), "ngram")
        elif plain:
            self._drafting = ""
        if not all(chunk.samples for chunk in step.chunks):
            return
        if (worth := self._choice.worth) is None:
            return
        n = len(step.chunks)
        tokens = sum(len(new) for new in sampled if isinstance(new, list))
        if self._drafting:
            by_head = self._mtp if self._drafting == "mtp" else None
            if by_head is None or not by_head.read_a_prompt:
                seconds += self._proposing
            if by_head is not None and n == 1:
                once = self.times.building if built else self.times.capturing if captured else None
                seconds -= min(seconds / 2, once.value) if once is not None else 0.0
            worth.add(self._drafting, n, tokens, seconds)
        elif plain and not (built or captured):
            worth.add_plain(n, seconds)

    def abandon(self) -> None:
        """The step is over, computed or not: sequence ids that were to become copies do."""
        self._in_flight = False
        if self._copies:
            copies, self._copies = self._copies, []
            for source, target in copies:
                self.copy(source, target)

    def _judge(self, chunk: Chunk, start: int, accepted: int) -> None:
        sequence, drafted = chunk.sequence, len(chunk.draft)
        if accepted < drafted and sequence.slot is not None:
            kept = self._rollback.reject(chunk, start, accepted)
            if kept > start:  # what was right stays: to the scheduler it was the whole draft
                chunk.draft = chunk.draft[:accepted]
                if self.spans is not None and self.spans.length(sequence.slot) > kept:
                    self.spans.truncate(sequence.slot, kept)
            elif self._mtp is not None:
                self._mtp.ahead(sequence.slot, kept)
        order = self._orders.get(sequence)
        if order is not None:
            self.totals[order.drafter].add(drafted, accepted)
            sequence.drafts.add(drafted, accepted)
            if order.sure:
                self._choice.learn(sequence, order.sure[:drafted], accepted)

    # --- what becomes of sequences and ids -----------------------------------------------------------------

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        for drafter in (self._ngram, self._mtp):
            if drafter is not None:
                drafter.forget(sequence)
        self._choice.forget(sequence)
        self._orders.pop(sequence, None)
        self._n = max(0, self._n - 1)

    def empty(self, slot: int) -> None:
        """A slot was emptied."""
        self._rollback.forget(slot)
        self.remove(slot)

    def copy(self, source: int, target: int) -> None:
        """A sequence id becomes what another is; during a step, not until what that computes is known."""
        if self._mtp is None:
            return
        if self._in_flight:
            self._copies.append((source, target))
        else:
            self._mtp.copy(source, target)

    def save(self, sequence_id: int) -> SavedReading | None:
        """What the head has of an id that runs nothing; None where that is not known before the step ends."""
        if self._mtp is None or any(target == sequence_id for _, target in self._copies):
            return None
        return self._mtp.save(sequence_id)

    def restore(self, sequence_id: int, saved: SavedReading | None) -> None:
        """Give an id what was saved; without it the head begins anew there."""
        self.remove(sequence_id)
        if self._mtp is not None and saved is not None:
            self._mtp.restore(sequence_id, saved)

    def remove(self, sequence_id: int) -> None:
        """A sequence id holds nothing any more."""
        self._copies = [copy for copy in self._copies if copy[1] != sequence_id]
        if self._mtp is not None:
            self._mtp.remove(sequence_id)
