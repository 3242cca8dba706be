"""The server's contract as checks, one module a theme; importing the package registers all, in order."""

from bench.checks import (  # noqa: I001 - the order in which they run
    health,
    shapes,
    prompts,
    cache,
    chat,
    thinking,
    structured,
    streaming,
    parameters,
    tokens,
    logprobs,
    concurrency,
    errors,
)
from bench.checks.base import CHECKS, Check, FailedError, SkippedError, Target

__all__ = [
    "CHECKS",
    "Check",
    "FailedError",
    "SkippedError",
    "Target",
    "cache",
    "chat",
    "concurrency",
    "errors",
    "health",
    "logprobs",
    "parameters",
    "prompts",
    "shapes",
    "streaming",
    "structured",
    "thinking",
    "tokens",
]
