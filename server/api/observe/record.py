"""What is known of one HTTP request when it ends: its id, why it was refused, the tokens it cost."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast
from urllib.parse import quote
from uuid import uuid4

if TYPE_CHECKING:
    from starlette.types import Scope

    from qwen_serve.server.api.errors import ApiError
    from qwen_serve.server.api.serving import ServedRequest

GIVEN_ID = re.compile(r"[\x21-\x7e]{1,128}")
"""Ids of clients that are taken over: printable ASCII, so that they can stand in a header and a log."""

LONGEST = 500
"""Characters of a message that the log shows."""


def shown_path(scope: Scope) -> str:
    """The path for a line of the log or a message, escapes and all: decoded, it could be several lines."""
    return quote(scope["path"], safe="/:@!$&'()*+,;=~")


@dataclass
class RequestRecord:
    """One request's, in the ASGI scope's state; filled in by whoever answers it."""

    id: str = field(default_factory=lambda: uuid4().hex)
    """The client's own `X-Request-Id`, or made up; echoed in that header."""
    served: ServedRequest | None = None
    """What was generated for it, if anything was."""
    error: ApiError | None = None
    """What it was told instead of an answer, or in the middle of one."""

    @classmethod
    def begin(cls, scope: Scope) -> RequestRecord:
        """The record of the request that `scope` begins."""
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        record = cls(given) if GIVEN_ID.fullmatch(given) else cls()
        scope.setdefault("state", {})["record"] = record
        return record

    @property
    def figures(self) -> Figures | None:
        """What it cost; None before anything was generated."""
        return Figures.of(self.served) if self.served is not None and self.served.generations else None

    def line(self, method: str, path: str, status: int, seconds: float) -> str:
        """The request as a line of the log."""
        parts = [f"{method} {path} {status}"]
        if self.error is not None:
            parts.append(self.error.message)
        if (figures := self.figures) is not None:
            parts.append(str(figures))
        parts += [f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms", f"id {self.id}"]
        return one_line(", ".join(parts))


def record_of(scope: Scope) -> RequestRecord | None:
    """The record of a running request; None for paths that are not watched, and before `begin`."""
    return cast("RequestRecord | None", scope.get("state", {}).get("record"))


@dataclass(frozen=True)
class Figures:
    """Tokens and times of a request, over all of its answers."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token_s: float | None
    """From submission to the first token of any answer; None if there was none."""
    per_second: float | None
    """Tokens after the first by the time they took; None if there were none."""

    @classmethod
    def of(cls, served: ServedRequest) -> Figures:
        """Those of a request that has ended, or of one that has got so far."""
        usage = served.usage()
        timings = [generation.generation.timings for generation in served.generations]
        first = min((t.first_token for t in timings if t.first_token), default=0.0)
        last = max(t.finished for t in timings)
        later = sum(max(0, generation.completion_tokens - 1) for generation in served.generations)
        return cls(
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            completion_tokens=usage["completion_tokens"],
            first_token_s=first - min(t.submitted for t in timings) if first else None,
            per_second=later / (last - first) if first and last > first and later else None,
        )

    def __str__(self) -> str:
        parts = [f"{self.prompt_tokens} tokens in ({self.cached_tokens} cached)"]
        parts.append(f"{self.completion_tokens} out")
        if self.first_token_s is not None:
            parts.append(f"first after {1000 * self.first_token_s:.0f} ms")
        if self.per_second is not None:
            parts.append(f"{self.per_second:.1f} tok/s")
        return ", ".join(parts)


def one_line(text: str) -> str:
    """`text` such that no client can write lines, or escape sequences, into a log."""
    shown = text if len(text) <= LONGEST else text[:LONGEST] + "..."
    if shown.isprintable():
        return shown
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in shown)
