"""The server's contract as checks, one module a theme; importing the package registers all, in order."""

from qwen_serve.bench.checks import (  # noqa: F401, I001 - the order in which they run
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
    messages,
    responses,
    endpoints,
    concurrency,
    errors,
)
