"""Tokens that llama.cpp's samplers choose on threads of the host, while steps without their sequences are
computed."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from qwen_serve.llamacpp.row_sampler import N_THREADS

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from .batch import Chunk
    from .verification import SampleResult


class Choices:
    """The choices under way, at most one of a sequence. Engine's thread only."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called by a thread when a choice is done."""
        self._wake = wake
        self._threads = ThreadPoolExecutor(N_THREADS, "sampler")
        self._open: list[tuple[Chunk, Future[SampleResult]]] = []

    def begin(self, chunk: Chunk, choose: Callable[[], SampleResult]) -> None:
        """Run `choose`, which raises nothing, for a chunk whose sequence joins no step until it is done."""
        future = chunk.sequence.choice = self._threads.submit(choose)
        self._open.append((chunk, future))
        future.add_done_callback(lambda _: self._wake())

    @property
    def pending(self) -> bool:
        """Whether one is not done."""
        return not all(future.done() for _, future in self._open)

    def take(self) -> list[tuple[Chunk, SampleResult]]:
        """Those that are done, in the order of their beginning. Sequences that were closed meanwhile are left
        out."""
        done = [(chunk, future) for chunk, future in self._open if future.done()]
        self._open = [one for one in self._open if one not in done] if done else self._open
        taken = []
        for chunk, future in done:
            if chunk.sequence.choice is future:
                chunk.sequence.choice = None
                taken.append((chunk, future.result()))
        return taken

    def wait(self) -> None:
        """Wait for one of them."""
        wait([future for _, future in self._open], return_when=FIRST_COMPLETED)

    def close(self) -> None:
        """End the threads; waits for the choices that have begun. Idempotent."""
        self._threads.shutdown(cancel_futures=True)
