"""The package's only error that is the caller's fault."""


class PromptError(ValueError):
    """A conversation that cannot become a prompt.

    `message` says what is wrong and what would be right; `param` is the path of the offending field in the
    request, such as `messages[2].role`, or None if no single field is at fault.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
