"""Generated tokens to text, as far as it is certain."""

from __future__ import annotations

import codecs
from bisect import bisect_left
from typing import TYPE_CHECKING

from .stop import StopStrings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.engine import Vocab


class TextStream:
    """Detokenises one sequence, cut before the first stop string.

    A character whose bytes span tokens appears with its last byte; bytes that are no UTF-8 become U+FFFD,
    except for an unfinished character at the very end, which is left out. Text that may be the start of a
    stop string is held back until that is decided. Raises ValueError for an empty stop string.
    """

    def __init__(self, vocab: Vocab, stop: Sequence[str] = ()) -> None:
        self._vocab = vocab
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = StopStrings(stop) if stop else None
        self._held = ""
        self._length = 0  # characters decoded so far
        self._starts: list[int] = []  # that length when each token arrived, kept when there are stop strings
        self._tokens = 0
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was completed. What is fed afterwards is ignored."""
        return self.stop_string is not None

    @property
    def completion_tokens(self) -> int:
        """How many tokens the returned text is made of.

        A token counts when its first byte lies before the cut: those of the stop string do not, unless they
        also carry text before it. Without a stop every token fed counts. So a count of the returned text's
        tokens agrees, up to text that the model spelled in other tokens than the tokenizer would.
        """
        return self._tokens

    def feed(self, tokens: Sequence[int]) -> str:
        """Take the next tokens; return the text that is now certain, which may be empty."""
        if self.stopped:
            return ""
        if self._stops is None:
            self._tokens += len(tokens)
            return self._decoder.decode(b"".join(map(self._vocab.token_bytes, tokens)))
        ready = []
        for token in tokens:
            self._starts.append(self._length)
            self._tokens += 1
            text = self._decoder.decode(self._vocab.token_bytes(token))
            self._length += len(text)
            ready.append(self._release(text, self._stops))
            if self.stopped:
                break
        return "".join(ready)

    def flush(self) -> str:
        """The sequence has ended: return what was held back."""
        held, self._held = self._held, ""
        return held

    def _release(self, text: str, stops: StopStrings) -> str:
        pending = self._held + text
        for index, character in enumerate(text):
            self.stop_string = stops.step(character)
            if self.stop_string is not None:
                cut = len(self._held) + index + 1 - len(self.stop_string)
                self._tokens = bisect_left(self._starts, self._length - len(pending) + cut)
                self._held = ""
                return pending[:cut]
        certain = len(pending) - stops.held
        self._held = pending[certain:]
        return pending[:certain]
