"""The API's contract as checks, one module for each theme. Importing the package registers them in order."""

from qwen_serve.bench.checks import (  # noqa: I001 - the order in which they run
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
    agents,
    endpoints,
    concurrency,
    errors,
)
