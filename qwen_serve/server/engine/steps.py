"""Runs the engine's steps. On a GPU the next step may be launched before the rows of the last one are
read."""

from collections.abc import Callable

from qwen_serve.llamacpp.errors import NoMemorySlot

from .batch import Batch
from .loading import Components
from .profile import StepProfile
from .request import Request
from .runner import Launched
from .verification import sample


class StepLoop:
    """Runs one step after the other: schedules, drafts, launches, samples, verifies and commits.

    While a step is computed, the host sends the tokens of the step before. The next step may be launched
    meanwhile: prompts, or decodes, which read on the device the tokens that the host does not know yet. So
    the device does not wait for the host between the two. If a sequence turns out to have ended in the first
    step, the second one still computes it, and drops the result. The sequence's slot is free for a third
    step, which the device computes after the second. Its last state includes the token that ended it.
    """

    def __init__(
        self,
        components: Components,
        profile: StepProfile,
        flush: Callable[[], None],
        relieve: Callable[[NoMemorySlot], None],
    ) -> None:
        """`flush` delivers the tokens of the last step. `relieve` is called if a step finds no free cells."""
        self._components, self._profile = components, profile
        self._scheduler, self._runner = components.scheduler, components.runner
        self._speculator, self._ends = components.speculator, components.vocab.eog_ids
        self._flush, self._relieve = flush, relieve
        self._ahead: Launched | None = None
        self._done = 0.0
        """Time at which the last step was done, by the clock of steps."""

    @property
    def ahead(self) -> bool:
        """Whether the next step is already being computed. Then nothing may change except that sequences are
        added."""
        return self._ahead is not None

    def step(self, *, last: bool = False) -> tuple[Batch, list[Request]] | None:
        """Run a step; return its batch and the requests with news, or None if there was none, for want of
        cells. With `last` the next step is not launched."""
        step, self._ahead = self._ahead or self._launch(), None
        if step is None:
            return None
        lap, batch = self._profile.lap, step.batch
        if batch.guesses is not None:
            batch.read_drafts()
            step.at = self._components.clock()
            lap("propose")
        self._runner.sample(step)
        if self._components.device_runs_alone:  # the event loop then runs while this thread waits
            self._flush()
            lap("flush")
            if not last:
                self._ahead = self._launch(behind=step)
        rows = self._runner.collect(step)
        self._profile.overlaps &= rows is None or self._ahead is not None
        sampled = sample(batch, rows, self._ends, one_by_one=self._ahead is not None or self._keeps_shape)
        lap("sample")
        done = self._components.clock()
        began = max(step.at, self._done)
        seconds = done - began
        scheduler = self._scheduler
        budget, policy = scheduler.prefill_budget, scheduler.waiting.policy
        if batch.prompt_tokens or budget.reading:
            budget.add(batch.prompt_tokens, began, None if rows is None else done)
        if rows is not None:
            self._done = done
        if batch.is_decode:
            policy.decoded(batch.n_tokens, seconds, budget.each)
        held = self._speculator.verify(batch, sampled, seconds)
        lap("verify")
        news = scheduler.commit(batch, sampled, held)
        lap("commit")
        self._profile.finish(batch)
        return batch, news

    def _launch(self, behind: Launched | None = None) -> Launched | None:
        """Launch the next step, if possible `behind` one that is being computed. None if that is not
        possible, or if there are no cells."""
        lap, scheduler, speculator = self._profile.lap, self._scheduler, self._speculator
        lap("receive")
        if behind and not (speculator.can_be_overtaken and self._runner.can_be_followed(behind)):
            return None
        batch = scheduler.schedule()
        lap("schedule")
        if behind:
            quiet = not batch.is_decode or speculator.is_quiet(len(batch.chunks))
            if not (batch.chunks and quiet and self._runner.can_follow(behind, batch)):
                return None
        # otherwise the tokens would wait for the step or for drafters
        if not self._components.device_runs_alone or speculator.catches_up(batch):
            self._flush()
            lap("flush")
        (speculator.propose_early if behind else speculator.propose)(batch)
        lap("propose")
        at = self._components.clock()
        try:
            step = self._runner.launch(batch, behind)
        except NoMemorySlot as error:
            speculator.abandon()
            if not behind:  # it will be met again, and handled
                self._relieve(error)
            return None
        step.at = at
        if not behind:
            self._profile.overlaps = self._components.device_runs_alone
        scheduler.launched(batch)
        lap("reserve")
        return step

    @property
    def _keeps_shape(self) -> bool:
        """Whether sequences are to compute one token each, so that steps are launched ahead again."""
        n = len(self._scheduler.running)
        return n > 1 and self._components.device_runs_alone and self._speculator.is_quiet(n)
