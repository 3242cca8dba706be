"""Who shares prefixes with whom: one word for a request's `cache_salt` and API key."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.datastructures import Headers


def key_of(headers: Headers) -> str:
    """The key in `Authorization` or, as Anthropic's clients send it, in `x-api-key`."""
    return headers.get("authorization", "").partition(" ")[2].strip() or headers.get("x-api-key", "")


def salt_of(key: str, cache_salt: str | None) -> str:
    """What the prompts of requests that may share prefixes have in common; neither can be read from it."""
    if not key and not cache_salt:
        return ""
    both = hashlib.sha256()
    for part in (key, cache_salt or ""):
        both.update(hashlib.sha256(part.encode("utf-8", "surrogatepass")).digest())
    return both.hexdigest()
