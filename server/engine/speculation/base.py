"""What every drafter does: guess how sequences go on. A wrong guess costs time, never an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from qwen_serve.server.engine.sequence import DraftCounts

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as ListLike

    from qwen_serve.server.engine.sequence import Sequence

DrafterState = Literal["active", "cooldown", "failed"]


@dataclass(slots=True)
class DraftRequest:
    """A draft of at most `limit` tokens is wanted for a sequence that decodes in `slot`."""

    sequence: Sequence
    slot: int
    limit: int


@dataclass(slots=True)
class Draft:
    """Tokens that may come next; none where the drafter has no guess."""

    tokens: list[int] = field(default_factory=list)
    kind: str = ""
    """One of the drafter's `kinds`: drafts of one kind are judged together."""


class Drafter(Protocol):
    """Guesses for sequences of which every token but the pending ones is in the trunk's cache.

    A drafter that is `instant` is asked first, and then it is decided how much of its drafts is verified; any
    other is asked only after it was decided that its drafts pay, and for as many tokens as do.
    """

    name: str
    instant: bool
    """To ask it takes no time to speak of."""
    most: int
    """Sequences that it drafts for at once."""
    depth: int
    """Tokens of its longest draft."""

    @property
    def kinds(self) -> Mapping[str, float]:
        """Its kinds of drafts; the chance of a first token that is assumed before anything is known."""

    def can_draft(self, request: DraftRequest) -> bool:
        """Whether it has what it needs to draft for a sequence."""

    def propose(self, requests: ListLike[DraftRequest]) -> list[Draft]:
        """A draft for each request, in order. May raise anything, which costs these drafts alone."""

    def cost(self, n: int, depth: int) -> float:
        """Expected seconds of drafts of `depth` tokens for `n` sequences."""

    def measure(self) -> None:
        """Time drafts of nothing, once, at start."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended. Nothing happens where it was not known."""


@dataclass(slots=True)
class DrafterStats(DraftCounts):
    """One drafter, all requests."""

    failed: int = 0
    """Drafts that were lost to an error."""
    unready: int = 0
    """Drafts that were wanted when the drafter lacked what it reads."""
    state: DrafterState = "active"
    """"cooldown": its drafts did not pay of late; "failed": errors keep it from drafting for a while."""
