"""What the tests of speculation share."""

from __future__ import annotations

from qwen_serve.server.engine.sequence import Sequence
from tests.server.engine.scheduling import NO_SAMPLER


def sequence(tokens: list[int], max_tokens: int = 1000) -> Sequence:
    """A request with this prompt that nobody samples."""
    return Sequence(tokens, max_tokens, NO_SAMPLER)
