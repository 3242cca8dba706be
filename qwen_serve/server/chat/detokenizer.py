"""Turns generated tokens into text, released once it is final, and finds the stop strings that end it."""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from qwen_serve.server.engine import Vocab


class Detokenizer:
    """Detokenizes one sequence, cut before the first stop string.

    A character whose bytes span several tokens appears with its last byte. Invalid UTF-8 becomes U+FFFD, but
    an unfinished character at the end is left out. Text that may begin a stop string is held back until it is
    clear whether it does.
    """

    def __init__(
        self, vocab: Vocab, stops: StopStrings | None = None, *, spell_control: bool = False
    ) -> None:
        """With `spell_control` the text includes control tokens by name."""
        self._bytes_of = vocab.spelling if spell_control else vocab.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = stops
        self._node = 0  # state of the stop strings' automaton after the text so far
        self._held = ""
        self._length = 0  # characters decoded so far
        self._starts: list[int] = []  # the length at each token's arrival, if there are stop strings
        self._tokens = 0
        self._flushed = False
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete. Later tokens are ignored."""
        return self.stop_string is not None

    @property
    def completion_tokens(self) -> int:
        """Number of tokens in the returned text.

        A token counts if its first byte lies before the cut. So the tokens of a stop string do not count,
        unless they also have text before it. Without a stop, every token counts. So the count agrees with the
        tokenizer's count for the returned text, unless the model generated the text in other tokens.
        """
        return self._tokens

    @property
    def certain_tokens(self) -> int:
        """Number of tokens that begin in the returned text: no stop string can remove them any more."""
        if self._stops is None or self.stopped or self._flushed:
            return self._tokens
        return bisect_left(self._starts, self._length - len(self._held))

    def feed(self, tokens: Sequence[int]) -> str:
        """Takes the next tokens; returns the text that is now final, which may be empty."""
        if self.stopped:
            return ""
        if self._stops is None:
            self._tokens += len(tokens)
            return self._decoder.decode(b"".join(map(self._bytes_of, tokens)))
        ready = []
        for token in tokens:
            self._starts.append(self._length)
            self._tokens += 1
            text = self._decoder.decode(self._bytes_of(token))
            self._length += len(text)
            ready.append(self._release(text, self._stops))
            if self.stopped:
                break
        return "".join(ready)

    def flush(self) -> str:
        """Ends the sequence; returns the text held back."""
        held, self._held, self._flushed = self._held, "", True
        return held

    def _release(self, text: str, stops: StopStrings) -> str:
        pending = self._held + text
        early = self._tokens <= stops.min_tokens
        for index, character in enumerate(text):
            self._node = stops.step(self._node, character)
            if early:
                continue
            self.stop_string = stops.match(self._node)
            if self.stop_string is not None:
                cut = len(self._held) + index + 1
                if not stops.included:
                    cut -= len(self.stop_string)
                self._tokens = bisect_left(self._starts, self._length - len(pending) + cut)
                self._held = ""
                return pending[:cut]
        certain = len(pending) - stops.held(self._node)
        self._held = pending[certain:]
        return pending[:certain]


class StopStrings:
    """Aho-Corasick automaton over stop strings: one step a character, however many strings there are.

    One automaton can match any number of texts, each of which keeps only its current node, 0 at first. The
    stop string that is *completed first* wins, and the longest of several that one character completes. So
    the result does not depend on how the text was cut into pieces. Raises ValueError for an empty stop
    string.
    """

    def __init__(self, stops: Iterable[str], *, included: bool = False, min_tokens: int = 0) -> None:
        """`included`: a text ends after the stop string, not before it. A stop string that is completed
        within the first `min_tokens` tokens has no effect."""
        self.included, self.min_tokens = included, min_tokens
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]
        self._fallback = [0]
        for stop in stops:
            self._insert(stop)
        self._link()

    def step(self, node: int, character: str) -> int:
        """The node after one more character."""
        while node and character not in self._next[node]:
            node = self._fallback[node]
        return self._next[node].get(character, 0)

    def match(self, node: int) -> str | None:
        """The stop string that is complete at a node, if any."""
        return self._match[node]

    def held(self, node: int) -> int:
        """Length of the longest suffix of the text that could still grow into a stop string."""
        return self._depth[node]

    def _insert(self, stop: str) -> None:
        if not stop:
            raise ValueError("a stop string must not be empty")
        node = 0
        for character in stop:
            if character not in self._next[node]:
                self._next[node][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._match.append(None)
                self._fallback.append(0)
            node = self._next[node][character]
        self._match[node] = stop

    def _link(self) -> None:
        """Sets each node's link, breadth first: the longest proper suffix of its text that is a node, too."""
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            self._match[node] = self._match[node] or self._match[self._fallback[node]]
            for character, child in self._next[node].items():
                back = self._fallback[node]
                while back and character not in self._next[back]:
                    back = self._fallback[back]
                self._fallback[child] = self._next[back].get(character, 0)
                queue.append(child)
