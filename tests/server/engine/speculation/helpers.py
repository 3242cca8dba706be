"""Helpers of the tests of speculation."""

from qwen_serve.server.engine.request import Request
from tests.server.engine.scheduling import NO_SAMPLER


def sequence(tokens: list[int], max_tokens: int = 1000) -> Request:
    """A sequence with this prompt, without a sampler."""
    return Request(tokens, max_tokens, NO_SAMPLER)
