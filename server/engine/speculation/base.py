"""What every drafter does: guess how sequences go on. A wrong guess costs time, never an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as ListLike

    from server.engine.batch import Batch, Chunk
    from server.engine.sequence import Sequence

DrafterState = Literal["active", "resting", "failed"]


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

    def look(self, sequences: ListLike[Sequence]) -> None:
        """While the device computes: do what makes the next drafts faster."""

    def measure(self) -> None:
        """Time drafts of nothing, once, at start."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended. Nothing happens where it was not known."""


class DraftStates(Protocol):
    """The way back from wrong drafts, as `server.engine.states` keeps it."""

    def guard(self, batch: Batch) -> None:
        """Before the launch: keep a way back for each chunk with a draft."""

    def rollback(self, chunk: Chunk, accepted: int) -> int:
        """Take a slot back after a wrong draft; the tokens that it holds then: with those accepted, or only
        those before the chunk."""

    def free(self, sequence_id: int) -> None:
        """Empty an id."""

    def rewinds(self, slot: int, n_sequences: int) -> int:
        """Tokens of the longest draft that can be taken back keeping what was right."""

    def keeps_graph(self, slot: int, n_sequences: int) -> int:
        """Tokens of the longest draft after which llama.cpp's graph is still the one in use."""


@dataclass(slots=True)
class DraftCounts:
    """What became of drafts: of one request, or of one drafter and all requests."""

    steps: int = 0
    """Steps that verified a draft."""
    drafted: int = 0
    """Tokens in those drafts."""
    accepted: int = 0
    """Those that were right."""

    def add(self, drafted: int, accepted: int) -> None:
        """A step verified a draft."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted

    @property
    def mean_accepted(self) -> float:
        """Accepted tokens a draft."""
        return self.accepted / self.steps if self.steps else 0.0


@dataclass(slots=True)
class DrafterStats(DraftCounts):
    """One drafter, all requests."""

    failed: int = 0
    """Drafts that were lost to an error."""
    unready: int = 0
    """Drafts that were wanted when the drafter lacked what it reads."""
    state: DrafterState = "active"
    """"resting": its drafts did not pay of late; "failed": errors keep it from drafting for a while."""
