"""What can go wrong in the engine, by who has to act on it."""

from __future__ import annotations

from qwen_serve.llamacpp.errors import ModelLoadError


class EngineError(Exception):
    """Base of every error this package raises on purpose."""


class DoesNotFit(ModelLoadError):
    """The model or its context is larger than the memory it would have to live in."""


class InvalidPrompt(EngineError):
    """The prompt is empty or holds an id outside the vocabulary."""


class PromptTooLong(EngineError):
    """The prompt leaves no room for even one generated token."""

    def __init__(self, prompt_tokens: int, context_size: int, *, exactly: bool = False) -> None:
        """Not `exactly`: counting ended there."""
        count = f"{prompt_tokens}" if exactly else f"at least {prompt_tokens}"
        super().__init__(
            f"the prompt has {count} tokens, but one sequence holds at most {context_size}, prompt and "
            "answer together; shorten the prompt or start the server with a larger ctx_size"
        )
        self.prompt_tokens = prompt_tokens
        self.context_size = context_size


class InvalidGrammar(EngineError):
    """What an answer is to be kept to is no grammar, has no text that fits it, or is too large."""


class QueueFull(EngineError):
    """As many requests wait as may; try again later, probably with success after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDead(EngineError):
    """The engine failed or was closed; it will serve nothing any more."""


class GenerationError(EngineError):
    """This generation ended before it was complete; if it is no RequestFault, not by its caller's doing."""


class RequestFault(GenerationError):
    """It could not be completed because of what its request asked for in its field `param`."""

    param = ""


class NoTokenLeft(RequestFault):
    """What its request says about tokens leaves none that could come next."""

    param = "allowed_token_ids"


class FormatTooComplex(RequestFault):
    """What its request says about the format cannot be followed to the end within the limits there are."""

    def __init__(self, param: str, why: str) -> None:
        super().__init__(param, why)
        self.param = param

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.args[1]}"
