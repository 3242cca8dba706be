"""The tags of a reply: tokens of the vocabulary, told from text that only looks like them.

In a reply's text the `<` of a tag that is a token is MARK, a character that no decoded text contains. So one
string carries text and tags, both of the length in which they are written.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

MARK = "\udc3c"
"""Half a surrogate pair."""


def marked(tag: str) -> str:
    """A tag's token in a reply's text."""
    return MARK + tag[1:]


def spelled(text: str) -> str:
    """A reply's text as it is written, tags and all."""
    return text.replace(MARK, "<") if MARK in text else text


class Tags(NamedTuple):
    """What the tags are in a reply's text: tokens, or their spelling where a tag is no single token."""

    think: str = "<think>"
    end_think: str = "</think>"
    call: str = "<tool_call>"
    end_call: str = "</tool_call>"

    @classmethod
    def of(cls, tokens: Collection[str]) -> Tags:
        """The tags of a vocabulary in which these are tokens."""
        return cls(*(marked(tag) if tag in tokens else tag for tag in cls()))

    @property
    def exact(self) -> bool:
        """Whether the tags of calls are tokens."""
        return self.call[0] == self.end_call[0] == MARK
