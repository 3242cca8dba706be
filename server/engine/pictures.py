"""Pictures in a prompt: rows that stand for tokens, and the positions that they take.

A row has an id like a token, a negative one: 31 bits of a hash of the picture. So whatever compares tokens
(the prefix cache, its file, drafts copied from the text) tells pictures apart, and knows one again. An id is
of one row alone, but a picture has at least eight rows, and prefixes are compared row by row.

Qwen3.5 counts positions in three planes (M-RoPE). A picture's rows stand at one time, in the rows and columns
of a grid, and what follows comes after the grid's longer side. So from a picture on, positions are smaller
than indices of tokens. Everything in the engine counts tokens; only llama.cpp is told positions.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Picture:
    """A picture as the model reads it; nobody writes to it, and several prompts may share one."""

    ids: list[int]
    """One for each row, as `row_ids` gives them."""
    rows: npt.NDArray[np.float32]
    """[n_rows, n_embd]"""
    positions: npt.NDArray[np.int32]
    """[4, n_rows], from 0 on: by time, row and column, and a plane that stays at 0."""
    n_pos: int
    """Positions that it takes."""

    def __len__(self) -> int:
        return len(self.ids)


def row_ids(key: bytes, n_rows: int) -> list[int]:
    """Ids for the rows of the picture that `key` stands for, all negative."""
    bits = np.frombuffer(hashlib.shake_256(key).digest(4 * n_rows), "<i4")
    ids: list[int] = (bits | np.int32(-(2**31))).tolist()
    return ids


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A picture in a prompt."""

    start: int
    """Index of its first row among the prompt's tokens."""
    position: int
    """That of its first row."""
    picture: Picture

    @property
    def end(self) -> int:
        return self.start + len(self.picture)


class Layout:
    """Which tokens of a sequence are rows of pictures, and where each token stands."""

    __slots__ = ("_starts", "places")

    def __init__(self, pictures: Iterable[tuple[int, Picture]] = ()) -> None:
        """`pictures`: each with the index of its first row among the tokens, in order."""
        places: list[Place] = []
        for start, picture in pictures:
            before = places[-1] if places else None
            position = start if before is None else _behind(before, start)
            places.append(Place(start, position, picture))
        self.places = tuple(places)
        self._starts = [place.start for place in places]

    def __bool__(self) -> bool:
        return bool(self.places)

    @property
    def n_rows(self) -> int:
        """Tokens that are rows of pictures."""
        return sum(len(place.picture) for place in self.places)

    def position(self, index: int) -> int:
        """Where the token of text at `index` stands, or the first row of a picture that begins there."""
        if not self.places or not (n := bisect_right(self._starts, index)):
            return index
        place = self.places[n - 1]
        return place.position if index < place.end else _behind(place, index)

    def at(self, index: int) -> Place | None:
        """The picture that has a row there; None for text."""
        if not self.places or not (n := bisect_right(self._starts, index)):
            return None
        place = self.places[n - 1]
        return place if index < place.end else None

    def run(self, index: int) -> int | None:
        """Index up to which tokens are like the one there, of text or of one picture; None: to the end."""
        if not self.places:
            return None
        if (place := self.at(index)) is not None:
            return place.end
        n = bisect_right(self._starts, index)
        return self._starts[n] if n < len(self._starts) else None


def _behind(place: Place, index: int) -> int:
    return place.position + place.picture.n_pos + index - place.end


NO_PICTURES = Layout()
