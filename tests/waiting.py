"""Waiting in tests: for a condition, never for a fixed time."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
EVERY_S = 0.005


def wait_until(condition: Callable[[], T], timeout: float = 60, told: Callable[[], str] = lambda: "") -> T:
    """Wait for the first true value of `condition` and return it. Fails with `told` after the time limit."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, told() or "it did not come to that in time"
        time.sleep(EVERY_S)
    return value


async def until(condition: Callable[[], T], timeout: float = 60) -> T:
    """The same on an event loop, which continues meanwhile."""
    async with asyncio.timeout(timeout):
        while not (value := condition()):
            await asyncio.sleep(EVERY_S)
    return value
