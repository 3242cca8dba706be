"""How long an answer may think: a budget of tokens, and a guard against going in circles.

Where either says that it is enough, a few words (the bridge) are put into the model's mouth that close the
think block, and it answers. Unlike a grammar this refuses no token: the model chooses freely up to there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qwen_serve.server.engine.vocab import Vocab

STRIDE = 64
"""Tokens between two looks for a circle."""

NEEDLE, ROUNDS, SPAN = 16, 4, 128
"""A circle is looked for by the last tokens, so many; it is one where the text has come round so often, over
at least so many tokens."""

ENDS = (b"</think>", b"<tool_call>")
"""What closes a think block, for whoever reads the answer."""


@dataclass(frozen=True)
class ThinkingLimits:
    """What one request allows, which may be anything; every answer that thinks is followed by a watch of its
    own, which counts its thoughts at least."""

    bridge: tuple[int, ...] = ()
    """The tokens that close the block; none of them ends a generation. Needed for a budget and the guard."""
    budget: int | None = None
    """Most tokens of the block before the bridge."""
    loop_guard: bool = False
    repetition_penalty: float = 1.0
    """Within the block, over the block; 1 is none."""

    def begin(self, vocab: Vocab) -> ThinkingWatch:
        """The watch of one answer."""
        return ThinkingWatch(self, vocab)


class ThinkingWatch:
    """Follows one answer, which begins inside a think block. The engine's thread only."""

    def __init__(self, limits: ThinkingLimits, vocab: Vocab) -> None:
        self.limits, self._vocab = limits, vocab
        self.open = True
        """The block is not closed yet."""
        self._text = ""
        """Of the guard: a character for each token."""
        self.tokens = 0
        """Of the block so far, without the one that closes it."""
        self._tail = b""

    @property
    def horizon(self) -> int | None:
        """Tokens until it has to be asked again: what is drafted must not reach further. None: never."""
        if not self.open:
            return None
        ahead = [] if self.limits.budget is None else [self.limits.budget - self.tokens]
        if self.limits.loop_guard:
            ahead.append(STRIDE - self.tokens % STRIDE)
        return max(1, min(ahead)) if ahead else None

    def follow(self, tokens: Sequence[int]) -> bool:
        """The answer has gained `tokens`; whether its thoughts must end here."""
        if not self.open:
            return False
        for token in tokens:
            self._tail = (self._tail + self._vocab.token_bytes(token))[-64:]
            if any(end in self._tail for end in ENDS):
                self.open = False
                return False
            self.tokens += 1
        limits = self.limits
        if limits.loop_guard:
            self._text += "".join(map(chr, tokens))
        if _within_character(self._tail):
            return False  # but after the next token
        if limits.budget is not None and self.tokens >= limits.budget:
            return True
        return limits.loop_guard and self.tokens % STRIDE == 0 and goes_in_circles(self._text)


def _within_character(text: bytes) -> bool:
    """Whether UTF-8 text breaks off in a character."""
    for length, last in enumerate(reversed(text[-3:]), 1):
        if last >= 0xC0:
            return length < (2 if last < 0xE0 else 3 if last < 0xF0 else 4)
        if last < 0x80:
            return False
    return False


def goes_in_circles(text: str) -> bool:
    """Whether the end of a text, a character for each token, is the same few tokens over and over."""
    end = len(text)
    place = text.rfind(text[-NEEDLE:], 0, end - 1)
    period = end - NEEDLE - place
    if place < 0:
        return False
    span = max(SPAN, ROUNDS * period)
    return span <= end and text[end - span + period :] == text[end - span : end - period]
