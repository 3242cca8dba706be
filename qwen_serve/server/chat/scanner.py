"""Reads text that arrives in pieces, once, from beginning to end."""

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TypeVar

from .markup import MARK

Result = TypeVar("Result")

Parser = Generator[None, None, Result]
"""A parser over a scanner: yields when it needs more text."""

_NO_NAME = f"<>\n{MARK}"


class Scanner:
    """Text that has arrived and is not read yet.

    The driver of a parser calls `add` or sets `ended`, and resumes the parser. Only text that may begin a tag
    is read twice, so the time is linear in the length of the text, however it is cut.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._before = 0  # characters of the text that are dropped already
        self.ended = False
        """Whether the text is complete. Then parsers run to their end."""
        self.limited = False
        """Whether a token limit ended the text."""
        self.broke_off = False
        """Whether the text ended in the last tag, name or stretch of text that was read."""
        self._tapes: list[list[str]] = []

    def add(self, text: str) -> None:
        """Appends text."""
        self._before += self._at
        self._text = self._text[self._at :] + text
        self._at = 0

    @property
    def position(self) -> int:
        """The number of characters that have been read."""
        return self._before + self._at

    @property
    def empty(self) -> bool:
        return self._at == len(self._text)

    @contextmanager
    def recording(self) -> Iterator[list[str]]:
        """A list that receives a copy of all text read inside the context."""
        self._tapes.append([])
        try:
            yield self._tapes[-1]
        finally:
            self._tapes.pop()

    def spaces(self) -> Parser[str]:
        """Reads the next white space."""
        pieces = []
        while True:
            end = self._at
            while end < len(self._text) and self._text[end].isspace():
                end += 1
            pieces.append(self._take(end))
            if not self.empty or self.ended:
                return "".join(pieces)
            yield

    def tag(self, *tags: str, take: bool = True) -> Parser[str]:
        """Reads the next tag; "" if none of `tags` comes next. With `take` false, it only looks."""
        longest = max(map(len, tags))
        while True:
            start = self._text[self._at : self._at + longest]
            for tag in tags:
                if start.startswith(tag):
                    self.broke_off = False
                    return self._take(self._at + len(tag)) if take else tag
            possible = any(tag.startswith(start) for tag in tags)
            if self.ended or not possible:
                self.broke_off = possible
                return ""
            yield

    def name(self, known: Callable[[str], bool] = lambda _: False) -> Parser[str]:
        """Reads the rest of an opening tag, such as `add>`, on one line. Returns "" if there is none; the
        text up to the place that shows this is read then. A `known` name may lack its `>`.
        """
        pieces = []
        while True:
            end = self._at
            while end < len(self._text) and self._text[end] not in _NO_NAME:
                end += 1
            pieces.append(self._take(end))
            if not self.empty:
                name = "".join(pieces).strip()
                closed = yield from self.tag(">")
                return name if closed or known(name) else ""
            if self.ended:
                self.broke_off = True
                return ""
            yield

    def matching(self, pattern: re.Pattern[str]) -> Parser[str]:
        """Reads what a pattern matches, "" included. It must match each beginning of what it matches."""
        while True:
            found = pattern.match(self._text, self._at)
            end = self._at if found is None else found.end()
            if end < len(self._text) or self.ended:
                return self._take(end)
            yield

    def until(self, tags: Sequence[str], emit: Callable[[str], None], *, whole: bool = True) -> Parser[str]:
        """Reads and emits all text before the first of `tags`, then that tag, which it returns; "" if the
        text ends. The beginning of a tag at the text's end is emitted if `whole`.

        A tag's only `<` or MARK must be its first character.
        """
        while True:
            if found := self._first(tags):
                emit(self._take(found.start()))
                return self._take(found.end())
            held = 0 if self.ended and whole else self._partial(tags)
            emit(self._take(len(self._text) - held))
            if self.ended:
                self.rest()
                self.broke_off = True
                return ""
            yield

    def rest(self) -> str:
        """Reads all text that has arrived."""
        return self._take(len(self._text))

    def _take(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        for tape in self._tapes:
            tape.append(text)
        return text

    def _first(self, tags: Sequence[str]) -> re.Match[str] | None:
        """The first of the tags in the unread text."""
        return _any_of(tuple(tags)).search(self._text, self._at) if tags else None

    def _partial(self, tags: Sequence[str]) -> int:
        """Length of the text's suffix that is the beginning of a tag."""
        longest = max(map(len, tags), default=0)
        tail = self._text[max(self._at, len(self._text) - longest) :]
        start = max(tail.rfind("<"), tail.rfind(MARK))
        return len(tail) - start if start >= 0 and any(tag.startswith(tail[start:]) for tag in tags) else 0


@lru_cache
def _any_of(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tags)))


class Trimmed:
    """Passes text on, but holds back white space at its end until the next text arrives."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._space: list[str] = []

    def add(self, text: str) -> None:
        """Appends text."""
        stripped = text.rstrip()
        if stripped:
            self._emit("".join(self._space) + stripped)
            self._space = []
        self._space.append(text[len(stripped) :])

    def drop(self) -> None:
        """Drops the white space, which belongs to a tag."""
        self._space = []

    def release(self) -> None:
        """Passes the white space on as text."""
        self._emit("".join(self._space))
        self._space = []
