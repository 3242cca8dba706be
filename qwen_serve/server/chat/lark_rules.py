"""Builds a Lark grammar's rules, each with a generated name."""

from .formats import check_length


class LarkRules:
    """Collects rules. Raises PromptError if the grammar becomes too long for its field."""

    def __init__(self, param: str) -> None:
        self._param = param
        self.lines: list[str] = []
        self._names: dict[tuple[str, bool], str] = {}
        """(Expression, whether it is lazy) -> its terminal's name."""
        self._length = 0

    def rule(self, expression: str) -> str:
        """Adds a rule; returns its name."""
        return self._add(f"r{len(self.lines)}", expression)

    def terminal(self, expression: str, *, lazy: bool = False) -> str:
        """The name of an expression's terminal, shared by all its uses."""
        name = self._names.get((expression, lazy))
        if name is None and lazy:
            name = self._add(f"r{len(self.lines)}", self.terminal(expression), "[lazy]")
        elif name is None:
            name = self._add(f"T{len(self.lines)}", expression)
        self._names[expression, lazy] = name
        return name

    def count(self, text: str, where: str) -> None:
        """Counts `text` like a rule."""
        self._length += len(text)
        check_length(self._length, where)

    def _add(self, name: str, expression: str, options: str = "") -> str:
        self.lines.append(f"{name}{options}: {expression}")
        self.count(self.lines[-1], self._param)
        return name


def either(options: list[str]) -> str:
    """An expression for one of `options`."""
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"
