"""Pictures in a prompt: rows in place of tokens, and their positions.

A row has a negative id in place of a token id: 31 bits of a hash of the picture. So code that compares tokens
(the prefix cache, its file, drafts copied from the text) distinguishes pictures and recognizes repeated ones.
An id identifies only one row, but a picture has at least eight rows, and prefixes are compared row by row.

Qwen3.5 counts positions in three planes (M-RoPE). A picture's rows have the same time, and the rows and
columns of a grid; the next token's position comes after the grid's longer side. So from a picture on,
positions are smaller than token indices. The engine counts tokens; it uses positions only for llama.cpp.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Picture:
    """A picture as the model reads it. It is never changed, and several prompts may share one."""

    ids: list[int]
    """One for each row, as `row_ids` gives them."""
    rows: npt.NDArray[np.float32]
    """[n_rows, n_embd]"""
    positions: npt.NDArray[np.int32]
    """[4, n_rows], from 0 on: time, row and column, and a plane that stays at 0."""
    n_pos: int
    """Number of positions that it takes."""

    def __len__(self) -> int:
        return len(self.ids)


def row_ids(key: bytes, n_rows: int) -> list[int]:
    """Ids for the rows of the picture with the hash `key`, all negative."""
    bits = np.frombuffer(hashlib.shake_256(key).digest(4 * n_rows), "<i4")
    ids: list[int] = (bits | np.int32(-(2**31))).tolist()
    return ids


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A picture in a prompt."""

    start: int
    """Index of its first row among the prompt's tokens."""
    position: int
    """Position of its first row."""
    picture: Picture

    @property
    def end(self) -> int:
        return self.start + len(self.picture)


class Layout:
    """Which tokens of a sequence are rows of pictures, and the position of each token."""

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
        """Number of tokens that are rows of pictures."""
        return sum(len(place.picture) for place in self.places)

    @property
    def end(self) -> int:
        """Index of the first token behind the last picture; 0 without pictures."""
        return self.places[-1].end if self.places else 0

    def position(self, index: int) -> int:
        """Position of the text token at `index`, or of the first row of the picture there."""
        if not self.places or not (n := bisect_right(self._starts, index)):
            return index
        place = self.places[n - 1]
        return place.position if index < place.end else _behind(place, index)

    def at(self, index: int) -> Place | None:
        """The picture with a row at `index`; None for text."""
        if not self.places or not (n := bisect_right(self._starts, index)):
            return None
        place = self.places[n - 1]
        return place if index < place.end else None

    def run(self, index: int) -> int | None:
        """End of the run of text, or of the picture, that contains `index`; None: the end of the sequence."""
        if not self.places:
            return None
        if (place := self.at(index)) is not None:
            return place.end
        n = bisect_right(self._starts, index)
        return self._starts[n] if n < len(self._starts) else None


def _behind(place: Place, index: int) -> int:
    return place.position + place.picture.n_pos + index - place.end


NO_PICTURES = Layout()
