"""The life of the server's one model: loading, ready, draining, failed."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from qwen_serve.server.api.errors import ApiError
from qwen_serve.server.api.limits import Bodies
from qwen_serve.server.api.picture_urls import AT_ONCE

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import Request

    from qwen_serve.server.api.fields.sampling import SamplingDefaults
    from qwen_serve.server.api.observe.metrics import Metrics
    from qwen_serve.server.chat import Prompter, TextGeneration
    from qwen_serve.server.engine import Engine
    from qwen_serve.server.settings import Settings

logger = logging.getLogger(__name__)

Status = Literal["loading", "ready", "draining", "failed"]


@dataclass(frozen=True)
class Backend:
    """What answers requests once the model is loaded and warmed up."""

    engine: Engine
    prompter: Prompter
    defaults: SamplingDefaults
    """The model's own sampling values, for the fields that a request leaves out."""


class Service:
    """Holds the backend while there is one, and counts the requests being answered.

    `load` makes the backend, warmed up. It runs on a thread of its own, so that the server answers 503, and
    obeys SIGTERM, meanwhile.
    """

    def __init__(self, settings: Settings, metrics: Metrics, load: Callable[[], Backend]) -> None:
        self.settings = settings
        self.keys = {
            key.key.encode().decode("latin-1"): (number, key)
            for number, key in enumerate(settings.api_keys())
        }
        """Those that clients may send, as they stand in a header, each with its number."""
        self.metrics = metrics
        self.started = int(time.time())
        self.in_flight = 0
        self.bodies = Bodies(settings.max_bodies_mib * 1024**2)
        self.fetching = asyncio.Semaphore(AT_ONCE)
        """Of those who fetch pictures from elsewhere."""
        self.open: set[TextGeneration] = set()
        """Those that their requests still wait for."""
        self.is_cut = False
        self.failure: Exception | None = None
        self._load = load
        self._backend: Backend | None = None
        self._drain_deadline: float | None = None
        self._closed = False
        self._close_lock = threading.Lock()
        """Held to close or to take in what was loaded: a model that arrives is freed by one thread alone."""

    def start(self) -> None:
        """Begins to load the model."""
        threading.Thread(target=self._run_load, name="load", daemon=True).start()

    def _run_load(self) -> None:
        try:
            backend = self._load()
        except Exception as error:
            logger.error(
                "the model could not be loaded: %s", error, exc_info=logger.isEnabledFor(logging.DEBUG)
            )
            self.failure = error
            return
        with self._close_lock:
            if not self._closed:
                self._backend = backend
                return
        backend.engine.close()  # nobody else knows of it

    @property
    def status(self) -> Status:
        """ "draining" wins: once a server is told to stop, it stops."""
        if self._drain_deadline is not None:
            return "draining"
        if self.failure is not None or (self._backend is not None and not self._backend.engine.ready):
            return "failed"
        return "ready" if self._backend is not None else "loading"

    @property
    def backend(self) -> Backend:
        """The loaded model. Raises ApiError 503 while there is none to use."""
        status = self.status
        if status == "ready" and self._backend is not None:
            return self._backend
        messages = {
            "loading": "the model is loading",
            "draining": "the server is shutting down",
            "failed": "the engine has stopped",
        }
        raise ApiError(503, messages[status], code=status, headers={"Retry-After": "1"})

    @property
    def loaded(self) -> Backend | None:
        """The backend whatever the status, for metrics."""
        return self._backend

    def drain(self) -> None:
        """New requests get 503 from now on; running ones have `drain_timeout` seconds. Signal-safe."""
        if self._drain_deadline is None:
            self._drain_deadline = time.monotonic() + self.settings.drain_timeout

    @property
    def drained(self) -> bool:
        """Told to drain, and nothing is being answered any more."""
        return self._drain_deadline is not None and self.in_flight == 0

    @property
    def overdue(self) -> float:
        """Seconds since the time to drain was over; 0 before."""
        return max(0.0, time.monotonic() - self._drain_deadline) if self._drain_deadline is not None else 0.0

    def cut_short(self) -> bool:
        """Ends whatever is being answered, so that its client is told. Whether this is the first call."""
        if self.is_cut:
            return False
        self.is_cut = self.bodies.closed = True
        for generation in self.open:
            generation.cancel()
        if self._backend is not None:
            self._backend.engine.grammars.stop()
        return True

    def close(self) -> None:
        """Stops the engine and blocks until its thread has ended; one still being loaded ends once it is."""
        with self._close_lock:
            self._closed = True
            if self._backend is not None:
                self._backend.engine.close()


def service_of(http: Request) -> Service:
    """The service of the app that answers this request."""
    return cast("Service", http.app.state.service)
