"""What the tests of speculation share."""

from __future__ import annotations

from typing import cast

from server.engine.sampling import Sampler
from server.engine.sequence import Sequence


def sequence(tokens: list[int], max_tokens: int = 1000) -> Sequence:
    """A request with this prompt that nobody samples."""
    return Sequence(tokens, max_tokens, cast("Sampler", None))
