"""Separates the caller's text from the template's, so that content cannot inject control tokens.

A tokenizer sees one string and cannot tell the template's `<|im_end|>` from a user's. Therefore:

- Before rendering, a sentinel (a character that occurs nowhere in the request) is inserted after every
  character of the caller that could begin an added token (for Qwen: every `<`). Templates copy, trim and join
  strings, so in the rendered text the sentinels still follow their characters.
- After rendering, the sentinels are removed, and the text is cut after each caller's character that begins an
  added token's text. The pieces are tokenized one by one, so such a token becomes plain text. Other text
  stays in one piece and keeps its ids.

Marking only first characters also covers joined strings, such as `<|im_` at the end of one and `end|>` at the
start of the next, or the template's own text (`<parameter=` + key + `>`). A template that writes the `<`
itself and lets the caller complete the token is not covered; Qwen's does not do that.

The sentinels change what a template finds in content: `content.startswith('<tool_response>')` is false for
marked text. In Qwen's template a user message wrapped in these tags then counts as a question, which is safe.
Templates also look for think tags in an assistant's history, so these are separated before marking
(`messages.separate_reasoning`).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from .errors import PromptError

# Unicode noncharacters first, which have no meaning in text, then the private use areas.
_CANDIDATES = (
    range(0xFDD0, 0xFDF0),
    range(0xE000, 0xF900),
    range(0xF0000, 0xFFFFE),
    range(0x100000, 0x10FFFE),
)

WINDOW = 2**18
"""Characters that are searched at a time, with the GIL held, in a few milliseconds."""


class AddedTokens:
    """The texts of a vocabulary's added tokens, except tokens of a single character, which cannot be cut, and
    of white space, which control nothing. The tokenizer treats those as usual.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple({text for text in texts if len(text) > 1 and not text.isspace()})
        self._first = {text[0] for text in self.texts}

    def mark(self, value: Any, sentinel: str) -> Any:
        """A copy of a JSON value with the sentinel after every character that could begin a token."""
        if isinstance(value, str):
            if not any(character in value for character in self._first):
                return value
            return "".join(self._mark(window, sentinel) for window in _windows(value))
        if isinstance(value, Mapping):
            return {self.mark(key, sentinel): self.mark(item, sentinel) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self.mark(item, sentinel) for item in value]
        return value

    def _mark(self, text: str, sentinel: str) -> str:
        for character in self._first:
            text = text.replace(character, character + sentinel)
        return text

    def cut(self, rendered: str, sentinel: str) -> Iterator[str]:
        """Removes the sentinels; yields the pieces to tokenize one by one, whose concatenation is the
        text."""
        start = 0
        for end in self._cuts(rendered, sentinel) if self.texts and sentinel in rendered else ():
            yield _without(sentinel, rendered[start:end])
            start = end
        yield _without(sentinel, rendered[start:])

    def _cuts(self, rendered: str, sentinel: str) -> Iterator[int]:
        """Positions after each caller's character that begins an added token."""
        pattern = self._pattern(sentinel)
        margin = 2 * max(map(len, self.texts))
        for at in range(0, len(rendered), WINDOW):
            for match in pattern.finditer(rendered, at, at + WINDOW + margin):
                if match.start() >= at + WINDOW:
                    break
                yield match.end()

    def _pattern(self, sentinel: str) -> re.Pattern[str]:
        """Finds a caller's character that begins an added token."""
        mark = re.escape(sentinel)
        optional = {character: f"{re.escape(character)}{mark}?" for character in self._first}
        rests: dict[str, list[str]] = {}
        for text in self.texts:
            rest = "".join(optional.get(character) or re.escape(character) for character in text[1:])
            rests.setdefault(text[0], []).append(rest)
        # grouped by first character: most places fail at the next one, before any token is compared
        return re.compile("|".join(f"{re.escape(c)}{mark}(?={'|'.join(r)})" for c, r in rests.items()))


def _without(sentinel: str, text: str) -> str:
    return "".join(window.replace(sentinel, "") for window in _windows(text)) if sentinel in text else text


def _windows(text: str) -> Iterator[str]:
    return (text[at : at + WINDOW] for at in range(0, len(text), WINDOW))


def choose_sentinel(*values: Any) -> str:
    """A character that occurs in none of the values' strings. Raises PromptError if all 137,000 are used."""
    texts = list(_strings(values))
    likely = chr(_CANDIDATES[0][0])
    if not any(likely in text for text in texts):  # far faster than checking every character
        return likely
    used: set[str] = set()
    for window in chain.from_iterable(map(_windows, texts)):
        used.update(window)
    for code in chain.from_iterable(_CANDIDATES):
        if chr(code) not in used:
            return chr(code)
    raise PromptError("messages", "the request contains every private-use character of Unicode")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings(tuple(value.keys()))
        yield from _strings(tuple(value.values()))
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)
