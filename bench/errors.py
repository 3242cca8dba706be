"""Failures of a benchmark that its user can mend."""


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
