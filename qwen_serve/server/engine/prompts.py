"""Checks prompts."""

from collections.abc import Sequence

import numpy as np

from .errors import InvalidPrompt
from .pictures import NO_PICTURES, Layout, Picture
from .request import Prompt

PIECE = 8192
"""Tokens of a prompt that are checked at once, with the GIL held."""


def checked_ids(ids: Sequence[int], n_vocab: int) -> list[int]:
    """The token ids as a list, if all are in the vocabulary. Raises InvalidPrompt."""
    checked: list[int] = []
    for start in range(0, len(ids), PIECE):
        part = ids[start : start + PIECE]
        try:
            piece = np.asarray(part)
        except ValueError:  # nested lists of different lengths
            raise InvalidPrompt("the prompt must be a list of token ids (integers)") from None
        if piece.dtype.kind not in "iu" and set(map(type, part)) == {int}:
            piece = np.clip(np.asarray(part, object), -1, n_vocab).astype(np.int64)
        if not np.issubdtype(piece.dtype, np.integer) or piece.ndim != 1:
            raise InvalidPrompt("the prompt must be a list of token ids (integers)")
        outside = np.flatnonzero((piece < 0) | (piece >= n_vocab))
        if outside.size:
            i = int(outside[0])
            raise InvalidPrompt(
                f"token {start + i} of the prompt is {part[i]}; ids run from 0 to {n_vocab - 1}"
            )
        checked += piece.tolist()
    return checked


def with_pictures(ids: list[int], pictures: Sequence[tuple[int, Picture]]) -> Prompt:
    """A prompt of checked ids and pictures, each before the token at its index into `ids`.

    Raises InvalidPrompt if the pictures are not in order or no token follows the last.
    """
    if not pictures:
        return Prompt(ids, NO_PICTURES)
    tokens: list[int] = []
    placed: list[tuple[int, Picture]] = []
    done = 0
    for index, picture in pictures:
        if not done <= index < len(ids):
            raise InvalidPrompt(
                f"a picture before token {index} of {len(ids)}; want them in order, and text behind"
            )
        tokens += ids[done:index]
        placed.append((len(tokens), picture))
        tokens += picture.ids
        done = index
    tokens += ids[done:]
    return Prompt(tokens, Layout(placed))
