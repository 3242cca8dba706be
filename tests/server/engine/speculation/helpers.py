"""Helpers of the tests of speculation."""

from __future__ import annotations

from qwen_serve.server.engine.sequence import Sequence
from tests.server.engine.scheduling import NO_SAMPLER


def sequence(tokens: list[int], max_tokens: int = 1000) -> Sequence:
    """A sequence with this prompt, without a sampler."""
    return Sequence(tokens, max_tokens, NO_SAMPLER)
