"""The engine: one thread schedules, decodes and verifies; event loops submit requests to it."""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import NamedTuple, TypeVar

from qwen_serve.llamacpp.errors import NoMemorySlot

from .adapters import salt_with
from .admission import AdmissionControl
from .errors import EngineDead, GenerationError, InvalidPrompt, PromptTooLong, RequestFault
from .loading import build_engine, resolve_settings
from .outputs import Generation, OutputQueue
from .pictures import Picture
from .planning.fit import plan_memory
from .planning.spec import read_checked
from .profile import StartProfile, StepProfile
from .prompts import checked_ids, with_pictures
from .request import FinishReason, GenerateRequest, Prompt, Request, SchedulingParams
from .sampling import DrySamplers, Logprobs, Sampler
from .settings import EngineSettings
from .stats import EngineStats, ImageStats
from .steps import StepLoop

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Message(NamedTuple):
    """What the engine's thread does between two steps."""

    act: Callable[[], None]
    sequence: Request | None = None
    """The request that fails if this raises an exception."""
    overlaps: bool = False
    """Whether the next step may be computed meanwhile: this adds a request, or only wakes."""


class Engine:
    """Loads a model and serves generations from it. Construct, `start`, `submit`, `close`.

    Raises ModelLoadError when the file cannot be loaded and DoesNotFit when memory is too small.
    """

    def __init__(self, settings: EngineSettings) -> None:
        stages = StartProfile()
        settings = resolve_settings(settings)
        self.plan = plan_memory(settings, read_checked(settings.model))
        self.settings = self.plan.settings
        """The settings with all defaults resolved; a `prefill_budget` of 0 is measured."""
        log.info("memory for %s:\n%s", settings.model, self.plan)
        stages.done("plan")
        self._profile = StepProfile()
        self.components = components = build_engine(self.plan, self._profile, stages)
        self._scheduler, self._runner = components.scheduler, components.runner
        self._speculator = components.speculator
        self.vocab = components.vocab
        self.metadata = components.model.metadata()
        """The GGUF's scalar keys, as text."""
        self.description = components.model.description()
        self.n_params, self.size_bytes = components.model.n_params, components.model.size_bytes
        """`size_bytes` counts all tensors in the file."""
        self.adapters = self.plan.spec.adapters
        """The loaded LoRA adapters, by number."""
        self.context_size = min(components.model.n_ctx_train, components.context.n_ctx_seq)
        """Maximum tokens of one sequence, prompt and output together."""
        self.encoder = components.encoder
        """Encodes pictures; None if the model has no vision part."""
        self.grammars = components.grammars
        """Compiles the grammars that constrain answers."""
        self.dries = DrySamplers(components.model, self.context_size)
        """Makes requests' DRY samplers. That is slow, so do it on another thread before submitting."""
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._lock, self._warm = threading.Lock(), threading.Event()
        self._open: dict[Request, Generation] = {}
        """Unfinished requests and their handles. Event loops add, the engine's thread removes; both hold the
        lock."""
        self._admission = AdmissionControl(self.settings.parallel, self.settings.max_queue)
        self._queues: Mapping[asyncio.AbstractEventLoop, OutputQueue] = {}
        """Replaced as a whole under the lock: event loops add to it while the engine's thread iterates."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._error: str | None = None
        self._closing, self._finished = False, Counter[str]()
        self._steps = self._prompt_tokens = 0
        self._step_loop = StepLoop(components, self._profile, self._flush, self._relieve)
        self._unsent: list[Request] = []
        """Requests with news that are delivered while the device computes the next step."""

    # --- the callers' side ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, which warms up and then serves; `ready` turns true in between."""
        self._thread.start()

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Block for at most `timeout` seconds; return whether it is warm. Raises EngineDead on failure."""
        self._warm.wait(timeout)
        if self._error:
            raise EngineDead(self._error)
        return self._warm.is_set()

    @property
    def ready(self) -> bool:
        return self._warm.is_set() and self._error is None

    def prompt(self, ids: Sequence[int], pictures: Sequence[tuple[int, Picture]] = ()) -> Prompt:
        """Check a prompt. The time grows with its length, so do not call this on an event loop.

        Each of `pictures` is inserted before the token at its index into `ids`; the indices ascend, and a
        token follows the last picture. Raises InvalidPrompt and PromptTooLong.
        """
        if not len(ids):
            raise InvalidPrompt("the prompt is empty; it must have at least one token")
        if len(ids) >= self.context_size:
            raise PromptTooLong(len(ids), self.context_size, exactly=True)
        prompt = with_pictures(checked_ids(ids, self.vocab.size), pictures)
        if len(prompt) >= self.context_size:
            raise PromptTooLong(len(prompt), self.context_size, exactly=True)
        return prompt

    def check_queue(self, scheduling: SchedulingParams) -> None:
        """Check for room before preparing a request. Raises QueueFull if `submit` would refuse it now."""
        with self._lock:
            self._admission.check(scheduling.tenant)

    def submit(self, request: GenerateRequest) -> Generation:
        """Queue a request, in constant time. Call this on the event loop that will read the answer.

        Raises ValueError for `max_tokens` below 0, InvalidPrompt, QueueFull and EngineDead.
        """
        prompt, params, max_tokens = request.prompt, request.params, request.max_tokens
        if max_tokens is not None and max_tokens < 0:
            raise ValueError(f"max_tokens is {max_tokens}; it must be at least 0")
        if prompt.pictures and params.prompt_logprobs is not None:
            raise InvalidPrompt("rows of pictures have no log-probabilities: prompt_logprobs is for text")
        loop, room = asyncio.get_running_loop(), self.context_size - len(prompt)
        sequence = Request(
            prompt.ids,
            room if max_tokens is None else min(max_tokens, room),
            logprobs=Logprobs.wanted(params),
            stops=params.stop_token_ids,
            include_stop=params.include_stop,
            pictures=prompt.pictures,
            salt=salt_with(request.salt, request.adapters, self.adapters),
            scheduling=request.scheduling,
            stream=request.stream,
            reports_progress=request.reports_progress,
            thinking=request.thinking.begin(self.vocab) if request.thinking else None,
            adapters=request.adapters,
        )
        with self._lock:
            if self._error:
                raise EngineDead(self._error)
            if loop not in self._queues:  # this may find no free file descriptor
                self._queues = {**self._queues, loop: OutputQueue(loop)}
            self._admission.take(request.scheduling.tenant)
            self._open[sequence] = generation = Generation(sequence, self._queues[loop], self._request_cancel)
            self._inbox.put(Message(partial(self._add, sequence, request), sequence, overlaps=True))
        return generation

    def between_steps(self, work: Callable[[], Result]) -> Future[Result]:
        """Run `work` on the engine's thread between two steps. This and the future raise EngineDead."""
        future: Future[Result] = Future()

        def act() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    if self._error:
                        raise EngineDead(self._error)
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)

        with self._lock:
            if self._error:
                raise EngineDead(self._error)
            self._inbox.put(Message(act))
        return future

    def stats(self) -> EngineStats:
        """Counters since the start and the current load; safe from any thread."""
        running = 0 if self._error else len(self._scheduler.running)
        return EngineStats(
            running=running,
            waiting=max(0, len(self._open) - running),
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._scheduler.generated_tokens,
            preemptions=self._scheduler.preemptions,
            tiers=self._scheduler.waiting.tiers(),
            kv_cells_used=self.components.states.cells.used,
            kv_cells=self.components.states.cells.total,
            prefix=self.components.cache.stats(),
            step_totals=self._profile.times(),
            drafts=self._speculator.stats(),
            images=self.encoder.stats() if self.encoder else ImageStats(),
            finished=dict(self._finished),
        )

    def close(self) -> None:
        """Stop the thread and free the model; open requests fail. Blocks for one step. Idempotent."""
        self._closing = True
        if self._thread.is_alive():
            self._inbox.put(Message(lambda: None, overlaps=True))  # wakes it
            self._thread.join()
        intact = self._warm.is_set() and self._error is None
        self._fail("the engine was closed")
        for queue in self._queues.values():
            queue.close()
        if intact:
            self.components.write_prefixes()
            self.components.remember()
        self.components.close()

    def _request_cancel(self, sequence: Request) -> None:
        self._inbox.put(Message(partial(self._end, sequence, "cancelled"), sequence))

    # --- the engine's thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.components.warm_up()
            self.components.read_prefixes()
            log.info("start: %s", self.components.stages)
            self._warm.set()
            while self._receive():
                self._step()
        except Exception as error:
            log.exception("the engine failed")
            self._fail(f"the engine failed: {error}")

    def _receive(self) -> bool:
        """Handle what event loops sent; block while there is nothing to do. Return False to stop."""
        while not self._closing:
            if idle := self._inbox.empty():
                busy = self._scheduler.running or self._scheduler.waiting or self._step_loop.ahead
                if busy:
                    return True
                self._flush()
                self._speculator.catch_up()
            act, sequence, overlaps = message = self._inbox.get()
            try:
                while self._step_loop.ahead and not overlaps:
                    self._step(last=True)
            except Exception:
                self._inbox.put(message)  # `_fail` answers it
                raise
            try:
                act()
            except Exception as error:
                if sequence is None:
                    raise
                if not isinstance(error, RequestFault):
                    log.exception("a request failed")
                    error = GenerationError(f"the request failed: {error}")
                self._end(sequence, error)
            if idle:
                self._profile.start()
        return False

    def _step(self, *, last: bool = False) -> None:
        """Run a step, count its tokens and end complete sequences. The next `_flush` delivers the others'."""
        if (taken := self._step_loop.step(last=last)) is None:
            return
        batch, news = taken
        self._steps += bool(batch.chunks)
        self._prompt_tokens += batch.prompt_tokens
        for sequence in news:
            done = sequence.done
            if isinstance(done, Exception) and not isinstance(done, RequestFault):
                log.error("a request failed in its sampler", exc_info=done)
                sequence.done = GenerationError(f"sampling failed: {done}")
            if done is None:
                self._unsent.append(sequence)
            else:
                self._finish(sequence)

    def _flush(self) -> None:
        """Deliver new tokens to listeners; cancel the requests of closed event loops."""
        unsent, self._unsent = self._unsent, []
        for sequence in dict.fromkeys(unsent):
            if sequence.done is None and sequence.delivers:
                generation = self._open[sequence]
                generation.queue.put(generation, sequence.take_unsent())
        for queue in self._queues.values():
            if not queue.flush():
                with self._lock:
                    orphans = [one for one, its in self._open.items() if its.queue is queue]
                    if not orphans:
                        self._queues = {
                            loop: other for loop, other in self._queues.items() if other is not queue
                        }
                        queue.close()
                for sequence in orphans:  # posted, since they may be in the step that is being computed
                    self._request_cancel(sequence)

    def _add(self, sequence: Request, request: GenerateRequest) -> None:
        if sequence not in self._open:
            return
        params, thinking, dry = request.params, sequence.thinking, self.dries.of(request.params)
        sampler = Sampler(params, self.vocab, request.prompt.ids, request.constraint, thinking, dry)
        sequence.begin(sampler)
        if sequence.limit > sequence.prompt_length:  # otherwise the prompt is read all the same
            forced = sequence.extend(sampler.forced([]), self.vocab.eog_ids)
            self._scheduler.generated_tokens += len(forced)
            if sequence.done is not None:  # forced tokens were the whole answer
                self._finish(sequence)
                return
            if forced:
                self._unsent.append(sequence)
        self._scheduler.add(sequence)

    def _end(self, sequence: Request, done: FinishReason | Exception) -> None:
        """End a request between two steps, in any state; do nothing if it has already ended."""
        if sequence in self._open:
            sequence.done = done
            self._scheduler.remove(sequence, failed=isinstance(done, Exception))
            self._finish(sequence)

    def _finish(self, sequence: Request) -> None:
        """A request has left the scheduler: free what it has, deliver the rest of its tokens and the end."""
        self._speculator.forget(sequence)
        self._close(sequence)

    def _close(self, sequence: Request) -> None:
        sequence.close()
        sequence.timings.finished = perf_counter()
        self._finished["error" if isinstance(sequence.done, Exception) else str(sequence.done)] += 1
        with self._lock:
            generation = self._open.pop(sequence)
            self._admission.leave(sequence.scheduling.tenant)
        generation.queue.put(generation, sequence.take_unsent(), ended=True)

    def _relieve(self, error: NoMemorySlot) -> None:
        """llama.cpp found no free cells although the scheduler counted some: log that and preempt a
        request."""
        scheduler, cells = self._scheduler, self.components.states.cells
        log.error("%s, though only %d of %d are counted as used", error, cells.used, cells.total)
        if len(scheduler.running) > 1:
            scheduler.preempt_youngest()
        else:
            self._end(scheduler.running[0], GenerationError(str(error)))

    def _fail(self, message: str) -> None:
        """End all open requests with `message`, and refuse new ones."""
        self._flush()
        with self._lock:
            self._error = self._error or message
        for sequence in [*self._open]:
            sequence.done = GenerationError(message)
            self._close(sequence)
        self._flush()
        while not self._inbox.empty():  # the futures of `between_steps` fail
            self._inbox.get().act()
        self._warm.set()  # releases `wait_ready`
