"""The life of the server's one model: loading, ready, sleeping, draining, failed."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

from fastapi import Request

from qwen_serve.server.api.errors import ApiError
from qwen_serve.server.api.fields.sampling import SamplingDefaults
from qwen_serve.server.api.limits import Bodies
from qwen_serve.server.api.observe.metrics import Metrics
from qwen_serve.server.chat import Prompter, TextGeneration
from qwen_serve.server.engine import Engine
from qwen_serve.server.settings import Settings

logger = logging.getLogger(__name__)

Status = Literal["loading", "ready", "sleeping", "draining", "failed"]

FETCHES_AT_ONCE = 8
"""Most pictures fetched at the same time."""

Facts = dict[str, Any]
"""What an endpoint reports about the model."""


@dataclass(frozen=True)
class Backend:
    """The loaded and warmed-up model, which answers requests."""

    engine: Engine
    prompter: Prompter
    defaults: SamplingDefaults
    """The model's own sampling values, for fields that a request omits."""


class Service:
    """Holds the backend while it is loaded, and counts the requests in flight.

    `load` creates the backend and warms it up on a thread of its own. Meanwhile the server answers 503 and
    reacts to SIGTERM. While the model sleeps, the results of the functions in `known` come from a copy.
    """

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        load: Callable[[], Backend],
        known: Sequence[Callable[[Service], Facts]] = (),
    ) -> None:
        self.settings = settings
        self.keys = {
            key.key.encode().decode("latin-1"): (number, key)
            for number, key in enumerate(settings.api_keys())
        }
        """The valid keys, as values of a header, with their numbers."""
        self.metrics = metrics
        self.started = int(time.time())
        self.in_flight = 0
        self.bodies = Bodies(settings.max_bodies_mib * 1024**2)
        self.fetching = asyncio.Semaphore(FETCHES_AT_ONCE)
        """Limits concurrent fetches of pictures."""
        self.open: set[TextGeneration] = set()
        """Generations that a request still waits for."""
        self.is_cut = False
        self.failure: Exception | None = None
        self._load = load
        self._backend: Backend | None = None
        self._drain_deadline: float | None = None
        self.last_work = time.monotonic()
        """When the model was loaded, or the last request that needed it ended."""
        self._known = known
        self._asleep: Mapping[Callable[[Service], Facts], Facts] | None = None
        """The copied results of `known` while the model sleeps; else None."""
        self._waking: asyncio.Future[ApiError | None] | None = None
        """Set while the model is loaded again. Requests that need it wait for this future, whose result is
        the error, if any."""
        self._loader = ThreadPoolExecutor(1, "sleep")
        """Runs unloading and loading one at a time."""
        self.loads = 0
        """How often the model was loaded."""
        self._closed = False
        self._close_lock = threading.Lock()
        """Held while closing and while storing a loaded backend, so that exactly one thread frees it."""

    def start(self) -> None:
        """Starts loading the model."""

        def run() -> None:
            self.failure = self._take_in()

        threading.Thread(target=run, name="load", daemon=True).start()

    def _take_in(self) -> Exception | None:
        """Loads the model. Returns the exception, if one was raised."""
        try:
            backend = self._load()
        except Exception as error:
            logger.error(
                "the model could not be loaded: %s", error, exc_info=logger.isEnabledFor(logging.DEBUG)
            )
            return error
        with self._close_lock:
            if not self._closed:
                self._backend = backend
                self.loads += 1
                self.last_work = time.monotonic()
                return None
        backend.engine.close()  # nobody else has it
        return None

    # --- sleep ---------------------------------------------------------------------------------------------

    async def sleep_when_idle(self, seconds: float) -> None:
        """Unloads the model each time that no request has needed it for `seconds`; runs until cancelled."""
        while True:
            left = seconds
            if self.status == "ready" and not self.in_flight:
                left += self.last_work - time.monotonic()
            if left > 0:
                await asyncio.sleep(left)
            else:
                await self._sleep()

    async def _sleep(self) -> None:
        """Unloads the model. No request may be in flight; later ones wait in `wake`."""
        backend = self.backend
        self.metrics.pause(backend.engine.stats())
        self._asleep = {about: about(self) for about in self._known}
        del backend
        await asyncio.get_running_loop().run_in_executor(self._loader, self._unload)
        logger.info("asleep: the model is unloaded until the next request")

    def _unload(self) -> None:
        with self._close_lock:
            if self._backend is not None and not self._closed:
                try:
                    self._backend.engine.close()
                except Exception:
                    logger.exception("the model was not unloaded in order")
                self._backend = None
        gc.unfreeze()  # undoes the freeze at start, which would keep the engine's objects
        gc.collect()

    async def wake(self) -> None:
        """Loads a sleeping model again; concurrent calls share one load. Raises ApiError 503 if the server
        drains or if loading fails; the next request then tries again."""
        if self._asleep is None:
            return
        if self._waking is None:
            loop = asyncio.get_running_loop()
            self._waking = waking = loop.create_future()
            loop.run_in_executor(self._loader, self._take_in).add_done_callback(
                partial(self._woken, waking, time.monotonic())
            )
        if (error := await asyncio.shield(self._waking)) is not None:
            raise error

    def _woken(
        self,
        waking: asyncio.Future[ApiError | None],
        began: float,
        loaded: asyncio.Future[Exception | None],
    ) -> None:
        self._waking = None
        if (failure := loaded.result()) is None:
            self._asleep = None
            self.metrics.resume()
            logger.info("awake again after %.1f s", time.monotonic() - began)
        self._end_wait(waking, None if failure is None else unloadable(failure))

    def _end_wait(self, waking: asyncio.Future[ApiError | None], error: ApiError | None) -> None:
        if not waking.done():
            waking.set_result(error)

    @property
    def idle_left(self) -> float | None:
        """Seconds until an idle model is unloaded; None if it never is."""
        seconds = self.settings.sleep_idle_seconds
        if seconds is None or self.in_flight > 1:  # the calling request is in flight, too
            return seconds
        return max(0.0, seconds + self.last_work - time.monotonic())

    def tell(self, about: Callable[[Service], Facts]) -> Facts:
        """`about(self)`, or its copied result while the model sleeps. `about` is a function of `known`.
        Raises ApiError 503."""
        asleep = self._asleep
        return about(self) if asleep is None or self.status != "sleeping" else asleep[about]

    # --- state ---------------------------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        """ "draining" takes precedence over all others."""
        if self._drain_deadline is not None:
            return "draining"
        if self._asleep is not None:
            return "sleeping"
        if self.failure is not None or (self._backend is not None and not self._backend.engine.ready):
            return "failed"
        return "ready" if self._backend is not None else "loading"

    @property
    def backend(self) -> Backend:
        """The loaded model. Raises ApiError 503 while there is none."""
        status = self.status
        if status == "ready" and self._backend is not None:
            return self._backend
        raise unavailable(status)

    @property
    def loaded(self) -> Backend | None:
        """The backend in every status, for metrics; None while the model sleeps."""
        return self._backend if self._asleep is None else None

    def drain(self) -> None:
        """New requests get 503 from now on; running ones have `drain_timeout` seconds. Signal-safe."""
        if self._drain_deadline is None:
            self._drain_deadline = time.monotonic() + self.settings.drain_timeout
            if (waking := self._waking) is not None:
                refusal = unavailable("draining")
                waking.get_loop().call_soon_threadsafe(self._end_wait, waking, refusal)

    @property
    def drained(self) -> bool:
        """Whether the server is draining and no request is in flight."""
        return self._drain_deadline is not None and self.in_flight == 0

    @property
    def overdue(self) -> float:
        """Seconds since the drain timeout passed; 0 before."""
        return max(0.0, time.monotonic() - self._drain_deadline) if self._drain_deadline is not None else 0.0

    def cut_short(self) -> bool:
        """Ends all running requests with an error. Returns whether this is the first call."""
        if self.is_cut:
            return False
        self.is_cut = self.bodies.closed = True
        for generation in self.open:
            generation.cancel()
        if self._backend is not None:
            self._backend.engine.grammars.stop()
        return True

    def close(self) -> None:
        """Stops the engine and blocks until its thread has ended. An engine that is still loading stops once
        it is loaded."""
        with self._close_lock:
            self._closed = True
            if self._backend is not None:
                self._backend.engine.close()


def unavailable(status: Status) -> ApiError:
    """The error for requests that need the model while the status is not "ready"."""
    messages = {
        "loading": "the model is loading",
        "sleeping": "the model is unloaded",
        "draining": "the server is shutting down",
        "failed": "the engine has stopped",
    }
    return ApiError(503, messages[status], code=status, headers={"Retry-After": "1"})


def unloadable(error: Exception) -> ApiError:
    """The error for requests whose model could not be loaded again."""
    message = f"the model could not be loaded: {error}"
    return ApiError(503, message, code="loading_failed", headers={"Retry-After": "1"})


def service_of(http: Request) -> Service:
    """The service of the app that answers this request."""
    return cast("Service", http.app.state.service)
