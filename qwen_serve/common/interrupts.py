"""Holds back Ctrl-C and SIGTERM. They raise an exception anywhere in the main thread, and in two places must
not:

- In a callback from C. If a signal arrives at its first instruction, before any `try`, ctypes prints the
  exception and returns 0 to C, and the signal is lost.
- While a lock is taken. An exception between the acquisition and the `with` leaves the lock taken
  (bugs.python.org/issue29988). concurrent.futures takes one for each future that it waits for. Its threads
  then wait for ever, and so does the end of the program, which joins them.
"""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def held() -> Iterator[Sequence[int]]:
    """Holds back SIGINT and SIGTERM inside the context. At its end they have their usual effect.

    Yields the signals that have arrived, for work that can stop early.
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
