"""The tokenizer inside the GGUF: text to ids, ids to bytes."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .llama import Model


class Vocab:
    """Read-only, and safe to use from any thread. Ids run from 0 to `size` - 1."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.size = model.n_vocab
        self.eos_id = model.eos
        self.bos_id = model.bos
        """What the GGUF wants every text to begin with; None for Qwen."""
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
            self._check(token)
            piece = self._pieces[token] = self._model.piece(token, special=False)
        return piece

    def is_eog(self, token: int) -> bool:
        """Whether the token ends a generation."""
        return token in self.eog_ids

    @cached_property
    def eog_ids(self) -> frozenset[int]:
        """Every id that ends a generation."""
        return frozenset(token for token in range(self.size) if self._model.is_eog(token))

    @cached_property
    def added_tokens(self) -> tuple[str, ...]:
        """Texts of all CONTROL and USER_DEFINED tokens: what must not be matched inside a user's text."""
        added = (token for token in range(self.size) if self._model.is_added(token))
        return tuple(self._model.piece(token, special=True).decode("utf-8", "replace") for token in added)

    @cached_property
    def n_real(self) -> int:
        """Ids from here on only pad the vocabulary to a round size (type UNUSED); none may be emitted."""
        end = self.size
        while end > 0 and self._model.is_unused(end - 1):
            end -= 1
        return end

    def _check(self, token: int) -> None:
        if not 0 <= token < self.size:
            raise ValueError(f"token {token} is not in the vocabulary (0 to {self.size - 1})")
