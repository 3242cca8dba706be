"""Carries tokens from the engine's thread to an event loop, and rings there without letting go of the thread.

`loop.call_soon_threadsafe` writes to a socket, which gives up the interpreter's lock; the loop's thread, just
woken, takes it, and the engine waits for that thread to have answered its streams before it gets on. Here the
bell is rung with the lock held. The loop wakes up, and runs as soon as the engine calls into llama.cpp.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

    from .generation import Generation
    from .sequence import FinishReason

    Letter = tuple[Generation, list[int], FinishReason | Exception | None]

_write = ctypes.PyDLL(None).write  # libc's; PyDLL keeps the lock
_write.argtypes, _write.restype = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t], ctypes.c_ssize_t


class Mailbox:
    """For one event loop, on whose thread it has to be made. `put` and `post` are for another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._written: list[Letter] = []
        self._urgent = False
        self._posted: deque[list[Letter]] = deque()
        self._ear, self._bell = os.pipe()
        os.set_blocking(self._ear, False)
        os.set_blocking(self._bell, False)
        loop.add_reader(self._ear, self._deliver)

    def put(self, generation: Generation, tokens: list[int], done: FinishReason | Exception | None) -> None:
        """Add a result; it leaves with the next `post`, where somebody waits for it or for another."""
        self._written.append((generation, tokens, done))
        self._urgent = self._urgent or done is not None or not generation.patient

    def post(self) -> bool:
        """Deliver what was put so far; False when the loop is closed and nobody can listen any more.

        Nobody is woken for what only patient listeners will read: that leaves with the end of their answers.
        """
        if self._loop.is_closed() or self._bell < 0:
            return False
        if not self._urgent:
            return True
        letters, self._written, self._urgent = self._written, [], False
        self._posted.append(letters)
        _write(self._bell, b"\0", 1)  # a full pipe rings all the same
        return True

    def _deliver(self) -> None:
        """On the loop."""
        try:
            os.read(self._ear, 4096)
        except OSError:  # nothing rang, or it was closed
            return
        while self._posted:
            for generation, tokens, done in self._posted.popleft():
                generation.receive(tokens, done)

    def close(self) -> None:
        """What was posted still arrives, if the loop is open; nothing after. Idempotent."""
        if self._bell < 0:
            return
        os.close(self._bell)
        self._bell = -1
        try:
            self._loop.call_soon_threadsafe(self._close_ear)
        except RuntimeError:  # closed, its reader gone with it
            os.close(self._ear)

    def _close_ear(self) -> None:
        self._deliver()
        self._loop.remove_reader(self._ear)
        os.close(self._ear)
