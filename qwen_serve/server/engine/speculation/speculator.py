"""Speculative decoding for the engine: drafts for a batch, rollback of wrong ones, updates of the policy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qwen_serve.server.engine.batch import UNREAD

from .base import Draft, DraftRequest
from .health import DrafterHealth
from .hidden_rows import COLLECT, HiddenRows
from .policy import Option, Policy, Step
from .proposal import Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from qwen_serve.llamacpp import Context
    from qwen_serve.server.engine.batch import Batch, Chunk
    from qwen_serve.server.engine.request import Request
    from qwen_serve.server.engine.states import StateStore
    from qwen_serve.server.engine.verification import SampleResult

    from .base import Drafter, DrafterState, DrafterStats
    from .policy import Plan
    from .times import StepTimesRecord

    Rows = npt.NDArray[Any]

QUIET, SPARSE = 128, 8
"""Maximum steps for which no drafter is asked, if none may draft, and if a text has nothing to copy. Asking
takes a considerable part of a short step."""


CAPTURED = 2
"""Steps of a shape after which one takes its usual time."""


class Speculator:
    """Asks the drafters, rolls wrong drafts back, and updates the policy with the results.

    In each step the engine's thread calls `propose` before the batch is launched, and `verify` when its
    tokens are known, or `abandon` if it could not be computed. None of them raises an exception of drafting:
    an error costs drafts, and a drafter that fails repeatedly is not asked for a while.
    """

    def __init__(
        self,
        context: Context,
        states: StateStore,
        drafters: Sequence[Drafter],
        policy: Policy,
        *,
        slots: int,
        most_rows: int,
        clock: Callable[[], float],
    ) -> None:
        """Sequences in the first `slots` draft, with at most `most_rows` rows in all."""
        self._context, self._states, self._policy = context, states, policy
        self._drafters = [DrafterHealth(drafter) for drafter in drafters]
        self._slots, self._most_rows, self._clock = slots, most_rows, clock
        self._alive: set[Request] = set()
        """Sequences that were in a batch and have not ended."""
        self._n = 0
        """Sequences of the last batch."""
        self._proposal: Proposal | None = None
        """None if the batch has no drafts."""
        self._drafting = ""
        """The kind of the last drafts, until a plain decode step follows."""
        self._hidden = HiddenRows(context, states, self._drafters, policy, slots)
        self.hidden_drafters = self._hidden.drafters
        """Their states must be copied, freed and saved with the trunk's."""
        self._shape = (0, 0)
        """Sequences of the last step and rows of all of them, if it decoded."""
        self._alike = 0
        """Steps before it of the same shape. The first of a shape may build a graph, and the second may have
        it captured."""
        self._behind = 0
        """Sequences of the last step, if it was a plain one that nothing of drafts has slowed down."""
        self._overtaken = False
        """Whether the next batch was proposed before the last one is verified."""
        self._quiet = 0
        """Further steps in which no drafter is asked, as long as they only decode and have the same number of
        sequences."""
        self._is_quiet = False
        """Whether the batch is such a step."""
        self._stats: Mapping[str, DrafterStats] = {}
        """The last published statistics. Any thread may read them, so each update is a new object."""
        self._publish()

    # --- before a step -------------------------------------------------------------------------------------

    def is_quiet(self, n: int) -> bool:
        """Whether nothing is drafted in this step, which `can_be_overtaken`, nor in the next one if that
        decodes `n` sequences."""
        if self._proposal is not None:
            return False
        same = n == self._n and self._is_quiet and self._quiet > 0
        return same or all(n > health.drafter.most for health in self._drafters)

    @property
    def can_be_overtaken(self) -> bool:
        """Whether the next batch may be proposed before this one, which has no drafts, is verified."""
        return not self._drafters or not (self._hidden.collects or self._states.deferred)

    def propose_early(self, batch: Batch) -> None:
        """`propose` for a batch that is launched before the last step is verified. Nothing is learned from
        that step then."""
        self._overtaken = bool(self._drafters)
        self.propose(batch)

    def catches_up(self, batch: Batch) -> bool:
        """Whether `propose` will run deferred reads: before a decode batch, which may get drafts, and before
        a batch that would overwrite their rows."""
        deferred = self._states.deferred
        return bool(deferred) and (not batch.prompt_tokens or deferred.spoiled_by(batch))

    def catch_up(self) -> None:
        """Run deferred reads."""
        self._states.deferred.clear_up()

    def propose(self, batch: Batch) -> None:
        """Add drafts to a decode batch if they pay, and prepare their rollback."""
        if not self._drafters:
            return
        if not batch.prompt_tokens:
            self.catch_up()
        try:
            self._decide(batch)
        except Exception as error:  # not of a single drafter's call, so any of them may have wrong states
            self._fail(error)
            self._proposal = None
            batch.drop_drafts()
        if self.catches_up(batch):
            self.catch_up()

    def _fail(self, error: Exception) -> None:
        """Restart all drafters after an error, since it is unknown which of them caused it."""
        self._quiet, self._is_quiet = 0, False
        for health in self._drafters:
            health.begin_anew(error)
        self._publish()

    def _decide(self, batch: Batch) -> None:
        chunks = batch.chunks
        self._policy.now += 1
        for health in self._drafters:
            health.now = self._policy.now
        plain = batch.n_tokens == len(chunks) == self._n and not batch.prompt_tokens
        self._is_quiet = self._quiet > 0 and plain
        if self._is_quiet:
            self._quiet -= 1
            return
        self._n, self._quiet, self._proposal = len(chunks), 0, None
        if not self._alive.issuperset(sequences := [chunk.sequence for chunk in chunks]):
            self._alive.update(sequences)
            self._policy.request_begins()
        self._choose_rows()
        if batch.prompt_tokens:
            for health in self._drafters:  # a new text is searched without delay
                health.fruitless = 0
        if not all(chunk.decodes for chunk in chunks):
            return
        if self._n <= self._slots and (requests := self._requests(chunks)):
            self._propose(batch, requests)
        if self._proposal is None and all(chunk.count == 1 for chunk in chunks):
            self._quiet = min(QUIET, *map(self._wait, self._drafters))
            self._choose_rows()
            self._publish()  # `verify` does not publish in quiet steps without hidden rows

    def _choose_rows(self) -> None:
        if self.hidden_drafters:
            self._hidden.choose(max(1, len(self._alive)), self._cooldown)

    def _wait(self, health: DrafterHealth) -> int:
        """Steps until it is worth asking a drafter."""
        if self._n > min(health.drafter.most, self._slots):
            return QUIET
        if left := self._cooldown(health, self._n):
            return left - 1 - (COLLECT if left > COLLECT else 0)  # it may collect rows before that
        return max(0, min(SPARSE, health.fruitless - SPARSE))

    def _cooldown(self, health: DrafterHealth, n: int) -> int:
        """Steps left in which a drafter does not draft for `n` sequences, since it failed or did not pay."""
        return max(health.paused, self._policy.cooldown(health.drafter, n))

    def _requests(self, chunks: list[Chunk]) -> list[DraftRequest]:
        """One request for each chunk; empty if no draft may have a token, as a sampled one always follows."""
        requests = []
        for chunk in chunks:
            sequence, slot = chunk.sequence, chunk.slot
            limit = sequence.limit - len(sequence.tokens) - 1 if slot < self._slots else 0
            if (horizon := sequence.sampler.horizon) is not None:
                limit = min(limit, horizon - 1)
            requests.append(
                DraftRequest(sequence, slot, max(0, min(limit, self._states.longest_draft(chunk))))
            )
        return requests if any(request.limit for request in requests) else []

    def _propose(self, batch: Batch, requests: list[DraftRequest]) -> None:
        found: dict[str, list[Draft]] = {}
        options = [o for health in self._drafters if (o := self._option(health, requests, found))]
        if not options:
            return
        step = Step(
            [chunk.count for chunk in batch.chunks],
            batch.draft_room,
            self._most_rows,
            owners=[request.sequence for request in requests],
            rewinds=self._states.rewinds(requests[0].slot, alone=len(requests) == 1),
            shape=self._shape,
        )
        if (plan := self._policy.choose(options, step)) is not None:
            self._carry_out(batch, plan, requests, found, exceeds_snapshots=max(plan.lengths) > step.rewinds)

    def _option(
        self, health: DrafterHealth, requests: list[DraftRequest], found: dict[str, list[Draft]]
    ) -> Option | None:
        """What a drafter may draft in this step; an instant drafter's drafts go to `found`."""
        drafter, n = health.drafter, len(requests)
        if n > drafter.most or health.paused:
            return None
        if not (drafter.instant or all(request.sequence.generated for request in requests)):
            return None  # a first token must not wait for a drafter that has to read the prompt
        if not (allowed := self._policy.allowed(drafter, n)):
            return None
        if drafter.instant:
            health.fruitless += 1
            drafts = found[drafter.name] = health.propose(requests)
            kinds = [draft.kind if draft.kind in allowed and draft.tokens else "" for draft in drafts]
            option = Option(drafter, kinds, [len(draft.tokens) for draft in drafts])
        else:
            [kind] = allowed
            ready = [
                request.limit > 0 and health.call(False, drafter.can_draft, request) for request in requests
            ]
            health.stats.unready += self._hidden.collects and not any(ready)
            kinds = [kind if is_ready else "" for is_ready in ready]
            option = Option(drafter, kinds, [min(request.limit, drafter.depth) for request in requests])
        return option if any(option.kinds) else None

    def _carry_out(
        self,
        batch: Batch,
        plan: Plan,
        requests: list[DraftRequest],
        found: dict[str, list[Draft]],
        *,
        exceeds_snapshots: bool,
    ) -> None:
        health = next(one for one in self._drafters if one.drafter is plan.drafter)
        if (drafts := found.get(plan.drafter.name)) is None:
            asked = [
                DraftRequest(request.sequence, request.slot, length)
                for request, length in zip(requests, plan.lengths, strict=True)
                if length
            ]
            answers = iter(self._begin(batch, health, asked))
            kind = min(plan.drafter.kinds)
            drafts = [Draft(next(answers), kind) if length else Draft() for length in plan.lengths]
        for chunk, draft, length in zip(batch.chunks, drafts, plan.lengths, strict=True):
            tokens = draft.tokens[:length]
            if tokens := tokens if batch.guesses else chunk.sequence.sampler.validate(tokens):
                batch.add_draft(chunk, tokens)
        if not any(chunk.draft for chunk in batch.chunks):
            return
        started = self._clock()
        try:
            self._states.checkpoint(batch)
        except Exception as error:  # without a checkpoint drafts could not be rolled back
            health.failed(error)
            batch.drop_drafts()
            return
        health.fruitless = 0
        kinds = [draft.kind if chunk.draft else "" for chunk, draft in zip(batch.chunks, drafts, strict=True)]
        self._proposal = Proposal(health, plan, kinds, exceeds_snapshots, self._clock() - started)

    def _begin(self, batch: Batch, health: DrafterHealth, requests: list[DraftRequest]) -> list[list[int]]:
        """The tokens of drafts of a drafter that is not instant. If they need not be known before they are
        verified, they are UNREAD: the batch reads its `guesses` later."""
        guesses = health.begin(requests)
        if guesses.context is None or not all(one.sequence.sampler.takes_any for one in requests):
            return guesses.read()

        batch.guesses = guesses
        drafted = zip(requests, guesses.rows, strict=True)
        return [[UNREAD] * min(one.limit, len(rows)) for one, rows in drafted]

    # --- after a step --------------------------------------------------------------------------------------

    def verify(self, batch: Batch, sampled: Sequence[SampleResult], seconds: float) -> list[int]:
        """Roll wrong drafts back and update the policy; return the tokens that each chunk's slot holds now.

        `seconds` is the time since the last token of the step before.
        """
        chunks = batch.chunks
        if not self._drafters:
            return [chunk.start + chunk.count for chunk in chunks]
        before, self._behind = self._behind, 0
        if self._overtaken or (self._is_quiet and not self._hidden.collects):
            self._overtaken = False
            n = self._behind = len(chunks) if batch.is_decode else 0
            self._shape, self._alike = (n, n), 0
            if before == n > 0:
                self._policy.times.took(n, "", 0, seconds, self._policy.times.of(n, n))
            return [chunk.start + chunk.count for chunk in chunks]
        if self._hidden.collects:
            self._hidden.collect(batch, sampled, len(self._alive))
        if self._proposal is not None:
            held = [self._roll_back(self._proposal, *pair) for pair in zip(chunks, sampled, strict=True)]
        else:
            held = [chunk.start + chunk.count for chunk in chunks]
        try:
            self._learn(batch, sampled, seconds)
        except Exception as error:
            self._fail(error)
        self._publish()
        return held

    def abandon(self) -> None:
        """Discard the proposal for a batch that could not be computed; llama.cpp may have no graph now."""
        self._shape = (0, 0)

    def _roll_back(self, proposal: Proposal, chunk: Chunk, new: SampleResult) -> int:
        """Keep the accepted part of a draft if rollback allows; return the tokens that the slot holds."""
        right, drafted = new.accepted, len(chunk.draft)
        if not drafted or right == drafted:
            return chunk.start + chunk.n_tokens
        slot, started = chunk.slot, self._clock()
        try:
            held = self._states.rollback(chunk, right)
        except Exception as error:  # the sequence computes its tokens again
            proposal.health.failed(error)
            self._states.free(slot)
            held = 0
        proposal.rollback += self._clock() - started
        if held < chunk.start + chunk.count + right:
            self._hidden.rolled_back(slot, held)
        return held

    def _learn(self, batch: Batch, sampled: Sequence[SampleResult], seconds: float) -> None:
        chunks, n, proposal, policy = batch.chunks, len(batch.chunks), self._proposal, self._policy
        decodes = all(chunk.decodes for chunk in chunks)
        before, self._shape = self._shape, (n, batch.n_tokens) if decodes else (0, 0)
        self._alike = self._alike + 1 if self._shape == before else 0
        timed = decodes and before != (0, 0)  # behind a prompt the time includes the prompt's
        if proposal is not None:
            drafter, plan = proposal.health.drafter, proposal.plan
            for chunk, new, kind in zip(chunks, sampled, proposal.kinds, strict=True):
                if kind:
                    proposal.health.stats.add(drafted := len(chunk.draft), new.accepted)
                    chunk.sequence.drafts.add(drafted, new.accepted)
                    policy.verified(drafter, kind, chunk.sequence, drafted, new.accepted)
            if proposal.exceeds_snapshots:
                policy.rollback.add(proposal.rollback)
            self._drafting = max(filter(None, proposal.kinds), key=proposal.kinds.count)
            policy.changes.add(float(self._shape != before))
            steady, as_planned = self._alike >= CAPTURED, plan.lengths == [len(one.draft) for one in chunks]
            if timed and as_planned and (steady or drafter.instant):
                pure = seconds - proposal.rollback - (0.0 if steady else policy.times.known.change)
                policy.times.took(n, drafter.name, plan.depth, pure, plan.seconds)
        elif batch.is_decode:
            self._drafting = ""
        if timed and self._drafting:
            tokens = sum(len(new.tokens) for new in sampled)
            policy.spent(self._drafting, n, tokens, seconds, proposal.plan if proposal else None)
        for kind in self._hidden.kinds(n) if timed and not self._drafting else ():
            policy.prepared(kind, n, seconds)

    # --- warming up ----------------------------------------------------------------------------------------

    def measure(
        self,
        rehearse: Callable[[int, int], float],
        pace: Callable[[int], float | None],
        seconds: float,
        prompt: tuple[int, float] | None = None,
        known: StepTimesRecord | None = None,
    ) -> None:
        """Time drafts, and verifications of more and more rows for about `seconds` (`StepTimes.rehearse`).
        Times of verifications that are `known` from an earlier start (`step_times`) are not measured.

        `rehearse(n, rows)` computes a batch with `rows` arbitrary tokens of each of `n` sequences, a row of
        logits each, empties the slots again, and returns the seconds that the batch took. `pace(n)`: see
        there.
        """
        if known is not None:
            self._policy.times.take(known)
        else:
            longest = 1 + max((health.drafter.depth for health in self._drafters), default=0)

            def fits(n: int, rows: int) -> bool:
                few = n == 1 or n <= self._slots
                return few and rows <= longest and n * rows <= self._most_rows

            self._policy.times.rehearse(rehearse, pace, fits, seconds, self._clock, prompt)
        for health in self._drafters:
            health.call(None, health.drafter.measure)
        self._publish()

    def step_times(self) -> StepTimesRecord:
        """The times that were measured at the start, for the next one."""
        return self._policy.times.known

    def told(self) -> str:
        """What decides about drafts, for the log: times and budgets."""
        costs = {one.name: one.costs for one in self.hidden_drafters}
        return f"{self._policy}; seconds of a first and a further token {costs}"

    # --- ended sequences and statistics --------------------------------------------------------------------

    def forget(self, sequence: Request) -> None:
        """Drop everything about a sequence that ended."""
        self._alive.discard(sequence)
        self._policy.forget(sequence)
        for health in self._drafters:
            health.call(None, health.drafter.forget, sequence)

    def stats(self) -> Mapping[str, DrafterStats]:
        """Statistics by drafter as of the last step; they do not change later. From any thread."""
        return self._stats

    def _publish(self) -> None:
        self._stats = {
            one.drafter.name: replace(
                one.stats, failed=one.stats.failed + one.lost_states, state=self._state(one)
            )
            for one in self._drafters
        }

    def _state(self, health: DrafterHealth) -> DrafterState:
        if not health.works:
            return "failed"
        n = max(1, self._n)
        cools = n > min(health.drafter.most, self._slots) or self._policy.cooldown(health.drafter, n)
        return "cooldown" if cools else "active"
