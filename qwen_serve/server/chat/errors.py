"""The package's only error that is the caller's fault, and the checks of JSON values that raise it."""

from collections.abc import Mapping, Sequence
from typing import Any


class PromptError(ValueError):
    """A conversation that cannot become a prompt.

    `param` is the path of the offending field in the request, such as `messages[2].role`, and begins the
    message; `what` is wrong with it, or would be right.
    """

    def __init__(self, param: str, what: str) -> None:
        super().__init__(f"{param}: {what}")
        self.param = param


def object_in(value: object, where: str) -> Mapping[str, Any]:
    """`value`, which must be an object."""
    if not isinstance(value, Mapping):
        raise PromptError(where, f"must be an object, not {kind_of(value)}")
    return value


def list_in(value: object, where: str) -> Sequence[Any]:
    """`value`, which must be a list."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise PromptError(where, f"must be a list, not {kind_of(value)}")
    return value


def text_in(value: object, where: str) -> str:
    """`value`, which must be a string."""
    if not isinstance(value, str):
        raise PromptError(where, f"must be a string, not {kind_of(value)}")
    return value


def kind_of(value: object) -> str:
    """The JSON name of a value's type."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    if isinstance(value, Mapping):
        return "an object"
    return names.get(type(value), "a list" if isinstance(value, Sequence) else type(value).__name__)
