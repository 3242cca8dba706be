"""Limits of an answer's think block: a budget of tokens, and a guard against loops.

When either limit is reached, a few forced words (the bridge) close the think block, and the model answers.
Unlike a grammar, the limits ban no token: until then the model chooses freely.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from qwen_serve.server.engine.vocab import Vocab, token_of

STRIDE = 64
"""Tokens between two checks for a loop."""

NEEDLE, ROUNDS, SPAN = 16, 4, 128
"""The check looks for an earlier occurrence of the last NEEDLE tokens. A loop has repeated its text ROUNDS
times, over at least SPAN tokens."""

END, CALL = "</think>", "<tool_call>"
"""The tags that close a think block. As in the reply parser, a tag is a token of the vocabulary, or text
where it is none; and where it is one, a call must follow `<tool_call>`."""

CALLED = re.compile(rb'\s*(<(function|parameter)=[^<>\n]+[>\n]\s*[<{]|\{\s*"(name|arguments)")')
"""A call's beginning, after its `<tool_call>`."""


def _begun(word: str, then: str) -> str:
    """A pattern of each beginning of `word`, and of all of it with what may follow."""
    return "".join(f"({re.escape(letter)}" for letter in word) + then + ")?" * len(word)


_NAME = r"[^<>\n]{0,128}([>\n]\s*)?"
NOT_YET_CALLED = re.compile(
    rf"\s*({_begun('<function=', _NAME)}|{_begun('<parameter=', _NAME)}|\{{[\s\"a-z]{{0,24}})".encode()
)
"""What can still become one."""


@dataclass(frozen=True)
class ThinkingLimits:
    """One request's limits, perhaps none. Every answer that thinks has a watch, which counts its thinking
    tokens even without limits."""

    bridge: tuple[int, ...] = ()
    """The tokens that close the block; none of them ends a generation. Required for a budget and the
    guard."""
    budget: int | None = None
    """Maximum tokens of the block before the bridge."""
    loop_guard: bool = False
    repetition_penalty: float = 1.0
    """Penalty within the block on the block's tokens; 1 is none."""
    calls: bool = False
    """Whether a tool call closes the block."""

    def begin(self, vocab: Vocab) -> ThinkingWatch:
        """The watch of one answer."""
        return ThinkingWatch(self, vocab)


class ThinkingWatch:
    """Follows one answer, which begins inside a think block. Engine's thread only."""

    def __init__(self, limits: ThinkingLimits, vocab: Vocab) -> None:
        self.limits, self._vocab = limits, vocab
        self.open = True
        """Whether the block is not closed yet."""
        self._text = ""
        """For the guard: a character for each token."""
        self.tokens = 0
        """Tokens of the block so far, without the one that closes it."""
        self._tail = b""
        self._end, self._call = token_of(vocab, END), token_of(vocab, CALL)
        self._called: bytes | None = None
        """The text after a `<tool_call>`, while it may become a call."""
        self._before_call = 0

    @property
    def horizon(self) -> int | None:
        """Tokens until the next check; a draft must not go beyond it. None: no further check."""
        if not self.open:
            return None
        ahead = [] if self.limits.budget is None else [self.limits.budget - self.tokens]
        if self.limits.loop_guard:
            ahead.append(STRIDE - self.tokens % STRIDE)
        return max(1, min(ahead)) if ahead else None

    def follow(self, tokens: Sequence[int]) -> bool:
        """Add `tokens` of the answer; return whether its think block must end here."""
        if not self.open:
            return False
        for token in tokens:
            if self._closes(token):
                self.open = False
                return False
            self.tokens += 1
        limits = self.limits
        if limits.loop_guard:
            self._text += "".join(map(chr, tokens))
        if _within_character(self._tail) or self._called is not None:
            return False  # ends after a later token instead
        if limits.budget is not None and self.tokens >= limits.budget:
            return True
        return limits.loop_guard and self.tokens % STRIDE == 0 and goes_in_circles(self._text)

    def _closes(self, token: int) -> bool:
        """Whether the block ends with this token."""
        if token == self._end:
            return True
        piece = self._vocab.token_bytes(token)
        self._tail = (self._tail + piece)[-64:]
        if self._end is None and END.encode() in self._tail:
            return True
        if not self.limits.calls:
            return False
        if self._call is None:
            return CALL.encode() in self._tail
        if token == self._call:
            self._called, self._before_call = b"", self.tokens
        elif self._called is not None:
            self._called += piece
            if CALLED.match(self._called):
                self.tokens = self._before_call
                return True
            if not NOT_YET_CALLED.fullmatch(self._called):
                self._called = None
        return False


def _within_character(text: bytes) -> bool:
    """Whether UTF-8 text ends within a character."""
    for length, last in enumerate(reversed(text[-3:]), 1):
        if last >= 0xC0:
            return length < (2 if last < 0xE0 else 3 if last < 0xF0 else 4)
        if last < 0x80:
            return False
    return False


def goes_in_circles(text: str) -> bool:
    """Whether the end of a text, in which each token is a character, repeats the same few tokens."""
    end = len(text)
    place = text.rfind(text[-NEEDLE:], 0, end - 1)
    period = end - NEEDLE - place
    if place < 0:
        return False
    span = max(SPAN, ROUNDS * period)
    return span <= end and text[end - span + period :] == text[end - span : end - period]
