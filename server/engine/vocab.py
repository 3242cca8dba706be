"""The tokenizer inside the GGUF: text to ids, ids to bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .llama import Model


TURN_START = b"<|im_start|>"
"""ChatML's, which every Qwen speaks."""


class Vocab:
    """Read-only, and safe to use from any thread. Ids run from 0 to `size` - 1."""

    def __init__(self, model: Model) -> None:
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

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Ids of `text`. With `special`, the texts of control tokens in it become those tokens.

        Without it llama.cpp still matches USER_DEFINED tokens (Qwen's `<think>`); see `added_tokens`. Lone
        surrogates, which have no UTF-8, become question marks.
        """
        return self._model.tokenize(text.encode("utf-8", "replace"), special=special)

    def token_bytes(self, token: int) -> bytes:
        """What the token adds to a text: often part of a character only, nothing for a control token."""
        piece = self._pieces.get(token)
        if piece is None:
            if not 0 <= token < self.size:
                raise ValueError(f"token {token} is not in the vocabulary (0 to {self.size - 1})")
            piece = self._pieces[token] = self._model.piece(token, special=False)
        return piece

    def is_eog(self, token: int) -> bool:
        """Whether the token ends a generation."""
        return token in self.eog_ids
