"""Rules of a Lark grammar as they are written, each under a name of its own."""

from __future__ import annotations

from .formats import check_length


class LarkRules:
    """Raises PromptError where the grammar becomes too long for the field that wants it."""

    def __init__(self, param: str) -> None:
        self._param = param
        self.lines: list[str] = []
        self._names: dict[tuple[str, bool], str] = {}
        """Terminals, by what they stand for and whether they are lazy."""
        self._length = 0

    def rule(self, expression: str) -> str:
        """The name of a new rule."""
        return self._add(f"r{len(self.lines)}", expression)

    def terminal(self, expression: str, *, lazy: bool = False) -> str:
        """The name of a terminal, one for all places where it stands."""
        name = self._names.get((expression, lazy))
        if name is None and lazy:
            name = self._add(f"r{len(self.lines)}", self.terminal(expression), "[lazy]")
        elif name is None:
            name = self._add(f"T{len(self.lines)}", expression)
        self._names[expression, lazy] = name
        return name

    def count(self, text: str, where: str) -> None:
        """`text` takes as much room as a rule."""
        self._length += len(text)
        check_length(self._length, where)

    def _add(self, name: str, expression: str, options: str = "") -> str:
        self.lines.append(f"{name}{options}: {expression}")
        self.count(self.lines[-1], self._param)
        return name


def either(options: list[str]) -> str:
    """One of several expressions."""
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"
