"""Errors of a benchmark that the user can fix."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class BenchError(Exception):
    """An error that the user can fix; a command prints it as ``error: ...`` and exits with 1."""


class UnreachableError(BenchError):
    """No HTTP answer: nothing listens, the name is unknown, or the time limit passed."""


class ServerError(BenchError):
    """An answer that cannot be measured: an error status, a broken stream, a missing field.

    ``status`` is the HTTP status, 200 when only the body was wrong.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def first_problem(error: ValidationError, whole: str) -> str:
    """The first wrong field and its error. ``whole`` is named instead if the error concerns no single
    field."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or whole}: {first['msg']}"
