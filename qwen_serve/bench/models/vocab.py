"""The tokenizer of the synthetic model: made-up words of one token each, and a filler of exactly ten tokens.

Byte-level BPE behind Qwen3.5's own pre-tokenizer. A word is a space and two or three syllables of a consonant
and a vowel (" bake", " tomilu"). Syllables merge first, then the space with the first one, then each word
from a shorter one and a syllable, so no other pair ever competes and every word comes out whole. Anything
else falls apart into syllables and bytes.

The filler's ". " is an added token: behind this pre-tokenizer the space after a full stop belongs to the next
word, or to no token at the text's end, and ten tokens a sentence would come out as 10 N + 1.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice, pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.load.protocol import FILLER
from qwen_serve.convert.vocab import BYTE_LEVEL_SPACE as SPACE
from qwen_serve.convert.vocab import Vocab

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

NANO = Path(__file__).resolve().parents[3] / "models" / "nano"
"""The model whose special tokens and chat template are used: they are the official ones."""

CONSONANTS, VOWELS = "bdfghjklmnprstvz", "aeiou"
SYLLABLES = tuple(consonant + vowel for consonant, vowel in product(CONSONANTS, VOWELS))
SENTENCE_END = ". "
FILLER_WORDS = tuple(FILLER.removesuffix(SENTENCE_END).replace(" ", f" {SPACE}").split(" "))


@dataclass(frozen=True)
class SyntheticVocab:
    """The tokenizer, and the ids of the filler's ten tokens and of the words (each a contiguous range).

    `words` are in the order of the chain that the model is to follow.
    """

    vocab: Vocab
    filler: range
    words: range

    @property
    def size(self) -> int:
        return len(self.vocab.tokens)

    def text(self, ids: Sequence[int]) -> str:
        """The text of words, made without a tokenizer: each with the space before it."""
        return "".join(self.vocab.tokens[id_].replace(SPACE, " ") for id_ in ids)


def make_vocab(size: int, rng: np.random.Generator) -> SyntheticVocab:
    """A vocabulary of exactly `size` tokens; `rng` chooses the words and their order.

    Raises:
        BenchError: models/nano is missing.
    """
    try:
        tokenizer = json.loads((NANO / "tokenizer.json").read_text(encoding="utf-8"))
        settings = json.loads((NANO / "tokenizer_config.json").read_text(encoding="utf-8"))
        template = (NANO / "chat_template.jinja").read_text(encoding="utf-8")
    except OSError as error:
        raise BenchError(f"special tokens and chat template come from {NANO}: {error}") from error
    added: list[dict[str, Any]] = tokenizer["added_tokens"]
    alphabet = _byte_symbols()
    merges: list[tuple[str, str]] = [(syllable[0], syllable[1]) for syllable in SYLLABLES]
    merges += [(SPACE, syllable) for syllable in SYLLABLES]
    filler_merges = _filler_merges(merges)
    pieces = list(dict.fromkeys("".join(pair) for pair in (*merges, *filler_merges)))
    pieces = [piece for piece in pieces if piece not in FILLER_WORDS]

    head = [*alphabet, *pieces]
    n_words = size - len(head) - len(FILLER_WORDS) - 1 - len(added)
    spelling = list(islice(_words(), n_words))
    words = [left + right for left, right in spelling]
    rng.shuffle(words)

    filler = range(len(head), len(head) + len(FILLER_WORDS) + 1)
    tokens = [*head, *FILLER_WORDS, SENTENCE_END, *words, *(entry["content"] for entry in added)]
    types = [int(gguf.TokenType.NORMAL)] * size
    types[filler[-1]] = int(gguf.TokenType.USER_DEFINED)
    for id_, entry in enumerate(added, size - len(added)):
        control = entry["special"] or (entry["content"].startswith("<|") and entry["content"].endswith("|>"))
        types[id_] = int(gguf.TokenType.CONTROL if control else gguf.TokenType.USER_DEFINED)
    ids = {token: id_ for id_, token in enumerate(tokens)}
    if len(ids) != size:
        raise AssertionError("two tokens have one text")
    special = {
        kind: ids[settings[f"{kind}_token"]] for kind in ("eos", "pad") if settings.get(f"{kind}_token")
    }
    vocab = Vocab(
        tokens=tokens,
        types=types,
        # the filler's merges come last, so that no word of the chain ever meets one
        merges=[f"{left} {right}" for left, right in (*merges, *spelling, *filler_merges)],
        pre_tokenizer="qwen35",
        special_ids=special,
        add_special={"bos": False, "eos": False},
        chat_template=template,
    )
    return SyntheticVocab(vocab, filler, range(filler.stop, filler.stop + n_words))


def _words() -> Iterator[tuple[str, str]]:
    """All words as the pairs that they are merged from; first the short ones, with which the long
    ones begin.
    """
    for first, second in product(SYLLABLES, repeat=2):
        yield SPACE + first, second
    for first, second, third in product(SYLLABLES, repeat=3):
        yield SPACE + first + second, third


def _filler_merges(merges: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Merges that complete each word of the filler after `merges` have applied."""
    more: list[tuple[str, str]] = []
    for word in FILLER_WORDS:
        parts = _merged(list(word), [*merges, *more])
        while len(parts) > 1:
            more.append((parts[0], parts[1]))
            parts = _merged(list(word), [*merges, *more])
    return more


def _merged(parts: list[str], merges: Sequence[tuple[str, str]]) -> list[str]:
    """Byte-pair encoding: the earliest applicable merge goes first."""
    rank = {pair: number for number, pair in enumerate(merges)}
    while True:
        pairs = [(rank[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in rank]
        if not pairs:
            return parts
        _, i = min(pairs)
        parts = [*parts[:i], parts[i] + parts[i + 1], *parts[i + 2 :]]


def _byte_symbols() -> list[str]:
    """The 256 characters that byte-level BPE uses for bytes, in the order of the bytes.

    Printable Latin-1 stands for itself, everything else for the next free character from 256 on (GPT-2's
    encoder.py, `bytes_to_unicode`).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    free = iter(range(256, 512))
    return [chr(byte if byte in printable else next(free)) for byte in range(256)]
