"""What is recorded of one HTTP request at its end: its error and its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from starlette.types import Scope

from qwen_serve.server.api.errors import ApiError
from qwen_serve.server.chat import TextGeneration

LONGEST = 500
"""Most characters of a message in the log."""


def shown_path(scope: Scope) -> str:
    """The path for a log line or a message. It stays percent-encoded, since it may contain line breaks."""
    return quote(scope["path"], safe="/:@!$&'()*+,;=~")


@dataclass
class RequestRecord:
    """Filled in by the code that answers the request."""

    answers: Answers | None = None
    """The request's generations, if there are any."""
    error: ApiError | None = None
    """The error that the client received, instead of an answer or in the middle of one."""

    def line(self, what: str, seconds: float, request_id: str) -> str:
        """The request's log line; `what` is its method, path and status."""
        parts = [what]
        if self.error is not None:
            parts.append(self.error.message)
        if self.answers is not None:
            parts.append(str(self.answers))
        parts += [f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms", f"id {request_id}"]
        return one_line(", ".join(parts))


@dataclass(frozen=True)
class Answers:
    """The generations of a request, the same number for each prompt, with their tokens and times so far."""

    id: str
    """Id of the response."""
    model: str
    generations: list[TextGeneration]
    per_prompt: int

    @property
    def prompts(self) -> list[TextGeneration]:
        """One generation of each prompt."""
        return self.generations[:: self.per_prompt]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts; a prompt with several answers counts once."""
        return sum(generation.request.prompt_length for generation in self.prompts)

    @property
    def image_tokens(self) -> int:
        return sum(generation.request.pictures.n_rows for generation in self.prompts)

    @property
    def cached_tokens(self) -> int:
        return sum(generation.request.cached_tokens for generation in self.prompts)

    @property
    def completion_tokens(self) -> int:
        return sum(generation.completion_tokens for generation in self.generations)

    @property
    def first_token_s(self) -> float | None:
        """Seconds from submission to the first token of any answer; None before that."""
        timings = [generation.request.timings for generation in self.generations]
        first = min((t.first_token for t in timings if t.first_token), default=0.0)
        return first - min(t.submitted for t in timings) if first else None

    @property
    def per_second(self) -> float | None:
        """Tokens after the first, divided by their time in seconds; None if there are none."""
        timings = [generation.request.timings for generation in self.generations]
        first = min((t.first_token for t in timings if t.first_token), default=0.0)
        last = max(t.finished for t in timings)
        later = sum(max(0, generation.completion_tokens - 1) for generation in self.generations)
        return later / (last - first) if first and last > first and later else None

    def __str__(self) -> str:
        images = f", {self.image_tokens} of images" if self.image_tokens else ""
        parts = [f"{self.prompt_tokens} tokens in ({self.cached_tokens} cached{images})"]
        parts.append(f"{self.completion_tokens} out")
        waits = [generation.request.timings for generation in self.generations]
        longest = max(waits, key=lambda timings: timings.queue_ms)
        if longest.waited_for:
            parts.append(f"waited {longest.queue_ms:.0f} ms for {longest.waited_for}")
        if preempted := sum(timings.preempted for timings in waits):
            parts.append(f"made room {preempted} times")
        if (first := self.first_token_s) is not None:
            parts.append(f"first after {1000 * first:.0f} ms")
        if (rate := self.per_second) is not None:
            parts.append(f"{rate:.1f} tok/s")
        return ", ".join(parts)


def one_line(text: str) -> str:
    """`text` without line breaks and escape sequences, safe for a log."""
    shown = text if len(text) <= LONGEST else text[:LONGEST] + "..."
    if shown.isprintable():
        return shown
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in shown)
