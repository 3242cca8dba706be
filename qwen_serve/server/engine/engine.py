"""The engine: one thread schedules, decodes and verifies; event loops submit requests to it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING

from .adapters import salt_with
from .errors import EngineDead, GenerationError, InvalidPrompt, PromptTooLong, RequestFault
from .futures import Result, run
from .loading import build_engine, resolve_settings
from .outputs import Generation, OutputQueue
from .places import Places
from .planning.fit import plan_memory
from .planning.spec import read_checked
from .profile import StartProfile, StepProfile
from .prompts import checked_ids, with_pictures
from .sampling import DrySamplers, Logprobs, Sampler
from .sequence import Output, Sequence, Timings
from .stats import EngineStats, ImageStats
from .steps import Arrival, Steps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Sequence as ListLike

    from qwen_serve.llamacpp.errors import NoMemorySlot

    from .batch import Batch
    from .pictures import Picture
    from .sequence import FinishReason, GenerateRequest, Prompt, SchedulingParams
    from .settings import EngineSettings

log = logging.getLogger(__name__)


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
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock, self._warm = threading.Lock(), threading.Event()
        self._open: dict[Generation, OutputQueue] = {}
        """Unfinished requests. Event loops add, the engine's thread removes; both hold the lock."""
        self._places = Places(self.settings.parallel, self.settings.max_queue)
        self._sequences: dict[Generation, Sequence] = {}
        self._listeners: dict[Sequence, Generation] = {}
        self._queues: Mapping[asyncio.AbstractEventLoop, OutputQueue] = {}
        """Replaced as a whole under the lock: event loops add to it while the engine's thread iterates."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._error: str | None = None
        self._closing, self._finished = False, Counter[str]()
        self._steps = self._prompt_tokens = self._generated_tokens = 0
        self._taking = Steps(components, self._profile, self._flush, self._relieve, self._wake)
        self._unsent: list[Output] = []
        """The last step's tokens of unfinished sequences, delivered while the device computes the next
        step."""

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

    def prompt(self, ids: ListLike[int], pictures: ListLike[tuple[int, Picture]] = ()) -> Prompt:
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
            self._places.check(scheduling.tenant)

    def submit(self, request: GenerateRequest) -> Generation:
        """Queue a request, in constant time. Call this on the event loop that will read the answer.

        Raises ValueError for `max_tokens` below 0, InvalidPrompt, QueueFull and EngineDead.
        """
        prompt, max_tokens, scheduling = request.prompt, request.max_tokens, request.scheduling
        if max_tokens is not None and max_tokens < 0:
            raise ValueError(f"max_tokens is {max_tokens}; it must be at least 0")
        if prompt.pictures and request.params.prompt_logprobs is not None:
            raise InvalidPrompt("rows of pictures have no log-probabilities: prompt_logprobs is for text")
        loop, room = asyncio.get_running_loop(), self.context_size - len(prompt)
        limit = room if max_tokens is None else min(max_tokens, room)
        salt = salt_with(request.salt, request.adapters, self.adapters)
        with self._lock:
            if self._error:
                raise EngineDead(self._error)
            timings = Timings(submitted=perf_counter())
            logprobs = Logprobs.wanted(request.params, self.vocab.n_real)
            watch = None if request.thinking is None else request.thinking.begin(self.vocab)
            generation = Generation(
                *(len(prompt), timings, self._request_cancel),
                image_tokens=prompt.pictures.n_rows,
                stream=request.stream,
                logprobs=logprobs,
                thinking=watch,
                scheduling=scheduling,
                progress=request.progress,
            )
            if loop not in self._queues:
                self._queues = {**self._queues, loop: OutputQueue(loop)}
            self._places.take(scheduling.tenant)
            self._open[generation] = self._queues[loop]
            self._post(generation, partial(self._add, generation, request, limit, salt), Arrival)
        return generation

    def between_steps(self, work: Callable[[], Result]) -> Future[Result]:
        """Run `work` on the engine's thread between two steps. This and the future raise EngineDead."""
        future: Future[Result] = Future()
        with self._lock:
            if self._error:
                raise EngineDead(self._error)
            self._inbox.put(lambda: run(future, work, self._error))
        return future

    def stats(self) -> EngineStats:
        """Counters since the start and the current load; safe from any thread."""
        running = 0 if self._error else len(self._scheduler.running)
        return EngineStats(
            running=running,
            waiting=max(0, len(self._open) - running),
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
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
            self._wake()
            self._thread.join()
        intact = self._warm.is_set() and self._error is None
        self._fail("the engine was closed")
        for queue in self._queues.values():
            queue.close()
        if intact:
            self.components.write_prefixes()
            self.components.remember()
        self._taking.close()
        self.components.close()

    def _wake(self) -> None:
        self._inbox.put(Arrival(lambda: None))

    def _request_cancel(self, generation: Generation) -> None:
        self._post(generation, partial(self._end, generation, "cancelled"))

    def _post(
        self,
        generation: Generation,
        action: Callable[[], None],
        kind: Callable[[Callable[[], None]], Callable[[], None]] = lambda act: act,
    ) -> None:
        """Run `action` for a request on the engine's thread, between two steps. An exception from it fails
        only that request."""

        def act() -> None:
            try:
                action()
            except RequestFault as error:
                self._end(generation, error)
            except Exception as error:
                log.exception("a request failed")
                self._end(generation, GenerationError(f"the request failed: {error}"))

        self._inbox.put(kind(act))

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
            if self._inbox.empty():
                busy = self._scheduler.running or self._scheduler.waiting or self._taking.ahead
                if busy and not self._taking.waits:
                    return True
                self._flush()
                self._speculator.catch_up()
                self._inbox.get()()
                self._profile.start()
            else:
                action = self._inbox.get()
                while self._taking.ahead and not isinstance(action, Arrival):
                    self._step(last=True)
                action()
        return False

    def _step(self, *, last: bool = False) -> None:
        if (taken := self._taking.step(last=last)) is not None:
            self._deliver(*taken)

    def _deliver(self, batch: Batch, outputs: list[Output]) -> None:
        """Count a step's tokens and end complete sequences. The next `_flush` delivers the other tokens."""
        self._steps += bool(batch.chunks)
        self._prompt_tokens += batch.prompt_tokens
        for output in outputs:
            self._generated_tokens += len(output.tokens)
            if output.done is None:
                self._unsent.append(output)
            elif isinstance(output.done, RequestFault):
                self._finish(output.sequence, output.done, [])
            elif isinstance(output.done, Exception):
                log.error("a sequence failed in its sampler", exc_info=output.done)
                self._finish(output.sequence, GenerationError(f"sampling failed: {output.done}"), [])
            else:
                self._finish(output.sequence, output.done, output.tokens)

    def _flush(self) -> None:
        """Deliver new tokens to listeners; cancel the requests of closed event loops."""
        outputs, self._unsent = self._unsent, []
        for output in outputs:
            generation = self._listeners.get(output.sequence)
            if generation is not None and generation.stream:
                generation.cached_tokens = output.sequence.reused or 0
                generation.missed = output.sequence.missed
                self._open[generation].put(generation, output.tokens, None)
        for queue in self._queues.values():
            if not queue.flush():
                with self._lock:
                    orphans = [generation for generation, its in self._open.items() if its is queue]
                    if not orphans:
                        self._queues = {
                            loop: other for loop, other in self._queues.items() if other is not queue
                        }
                        queue.close()
                for generation in orphans:  # posted, since they may be in the step that is being computed
                    self._request_cancel(generation)

    def _add(self, generation: Generation, request: GenerateRequest, max_tokens: int, salt: str) -> None:
        if generation not in self._open:
            return
        prompt, params, dry = request.prompt, request.params, self.dries.of(request.params)
        sampler = Sampler(params, self.vocab, prompt.ids, request.constraint, generation.thinking, dry)
        sequence = Sequence(
            prompt.ids.copy(),
            max_tokens,
            sampler,
            *(generation.timings, generation.drafts, generation.logprobs),
            stops=params.stop_token_ids,
            include_stop=params.include_stop,
            pictures=prompt.pictures,
            salt=salt,
            scheduling=generation.scheduling,
            progress=generation.progress,
            adapters=request.adapters,
        )
        self._sequences[generation], self._listeners[sequence] = sequence, generation
        # the prompt is read even if no output token is wanted
        forced, done = sequence.extend(sampler.forced([]), self.vocab.eog_ids) if max_tokens else ([], None)
        self._generated_tokens += len(forced)
        if done is not None:  # forced tokens were the whole answer
            self._finish(sequence, done, forced)
            return
        if forced:
            self._unsent.append(Output(sequence, forced, None))
        self._scheduler.add(sequence)

    def _end(self, generation: Generation, done: FinishReason | Exception) -> None:
        """End a request between two steps, in any state; do nothing if it has already ended."""
        if generation not in self._open:
            return
        if (sequence := self._sequences.get(generation)) is None:  # `_add` made none
            self._close(generation, done, [])
            return
        self._scheduler.remove(sequence, failed=isinstance(done, Exception))
        tokens = [token for output in self._unsent if output.sequence is sequence for token in output.tokens]
        self._unsent = [output for output in self._unsent if output.sequence is not sequence]
        self._finish(sequence, done, tokens)

    def _finish(self, sequence: Sequence, done: FinishReason | Exception, tokens: list[int]) -> None:
        """Free the resources of a sequence that left the scheduler, and deliver `tokens` and the end."""
        generation = self._listeners.pop(sequence)
        del self._sequences[generation]
        self._speculator.forget(sequence)
        sequence.close()
        generation.cached_tokens, generation.missed = sequence.reused or 0, sequence.missed
        if not generation.stream:
            tokens = sequence.tokens[sequence.prompt_length :]
        self._close(generation, done, tokens)

    def _close(self, generation: Generation, done: FinishReason | Exception, tokens: list[int]) -> None:
        generation.timings.finished = perf_counter()
        self._finished["error" if isinstance(done, Exception) else done] += 1
        with self._lock:
            queue = self._open.pop(generation)
            self._places.leave(generation.scheduling.tenant)
        queue.put(generation, tokens, done)

    def _relieve(self, error: NoMemorySlot) -> None:
        """llama.cpp found no free cells although the scheduler counted some: log that and preempt a
        sequence."""
        scheduler, cells = self._scheduler, self.components.states.cells
        log.error("%s, though only %d of %d are counted as used", error, cells.used, cells.total)
        if len(scheduler.running) > 1:
            scheduler.preempt_youngest()
        else:
            self._end(self._listeners[scheduler.running[0]], GenerationError(str(error)))

    def _fail(self, message: str) -> None:
        """End all open requests with `message`, and refuse new ones."""
        self._flush()
        with self._lock:
            self._error = self._error or message
            left, self._open = self._open, {}
        for generation, queue in left.items():
            if (sequence := self._sequences.pop(generation, None)) is not None:
                sequence.close()
            generation.timings.finished = perf_counter()
            self._finished["error"] += 1
            queue.put(generation, [], GenerationError(message))
        self._listeners.clear()
        self._flush()
        while not self._inbox.empty():  # the futures of `between_steps` fail
            self._inbox.get()()
        self._warm.set()  # releases `wait_ready`
