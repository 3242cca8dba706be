"""What every drafter does: guess how sequences go on. A wrong guess costs time, never an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence as ListLike

    from server.engine.sequence import Sequence


COPIED = 16
"""Tokens found again in a row from which on a text is being copied."""


@dataclass(slots=True)
class Order:
    """A draft of at most `limit` tokens to be made for a sequence that decodes; the drafter puts it in."""

    sequence: Sequence
    limit: int
    errors: float = 1.0
    """How many guesses were wrong for each that the head's own doubts promised."""
    typical: tuple[float, ...] = ()
    """The chances of tokens that are not drafted yet, by depth; sure where it ends."""

    tokens: list[int] = field(default_factory=list)
    drafter: str = ""
    match: int = 0
    """Tokens of context that the n-gram drafter found again."""
    sure: list[float] = field(default_factory=list)
    """The MTP head's confidence in each token."""
    chance: float = 1.0
    """That all of the head's tokens are right."""

    @property
    def judged(self) -> str:
        """As what its results count: text that is being copied apart from matches that may be chance."""
        return "copy" if self.drafter == "ngram" and self.match >= COPIED else self.drafter

    @property
    def slot(self) -> int:
        """llama.cpp's id of the sequence, which must run."""
        assert self.sequence.slot is not None
        return self.sequence.slot


@dataclass(frozen=True, slots=True)
class Floors:
    """By depth, the right tokens that all orders together must expect of one more token each."""

    go_on: list[float]
    """To draft it: it takes the drafter's time and another row to verify."""
    keep: list[float]
    """To verify it: a row."""


class Drafter(Protocol):
    """Guesses for sequences in which every token but the newest was decoded at least once."""

    name: str

    def propose(self, orders: ListLike[Order], floors: Floors | None = None) -> None:
        """Fill in `tokens` and `drafter` of each order; an order without a guess stays empty."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended. Nothing happens where it was not known."""
