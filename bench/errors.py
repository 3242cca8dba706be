"""Failures of a benchmark that its user can mend."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class BenchError(Exception):
    """Anything the user can mend; a command prints it as ``error: ...`` and exits with 1."""


class UnreachableError(BenchError):
    """No HTTP answer at all: nothing listens, the name is unknown, or the time is up."""


class ServerError(BenchError):
    """An answer that cannot be measured: an error status, a broken stream, a missing field.

    ``status`` is the HTTP status, 200 when only the body was wrong.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def first_problem(error: ValidationError, whole: str) -> str:
    """The first field that is wrong, and how; ``whole`` stands for the field where it is none alone."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or whole}: {first['msg']}"
