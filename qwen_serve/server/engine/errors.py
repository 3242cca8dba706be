"""The engine's errors."""

from qwen_serve.llamacpp.errors import ModelLoadError


class EngineError(Exception):
    """Base of this module's errors, except DoesNotFit."""


class DoesNotFit(ModelLoadError):
    """The model or its context is larger than the available memory."""


class InvalidPrompt(EngineError):
    """The prompt is empty or holds an id outside the vocabulary."""


class PromptTooLong(EngineError):
    """The prompt leaves no room for even one generated token."""

    def __init__(self, prompt_tokens: int, context_size: int, *, exactly: bool = False) -> None:
        """Without `exactly`, counting stopped at `prompt_tokens`."""
        count = f"{prompt_tokens}" if exactly else f"at least {prompt_tokens}"
        super().__init__(
            f"the prompt has {count} tokens, but one sequence holds at most {context_size}, prompt and "
            "answer together; shorten the prompt or start the server with a larger ctx_size"
        )
        self.prompt_tokens = prompt_tokens
        self.context_size = context_size


class InvalidGrammar(EngineError):
    """The grammar for an answer is invalid, matches no text, or is too large."""


class QueueFull(EngineError):
    """The queue is full; a retry will probably succeed after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDead(EngineError):
    """The engine failed or was closed; it serves no more requests."""


class GenerationError(EngineError):
    """The generation ended before it was complete. Only a RequestFault is caused by the request."""


class RequestFault(GenerationError):
    """The generation could not be completed because of the request's field `param`."""

    param = ""


class NoTokenLeft(RequestFault):
    """The request's rules allow no next token."""

    param = "allowed_token_ids"


class FormatTooComplex(RequestFault):
    """Following the request's format to its end exceeds a limit."""

    def __init__(self, param: str, why: str) -> None:
        super().__init__(param, why)
        self.param = param

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.args[1]}"
