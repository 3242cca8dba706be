"""Work that another thread waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from .errors import EngineDead

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

Result = TypeVar("Result")


def run(future: Future[Result], work: Callable[[], Result], error: str | None) -> None:
    """Set `future` to what `work` returns or raises, or to EngineDead if the engine ended with an `error`."""
    if future.set_running_or_notify_cancel():
        try:
            if error:
                raise EngineDead(error)
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
