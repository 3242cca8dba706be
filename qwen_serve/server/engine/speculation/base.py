"""The protocol of drafters, which guess the next tokens. A wrong guess costs time and changes no answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from qwen_serve.llamacpp.drafter import DrafterContext
from qwen_serve.server.engine.request import DraftCounts, Request

DrafterState = Literal["active", "cooldown", "failed"]


@dataclass(slots=True)
class DraftRequest:
    """Asks for a draft of at most `limit` tokens for the sequence that decodes in `slot`."""

    sequence: Request
    slot: int
    limit: int


@dataclass(slots=True)
class Draft:
    """Tokens that may come next; empty if the drafter has no guess."""

    tokens: list[int] = field(default_factory=list)
    kind: str = ""
    """One of the drafter's `kinds`: drafts of one kind are judged together."""


@dataclass(slots=True)
class Guesses:
    """Drafts that are being computed."""

    read: Callable[[], list[list[int]]]
    """Waits for them; returns the tokens of each, in the order of the requests."""
    context: DrafterContext | None = None
    """If it is one that `queues`, it chooses the drafts' tokens in these `rows`, where another context may
    read them before the host does."""
    rows: list[list[int]] = field(default_factory=list)


class Drafter(Protocol):
    """Drafts for sequences whose tokens, all but the pending ones, are in the trunk's cache.

    An `instant` drafter is asked first, and then the policy decides how many tokens of its drafts are
    verified. Any other drafter is asked only after the policy has decided that drafts pay, and for as many
    tokens as pay.
    """

    name: str
    instant: bool
    """Whether a call of `propose` takes negligible time."""
    most: int
    """Maximum sequences that it drafts for at once."""
    depth: int
    """Tokens of its longest draft."""

    @property
    def kinds(self) -> Mapping[str, float]:
        """Its kinds of drafts, each with the acceptance assumed for a first token before any is measured."""

    def can_draft(self, request: DraftRequest) -> bool:
        """Whether it has what it needs to draft for a sequence."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """A draft for each request, in order. May raise anything; that costs only these drafts."""

    def cost(self, n: int, depth: int) -> float:
        """Expected seconds of drafts of `depth` tokens for `n` sequences."""

    def measure(self) -> None:
        """Time drafts of arbitrary input, once, at start."""

    def forget(self, sequence: Request) -> None:
        """Drop everything about a sequence that ended. Does nothing if it is unknown."""


@dataclass(slots=True)
class DrafterStats(DraftCounts):
    """Counts of one drafter over all requests."""

    failed: int = 0
    """Drafts lost to an error."""
    unready: int = 0
    """Drafts not made because the drafter did not have the hidden rows that it reads."""
    state: DrafterState = "active"
    """"cooldown": its recent drafts did not pay; "failed": it does not draft for a while after errors."""
