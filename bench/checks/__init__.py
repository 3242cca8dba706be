"""The server's contract as checks, one module a theme; importing the package registers all, in order."""

from bench.checks import (  # noqa: I001 - the order in which they run
    health,
    shapes,
    prompts,
    chat,
    thinking,
    streaming,
    parameters,
    messages,
    responses,
    endpoints,
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
    "chat",
    "concurrency",
    "endpoints",
    "errors",
    "health",
    "messages",
    "parameters",
    "prompts",
    "responses",
    "shapes",
    "streaming",
    "thinking",
]
