"""Takes the engine's steps. On a GPU the next one may be launched before the last one's rows are read."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from qwen_serve.llamacpp.errors import NoMemorySlot

from .profile import kind_of
from .sampling import sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from .batch import Batch
    from .loading import Components
    from .profile import StepProfile
    from .runner import Launched
    from .scheduler import Output


@dataclass(frozen=True, slots=True)
class Arrival:
    """Adds a request, which may happen while a step is computed ahead."""

    add: Callable[[], None]

    def __call__(self) -> None:
        self.add()


class Steps:
    """Schedules, drafts, launches, samples, verifies and commits, one step after the other.

    While a step is computed, the host sends the tokens of the one before. If nothing else is to do than the
    same step again, that is launched, too, and reads its tokens on the device: the device then goes from one
    to the next without waiting for the host. A sequence that turns out to have ended is part of one such
    step too many. It keeps its slot until that is over, and its last state includes the token that ended it.
    """

    def __init__(
        self,
        components: Components,
        profile: StepProfile,
        flush: Callable[[], None],
        relieve: Callable[[NoMemorySlot], None],
    ) -> None:
        """`flush` delivers the tokens of the last step, and `relieve` is called if there are no cells for a
        step."""
        self._components, self._profile = components, profile
        self._scheduler, self._runner = components.scheduler, components.runner
        self._speculator, self._ends = components.speculator, components.vocab.eog_ids
        self._flush, self._relieve = flush, relieve
        self._ahead: Launched | None = None
        self._done = 0.0
        """When the last step was done, by the clock of steps."""

    @property
    def ahead(self) -> bool:
        """Whether a step is being computed. Then sequences may be added, and nothing else may change."""
        return self._ahead is not None

    def step(self, *, last: bool = False) -> tuple[Batch, list[Output]] | None:
        """Take a step; return its batch and its results, or None if there were no cells for it. After a
        `last` step nothing is being computed."""
        step, self._ahead = self._ahead or self._launch(), None
        if step is None:
            return None
        lap, batch = self._profile.lap, step.batch
        if self._components.device_runs_alone:  # so that the event loop runs while this thread waits
            self._flush()
            lap("flush")
            if not last:
                self._ahead = self._launch_next(step)
        rows = self._runner.collect(step)
        sampled = sample(batch, rows, self._ends)
        lap("sample")
        done = self._components.clock()
        began = max(step.at, self._done)
        seconds = done - began
        self._scheduler.prefill_budget.add(batch.prompt_tokens, began, None if rows is None else done)
        if rows is not None:
            self._done = done
        if batch.is_decode:
            self._scheduler.decoded(batch, seconds)
        if self._ahead is not None and any(new.recompute for new in sampled):
            self._components.context.wait()  # logits are no use: all that run begin anew
            self._ahead = None
        again = self._ahead is not None and self._ahead.batch is batch
        held = self._speculator.verify(batch, sampled, seconds)
        lap("verify")
        outputs = self._scheduler.commit(batch, sampled, held, again=again)
        lap("commit")
        self._profile.finish(kind_of(batch), batch.n_rows, batch.n_tokens)
        return batch, outputs

    def _launch(self) -> Launched | None:
        """Launch the next step; None if there are no cells for it."""
        lap, scheduler, speculator = self._profile.lap, self._scheduler, self._speculator
        lap("receive")
        batch = scheduler.schedule()
        lap("schedule")
        # else tokens wait for the step or the drafters
        if not self._components.device_runs_alone or speculator.catches_up(batch):
            self._flush()
            lap("flush")
        speculator.propose(batch)
        lap("propose")
        at = self._components.clock()
        try:
            step = self._runner.launch(batch)
        except NoMemorySlot as error:
            speculator.abandon()
            self._relieve(error)
            return None
        step.at = at
        scheduler.reserve(batch)
        lap("reserve")
        for chunk in batch.chunks:
            if chunk.samples:
                with suppress(Exception):  # `sample` meets the same exception and handles it
                    chunk.sequence.sampler.prepare(chunk.draft)
        return step

    def _launch_next(self, step: Launched) -> Launched | None:
        """Launch the same step again behind one that is being computed, or prompts, if nothing speaks against
        it."""
        batch, runner, speculator = step.batch, self._runner, self._speculator
        if again := runner.can_follow(step) and speculator.is_quiet and self._scheduler.follows(batch):
            following = batch
            speculator.propose(batch)
        else:
            if step.outputs is None or not (batch.may_be_read_late and speculator.can_be_overtaken):
                return None
            prompts = self._scheduler.prompts_behind(batch, partial(runner.can_precede, step))
            if prompts is None:
                return None
            following = prompts
            speculator.propose_early(prompts)
        self._profile.lap("propose")
        at = self._components.clock()
        try:
            launched = runner.launch(following, reads_next=again)
        except NoMemorySlot:  # the step that is not ahead meets it, too
            speculator.abandon()
            return None
        launched.at = at
        self._scheduler.reserve(following)
        self._profile.lap("reserve")
        return launched
