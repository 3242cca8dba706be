"""The tokenizer inside the GGUF: text to ids, ids to bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .tokenizer_cache import TokenizerCache

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .llama import Model


TURN_START = b"<|im_start|>"
"""ChatML's, which every Qwen speaks."""

LONG = 512
"""Characters from which on a text is cached: shorter ones would push long ones out for little."""


class Vocab:
    """Read-only, and safe to use from any thread. Ids run from 0 to `size` - 1."""

    def __init__(self, model: Model, cached: int = 0) -> None:
        """The ids of long texts are kept for when they come again, up to so many tokens."""
        self._model = model
        self.size = model.n_vocab
        self.eos_id = model.eos
        self.bos_id = model.bos
        """What the GGUF wants every text to begin with; None for Qwen."""
        ids = range(self.size)
        self.eog_ids = frozenset(token for token in ids if model.is_eog(token))
        """Every id that ends a generation."""
        added = {token: model.piece(token, special=True) for token in ids if model.is_added(token)}
        self.added_tokens = tuple(piece.decode("utf-8", "replace") for piece in added.values())
        """Texts of all CONTROL and USER_DEFINED tokens: what must not be matched inside a user's text."""
        self.turn_ids = frozenset(token for token, piece in added.items() if piece == TURN_START)
        """The control token with which a chat turn begins, if there is one."""
        self.n_real = self.size
        """Ids from here on only pad the vocabulary to a round size (type UNUSED); none may be emitted."""
        while self.n_real > 0 and model.is_unused(self.n_real - 1):
            self.n_real -= 1
        self._pieces: dict[int, bytes] = {}
        self._cut = TURN_START.decode() if _stands_alone(TURN_START, added.values()) else None
        self._cache = TokenizerCache(cached)

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Ids of `text`. With `special`, the texts of control tokens in it become those tokens.

        Without it llama.cpp still matches USER_DEFINED tokens (Qwen's `<think>`); see `added_tokens`. Lone
        surrogates, which have no UTF-8, become question marks.
        """
        if len(text) < LONG or not special:
            return self._model.tokenize(text.encode("utf-8", "replace"), special=special)
        ids: list[int] = []
        short = ""
        for turn in self._turns(text):
            if len(turn) < LONG:
                short += turn
            else:
                ids += self._parse(short) + self._cache.ids(turn, self._parse)
                short = ""
        return ids + self._parse(short)

    def _parse(self, text: str) -> list[int]:
        return self._model.tokenize(text.encode("utf-8", "replace"), special=True) if text else []

    def _turns(self, text: str) -> list[str]:
        """The text cut where chat turns begin: whatever follows a control token, it splits the text there."""
        if self._cut is None:
            return [text]
        first, *others = text.split(self._cut)
        return [first, *(self._cut + turn for turn in others)]

    def token_bytes(self, token: int) -> bytes:
        """What the token adds to a text: often part of a character only, nothing for a control token."""
        piece = self._pieces.get(token)
        if piece is None:
            if not 0 <= token < self.size:
                raise ValueError(f"token {token} is not in the vocabulary (0 to {self.size - 1})")
            piece = self._pieces[token] = self._model.piece(token, special=False)
        return piece

    def spelling(self, token: int) -> bytes:
        """The token's own text, that of a control token too."""
        if not 0 <= token < self.size:
            raise ValueError(f"token {token} is not in the vocabulary (0 to {self.size - 1})")
        return self._model.piece(token, special=True)

    def is_eog(self, token: int) -> bool:
        """Whether the token ends a generation."""
        return token in self.eog_ids


def _stands_alone(piece: bytes, added: Iterable[bytes]) -> bool:
    """Whether `piece` is an added token that no other one can lie across, or hold."""
    others = set(added)
    if piece not in others:
        return False
    others.remove(piece)
    ends = range(1, len(piece) + 1)
    return not any(
        piece in other or any(other.endswith(piece[:n]) or other.startswith(piece[-n:]) for n in ends)
        for other in others
        if other
    )
