"""Prompts of an exact token length, no two alike: natural text, random words, random tokens, or a user's
text."""

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from bench.errors import BenchError
from bench.load.client import Client
from bench.load.vocabulary import Vocabulary

Kind = Literal["natural", "words", "tokens"]

POOL_SIZE = 2048
FIXES = 50
CHARACTERS_A_TOKEN = 6  # more than a token of English has, so that one piece of text is usually enough
WORD = re.compile(r" [A-Za-z]{2,}")
SPECIAL = re.compile(r"\s*<.*>\s*", re.DOTALL)
PROSE = re.compile(r"[A-Z][^\n]*(?:\n[^\n]+)*[.!?]")

# For servers without a tokenizer: each word's token count is asked of the server's usage.
WORDS = Path(__file__).with_name("words.txt")


class Prompts(ABC):
    """A supply of prompts."""

    @abstractmethod
    async def make(self, tokens: int, rng: random.Random) -> str:
        """A new text of exactly ``tokens`` tokens, the same for an ``rng`` of the same state.

        Raises BenchError when it cannot be had.
        """


class NaturalPrompts(Prompts):
    """Paragraphs of English prose in an order of its own for every prompt: none begins as another does.

    They are those of the Python language reference, which every Python brings along (``pydoc_data.topics``).
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    async def make(self, tokens: int, rng: random.Random) -> str:
        left: list[str] = []

        async def more(count: int) -> list[int]:
            taken: list[str] = []
            while sum(map(len, taken)) < CHARACTERS_A_TOKEN * count:
                if not left:
                    left.extend(rng.sample(prose(), len(prose())))
                taken.append(left.pop())
            return await self._vocabulary.encode("\n\n".join(taken))

        ids: list[int] = []
        for _ in range(FIXES):
            while len(ids) < tokens:
                ids += await more(tokens - len(ids))
            text = (await self._vocabulary.decode(ids[:tokens])).rstrip("\ufffd")
            ids = await self._vocabulary.encode(text)
            if len(ids) == tokens:
                return text
        raise BenchError(f"{self._vocabulary.source}: no natural text of exactly {tokens} tokens found")


@cache
def prose() -> tuple[str, ...]:
    """The paragraphs of plain sentences, without the code and the tables between them."""
    from pydoc_data.topics import topics

    paragraphs = (part.strip() for topic in topics.values() for part in topic.split("\n\n"))
    plain = (re.sub(r"\s+", " ", part) for part in paragraphs if PROSE.fullmatch(part))
    return tuple(dict.fromkeys(part for part in plain if len(part) > 120))


class RandomPrompts(Prompts):
    """Random tokens of the model's vocabulary, no specials, fixed by decode-encode until the length holds.

    ``words`` keeps to tokens that are a whole word with its space, which read like text.
    """

    def __init__(self, vocabulary: Vocabulary, pool: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._pool = pool

    @classmethod
    async def build(cls, vocabulary: Vocabulary, rng: random.Random, *, words: bool) -> "RandomPrompts":
        """Draw the pool of tokens: those that have a text of their own and are not special."""
        drawn = rng.sample(range(vocabulary.size), min(POOL_SIZE, vocabulary.size))
        pool = [token for token in drawn if _is_plain(await vocabulary.decode([token]), words)]
        if len(pool) < 16:
            raise BenchError(f"{vocabulary.source}: only {len(pool)} of {len(drawn)} tokens fit a prompt")
        return cls(vocabulary, pool)

    async def make(self, tokens: int, rng: random.Random) -> str:
        ids = rng.choices(self._pool, k=tokens)
        for _ in range(FIXES):
            text = (await self._vocabulary.decode(ids)).rstrip("\ufffd")  # a character cut by the length
            ids = await self._vocabulary.encode(text)
            if len(ids) == tokens:
                return text
            ids = ids[:tokens] + rng.choices(self._pool, k=max(0, tokens - len(ids)))
        raise BenchError(f"{self._vocabulary.source}: no random text of exactly {tokens} tokens found")


class TextPrompts(Prompts):
    """Consecutive slices of a text that the user names: nothing is used twice, and ``rng`` decides
    nothing."""

    def __init__(self, vocabulary: Vocabulary, ids: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._ids = ids
        self._next = 0

    @classmethod
    async def build(cls, vocabulary: Vocabulary, path: Path) -> "TextPrompts":
        """Tokenize the whole text once. Raises BenchError when it cannot be read."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BenchError(f"--text {path}: {error}") from error
        return cls(vocabulary, await vocabulary.encode(text))

    async def make(self, tokens: int, rng: random.Random) -> str:
        # A slice's own tokenization can differ at its ends: take as many tokens more or fewer as it needs.
        length = tokens
        for _ in range(FIXES):
            ids = self._ids[self._next : self._next + length]
            if len(ids) < length:
                raise BenchError(
                    f"the text's {len(self._ids):,} tokens are used up: "
                    "name a longer --text, or ask for fewer requests"
                )
            text = await self._vocabulary.decode(ids)
            count = await self._vocabulary.count(text)
            if count == tokens and "\ufffd" not in text:
                self._next += length
                return text
            if count == tokens:
                self._next += 1  # the slice begins or ends inside a character
            length += tokens - count
        raise BenchError(f"--text: no slice of exactly {tokens} tokens found")


class CountedPrompts(Prompts):
    """Random words whose token counts the server's own usage told, where there is no tokenizer to ask."""

    def __init__(self, counts: dict[str, int], overhead: int) -> None:
        self._counts = counts
        self._words = list(counts)
        self._single = [word for word, count in counts.items() if count == 1]
        self._overhead = overhead

    @classmethod
    async def build(cls, count: Callable[[str], Awaitable[int]]) -> "CountedPrompts":
        """Ask for the count of every word: a request with one token of output each."""
        once, twice = await count(" water"), await count(" water water")
        overhead = 2 * once - twice  # a BOS token, say
        counts = {word: await count(f" {word}") - overhead for word in WORDS.read_text().split()}
        usable = {word: tokens for word, tokens in counts.items() if tokens >= 1}
        if sum(tokens == 1 for tokens in usable.values()) < 16:
            raise BenchError("too few English words are single tokens of this model: name its --tokenizer")
        return cls(usable, overhead)

    async def make(self, tokens: int, rng: random.Random) -> str:
        words: list[str] = []
        left = tokens - self._overhead
        while left > 0:
            word = rng.choice(self._words)
            if self._counts[word] > left:
                word = rng.choice(self._single)
            words.append(word)
            left -= self._counts[word]
        return "".join(f" {word}" for word in words)


async def find_prompts(
    client: Client,
    vocabulary: Vocabulary | None,
    model: str | None,
    *,
    kind: Kind,
    seed: int,
    text: Path | None = None,
) -> Prompts:
    """Prompts cut from the user's ``text``, else of the ``kind``; without a tokenizer, of counted words."""
    if text is not None and vocabulary is None:
        raise BenchError("--text needs a tokenizer: the server offers none, so name one with --tokenizer")
    if vocabulary is None:
        return await CountedPrompts.build(lambda text: _usage_count(client, model, text))
    if text is not None:
        return await TextPrompts.build(vocabulary, text)
    if kind == "natural":
        return NaturalPrompts(vocabulary)
    return await RandomPrompts.build(vocabulary, random.Random(seed), words=kind == "words")


async def _usage_count(client: Client, model: str | None, text: str) -> int:
    body = {"prompt": text, "max_tokens": 1, "temperature": 0.0, **({"model": model} if model else {})}
    done = await client.complete("/v1/completions", body)
    if done.usage is None:
        raise BenchError("/v1/completions reports no usage: name the model's tokenizer with --tokenizer")
    return done.usage.prompt_tokens


def _is_plain(text: str, words: bool) -> bool:
    if words:
        return WORD.fullmatch(text) is not None
    return bool(text.strip()) and "\ufffd" not in text and not SPECIAL.fullmatch(text)
