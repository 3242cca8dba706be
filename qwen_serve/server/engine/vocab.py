"""The tokenizer inside the GGUF: text to ids, ids to bytes."""

import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from threading import Lock
from typing import Any
from unicodedata import normalize

from cachetools import LRUCache

from qwen_serve.llamacpp import Model

from .errors import InvalidPrompt, PromptTooLong

PICTURE = b"<|image_pad|>"
TURN_START = b"<|im_start|>"
"""ChatML's token, which all Qwen models use."""

TOOL_RESULT = b"<tool_response>"
"""Qwen's token."""

LONG = 512
"""Minimum characters of a cached text: shorter ones save little and would evict long ones."""

BLOCK = 4096
"""About how many characters of a text llama.cpp tokenizes at a time. Its search for control tokens cannot be
interrupted, and its time grows with the square of their number."""

LONGEST_WORD = 2**18
"""Maximum characters without a place where the text can be cut; they take about 0.1 s."""

_PRE_TOKENIZERS = ("qwen2", "qwen35")
"""Pre-tokenizers that split words at every `_BETWEEN_WORDS` (expressions: llama.cpp, src/llama-vocab.cpp)."""

_LETTER = "[A-Za-zÀ-ÖØ-öø-ɏА-яぁ-ゖァ-ヺ一-龥가-힣]"
_BETWEEN_WORDS = rf"{_LETTER}(?=[\x00-@\[-`{{-\x7f、。，])|[0-9]|\n(?=[!-~一-龥])"
"""Matches the last character before a place where a text may be cut. No word of those pre-tokenizers crosses
such a place: after its first character a word of letters has only letters, each digit is a word, and in a
word only white space follows a line break. So both parts have the same words as the whole text."""


class TokenBudget:
    """Counts a prompt's ids while it is tokenized; a `check` for `Vocab.tokenize`.

    Once there are `limit` ids, it raises PromptTooLong, or the exception that `error` returns, so that the
    rest is not tokenized. Each call also calls `interrupt`, which may raise.
    """

    def __init__(
        self,
        limit: int,
        interrupt: Callable[[], None],
        error: Callable[[int, int], Exception] = PromptTooLong,
    ) -> None:
        """`error` gets the number of ids and the limit."""
        self._limit, self._interrupt, self._error = limit, interrupt, error
        self.used = 0

    def __call__(self, count: int) -> None:
        self._interrupt()
        self.used += count
        if self.used >= self._limit:
            raise self._error(self.used, self._limit)


def _unhindered(count: int) -> None:
    """The default `check` of `Vocab.tokenize`, which allows any number of ids."""


class Vocab:
    """Read-only, and safe to use from any thread. Ids run from 0 to `size` - 1."""

    def __init__(self, model: Model, cached: int = 0) -> None:
        """The ids of long texts are cached, up to `cached` tokens in all."""
        self._model = model
        self.size = model.n_vocab
        self.eos_id = model.eos
        self.bos_id = model.bos
        """The token that the GGUF puts before every text; None for Qwen."""
        ids = range(self.size)
        self.eog_ids = model.eog_ids
        """Every id that ends a generation."""
        added = {token: model.piece(token, special=True) for token in ids if model.is_added(token)}
        self.added_tokens = tuple(piece.decode("utf-8", "replace") for piece in added.values())
        """Texts of all CONTROL and USER_DEFINED tokens, which must not be matched inside a user's text."""
        self.turn_ids = frozenset(token for token, piece in added.items() if piece == TURN_START)
        """The control token that begins a chat turn, if there is one."""
        self.tool_ids = frozenset(token for token, piece in added.items() if piece == TOOL_RESULT)
        """The token before a tool's result, if there is one."""
        self.picture_id = next((token for token, piece in added.items() if piece == PICTURE), None)
        """The control token that a chat template writes for a picture, if there is one."""
        self.n_real = model.n_real
        """Ids from here on only pad the vocabulary to a round size (type UNUSED); none may be emitted."""
        self._silent = {token for token in added if not model.piece(token, special=False)}
        """Control tokens, which add nothing to a text."""
        self._spellings: dict[int, bytes] = {}
        self.kept: dict[object, Any] = {}
        """What is written of tokens in JSON, which answers share, by its kind."""
        self._cut = TURN_START.decode() if _stands_alone(TURN_START, added.values()) else None
        self._cache: LRUCache[str, array[int]] = LRUCache(cached, getsizeof=len)
        self._cache_lock = Lock()
        parts = model.metadata().get("tokenizer.ggml.pre") in _PRE_TOKENIZERS
        self._composes = parts
        apart = parts and all(_stands_alone(piece, added.values()) for piece in added.values() if piece)
        always = [piece for token, piece in added.items() if not model.is_control(token)]
        self._places = {True: _places(added.values()), False: _places(always)} if apart else {}
        """Patterns after which a text may be cut, with and without `special`."""
        self._longest = max(map(len, added.values()), default=0)

    def tokenize(self, text: str, *, special: bool, check: Callable[[int], None] = _unhindered) -> list[int]:
        """Ids of `text`. With `special`, the texts of control tokens in it become those tokens.

        Without it llama.cpp still matches USER_DEFINED tokens (Qwen's `<think>`); see `added_tokens`. Lone
        surrogates, which have no UTF-8, become question marks. The time grows with the length of the text.
        `check` is called every few thousand ids with their number; an exception from it ends the work.
        Raises InvalidPrompt for words longer than LONGEST_WORD.
        """
        if self._composes:
            text = normalize("NFC", text)  # as Qwen's tokenizer.json says; llama.cpp does not
        if len(text) < LONG or not special:
            return self._parse(text, special, check)
        ids: list[int] = []
        short: list[str] = []
        length = 0
        for turn in self._turns(text):
            if len(turn) >= LONG or length >= BLOCK:
                ids += self._parse("".join(short), True, check)
                short, length = [], 0
            if len(turn) < LONG:
                short.append(turn)
                length += len(turn)
            else:
                ids += self._remembered(turn, check)
        return ids + self._parse("".join(short), True, check)

    def _remembered(self, turn: str, check: Callable[[int], None]) -> list[int]:
        with self._cache_lock:
            known = self._cache.get(turn)
        if known is not None:
            check(len(known))
            return known.tolist()
        ids = self._parse(turn, True, check)
        with self._cache_lock, suppress(ValueError):  # larger than the whole cache
            self._cache[turn] = array("i", ids)
        return ids

    def _parse(self, text: str, special: bool, check: Callable[[int], None]) -> list[int]:
        ids: list[int] = []
        for block in self._blocks(text, special):
            part = self._model.tokenize(block.encode("utf-8", "replace"), special=special)
            check(len(part))
            ids += part
        return ids

    def _blocks(self, text: str, special: bool) -> Iterator[str]:
        """The text in pieces of about BLOCK characters, whose ids together are those of the whole."""
        start = 0
        while len(text) - start > BLOCK:
            cut = self._place(text, start, special)
            if cut is None:
                if len(text) - start > LONGEST_WORD:
                    raise InvalidPrompt(
                        f"more than {LONGEST_WORD:,} characters without a place between words; break them up"
                    )
                break
            yield text[start:cut]
            start = cut
        if start < len(text):
            yield text[start:]

    def _place(self, text: str, start: int, special: bool) -> int | None:
        """The first place to cut at, at least BLOCK characters after `start`; None if there is none."""
        if not self._places:
            return None
        least = start + BLOCK
        for at in range(least, min(start + LONGEST_WORD, len(text)), BLOCK):
            # with a margin, so that no added token is cut off
            margin = self._longest
            for match in self._places[special].finditer(text, max(start, at - margin), at + BLOCK + margin):
                if match.start() >= at + BLOCK:
                    break
                if match.end() >= least:
                    return match.end()
        return None

    def _turns(self, text: str) -> Iterator[str]:
        """The text, cut before each chat turn's control token, where the tokenizer splits it anyway."""
        start = 0
        while self._cut is not None and (next_ := text.find(self._cut, start + 1)) >= 0:
            yield text[start:next_]
            start = next_
        yield text[start:]

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to a text, perhaps only part of a character; none for a control
        token."""
        return b"" if token in self._silent else self.spelling(token)

    def spelling(self, token: int) -> bytes:
        """The token's own text, also that of a control token."""
        piece = self._spellings.get(token)
        if piece is None:
            if not 0 <= token < self.size:
                raise ValueError(f"token {token} is not in the vocabulary (0 to {self.size - 1})")
            piece = self._spellings[token] = self._model.piece(token, special=True)
        return piece


def token_of(vocab: Vocab, tag: str) -> int | None:
    """The added token with this text; None if there is none."""
    ids = vocab.tokenize(tag, special=True) if tag in vocab.added_tokens else []
    return ids[0] if len(ids) == 1 else None


def _places(tokens: Iterable[bytes]) -> re.Pattern[str]:
    """A pattern of the tokens' texts and of all other places after which a text may be cut."""
    texts = [re.escape(piece.decode("utf-8", "replace")) for piece in tokens if piece]
    return re.compile("|".join([*texts, _BETWEEN_WORDS]))


def _stands_alone(piece: bytes, added: Iterable[bytes]) -> bool:
    """Whether `piece` is an added token that cannot overlap with any added token, not even with itself."""
    others = set(added)
    if piece not in others:
        return False
    others.remove(piece)
    ends = range(1, len(piece) + 1)
    if any(piece.startswith(piece[-n:]) for n in ends[:-1]):
        return False
    return not any(
        piece in other or any(other.endswith(piece[:n]) or other.startswith(piece[-n:]) for n in ends)
        for other in others
        if other
    )
