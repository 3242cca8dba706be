"""Prompts with an exact number of tokens, all different: natural text, random words, random tokens, or a
user's text.
"""

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.load.vocabulary import Vocabulary

Kind = Literal["natural", "words", "tokens"]

POOL_SIZE = 2048
FIXES = 50
CHARACTERS_A_TOKEN = 6  # more than an English token has, so that one draw usually suffices
WORD = re.compile(r" [A-Za-z]{2,}")
SPECIAL = re.compile(r"\s*<.*>\s*", re.DOTALL)
PROSE = re.compile(r"[A-Z][^\n]*(?:\n[^\n]+)*[.!?]")


class Prompts(ABC):
    """A source of prompts. Token ids are drawn, decoded and encoded again, then cut or extended until the
    number is right.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    async def make(self, tokens: int, rng: random.Random) -> str:
        """A text of exactly ``tokens`` tokens, which depends only on the state of ``rng``.

        Raises BenchError if none is found.
        """
        ids = await self._draw(tokens, rng)
        for _ in range(FIXES):
            # U+FFFD at the ends: characters that were cut in two
            text = (await self._vocabulary.decode(ids[:tokens])).strip("\ufffd")
            ids = await self._vocabulary.encode(text)
            if len(ids) == tokens:
                return text
            if len(ids) < tokens:
                ids += await self._draw(tokens - len(ids), rng)
        raise BenchError(f"{self._vocabulary.source}: no text of exactly {tokens} tokens found")

    @abstractmethod
    async def _draw(self, count: int, rng: random.Random) -> list[int]:
        """About ``count`` ids."""


class NaturalPrompts(Prompts):
    """Paragraphs of English prose in a random order, so that no two prompts begin alike.

    The paragraphs are from the Python language reference, which is part of every Python
    (``pydoc_data.topics``).
    """

    async def _draw(self, count: int, rng: random.Random) -> list[int]:
        left, text = rng.sample(prose(), len(prose())), ""
        while left and len(text) < CHARACTERS_A_TOKEN * count:
            text += f"{left.pop()}\n\n"
        return await self._vocabulary.encode(text)


@cache
def prose() -> tuple[str, ...]:
    """The reference's paragraphs of plain sentences, without code and tables."""
    from pydoc_data.topics import topics

    paragraphs = (part.strip() for topic in topics.values() for part in topic.split("\n\n"))
    plain = (re.sub(r"\s+", " ", part) for part in paragraphs if PROSE.fullmatch(part))
    return tuple(dict.fromkeys(part for part in plain if len(part) > 120))


class RandomPrompts(Prompts):
    """Random tokens of the model's vocabulary, without special ones.

    ``words``: only tokens that are a whole word with its space.
    """

    def __init__(self, vocabulary: Vocabulary, pool: Sequence[int]) -> None:
        super().__init__(vocabulary)
        self._pool = pool

    @classmethod
    async def build(cls, vocabulary: Vocabulary, rng: random.Random, *, words: bool) -> "RandomPrompts":
        """Draw the pool of tokens: those that decode to plain text and are not special."""
        drawn = rng.sample(range(vocabulary.size), min(POOL_SIZE, vocabulary.size))
        pool = [token for token in drawn if _is_plain(await vocabulary.decode([token]), words)]
        if len(pool) < 16:
            raise BenchError(f"{vocabulary.source}: only {len(pool)} of {len(drawn)} tokens fit a prompt")
        return cls(vocabulary, pool)

    async def _draw(self, count: int, rng: random.Random) -> list[int]:
        return rng.choices(self._pool, k=count)


class TextPrompts(Prompts):
    """Consecutive slices of a user's text: no part is used twice, and ``rng`` is not used."""

    def __init__(self, vocabulary: Vocabulary, ids: Sequence[int]) -> None:
        super().__init__(vocabulary)
        self._ids = ids
        self._next = 0

    @classmethod
    async def build(cls, vocabulary: Vocabulary, path: Path) -> "TextPrompts":
        """Tokenize the whole text. Raises BenchError if it cannot be read."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BenchError(f"--text {path}: {error}") from error
        return cls(vocabulary, await vocabulary.encode(text))

    async def _draw(self, count: int, rng: random.Random) -> list[int]:
        drawn = list(self._ids[self._next : self._next + count])
        self._next += count
        if len(drawn) < count:
            raise BenchError(
                f"the text's {len(self._ids):,} tokens are used up: "
                "name a longer --text, or ask for fewer requests"
            )
        return drawn


async def find_prompts(
    vocabulary: Vocabulary | None, *, kind: Kind, seed: int, text: Path | None = None
) -> Prompts:
    """Prompts cut from the user's ``text``, else prompts of ``kind``. Raises BenchError without a
    tokenizer."""
    if vocabulary is None:
        raise BenchError("the server offers no tokenizer to count prompts with: name one with --tokenizer")
    if text is not None:
        return await TextPrompts.build(vocabulary, text)
    if kind == "natural":
        return NaturalPrompts(vocabulary)
    return await RandomPrompts.build(vocabulary, random.Random(seed), words=kind == "words")


def _is_plain(text: str, words: bool) -> bool:
    if words:
        return WORD.fullmatch(text) is not None
    return bool(text.strip()) and "\ufffd" not in text and not SPECIAL.fullmatch(text)
