"""Names that people type, and what they may have meant."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

NEAR = 0.75
"""How alike (difflib's ratio) a name and a known one are, for the one to be a slip of the other."""


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that `name` may be a slip of; None where there is none like it."""
    return next(iter(difflib.get_close_matches(name.lower(), list(names), 1, NEAR)), None)
