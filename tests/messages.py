"""Messages of a conversation: of a text, or of parts."""

from typing import Any


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": _content(content)}


def assistant(*content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": _content(content), **fields}


def system(*content: Any) -> dict[str, Any]:
    return {"role": "system", "content": _content(content)}


def _content(content: tuple[Any, ...]) -> Any:
    return content[0] if len(content) == 1 and isinstance(content[0], str) else [*content]
