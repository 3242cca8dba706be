"""From other wire formats to a chat request, so that all of them are answered by the same code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from server.api.errors import ApiError, bad_request, from_validation
from server.api.protocol import ChatRequest

if TYPE_CHECKING:
    from collections.abc import Mapping


def to_chat(fields: Mapping[str, Any], names: Mapping[str, str]) -> ChatRequest:
    """The chat request of these fields; null counts as absent.

    `names` are those under which the client knows fields: complaints use them. Raises ApiError 400.
    """
    try:
        return ChatRequest.model_validate(
            {name: value for name, value in fields.items() if value is not None}
        )
    except ValidationError as error:
        wrong = from_validation(error)
    except ApiError as error:
        wrong = error
    field, dot, rest = (wrong.param or "").partition(".")
    name = names.get(field)
    if name is None:
        raise wrong
    message = wrong.message.replace(field, name, 1)
    raise ApiError(wrong.status, message, param=name + dot + rest, code=wrong.code)


def object_in(value: Any, where: str) -> Mapping[str, Any]:
    """`value`, which must be an object. Raises ApiError 400."""
    if not isinstance(value, dict):
        raise bad_request(f"{where}: must be an object", where, "invalid_value")
    return value


def text_in(value: Any, where: str) -> str:
    """`value`, which must be a string. Raises ApiError 400."""
    if not isinstance(value, str):
        raise bad_request(f"{where}: must be a string", where, "invalid_value")
    return value


def blocks_in(value: Any, where: str, text_type: str = "text") -> list[tuple[str, Mapping[str, Any]]]:
    """Content as a list of blocks, each with where it stands; a string is one block of `text_type`."""
    if isinstance(value, str):
        return [(where, {"type": text_type, "text": value})]
    if not isinstance(value, list):
        raise bad_request(f"{where}: must be a string or a list of content blocks", where, "invalid_value")
    return [(f"{where}[{index}]", object_in(block, f"{where}[{index}]")) for index, block in enumerate(value)]


def refused(where: str, what: str) -> ApiError:
    """400 for something that this server does not do."""
    return bad_request(f"{where}: {what}", where, "unsupported_parameter")
