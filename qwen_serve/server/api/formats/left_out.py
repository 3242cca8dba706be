"""Tools that are no functions: the model is not offered them, and the response says so."""

import re
from collections.abc import Iterable
from typing import Any

from fastapi import Response

LEFT = "of all tools, this server offers a model functions only"

LONGEST_NOTE = 512
"""OpenAI's limit for a value in a response's `metadata`, in characters."""


def names_of(tools: Iterable[Any]) -> str:
    """Names of the tools that are not functions, for a note: `web_search, apply_patch (custom)`. Empty if
    there are none. The text is printable ASCII of at most LONGEST_NOTE characters, since clients choose the
    names."""
    named: dict[str, None] = {}
    for tool in tools:
        kind = str(tool.get("type")) if isinstance(tool, dict) else ""
        inner = tool.get(kind) if isinstance(tool, dict) else None
        name = tool.get("name", inner.get("name") if isinstance(inner, dict) else None) if kind else None
        named[f"{name} ({kind})" if isinstance(name, str) and name != kind else kind] = None
    return re.sub(r"[^\x20-\x7e]", "?", ", ".join(named))[:LONGEST_NOTE]


def noted(response: Response, left_out: str) -> Response:
    """The response with a note of the tools that the model was not offered."""
    if left_out:
        response.headers["x-tools-left-out"] = left_out
    return response
