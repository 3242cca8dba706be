"""Every failure as an error object. It is OpenAI's: `{"error": {"message", "type", "param", "code"}}`.

Under /v1/messages it is Anthropic's: `{"type": "error", "error": {"type", "message"}}`. Under /api it is
Ollama's: `{"error": message}`.
"""

from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from qwen_serve.server.chat import PromptError
from qwen_serve.server.engine import (
    EngineDead,
    GenerationError,
    InvalidPrompt,
    PromptTooLong,
    QueueFull,
    RequestFault,
)

RETRY_AFTER_S = 1

MAX_MESSAGE = 2000
"""Most characters of a message, which may quote client input of any length."""


class ApiError(Exception):
    """A request that ends with `status`; `param` is the field at fault, as in `messages[0].role`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _cut(message)
        self.param = None if param is None else _cut(param)
        self.code = code
        # OpenAI's and Anthropic's packages ask again after a 5xx, unless this header says that it is no use
        self.headers = {"x-should-retry": "false", **(headers or {})} if status == 501 else headers

    @property
    def type(self) -> str:
        """OpenAI's error type for the status."""
        named = {
            401: "authentication_error",
            429: "rate_limit_error",
            501: "not_supported_error",
            503: "service_unavailable_error",
        }
        return named.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """OpenAI's error object: a response's body, or the last event of a stream."""
        fields = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": fields}

    def anthropic_body(self) -> dict[str, Any]:
        """Anthropic's error object, for the same uses."""
        named = {
            401: "authentication_error",
            404: "not_found_error",
            413: "request_too_large",
            429: "rate_limit_error",
            503: "overloaded_error",
        }
        kind = named.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def ollama_body(self) -> dict[str, Any]:
        """Ollama's error object, for the same uses."""
        return {"error": self.message}

    def body_for(self, path: str) -> dict[str, Any]:
        """The error object in the format of the endpoint at `path`."""
        if path.startswith("/api/"):
            return self.ollama_body()
        return self.anthropic_body() if path.startswith("/v1/messages") else self.body()


def _cut(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "..."


class ClientLeft(Exception):
    """The client no longer waits for the answer."""


def bad_request(param: str, what: str, code: str = "invalid_value") -> ApiError:
    """400, for the field `param`: `what` is wrong with it, or would be right."""
    return ApiError(400, f"{param}: {what}", param=param, code=code)


def refused(param: str, what: str) -> ApiError:
    """400, for a field that asks for what this server lacks."""
    return bad_request(param, what, "unsupported_parameter")


def from_validation(error: ValidationError | RequestValidationError) -> ApiError:
    """The schema's first complaint, with the number of further ones."""
    first, *others = error.errors()
    param = field_path(first["loc"])
    message = str(first["msg"]).removeprefix("Value error, ")
    more = f" (and {len(others)} more)" if others else ""
    return bad_request(param, f"{message}{more}")


def field_path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "role")` -> `messages[0].role`."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def from_exception(error: Exception) -> ApiError:
    """The error that a client gets for an exception from the schemas, the chat package or the engine."""
    match error:
        case ApiError():
            return error
        case ClientLeft():  # nginx's status for it, which only the log and the metrics show
            return ApiError(499, "the client left before the answer was complete")
        case RequestValidationError():
            return from_validation(error)
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case PromptError() | RequestFault():
            return ApiError(400, str(error), param=error.param, code="invalid_value")
        case InvalidPrompt():
            return bad_request("prompt", str(error))
        case PromptTooLong():
            return ApiError(400, str(error), code="context_length_exceeded")
        case QueueFull():
            seconds = str(error.retry_after)
            return ApiError(429, str(error), code="queue_full", headers={"Retry-After": seconds})
        case EngineDead():
            return ApiError(503, "the engine has stopped", code="engine_dead")
        case GenerationError():
            return ApiError(500, f"generation failed: {error}", code="generation_failed")
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")
