"""Ctrl-C and SIGTERM raise wherever the main thread stands; here is where they must wait.

An exception between a lock's taking and its `with` leaves the lock taken (bugs.python.org/issue29988), and
concurrent.futures takes one for each future it waits for. Its threads then wait for ever, and so does the
end of the program, which joins them.
"""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def held() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM are remembered; at its end they do what they would have done."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python runs handlers in the main thread only
        return
    arrived: list[int] = []
    handlers = {number: signal.signal(number, lambda n, _: arrived.append(n)) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late in arrived:
            signal.raise_signal(late)
