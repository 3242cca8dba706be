"""Suggests known names for mistyped ones."""

import difflib
from collections.abc import Iterable

NEAR = 0.75
"""Least difflib ratio at which a known name is suggested."""


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` closest to `name`; None if none is close."""
    return next(iter(difflib.get_close_matches(name.lower(), list(names), 1, NEAR)), None)
