"""The OpenAPI description: bodies are the models that validate them, errors are those of `errors`."""

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

REFERENCE = "#/components/schemas/{model}"


class Error(BaseModel):
    """What is wrong; `param` is the field at fault, as in `messages[0].role`."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """OpenAI's error object."""

    error: Error


class AnthropicError(BaseModel):
    """What is wrong."""

    type: str
    message: str


class AnthropicErrorAnswer(BaseModel):
    """Anthropic's error object."""

    type: Literal["error"]
    error: AnthropicError


class OllamaErrorAnswer(BaseModel):
    """Ollama's error object."""

    error: str


ERRORS = {
    400: "A field, or the body, is wrong",
    401: "The API key is missing or wrong",
    403: "Asked by another site's page, or under a name that is not this server's",
    404: "There is no such thing",
    413: "The body is too large",
    415: "The body is not JSON in UTF-8",
    429: "The queue is full; Retry-After says when to try again",
    500: "The server failed",
    503: "The model is loading, the server is shutting down, or the engine has stopped",
}
"""The endpoints' statuses other than 200, and their meanings."""

FOR_A_BODY = (400, 401, 403, 413, 415, 429, 500, 503)

_models: list[type[BaseModel]] = [ErrorAnswer, AnthropicErrorAnswer, OllamaErrorAnswer]


def documented(*schemas: type[BaseModel], error: type[BaseModel] = ErrorAnswer) -> dict[str, Any]:
    """OpenAPI for an endpoint that reads its body, one of `schemas`, without FastAPI. `error` is the format
    of its errors."""
    _models.extend(schema for schema in schemas if schema not in _models)
    shapes = [{"$ref": REFERENCE.format(model=schema.__name__)} for schema in schemas]
    body = {"application/json": {"schema": shapes[0] if len(shapes) == 1 else {"anyOf": shapes}}}
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if any("stream" in schema.model_fields for schema in schemas):
        content["text/event-stream"] = {}  # OpenAPI 3.1 cannot describe events
    return {
        "requestBody": {"required": True, "content": body},
        "responses": {
            "200": {"description": "The answer", "content": content},
            **{str(status): refusal for status, refusal in errors(*FOR_A_BODY, answer=error).items()},
        },
    }


def errors(*statuses: int, answer: type[BaseModel] = ErrorAnswer) -> dict[int | str, dict[str, Any]]:
    """The error responses that an endpoint may give."""
    schema = {"$ref": REFERENCE.format(model=answer.__name__)}
    content = {"application/json": {"schema": schema}}
    return {status: {"description": ERRORS[status], "content": content} for status in statuses}


def describe(app: FastAPI, *, key: bool, unlocked: frozenset[str]) -> None:
    """Sets the app's description, built on first use; with `key`, all paths but `unlocked` require one."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, schemas = models_json_schema(
                [(model, "validation") for model in _models], ref_template=REFERENCE
            )
            components = made.setdefault("components", {})
            components.setdefault("schemas", {}).update(schemas["$defs"])
            for path, operations in made["paths"].items():
                for operation in operations.values():
                    operation["responses"].pop("422", None)  # FastAPI's; this server answers 400
                    if key and path not in unlocked:
                        operation["security"] = [{"key": []}]
            for unused in ("HTTPValidationError", "ValidationError"):
                components["schemas"].pop(unused, None)
            if key:
                components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
