"""Speculative decoding as the engine sees it: drafts for a batch, the way back from wrong ones, lessons."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from .base import Draft, DraftRequest
from .controller import Always, Controller, Option, Step
from .dflash import DflashDrafter
from .health import DrafterHealth
from .hidden import HiddenDrafter
from .mtp import WIDEST, MtpDrafter
from .ngram import NgramDrafter
from .timer import StepTimer
from .times import StepTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Sequence as ListLike

    import numpy.typing as npt

    from qwen_serve.llamacpp import Context
    from qwen_serve.llamacpp.draft import DraftContext
    from qwen_serve.llamacpp.mtp import MtpContext
    from qwen_serve.server.engine.batch import Batch, Chunk
    from qwen_serve.server.engine.planning.spec import DraftSpec
    from qwen_serve.server.engine.sampling import SampleResult
    from qwen_serve.server.engine.sequence import Sequence
    from qwen_serve.server.engine.settings import EngineSettings
    from qwen_serve.server.engine.states import StateStore

    from .base import Drafter, DrafterState, DrafterStats
    from .controller import Plan
    from .times import StepTimesRecord

    Rows = npt.NDArray[Any]

FRUITLESS, SPARSE, QUIET = 8, 8, 32
"""Looks in a row that found nothing to draft, after which a text is looked at only every so many steps; and
steps for which nobody is asked at most where all rest. A look takes 30 to 50 us between two steps that empty
the processor's caches: 3 to 5% of a step of nano on a processor."""

COLLECT = 64
"""Steps before its next draft from which on hidden rows are kept for a drafter that reads them, which guesses
better with some text before its eyes. A rest must be twice as long for it to pay that none are kept, since to
change over takes a graph each time; to keep them took an H200 0.02 to 0.1 ms of a step of 3.6 for one
sequence, and with the rows of five layers about 0.7 of 4.7 for eight."""


@dataclass(slots=True)
class Proposal:
    """The drafts of the batch that is being computed."""

    health: DrafterHealth
    """Whose they are."""
    kinds: list[str]
    """By chunk; "" for one without a draft."""
    exceeds_snapshots: bool
    """Whether they are longer than what is taken back for nothing."""
    way_back: float
    """Seconds that it took to keep the way back and, later, to go it."""
    seconds: float = 0.0
    """Seconds that it took to make them."""


class Speculator:
    """Asks the drafters, keeps the way back open, and has the controller learn from what comes out.

    The engine's thread calls, step by step: `propose` before a batch is launched, then `verify` when its
    tokens are known, or `abandon` when it could not be computed. None of them raises what drafting did: an
    error costs drafts, and those who fail again and again are not asked for a while.
    """

    def __init__(
        self,
        context: Context,
        states: StateStore,
        drafters: ListLike[Drafter],
        controller: Controller,
        *,
        slots: int,
        most_rows: int,
        clock: Callable[[], float],
    ) -> None:
        """Sequences in the first `slots` draft, with at most `most_rows` rows in all."""
        self._context, self._states, self._controller = context, states, controller
        self._drafters = [DrafterHealth(drafter) for drafter in drafters]
        self.hidden_drafters = [drafter for drafter in drafters if isinstance(drafter, HiddenDrafter)]
        """Their states must go where the trunk's go."""
        self._readers = [
            (one, one.drafter) for one in self._drafters if isinstance(one.drafter, HiddenDrafter)
        ]
        self._slots, self._most_rows, self._clock = slots, most_rows, clock
        self._alive: set[Sequence] = set()
        """Sequences that were in a batch and have not ended."""
        self._n = 0
        """Sequences of the last batch."""
        self._proposal: Proposal | None = None
        """None where the batch has no drafts."""
        self._drafting = ""
        """The kind that was drafted last, as long as the consequences last."""
        self._timer = StepTimer(context, controller.times)
        self._quiet = 0
        """Steps for which nobody is asked, if they only decode for as many sequences."""
        self._is_quiet = False
        """Whether the batch is such a step."""
        self._waited = True
        """Whether somebody waited for the batch before: else the device may compute it first."""
        self._collects = bool(self.hidden_drafters)
        self._stats: Mapping[str, DrafterStats] = {}
        """As last published: a new object each time, which nobody writes to, since any thread may read it."""
        if self.hidden_drafters:
            self._keep(True)
        self._publish()

    # --- before a step -------------------------------------------------------------------------------------

    def catches_up(self, batch: Batch) -> bool:
        """Whether `propose` will have drafters read what was put off: a batch that only decodes may be
        drafted for, and others may write over it."""
        deferred = self._states.deferred
        return bool(deferred) and (not batch.prompt_tokens or deferred.spoiled_by(batch))

    def catch_up(self) -> None:
        """Have drafters read what was put off: nothing else is to be done."""
        self._states.deferred.clear_up()

    def propose(self, batch: Batch) -> None:
        """Add drafts to a decode batch, where they pay, and keep a way back."""
        if not self._drafters:
            return
        if not batch.prompt_tokens:
            self.catch_up()
        try:
            self._decide(batch)
        except Exception as error:  # none of the drafters' calls: nobody can be trusted
            self._fail(error)
            self._proposal = None
            batch.drop_drafts()
        if self.catches_up(batch):
            self.catch_up()

    def _fail(self, error: Exception) -> None:
        """Drafting failed, whoever's fault that is."""
        self._quiet, self._is_quiet = 0, False
        for health in self._drafters:
            health.begin_anew(error)
        self._publish()

    def _decide(self, batch: Batch) -> None:
        chunks = batch.chunks
        self._controller.now += 1
        for health in self._drafters:
            health.now = self._controller.now
        plain = batch.n_tokens == len(chunks) == self._n and not batch.prompt_tokens
        self._is_quiet = self._quiet > 0 and plain
        if self._is_quiet:
            self._quiet -= 1
            return
        started = self._clock()
        self._n, self._quiet = len(chunks), 0
        self._proposal = None
        if not self._alive.issuperset(sequences := [chunk.sequence for chunk in chunks]):
            self._alive.update(sequences)
            self._controller.retry_early()
        if self.hidden_drafters:
            self._collect_hidden()
        if batch.prompt_tokens:
            for health in self._drafters:  # a new text is looked at once, whatever became of the last
                health.fruitless = min(health.fruitless, FRUITLESS - 1)
        if not all(chunk.decodes for chunk in chunks):
            return
        if self._n <= self._slots and (requests := self._requests(chunks)):
            self._propose(batch, requests)
        if self._proposal is not None:
            self._proposal.seconds = self._clock() - started - self._proposal.way_back
        elif all(chunk.count == 1 for chunk in chunks):
            self._quiet = min([QUIET, *map(self._wait, self._drafters)])
            self._publish()  # `verify` has nothing to learn where nobody collects

    def _wait(self, health: DrafterHealth) -> int:
        """Steps until it is worth asking a drafter."""
        if self._n > min(health.drafter.most, self._slots):
            return QUIET
        if rest := self._cooldown(health, self._n):
            return rest - 1 - (COLLECT if rest > COLLECT else 0)  # it may read along before
        return SPARSE - 1 if health.drafter.instant and health.fruitless >= FRUITLESS else 0

    def _cooldown(self, health: DrafterHealth, n: int) -> int:
        """Steps for which a drafter does not draft for `n` sequences: it failed, or it does not pay."""
        now = self._controller.now
        return max(health.disabled.left(now), self._controller.cooldown_left(health.drafter, n))

    def _requests(self, chunks: list[Chunk]) -> list[DraftRequest]:
        """One for each chunk; none where no draft may have a token: the one after the last is sampled too."""
        requests = []
        for chunk in chunks:
            sequence, slot = chunk.sequence, chunk.slot
            limit = sequence.limit - len(sequence.tokens) - 1 if slot < self._slots else 0
            if (horizon := sequence.sampler.horizon) is not None:
                limit = min(limit, horizon - 1)
            requests.append(DraftRequest(sequence, slot, max(0, limit)))
        return requests if any(request.limit for request in requests) else []

    def _propose(self, batch: Batch, requests: list[DraftRequest]) -> None:
        n, slot = len(requests), requests[0].slot
        found: dict[str, list[Draft]] = {}
        options = [o for health in self._drafters if (o := self._option(health, requests, found))]
        if not options:
            return
        alone = n == 1
        step = Step(
            [chunk.count for chunk in batch.chunks],
            batch.draft_room,
            self._most_rows,
            rewinds=self._states.rewinds(slot) if alone else 0,
            keeps_graph=self._states.keeps_graph(slot) if alone else 0,
            shape=self._timer.shape,
        )
        if (plan := self._controller.choose(options, step)) is not None:
            self._carry_out(batch, plan, requests, found, exceeds_snapshots=max(plan.lengths) > step.rewinds)

    def _option(
        self, health: DrafterHealth, requests: list[DraftRequest], found: dict[str, list[Draft]]
    ) -> Option | None:
        """What a drafter may bring to this step; `found` gets what it brought already."""
        drafter, n = health.drafter, len(requests)
        if n > drafter.most or health.disabled.left(self._controller.now):
            return None
        if not (drafter.instant or all(request.sequence.generated for request in requests)):
            return None  # no first token waits for who has to read the prompt: 13 ms on an H200
        if not (allowed := self._controller.allowed(drafter, n)):
            return None
        if drafter.instant:
            health.fruitless += 1
            drafts = found[drafter.name] = self._ask(health, requests)
            kinds = [draft.kind if draft.kind in allowed and draft.tokens else "" for draft in drafts]
            option = Option(drafter, kinds, [len(draft.tokens) for draft in drafts])
        else:
            [kind] = allowed
            ready = [
                request.limit > 0 and health.call(False, drafter.can_draft, request) for request in requests
            ]
            health.stats.unready += self._collects and not any(ready)
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
        drafter, lengths = plan.drafter, plan.lengths
        health = next(one for one in self._drafters if one.drafter is drafter)
        if drafter.instant:
            drafts = found[drafter.name]
        else:
            asked = [
                DraftRequest(request.sequence, request.slot, length)
                for request, length in zip(requests, lengths, strict=True)
                if length
            ]
            answers = iter(self._ask(health, asked))
            drafts = [next(answers) if length else Draft() for length in lengths]
        for chunk, draft, length in zip(batch.chunks, drafts, lengths, strict=True):
            if tokens := chunk.sequence.sampler.validate(draft.tokens[:length]):
                batch.add_draft(chunk, tokens)
        if not any(chunk.draft for chunk in batch.chunks):
            return
        started = self._clock()
        try:
            self._states.guard(batch)
        except Exception as error:  # no way back: no drafts
            health.failed(error)
            batch.drop_drafts()
            return
        health.fruitless = 0
        kinds = [draft.kind if chunk.draft else "" for chunk, draft in zip(batch.chunks, drafts, strict=True)]
        self._proposal = Proposal(health, kinds, exceeds_snapshots, way_back=self._clock() - started)

    def _ask(self, health: DrafterHealth, requests: list[DraftRequest]) -> list[Draft]:
        """Its drafts; empty ones where it fails."""
        if (drafts := health.call(None, health.drafter.propose, requests)) is None:
            return [Draft() for _ in requests]
        health.succeeded()
        return drafts

    def _collect_hidden(self) -> None:
        """Have hidden rows kept, or not where those who read them will not draft for long."""
        n = max(1, len(self._alive))
        patience = 2 * COLLECT if self._collects else COLLECT
        collects = any(
            n <= health.drafter.most
            and self._cooldown(health, n) <= patience
            and (self._collects or self._controller.promises(health.drafter, n, self._most_rows))
            for health, _ in self._readers
        )
        if collects is not self._collects:
            self.catch_up()  # the next batch may leave nothing where rows are now
            self._collects = collects
            self._keep(collects)
            if not collects:
                for health, reader in self._readers:
                    health.call(None, reader.pause)

    def _keep(self, keep: bool) -> None:
        if any(not reader.layers for reader in self.hidden_drafters):
            self._context.keep_hidden(keep)
        for reader in self.hidden_drafters:
            if reader.layers:
                self._context.keep_layers(reader.layers, keep)

    # --- after a step --------------------------------------------------------------------------------------

    def verify(self, batch: Batch, sampled: ListLike[SampleResult], seconds: float) -> list[int]:
        """Take wrong drafts back, and learn: the tokens that each chunk's slot holds now.

        `seconds` is the time from the launch to the last token.
        """
        chunks = batch.chunks
        if not self._drafters:
            return [chunk.start + chunk.count for chunk in chunks]
        alone, self._waited = self._waited, batch.n_rows > 0
        if self._is_quiet and not self._collects:
            self._timer.skip()
            return [chunk.start + 1 for chunk in chunks]
        started = self._clock()
        if self._collects:
            for health, reader in self._readers:
                self._collect(health, reader, batch, sampled)
        if (proposal := self._proposal) is not None:
            held = [self._settle(proposal, *pair) for pair in zip(chunks, sampled, strict=True)]
        else:
            held = [chunk.start + chunk.count for chunk in chunks]
        try:
            self._learn(batch, sampled, seconds if alone else None, started)
        except Exception as error:
            self._fail(error)
        self._publish()
        return held

    def abandon(self) -> None:
        """The batch could not be computed."""
        self._timer.forget_graph()

    def _settle(self, proposal: Proposal, chunk: Chunk, new: SampleResult) -> int:
        """Of a draft what was right stays, if the way back allows; returns the tokens that the slot holds."""
        right, drafted = new.accepted, len(chunk.draft)
        if not drafted or right == drafted:
            return chunk.start + chunk.n_tokens
        slot, started = chunk.slot, self._clock()
        try:
            held = self._states.rollback(chunk, right)
        except Exception as error:  # the sequence reads its text again
            proposal.health.failed(error)
            self._states.free(slot)
            held = 0
        proposal.way_back += self._clock() - started
        if held < chunk.start + chunk.count + right:
            for health, reader in self._readers:
                self._states.deferred.in_turn(partial(health.call, None, reader.rolled_back, slot, held))
        return held

    def _collect(
        self, health: DrafterHealth, reader: HiddenDrafter, batch: Batch, sampled: ListLike[SampleResult]
    ) -> None:
        """Give a reader the hidden rows of what was right: those of prompts later, so that neither the
        rest of a prompt nor its first token waits; else now, when the device is waited for in any case."""
        if len(self._alive) > reader.most:  # who drafts for fewer than run reads nothing
            return
        wanted: list[tuple[int, int, Rows | Callable[[], Rows]]] = []
        on_host: list[int] = []
        try:
            reach = self._reach(reader, len(batch.chunks))
            for chunk, placement, new in zip(batch.chunks, batch.placements, sampled, strict=True):
                slot, right = chunk.sequence.slot, chunk.count + new.accepted
                if slot is None or slot >= self._slots:
                    continue
                left = len(chunk.sequence.tokens) - chunk.start - right
                if left >= reach:
                    continue
                skipped = max(0, right + left - reach)
                batch_indices = placement.batch_indices[skipped:right]
                rows = self._rows(reader, batch.n_tokens, batch_indices)
                wanted.append((slot, chunk.start + skipped, rows))
                if callable(rows):
                    on_host += batch_indices[:1]
        except Exception as error:
            health.begin_anew(error)
            return
        if wanted:
            read = partial(_read, health, reader, wanted)
            if batch.prompt_tokens:
                self._states.deferred.put_off(read, min(on_host, default=None))
            else:
                self._states.deferred.in_turn(read)

    def _reach(self, reader: HiddenDrafter, n: int) -> int:
        """How many of the newest tokens a drafter is given to read: few where it is on trial, since most
        trials fail. 512 take the MTP head 13 ms on an H200; a block drafter 0.6, but 37 without the patch
        layer-inputs-ring.
        """
        return min(COLLECT, reader.window) if self._controller.on_trial(reader.kinds, n) else reader.window

    def _rows(
        self, reader: HiddenDrafter, n_tokens: int, batch_indices: list[int]
    ) -> Rows | Callable[[], Rows]:
        """What a reader wants of the rows at `batch_indices` of the last batch, which has so many tokens:
        where they stay, or what gets them when they are computed."""
        context = self._context
        if not reader.layers:
            return lambda: context.hidden(n_tokens)[batch_indices]  # a copy: these rows are llama.cpp's
        if context.ring is None:
            return partial(context.layer_inputs, reader.layers, batch_indices)
        return context.layer_inputs(reader.layers, batch_indices)  # the next batch has others

    def _learn(
        self, batch: Batch, sampled: ListLike[SampleResult], seconds: float | None, started: float
    ) -> None:
        """`seconds` is None where they are those of the batch before, too."""
        chunks, n, proposal = batch.chunks, len(batch.chunks), self._proposal
        plain = proposal is None and batch.is_decode
        if proposal is not None:
            self._count(proposal, chunks, sampled)
        decodes = all(chunk.decodes for chunk in chunks)
        built, captured = self._learn_times(batch, seconds, decodes=decodes)
        if not decodes or seconds is None:
            return
        controller, spent = self._controller, seconds + self._clock() - started
        if proposal is not None:
            self._drafting = max(filter(None, proposal.kinds), key=proposal.kinds.count)
            if proposal.exceeds_snapshots:
                controller.add_way_back(proposal.way_back)
            drafter = proposal.health.drafter
            # what a draft takes once, to read a prompt, is no sign of what the next one will take
            expected = drafter.cost(n, max(len(chunk.draft) for chunk in chunks))
            spent += min(proposal.seconds, 2 * expected) if expected else proposal.seconds
            if n == 1 and not drafter.instant:  # nor is what it takes to come to a graph that lasts
                times = controller.times
                graph = times.building.value if built else times.capturing.value if captured else 0.0
                spent = max(spent / 2, spent - graph)
        elif plain:
            self._drafting = ""
        if self._drafting:
            tokens = sum(len(new.tokens) for new in sampled)
            controller.add(self._drafting, n, tokens, spent)
        elif plain and not (built or captured):
            controller.add_plain(n, spent)

    def _count(self, proposal: Proposal, chunks: ListLike[Chunk], sampled: ListLike[SampleResult]) -> None:
        health = proposal.health
        for chunk, new, kind in zip(chunks, sampled, proposal.kinds, strict=True):
            if kind:
                drafted, right = len(chunk.draft), new.accepted
                health.stats.add(drafted, right)
                chunk.sequence.drafts.add(drafted, right)
                self._controller.rates(health.drafter, kind).add(drafted, right)

    def _learn_times(self, batch: Batch, seconds: float | None, *, decodes: bool) -> tuple[bool, bool]:
        """Book a step's time under its shape; whether it built a graph, or had one captured."""
        lengths = {chunk.n_tokens for chunk in batch.chunks}
        even = decodes and len(lengths) == 1
        return self._timer.book((len(batch.chunks), lengths.pop()) if even else (0, 0), seconds)

    # --- warming up ----------------------------------------------------------------------------------------

    def measure(
        self,
        rehearse: Callable[[int, int], float],
        seconds: float,
        prompt: tuple[int, float] | None = None,
        known: StepTimesRecord | None = None,
    ) -> None:
        """Time drafts and, unless they are `known` from an earlier start (`step_times`), verifications of
        more and more rows, in about so many seconds (`StepTimer.rehearse`).

        `rehearse(n, rows)` computes a batch of `rows` made-up tokens with a row of logits each for each of
        `n` sequences, empties the slots again, and says how many seconds the batch took.
        """
        self._timer.start()
        if known is not None:
            self._controller.times.take(known)
        else:
            longest = 1 + max((health.drafter.depth for health in self._drafters), default=0)

            def fits(n: int, rows: int) -> bool:
                few = n == 1 or n <= self._slots
                return few and rows <= longest and n * rows <= self._most_rows

            self._timer.rehearse(rehearse, fits, seconds, self._clock, prompt)
        for health in self._drafters:
            health.call(None, health.drafter.measure)
        self._publish()

    def step_times(self) -> StepTimesRecord:
        """What is known of steps by now, for the next start."""
        return self._controller.times.dump()

    # --- what becomes of sequences -------------------------------------------------------------------------

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._alive.discard(sequence)
        for health in self._drafters:
            health.call(None, health.drafter.forget, sequence)

    def stats(self) -> Mapping[str, DrafterStats]:
        """By drafter, as of the last step; they do not change later. From any thread."""
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
        rests = n > min(health.drafter.most, self._slots) or self._controller.cooldown_left(health.drafter, n)
        return "resting" if rests else "active"


def _read(
    health: DrafterHealth,
    reader: HiddenDrafter,
    wanted: list[tuple[int, int, Rows | Callable[[], Rows]]],
) -> None:
    """Give it rows, from a position in a slot on; where some are lost, it begins anew."""
    try:
        for slot, start, rows in wanted:
            reader.collect(slot, start, rows() if callable(rows) else rows)
    except Exception as error:
        health.begin_anew(error)


def build_speculator(
    settings: EngineSettings,
    context: Context,
    head: MtpContext | None,
    states: StateStore,
    *,
    slots: int,
    most_rows: int,
    clock: Callable[[], float],
    draft: tuple[DraftContext, DraftSpec] | None = None,
) -> Speculator:
    """Drafters and controller as the settings want them; without a `head` or a draft model (`draft`) the text
    alone is drafted from.

    Slots below `slots` have what a way back takes; `most_rows` bounds a verification; the `clock` is what
    `verify`'s seconds were told by. The caller has `states` keep the `hidden_drafters` up to date.
    """
    drafters: list[Drafter] = []
    if settings.speculation in ("both", "ngram"):
        drafters.append(NgramDrafter(settings.draft_max, slots))
    if draft is not None:
        drafters.append(DflashDrafter(*draft, settings.draft_window, slots=settings.parallel, most=slots))
    if head is not None:
        drafters.append(
            MtpDrafter(
                head,
                settings.mtp_window,
                depth=settings.mtp_depth,
                slots=settings.parallel,
                span=max(settings.mtp_window + 1, head.n_ctx // settings.parallel),
                # where the host reads the rows, it computes them, too, and one that counts for nothing costs
                widest=WIDEST if head.samplers.active else 0,
            )
        )
    times = StepTimes()
    controller = Always(times) if settings.draft_always else Controller(times)
    rows = min(most_rows, context.n_batch)
    return Speculator(context, states, drafters, controller, slots=slots, most_rows=rows, clock=clock)
