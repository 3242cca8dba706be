"""llama.cpp's log, routed to Python's logging (logger `llama.cpp`), and the start of its backends."""

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API

from . import abi_checks

log = logging.getLogger("llama.cpp")

_LEVELS = {1: 5, 2: logging.DEBUG, 3: logging.WARNING, 4: logging.ERROR}
"""ggml's levels (debug, info, warning, error). Its info maps to debug, since it is meant for llama.cpp's
developers."""

SKIPPED = "non-consecutive token position"
"""A warning of the recurrent memory, normal after every picture."""

_tap: list[str] | None = None
_listener: Callable[[str], None] | None = None
_log_level = logging.DEBUG


@C.llama_log_callback  # type: ignore[untyped-decorator]
def _route_log(level: int, text: bytes, _user_data: object) -> None:
    global _log_level
    if level != 5:  # 5 continues the previous line
        _log_level = _LEVELS.get(level, logging.DEBUG)
    words = text.decode("utf-8", "replace")
    if _listener is not None:
        _listener(words)
    line = words.strip()
    if not line or not line.strip("."):  # loading prints dots as its progress
        return
    if _tap is not None:
        _tap.append(line)
        log.log(min(_log_level, logging.DEBUG), line)
    else:
        log.log(logging.DEBUG if SKIPPED in line else _log_level, line)


@cache
def set_up() -> None:
    """Start llama.cpp's backends and redirect its log, once. Raises LlamaError if a check of abi_checks.py
    fails."""
    abi_checks.require(abi_checks.LIBRARY)
    C.llama_log_set(_route_log, ctypes.c_void_p(0))
    C.llama_backend_init()


@contextmanager
def tapped_log(listener: Callable[[str], None] | None = None) -> Iterator[list[str]]:
    """Collect llama.cpp's log lines while the block runs, and keep them off the console.

    `listener` is called with each piece as it comes: a line may come in several.
    """
    global _tap, _listener
    lines: list[str] = []
    _tap, _listener = lines, listener
    try:
        yield lines
    finally:
        _tap = _listener = None


def reason(lines: Sequence[str]) -> str:
    """The lines of a tapped log that explain a failure, else the last one."""
    telling = [line for line in lines if any(word in line for word in ("error", "fail", "unable", "cannot"))]
    return "; ".join(telling[:3] or lines[-1:]) or "llama.cpp gave no reason"
