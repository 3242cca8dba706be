"""What every drafter does: guess how sequences go on. A wrong guess costs time, never an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence as ListLike

    from server.engine.sequence import Sequence


@dataclass(slots=True)
class Draft:
    """Guessed tokens, first to last; empty where there is no guess.

    `match` is how much speaks for them: tokens of context that the n-gram drafter found again; 0 elsewhere.
    """

    tokens: list[int] = field(default_factory=list)
    drafter: str = ""
    match: int = 0


class Drafter(Protocol):
    """Guesses for sequences in which every token but the newest is decoded."""

    name: str

    def propose(self, sequences: ListLike[Sequence], limits: ListLike[int]) -> list[Draft]:
        """A draft of at most `limits[i]` tokens for each sequence."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended. Nothing happens where it was not known."""
