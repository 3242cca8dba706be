"""Where the end of a text occurred before: hash chains, as LZ77 compressors keep them (RFC 1951, section 4).

A chain links the places where the same four tokens end, another those of the same two.
"""

from __future__ import annotations

import numpy as np

from .acceptance import Record

MIX = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1

LONGEST_COMPARED = 64
"""Tokens to which two matches are told apart; the more recent of two that reach this is taken."""

CANDIDATES = 64
"""Places of a chain that are compared, the most recent first."""


class Chain:
    """Where each run of `length` tokens, 2 or 4, ended before. A place is the index of the next token.

    Made from a whole text at once it costs O(n log n), but in C.
    """

    __slots__ = ("before", "latest", "length")

    def __init__(self, length: int, tokens: list[int]) -> None:
        self.length = length
        self.latest: dict[int, int] = {}
        self.before: list[int] = [-1] * length
        """For each place the one before it with the same key, or -1."""
        if len(tokens) < length:
            return
        text = np.array(tokens, np.uint64)
        pairs = text[:-1] << np.uint64(32) | text[1:]
        keys = pairs if length == 2 else pairs[:-2] * np.uint64(MIX) ^ pairs[2:]
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        again = ordered[1:] == ordered[:-1]
        before = np.full(len(keys), -1, np.int64)
        before[order[1:][again]] = order[:-1][again] + length
        self.before += before.tolist()
        self.latest = dict(zip(keys.tolist(), range(length, length + len(keys)), strict=True))

    def add(self, text: list[int], end: int) -> None:
        """Take in the token `text[end - 1]`, the next one."""
        if end < self.length:
            return
        key = self.key(text, end)
        self.before.append(self.latest.get(key, -1))
        self.latest[key] = end

    def key(self, text: list[int], end: int) -> int:
        """What stands for the last tokens of `text[:end]`: different tokens may share it, if rarely."""
        pair = text[end - 2] << 32 | text[end - 1]
        if self.length == 2:
            return pair
        return ((text[end - 4] << 32 | text[end - 3]) * MIX & MASK) ^ pair


class SuffixIndex:
    """Follows a growing list of tokens and knows the longest earlier occurrence of its end.

    `source` is the index of the token that followed that occurrence, -1 where the last two tokens are new;
    `match` its length. Exact up to `longest_compared` tokens among the latest `candidates` occurrences. Each
    token costs O(1): while the text repeats, the occurrence moves along; else a chain is searched, bounded.
    """

    def __init__(
        self, tokens: list[int], *, longest_compared: int = LONGEST_COMPARED, candidates: int = CANDIDATES
    ) -> None:
        self.tokens = tokens
        self.source, self.match = -1, 0
        self.record = Record()
        """How often the occurrence was right about the next token, drafted from or not."""
        self._longest_compared, self._candidates = longest_compared, candidates
        self._indexed = len(tokens)
        self._quads = Chain(4, tokens)
        self._pairs: Chain | None = None
        """Made when it is first needed: most texts that repeat do so by more than three tokens."""
        self._search_own()

    def update(self) -> None:
        """Take in the tokens that were appended to the list since the last time."""
        tokens = self.tokens
        while self._indexed < len(tokens):
            token = tokens[self._indexed]
            self._indexed += 1
            self._quads.add(tokens, self._indexed)
            if self._pairs is not None:
                self._pairs.add(tokens, self._indexed)
            goes_on = self.source >= 0 and tokens[self.source] == token
            if self.source >= 0:
                self.record.add(self.match, goes_on)
            if goes_on:
                self.source += 1
                self.match += 1
            else:
                self._search_own()

    def continuation(self, n: int) -> list[int]:
        """The `n` tokens that follow if the occurrence is repeated further, past its own end if need be."""
        if self.source < 0:
            return []
        period = len(self.tokens) - self.source
        follows = self.tokens[self.source : self.source + n]
        return follows if n <= period else (follows * -(-n // period))[:n]

    def find(self, text: list[int]) -> tuple[int, int]:
        """Where the end of another text occurs in this one, as `source` and `match`; (-1, 0) for nowhere."""
        end = len(text)
        for chain in (self._quads, self._pair_chain()):
            if end >= chain.length and (place := chain.latest.get(chain.key(text, end), -1)) >= 0:
                found = self._longest(chain, place, text, end)
                if found[1] >= chain.length:
                    return found
        return -1, 0

    def _pair_chain(self) -> Chain:
        if self._pairs is None:
            self._pairs = Chain(2, self.tokens[: self._indexed])
        return self._pairs

    def _search_own(self) -> None:
        end = self._indexed
        self.source, self.match = -1, 0
        if end >= 4 and (place := self._quads.before[end]) >= 0:
            self.source, self.match = self._longest(self._quads, place, self.tokens, end)
        if self.match < 4 and end >= 2 and (place := self._pair_chain().before[end]) >= 0:
            self.source, self.match = self._longest(self._pair_chain(), place, self.tokens, end)

    def _longest(self, chain: Chain, place: int, text: list[int], end: int) -> tuple[int, int]:
        """Of the places from `place` on down the chain, the one that agrees longest with `text[:end]`."""
        tokens, most = self.tokens, self._longest_compared
        source, match = -1, 0
        for _ in range(self._candidates):
            length, limit = 0, min(place, end, most)
            while length < limit and tokens[place - 1 - length] == text[end - 1 - length]:
                length += 1
            if length > match:
                source, match = place, length
                if length >= most:
                    break
            place = chain.before[place]
            if place < 0:
                break
        return source, match
