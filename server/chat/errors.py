"""The one error of this package that is the caller's doing."""

from __future__ import annotations


class PromptError(ValueError):
    """A conversation that can not become a prompt.

    `message` says what is wrong and what would be right; `param` is the path of the offending field in the
    request, such as `messages[2].role`, or None when no single field is to blame.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
