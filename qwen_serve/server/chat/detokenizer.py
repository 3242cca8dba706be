"""Turns generated tokens into text, released once it is final, and finds the stop strings that end it."""

from __future__ import annotations

import codecs
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from qwen_serve.server.engine import Vocab

from .markup import MARK, marked


class Detokenizer:
    """Detokenizes one sequence; `feed` cuts it before the first stop string, `decode` does not.

    A character whose bytes span several tokens appears with its last byte. Invalid UTF-8 becomes U+FFFD, but
    an unfinished character at the end is left out. Text that may begin a stop string is held back until it is
    clear whether it does.
    """

    def __init__(
        self,
        vocab: Vocab,
        stops: StopStrings | None = None,
        *,
        spell_control: bool = False,
        tags: Mapping[int, str] | None = None,
    ) -> None:
        """With `spell_control` the text includes control tokens by name. `tags` are the tokens that are
        marked in the text (`markup`), with their names."""
        self._bytes_of = vocab.spelling if spell_control else vocab.token_bytes
        self._tags = {token: marked(tag) for token, tag in (tags or {}).items()}
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.stops = None if stops is None else StopFilter(stops, self._arrived_with)
        """What cuts the text; the caller's of `decode` to use."""
        self._length = 0  # characters decoded so far
        self._starts: list[int] = []  # the length at each token's arrival, if there are stop strings
        self._tokens = 0
        self.ended = False
        """Whether no token follows."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that is complete, if one is. Later tokens are ignored."""
        return None if self.stops is None else self.stops.stop_string

    @property
    def completion_tokens(self) -> int:
        """Number of tokens in the returned text.

        A token counts if its first byte lies before the cut. So the tokens of a stop string do not count,
        unless they also have text before it. Without a stop, every token counts. So the count agrees with the
        tokenizer's count for the returned text, unless the model generated the text in other tokens.
        """
        return self._tokens if self.stop_string is None else self._settled

    @property
    def certain_tokens(self) -> int:
        """Number of tokens that begin in the returned text: no stop string can remove them any more."""
        return self.completion_tokens if self.stops is None or self.ended else self._settled

    @property
    def _settled(self) -> int:
        return 0 if self.stops is None else bisect_left(self._starts, self.stops.settled)

    def _arrived_with(self, position: int) -> int:
        """Number of tokens up to the one that completed the character at `position`."""
        return bisect_right(self._starts, position)

    def decode(self, tokens: Sequence[int]) -> str:
        """Takes the next tokens; returns their text, which may be empty."""
        self._tokens += len(tokens)
        if self.stops is None and self._tags.keys().isdisjoint(tokens):
            return self._decoder.decode(b"".join(map(self._bytes_of, tokens)))
        pieces = []
        for token in tokens:
            if self.stops is not None:
                self._starts.append(self._length)
            tag = self._tags.get(token)
            text = self._decoder.decode(b"" if tag else self._bytes_of(token), final=tag is not None)
            pieces.append(text + (tag or ""))
            self._length += len(pieces[-1])
        return "".join(pieces)

    def feed(self, tokens: Sequence[int]) -> str:
        """Takes the next tokens; returns the text that is now final, which may be empty."""
        text = self.decode(tokens)
        return text if self.stops is None else self.stops.feed(text, self._length - len(text))

    def flush(self) -> str:
        """Ends the sequence; returns the text held back."""
        self.ended = True
        return "" if self.stops is None else self.stops.flush()


class StopFilter:
    """Cuts a text, or the parts of one in which stop strings count, before the first stop string."""

    def __init__(self, stops: StopStrings, arrived_with: Callable[[int], int]) -> None:
        """`arrived_with` gives the number of tokens up to the one that completed a character."""
        self._stops, self._arrived_with = stops, arrived_with
        self._node = 0  # state of the stop strings' automaton after the text so far
        self._held = ""
        self.settled = 0
        """The place before which no text can be cut, in characters of the whole text; in the end, the cut."""
        self.stop_string: str | None = None

    def feed(self, text: str, place: int) -> str:
        """Takes more text, which begins at `place`; returns what is now final, which may be empty."""
        if self.stop_string is not None:
            return ""
        stops, pending = self._stops, self._held + text
        for index, character in enumerate(text):
            self._node = stops.step(self._node, "<" if character == MARK else character)
            found = stops.match(self._node)
            if found is None or (stops.min_tokens and self._arrived_with(place + index) <= stops.min_tokens):
                continue
            cut = len(self._held) + index + 1 - (0 if stops.included else len(found))
            self.settled = place - len(self._held) + cut
            self.stop_string, self._held = found, ""
            return pending[:cut]
        certain = len(pending) - stops.held(self._node)
        self.settled = place - len(self._held) + certain
        self._held = pending[certain:]
        return pending[:certain]

    def flush(self) -> str:
        """Ends a part of the text; returns what was held back."""
        held, self._held, self._node = self._held, "", 0
        return held


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
