"""Prompts of an exact token length, no two alike: random tokens, slices of a text, or counted words."""

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from bench.errors import BenchError
from bench.load.client import Client
from bench.load.vocabulary import Vocabulary

POOL_SIZE = 2048
FIXES = 50
WORD = re.compile(r" [A-Za-z]{2,}")
SPECIAL = re.compile(r"\s*<.*>\s*", re.DOTALL)

# For servers without a tokenizer: each word's token count is asked of the server's usage.
WORDS = Path(__file__).parent / "load" / "words.txt"


class Prompts(ABC):
    """An endless or finite supply of prompts. ``source`` says what they are made of."""

    source: str

    @abstractmethod
    async def make(self, tokens: int) -> str:
        """A new text of exactly ``tokens`` tokens; BenchError when that cannot be had."""


class RandomPrompts(Prompts):
    """Random tokens of the model's vocabulary, no specials, fixed by decode-encode until the length holds.

    ``words`` keeps to tokens that are a whole word with its space, which read like text.
    """

    def __init__(self, vocabulary: Vocabulary, pool: Sequence[int], rng: random.Random, source: str) -> None:
        self.source = source
        self._vocabulary = vocabulary
        self._pool = pool
        self._rng = rng

    @classmethod
    async def build(cls, vocabulary: Vocabulary, rng: random.Random, *, words: bool) -> "RandomPrompts":
        """Draw the pool of tokens: those that have a text of their own and are not special."""
        drawn = rng.sample(range(vocabulary.size), min(POOL_SIZE, vocabulary.size))
        pool = [token for token in drawn if _is_plain(await vocabulary.decode([token]), words)]
        if len(pool) < 16:
            raise BenchError(f"{vocabulary.source}: only {len(pool)} of {len(drawn)} tokens fit a prompt")
        kind = "whole-word tokens" if words else "tokens"
        return cls(vocabulary, pool, rng, f"random {kind} from {vocabulary.source}")

    async def make(self, tokens: int) -> str:
        ids = self._rng.choices(self._pool, k=tokens)
        for _ in range(FIXES):
            text = (await self._vocabulary.decode(ids)).rstrip("\ufffd")  # a character cut by the length
            ids = await self._vocabulary.encode(text)
            if len(ids) == tokens:
                return text
            ids = ids[:tokens] + self._rng.choices(self._pool, k=max(0, tokens - len(ids)))
        raise BenchError(f"{self._vocabulary.source}: no random text of exactly {tokens} tokens found")


class TextPrompts(Prompts):
    """Consecutive slices of a text that the user names: nothing is used twice."""

    def __init__(self, vocabulary: Vocabulary, ids: Sequence[int], path: Path) -> None:
        self.source = f"slices of {path}"
        self._vocabulary = vocabulary
        self._ids = ids
        self._path = path
        self._next = 0

    @classmethod
    async def build(cls, vocabulary: Vocabulary, path: Path) -> "TextPrompts":
        """Tokenize the whole text once. Raises BenchError when it cannot be read."""
        return cls(vocabulary, await vocabulary.encode(read_text(path)), path)

    def anew(self) -> "TextPrompts":
        """The same text from its start."""
        return TextPrompts(self._vocabulary, self._ids, self._path)

    async def make(self, tokens: int) -> str:
        # A slice's own tokenization can differ at its ends: take as many tokens more or fewer as it needs.
        length = tokens
        for _ in range(FIXES):
            ids = self._ids[self._next : self._next + length]
            if len(ids) < length:
                raise BenchError(
                    f"the text's {len(self._ids):,} tokens are used up: name a longer --text, or fewer --runs"
                )
            text = await self._vocabulary.decode(ids)
            count = await self._vocabulary.count(text)
            if count == tokens and "\ufffd" not in text:
                self._next += length
                return text
            if count == tokens:
                self._next += 1  # the slice begins or ends inside a character
            length += tokens - count
        raise BenchError(f"no slice of exactly {tokens} tokens found in {self.source}")


class CountedPrompts(Prompts):
    """Random words whose token counts the server's own usage told, where there is no tokenizer to ask."""

    def __init__(self, counts: dict[str, int], overhead: int, rng: random.Random) -> None:
        self.source = f"random words, counted by the server's usage ({len(counts)} words)"
        self._counts = counts
        self._single = [word for word, count in counts.items() if count == 1]
        self._overhead = overhead
        self._rng = rng

    @classmethod
    async def build(
        cls, client: Client, path: str, model: str | None, rng: random.Random
    ) -> "CountedPrompts":
        """Ask ``path`` for the count of every word: a request with one token of output each."""

        async def count(text: str) -> int:
            body = {"prompt": text, "max_tokens": 1, "temperature": 0.0}
            done = await client.complete(path, {"model": model, **body} if model else body)
            if done.usage is None:
                raise BenchError(f"{path} reports no usage: name the model's tokenizer with --tokenizer")
            return done.usage.prompt_tokens

        once, twice = await count(" water"), await count(" water water")
        overhead = 2 * once - twice  # a BOS token, say
        counts = {word: await count(f" {word}") - overhead for word in WORDS.read_text().split()}
        usable = {word: tokens for word, tokens in counts.items() if tokens >= 1}
        if sum(tokens == 1 for tokens in usable.values()) < 16:
            raise BenchError("too few English words are single tokens of this model: name its --tokenizer")
        return cls(usable, overhead, rng)

    async def make(self, tokens: int) -> str:
        words: list[str] = []
        left = tokens - self._overhead
        everything = list(self._counts)
        while left > 0:
            word = self._rng.choice(everything)
            if self._counts[word] > left:
                word = self._rng.choice(self._single)
            words.append(word)
            left -= self._counts[word]
        return "".join(f" {word}" for word in words)


async def find_prompts(
    client: Client,
    vocabulary: Vocabulary | None,
    model: str | None,
    rng: random.Random,
    *,
    words: bool,
    text: Path | None = None,
) -> Prompts:
    """Prompts cut from the user's ``text``, else from the vocabulary, else of words the server counts."""
    if text is not None:
        if vocabulary is None:
            raise BenchError("--text needs a tokenizer: the server offers none, so name one with --tokenizer")
        return await TextPrompts.build(vocabulary, text)
    if vocabulary is not None:
        return await RandomPrompts.build(vocabulary, rng, words=words)
    return await CountedPrompts.build(client, "/v1/completions", model, rng)


def read_text(path: Path) -> str:
    """The text that the user names with ``--text``. Raises BenchError when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--text {path}: {error}") from error


def _is_plain(text: str, words: bool) -> bool:
    if words:
        return WORD.fullmatch(text) is not None
    return bool(text.strip()) and "\ufffd" not in text and not SPECIAL.fullmatch(text)
