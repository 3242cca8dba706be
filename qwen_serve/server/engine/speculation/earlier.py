"""Earlier answers of the same tenant, as drafts: what followed the newest tokens in one of them.

After SuffixDecoding (Oliaro et al. 2024). Only requests with the same tenant and salt share answers, as with
prefixes: otherwise the time of an answer would tell one tenant what another one wrote.
"""

from collections import OrderedDict

from qwen_serve.server.engine.request import Request, is_private

TENANTS = 64
"""Tenants whose answers are kept; those of others are dropped, the longest unused first."""

SHORTEST = 8
"""Tokens of the shortest answer that is kept."""

END = chr(0x10FFFE)
"""Stands behind each answer; no token has this character."""


class EarlierAnswers:
    """The newest answers of each tenant, as strings with one character a token."""

    def __init__(self, tokens: int) -> None:
        """Keeps up to `tokens` tokens of a tenant."""
        self._tokens = tokens
        self._texts: OrderedDict[tuple[str, str], str] = OrderedDict()

    def of(self, sequence: Request) -> str:
        """The answers that a sequence may draft from."""
        if (key := _key(sequence)) not in self._texts:
            return ""
        self._texts.move_to_end(key)
        return self._texts[key]

    def add(self, sequence: Request, answer: str) -> None:
        """Keep the answer of a sequence that ended, unless nothing of it may be shared."""
        if len(answer) < SHORTEST or is_private(sequence.salt) or not self._tokens:
            return
        self._texts[_key(sequence)] = (self.of(sequence) + answer + END)[-self._tokens :]
        self._texts.move_to_end(_key(sequence))
        if len(self._texts) > TENANTS:
            self._texts.popitem(last=False)


def _key(sequence: Request) -> tuple[str, str]:
    return sequence.scheduling.tenant, sequence.salt


class EarlierLookup:
    """Follows a growing text and finds the latest occurrence of its end in earlier answers.

    `match` tokens at the end of the text are the same as there; 0 if there is no occurrence.
    """

    __slots__ = ("_answers", "_known", "_source", "match")

    def __init__(self) -> None:
        self._answers, self._known, self._source, self.match = "", 0, 0, 0

    def update(self, text: str, answers: str, lengths: tuple[int, ...]) -> None:
        """Process what was appended to `text`. A new occurrence is sought in `answers`, for the matches
        `lengths`, ascending."""
        new, self._known = text[self._known :], len(text)
        if self.match and new and self._answers.startswith(new, self._source):
            self._source += len(new)
            self.match += len(new)
        elif new:
            self._answers, self.match = answers, 0
            for length in lengths:  # without a shorter match there is no longer one
                if length > len(text) or (place := answers.rfind(text[-length:])) < 0:
                    break
                self._source, self.match = place + length, length

    def continuation(self, n: int) -> list[int]:
        """At most `n` tokens that followed there, up to the end of that answer."""
        if not self.match:
            return []
        return [*map(ord, self._answers[self._source : self._source + n].split(END, 1)[0])]
