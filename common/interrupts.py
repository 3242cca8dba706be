"""Ctrl-C and SIGTERM raise wherever the main thread stands; here is where they must wait.

Inside a callback from C: as one comes with its first instruction, before any `try`, ctypes prints it, answers
C with 0, and it is lost. And while locks are taken: an exception between the taking and the `with` leaves the
lock taken (bugs.python.org/issue29988), and concurrent.futures takes one for each future it waits for. Its
threads then wait for ever, and so does the end of the program, which joins them.
"""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def held() -> Iterator[Sequence[int]]:
    """Inside, SIGINT and SIGTERM are remembered; at its end they do what they would have done.

    Yields those that have arrived, for work that can stop early.
    """
    arrived: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield arrived  # Python runs handlers in the main thread only
        return
    handlers = {number: signal.signal(number, lambda n, _: arrived.append(n)) for number in SIGNALS}
    try:
        yield arrived
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late in arrived:
            signal.raise_signal(late)
