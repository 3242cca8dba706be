"""Limits the digits of numbers in JSON, as llama.cpp's grammars do.

JSON and llguidance set no limit, so a small model that begins `0.333` may fill its answer with digits.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from qwen_serve.llamacpp.row_sampler import Bits

MOST_DIGITS = 16
"""Maximum digits of a number's integral part, fraction and exponent, each (json-schema-to-grammar.cpp,
`integral-part`)."""

DIGITS = b"0123456789"


class DigitTokens:
    """The digits that a vocabulary's tokens begin and end with. Constructing it decodes every token."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        pieces = [tokenizer.decode_bytes([token]) for token in range(tokenizer.vocab_size)]
        leading = [len(piece) - len(piece.lstrip(DIGITS)) for piece in pieces]
        self.leading = np.array(leading, np.int32)
        self._ends = [
            (count, len(piece) - len(piece.rstrip(DIGITS)), count == len(piece))
            for count, piece in zip(leading, pieces, strict=True)
        ]
        self._most = max(leading)
        ids = {piece: token for token, piece in enumerate(pieces) if len(piece) == 1}
        self._behind = [ids[char] for char in (b",", b"}", b"]", b"\n", b" ") if char in ids]
        self._text = [ids[char] for char in (b'"', b"z") if char in ids]

    def after(self, run: int, tokens: Iterable[int]) -> int:
        """Digits at the end of a text that ends with `run` digits and `tokens` after them."""
        for token in tokens:
            _, trailing, whole = self._ends[token]
            run = run + trailing if whole else trailing
        return run

    def too_many(self, run: int, token: int) -> bool:
        """Whether a number that ends with `run` digits has too many after `token`."""
        leading = self._ends[token][0]
        return leading > 0 and run + leading > MOST_DIGITS

    def bearable(self, run: int, tokens: Sequence[int]) -> int:
        """How many of the tokens come before a run of digits that is too long, whether or not it is part of a
        number."""
        for n, token in enumerate(tokens):
            if self.too_many(run, token):
                return n
            run = self.after(run, [token])
        return len(tokens)

    def may_exceed(self, run: int, tokens: Sequence[int]) -> bool:
        """Whether a token may make a run too long, before any of `tokens` or after the last."""
        for token in tokens:
            if run + self._most > MOST_DIGITS:
                return True
            run = self.after(run, [token])
        return run + self._most > MOST_DIGITS

    def in_number(self, matcher: LLMatcher) -> bool:
        """Whether the next digits belong to a number that may end here.

        The schema may not allow the number to end here. In a string, letters or the quotation mark may
        follow.
        """

        def allows(token: int) -> bool:
            return matcher.validate_tokens([token]) == 1

        ends = matcher.is_accepting() or any(map(allows, self._behind))
        return ends and not any(map(allows, self._text))

    def restrict(self, bits: Bits, run: int, matcher: LLMatcher) -> Bits:
        """The mask without the tokens that would make a number too long."""
        if not (run and run + self._most > MOST_DIGITS and self.in_number(matcher)):
            return bits
        mask = np.unpackbits(bits.view(np.uint8), bitorder="little")
        mask[: self.leading.size] &= self.leading <= MOST_DIGITS - run
        return np.packbits(mask, bitorder="little").view(np.uint32)
