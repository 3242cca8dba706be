"""Which text came from the caller and which from the template: so that content can not inject control tokens.

A tokenizer sees one string and can not tell the template's `<|im_end|>` from a user's. Before rendering,
every character of the caller that could begin an added token (for Qwen: every `<`) is followed by a sentinel,
a character that occurs nowhere in the request. Templates copy, trim and join strings, so the sentinels arrive
beside their characters in the rendered text, wherever that is. There they are removed, and the text is cut
right behind each caller's character that begins an added token's text. No tokenizer joins what lies in two
pieces, so those tokens become plain text, and only those: text without them stays in one piece and keeps its
ids.

Marking the first character, rather than whole occurrences, is what makes it hold at seams: `<|im_` at the end
of one string and `end|>` at the start of the next, or in the template's own text (`<parameter=` + key + `>`),
are found after they met. A template that writes the `<` itself and lets the caller complete a token behind it
is not covered; Qwen's does not.

What changes is a template's view of literals in content: `content.startswith('<tool_response>')` is false for
marked text. In Qwen's template this makes a user message that is wrapped in these tags count as a question.
Safety wins here. The think tags in an assistant's history, which templates look for as well, are taken apart
before marking (`messages.separate_reasoning`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

from .errors import PromptError

# Unicode noncharacters first (no text means anything by them), then the private use areas.
_CANDIDATES = (
    range(0xFDD0, 0xFDF0),
    range(0xE000, 0xF900),
    range(0xF0000, 0xFFFFE),
    range(0x100000, 0x10FFFE),
)


class AddedTokens:
    """The texts of a vocabulary's added tokens, as far as they can be told apart from plain text.

    One character can not be cut, and white space is no control token: such tokens stay as the tokenizer
    treats them.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple({text for text in texts if len(text) > 1 and not text.isspace()})
        self._first = {text[0] for text in self.texts}

    def mark(self, value: Any, sentinel: str) -> Any:
        """A copy of a JSON value with the sentinel behind every character that could begin a token."""
        if isinstance(value, str):
            for character in self._first:
                value = value.replace(character, character + sentinel)
            return value
        if isinstance(value, Mapping):
            return {self.mark(key, sentinel): self.mark(item, sentinel) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self.mark(item, sentinel) for item in value]
        return value

    def cut(self, rendered: str, sentinel: str) -> list[str]:
        """Remove the sentinels; return the pieces to be tokenised one by one, which joined are the text."""
        fragments = rendered.split(sentinel)
        text = "".join(fragments)
        cuts = [0]
        end = 0
        for fragment in fragments[:-1]:
            end += len(fragment)
            if end > cuts[-1] and text.startswith(self.texts, end - 1):
                cuts.append(end)
        return [text[start:stop] for start, stop in pairwise([*cuts, len(text)])]


def choose_sentinel(*values: Any) -> str:
    """A character that occurs in none of the values' strings; PromptError when all 137,000 are used."""
    texts = list(_strings(values))
    likely = chr(_CANDIDATES[0][0])
    if not any(likely in text for text in texts):  # far faster than a look at every character
        return likely
    used = set(chain.from_iterable(texts))
    for code in chain.from_iterable(_CANDIDATES):
        if chr(code) not in used:
            return chr(code)
    raise PromptError("the request contains every private-use character of Unicode", "messages")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings(tuple(value.keys()))
        yield from _strings(tuple(value.values()))
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)
