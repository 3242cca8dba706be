"""Memory that the C library keeps after it was freed."""

import ctypes
from contextlib import suppress


def give_back() -> None:
    """Return freed memory to the system, for after something large: glibc (malloc_trim) keeps blocks of up to
    32 MiB for later. Takes milliseconds; other C libraries need nothing."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
