"""The engine: one thread that schedules, decodes and postprocesses, and a door to it for the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from functools import partial
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from .errors import (
    EngineDead,
    EngineDraining,
    GenerationError,
    InvalidPrompt,
    NoMemorySlot,
    PromptTooLong,
    QueueFull,
)
from .generation import Generation
from .gguf import read_header
from .loading import decide, load, prefix_cache_for, speculator_for, warm_up
from .mailbox import Mailbox
from .memory import plan_memory
from .profile import StepProfile
from .runner import Runner
from .sampling import Sampler
from .scheduler import Scheduler, no_drafts
from .sequence import Sequence
from .stats import EngineStats
from .vocab import Vocab

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as ListLike

    from .profile import Kind
    from .sampling import SamplingParams
    from .scheduler import Sampled, Step
    from .sequence import FinishReason
    from .settings import EngineSettings

log = logging.getLogger(__name__)

IDLE_S = 0.25
"""Seconds without a request after which there is time for other things."""


class Engine:
    """Loads a model and serves generations from it. Construct, `start`, `submit`, `drain`, `close`.

    Raises ModelLoadError when the file is no good and DoesNotFit when memory is too small.
    """

    def __init__(self, settings: EngineSettings) -> None:
        settings = decide(settings)
        header = read_header(settings.model)
        self.plan = plan_memory(settings, header)
        self.settings = self.plan.settings
        """The settings with every choice made; a `prefill_budget` of 0 is the warm-up's to measure."""
        log.info("memory for %s:\n%s", settings.model, self.plan)
        self._loaded = load(self.plan)
        self._model, self._context = self._loaded.model, self._loaded.context
        self.vocab = Vocab(self._model, self.settings.tokenizer_cache)
        self.metadata = self._model.metadata()
        """The GGUF's scalar keys, as text."""
        self.description = self._model.description()
        self.n_params = self._model.n_params
        self.size_bytes = self._model.size_bytes
        """Bytes of all tensors in the file."""
        self.context_size = min(self._model.n_ctx_train, self._context.n_ctx)
        """Most tokens of one sequence, prompt and output together."""

        self._profile = StepProfile()
        self._speculator = speculator_for(self.settings, self._loaded)
        self._device_runs_alone = self.plan.leaves_the_host_alone
        self._runner = Runner(
            self._context,
            self.vocab.eog_ids,
            self._profile,
            self._speculator,
            device_runs_alone=self._device_runs_alone,
        )
        self._scheduler = Scheduler(
            slots=self.settings.parallel,
            batch_size=self._context.n_batch,
            prefill_budget=self.settings.prefill_budget or self._context.n_ubatch,
            cache=prefix_cache_for(self.plan, self._context, self.vocab, self._speculator),
            release=self._runner.forget,
            place=self._runner.place,
            mixed_steps=False,
            propose=no_drafts if self._speculator is None else self._speculator.propose,
        )
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._open: dict[Sequence, tuple[Generation, Mailbox]] = {}
        self._mailboxes: dict[asyncio.AbstractEventLoop, Mailbox] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._warm = threading.Event()
        self._error: str | None = None
        self._draining = False
        self._closing = False
        self._steps = self._prompt_tokens = self._generated_tokens = 0
        self._finished: Counter[str] = Counter()
        self._news: list[tuple[Sequence, list[int]]] = []
        """Tokens whose listeners have not been told yet."""

    # --- the event loop's side -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, which warms up and then serves; `ready` tells when."""
        self._thread.start()

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Block for at most `timeout` seconds; whether it is warm then. Raises EngineDead on failure."""
        self._warm.wait(timeout)
        if self._error:
            raise EngineDead(self._error)
        return self._warm.is_set()

    @property
    def ready(self) -> bool:
        """Warm, healthy, and taking requests."""
        return self._warm.is_set() and self._error is None and not self._draining

    def submit(
        self, prompt: ListLike[int], params: SamplingParams, max_tokens: int | None = None
    ) -> Generation:
        """Queue a request; call on the event loop that will listen.

        `max_tokens` is clamped to the room that the prompt leaves in the context; None means all of it.
        Raises ValueError for `max_tokens` below 1, InvalidPrompt, PromptTooLong, QueueFull, EngineDraining
        and EngineDead.
        """
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; it must be at least 1")
        self._check_prompt(prompt)
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._error:
                raise EngineDead(self._error)
            if self._draining:
                raise EngineDraining("the server is shutting down and takes no new requests")
            if len(self._open) >= self.settings.parallel + self.settings.max_queue:
                raise QueueFull(
                    f"{self.settings.parallel} requests run and {self.settings.max_queue} wait already; "
                    "try again later"
                )
            sampler = Sampler(params, self.vocab, prompt)
            room = self.context_size - len(prompt)
            sequence = Sequence(list(prompt), min(max_tokens or room, room), sampler)
            cancel = partial(self._inbox.put, partial(self._finish, sequence, "cancelled"))
            generation = Generation(len(prompt), sequence.timings, cancel, sequence.drafts)
            mailbox = self._mailbox(loop)
            self._open[sequence] = generation, mailbox
            self._inbox.put(partial(self._scheduler.add, sequence))
        return generation

    def _mailbox(self, loop: asyncio.AbstractEventLoop) -> Mailbox:
        if loop not in self._mailboxes:
            self._mailboxes[loop] = Mailbox(loop)
        return self._mailboxes[loop]

    def _check_prompt(self, prompt: ListLike[int]) -> None:
        if not prompt:
            raise InvalidPrompt("the prompt is empty; it must have at least one token")
        if len(prompt) >= self.context_size:
            raise PromptTooLong(len(prompt), self.context_size)
        ids = np.asarray(prompt)
        if not np.issubdtype(ids.dtype, np.integer) or ids.ndim != 1:
            raise InvalidPrompt("the prompt must be a list of token ids (integers)")
        outside = np.flatnonzero((ids < 0) | (ids >= self.vocab.size))
        if outside.size:
            i = int(outside[0])
            raise InvalidPrompt(
                f"token {i} of the prompt is {ids[i]}; ids run from 0 to {self.vocab.size - 1}"
            )

    def stats(self) -> EngineStats:
        """What the engine did so far and does now; safe from any thread."""
        running = 0 if self._error else len(self._scheduler.running)
        return EngineStats(
            running=running,
            waiting=max(0, len(self._open) - running),
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._scheduler.preemptions,
            kv_cells_used=self._scheduler.cells_used,
            kv_cells=self._scheduler.cells,
            prefix=self._scheduler.cache.stats(),
            readout_changes=self._runner.readout_changes,
            step_totals=self._profile.times(),
            drafts={} if self._speculator is None else self._speculator.stats(),
            finished=dict(self._finished),
        )

    async def drain(self) -> None:
        """Take nothing new and wait until everything in flight has ended."""
        self._draining = True
        while self._open:
            await asyncio.sleep(0.02)

    def close(self) -> None:
        """Stop the thread and free the model; what is in flight fails. Blocks for one step. Idempotent."""
        self._closing = True
        if self._thread.is_alive():
            self._inbox.put(lambda: None)  # wakes it
            self._thread.join()
        self._fail("the engine was closed")
        for mailbox in self._mailboxes.values():
            mailbox.close()
        self._loaded.close()

    # --- the engine's thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if n := warm_up(self.plan, self._context, self.vocab, self._runner, self._speculator):
                self._scheduler.pace(n)
            self._warm.set()
            while self._receive():
                self._step()
        except Exception as error:
            log.exception("the engine failed")
            self._fail(f"the engine failed: {error}")

    def _step(self) -> None:
        """Schedule, decode, sample. What the device does not have to wait for is done while it computes."""
        profile, started = self._profile, perf_counter()
        profile.lap("receive")
        step = self._scheduler.schedule()
        kind = _kind(step)
        profile.lap("schedule")
        self._runner.prepare(step)
        profile.lap("fill")
        if not self._device_runs_alone:  # the tokens would wait for the whole step; this thread does anyway
            self._deliver()
            profile.lap("post")
        try:
            self._runner.launch(step)
        except NoMemorySlot as error:
            if self._speculator is not None:
                self._speculator.abandon()
            self._relieve(error)
            return
        profile.lap("decode")
        self._scheduler.postprocess(step, self._context.sequences[: step.n_tokens])
        profile.lap("account")
        self._deliver()  # last: the event loop wakes up, and can run while this thread waits
        profile.lap("post")
        if self._speculator is not None and self._device_runs_alone:
            self._speculator.meanwhile(step)
        sampled = self._runner.collect(step)
        self._advance(step, sampled, started)
        profile.lap("finish")
        profile.finish(kind, step.n_rows, step.n_tokens)

    def _receive(self) -> bool:
        """Take in what the event loop sent, waiting for it when there is nothing to do; False to stop."""
        while not self._closing:
            if self._inbox.empty():
                if self._scheduler.running or self._scheduler.waiting:
                    return True
                self._deliver()
                self._idle()()
                self._profile.start()
            else:
                self._inbox.get()()
        return False

    def _idle(self) -> Callable[[], None]:
        """What comes next; when nothing does for a while, the prefix cache is tidied up meanwhile."""
        patience: float | None = IDLE_S
        while True:
            try:
                return self._inbox.get(timeout=patience)
            except Empty:
                patience = 0 if self._scheduler.cache.tidy() else None

    def _advance(self, step: Step, sampled: list[Sampled], started: float) -> None:
        """Append what was sampled, and end what is complete. Whoever goes on is told later, by `_deliver`."""
        self._steps += 1
        now = perf_counter()
        for chunk, tokens in zip(step.chunks, sampled, strict=True):
            sequence = chunk.sequence
            if chunk.draft:
                self._scheduler.settle(chunk, len(tokens) - 1 if isinstance(tokens, list) else 0)
            if chunk.is_prompt:
                self._prompt_tokens += chunk.count
                sequence.timings.started = sequence.timings.started or started
            if tokens is None:
                continue
            if isinstance(tokens, Exception):
                log.error("a sequence failed in its sampler", exc_info=tokens)
                self._finish(sequence, GenerationError(f"sampling failed: {tokens}"))
                continue
            sequence.timings.first_token = sequence.timings.first_token or now
            new, done = self._cut(sequence, tokens)
            sequence.tokens += new
            self._generated_tokens += len(new)
            if done:
                self._finish(sequence, done, new)
            else:
                self._news.append((sequence, new))

    def _deliver(self) -> None:
        """Tell the listeners what their sequences have gained."""
        news, self._news = self._news, []
        for sequence, tokens in news:
            if (entry := self._open.get(sequence)) is not None:  # else it was cancelled meanwhile
                generation, mailbox = entry
                generation.cached_tokens = sequence.reused or 0
                mailbox.put(generation, tokens, None)
        self._post()

    def _cut(self, sequence: Sequence, tokens: list[int]) -> tuple[list[int], FinishReason | None]:
        """The part of `tokens` before the end of the answer, and the reason to end, if there is one."""
        room = sequence.limit - len(sequence.tokens)
        if len(tokens) < room and self.vocab.eog_ids.isdisjoint(tokens):
            return tokens, None
        new: list[int] = []
        for token in tokens:
            if self.vocab.is_eog(token):
                return new, "stop"
            new.append(token)
            if len(new) == room:
                return new, "length"
        return new, None

    def _finish(
        self, sequence: Sequence, done: FinishReason | Exception, tokens: list[int] | None = None
    ) -> None:
        """End a sequence: free its place, tell its listener. Nothing happens when it has ended before."""
        entry = self._open.get(sequence)
        if entry is None:
            return
        self._scheduler.remove(sequence, failed=isinstance(done, Exception))
        if self._speculator is not None:
            self._speculator.forget(sequence)
        sequence.sampler.close()
        sequence.timings.finished = perf_counter()
        self._finished["error" if isinstance(done, Exception) else done] += 1
        generation, mailbox = entry
        generation.cached_tokens = sequence.reused or 0
        mailbox.put(generation, tokens or [], done)
        with self._lock:  # last: `drain` waits for all of this, and `_fail` tells of what fails above
            del self._open[sequence]

    def _relieve(self, error: NoMemorySlot) -> None:
        """llama.cpp found no cells where the scheduler counted some: run fewer, and say so."""
        scheduler = self._scheduler
        log.error(
            "%s, though only %d of %d are counted as used", error, scheduler.cells_used, scheduler.cells
        )
        if len(scheduler.running) > 1:
            scheduler.preempt_youngest()
        else:
            self._finish(scheduler.running[0], GenerationError(str(error)))

    def _post(self) -> None:
        """Send the step's results off; whoever listened on a loop that is closed is cancelled."""
        for loop, mailbox in list(self._mailboxes.items()):
            if not mailbox.post():
                with self._lock:
                    orphans = [sequence for sequence, (_, box) in self._open.items() if box is mailbox]
                    if not orphans:
                        self._mailboxes.pop(loop).close()
                for sequence in orphans:  # not now: they may be in the step that is being computed
                    self._inbox.put(partial(self._finish, sequence, "cancelled"))

    def _fail(self, message: str) -> None:
        """End everything in flight with `message`, and refuse whatever comes."""
        self._deliver()
        with self._lock:
            self._error = self._error or message
            left, self._open = self._open, {}
        for sequence, (generation, mailbox) in left.items():
            sequence.sampler.close()
            sequence.timings.finished = perf_counter()
            self._finished["error"] += 1
            mailbox.put(generation, [], GenerationError(message))
        self._post()
        self._warm.set()  # nobody needs to wait any longer


def _kind(step: Step) -> Kind:
    """What to book a step under, before it is accounted for."""
    if step.is_decode:
        return "decode"
    if not all(chunk.sequence.decoding for chunk in step.chunks):
        return "prefill"
    return "verify"
