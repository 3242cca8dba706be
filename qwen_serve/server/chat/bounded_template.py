"""Jinja's sandbox with limits on time and size. A template comes with its model, so it may be hostile."""

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from time import thread_time
from types import BuiltinMethodType
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

SECONDS = 5.0
"""CPU seconds for one rendering."""

MOST_CHARACTERS = 2**26
"""Most characters of a rendering, and of any text or list that it creates."""

MOST_DIGITS = 10_000
"""Most bits of an integer, and the largest width to which a text is padded."""

_WIDE = re.compile(r"%[^a-zA-Z%]*(\d{5}|\*)")
_WIDE_FIELD = re.compile(r"\{[^}]*(\d{5}|\{)")
_FILLING = {"center", "ljust", "rjust", "zfill", "expandtabs"}


class TooMuch(jinja2.TemplateError):
    """A template exceeds its limits."""


class _Bounds(NodeTransformer):
    """Routes loops and `~` through filters that check the limits."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja's naming
        self.generic_visit(node)
        node.iter = self._filtered(cast("nodes.Expr", node.iter), "_watched", node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._filtered(nodes.List(node.nodes, lineno=node.lineno), "_concatenated", node)

    def _filtered(self, value: nodes.Expr, name: str, where: nodes.Node) -> nodes.Filter:
        return nodes.Filter(value, name, [], [], None, None, lineno=where.lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Raises TooMuch for a rendering that exceeds the limits."""

    intercepted_binops = frozenset(["*", "**", "%", "+"])

    def __init__(self, **options: Any) -> None:
        # no optimizer: it would compute constants without these limits
        super().__init__(optimized=False, **options)
        self._of_thread = threading.local()
        self.filters["_watched"] = self._watched
        self.filters["_concatenated"] = _concatenated
        for name in ("center", "indent", "format", "replace", "join"):
            self.filters[name] = _checked(name, self.filters[name])

    def begin(self) -> None:
        """Starts a rendering on this thread."""
        self._of_thread.end = thread_time() + SECONDS

    def _check_time(self) -> None:
        if thread_time() > getattr(self._of_thread, "end", float("inf")):
            raise TooMuch(f"the chat template takes more than {SECONDS:g} s")

    def _watched(self, items: Iterable[Any]) -> Iterable[Any]:
        return _Watched(items, self._check_time)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Bounds().visit(super()._parse(source, name, filename))
        return template

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as jinja's
        __self._check_time()
        if isinstance(__obj, BuiltinMethodType) and isinstance(__obj.__self__, str):
            check(__obj.__name__, __obj.__self__, args)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "*" and numbers:
            _bound(left.bit_length() + right.bit_length(), MOST_DIGITS)
        elif operator == "*":
            _bound(_size(left) * right if isinstance(right, int) else 0)
            _bound(_size(right) * left if isinstance(left, int) else 0)
        elif operator == "**" and numbers:
            _bound(left.bit_length() * right, MOST_DIGITS)
        elif operator == "%" and isinstance(left, str):
            check("format", left, ())
        elif operator == "+":
            _bound(_size(left) + _size(right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_FIELD.search(value.__self__):
            raise TooMuch("the chat template fills a text to more than 9,999 characters")
        return wrapped


class _Watched:
    """The items of a loop; `loop.length` works as before."""

    def __init__(self, items: Iterable[Any], check_time: Callable[[], None]) -> None:
        self._items, self._check_time = items, check_time

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._check_time()
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]


def check(name: str, text: str, args: tuple[Any, ...]) -> None:
    """Raises TooMuch if the result of a string method, or of the filter with its name, would be too long."""
    if name in _FILLING or name == "indent":
        for arg in args:
            _bound(arg if isinstance(arg, int) else 0, MOST_DIGITS)
        if name in ("indent", "expandtabs") and args:
            lines = text.count("\n") + text.count("\t") + 1
            _bound(len(text) + lines * (args[0] if isinstance(args[0], int) else _size(args[0])))
    elif name == "format" and _WIDE.search(text):
        raise TooMuch("the chat template fills a text to more than 9,999 characters")
    elif name == "replace" and len(args) >= 2:
        times = text.count(str(args[0])) if args[0] else len(text) + 1
        _bound(len(text) + times * _size(args[1]))
    elif name == "join" and args and isinstance(args[0], list | tuple):
        _bound(sum(map(_size, args[0])) + len(text) * len(args[0]))


def _checked(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    """A filter with the same check as the method with its name."""
    # Jinja passes its environment or context to some filters, which have this mark
    passed = hasattr(filter_, "jinja_pass_arg")

    def checked(*args: Any, **kwargs: Any) -> Any:
        value, *others = args[1:] if passed else args
        given = (*others, *kwargs.values())
        if name == "join" and isinstance(value, list | tuple):
            check(name, str(given[0]) if given else "", (value,))
        else:
            check(name, str(value), given)
        return filter_(*args, **kwargs)

    checked.__dict__.update(filter_.__dict__)
    return checked


def _concatenated(parts: list[Any]) -> str:
    texts = list(map(str, parts))
    _bound(sum(map(len, texts)))
    return "".join(texts)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _bound(size: int, most: int = MOST_CHARACTERS) -> None:
    if size > most:
        raise TooMuch(f"the chat template makes something larger than {most:,}")
