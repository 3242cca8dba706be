"""What one call of llama_decode computes, and where its results are."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .request import Adapters, Request
    from .speculation.base import Guesses

UNREAD = -1
"""A draft's token that the host does not know yet. It is never right."""


@dataclass(slots=True, eq=False)
class Chunk:
    """The next `count` pending tokens of a sequence, and a `draft` of tokens that may follow them.

    With `samples` the chunk holds all pending tokens; only then may there be a draft. The last of these may
    be a placeholder: a token that the pass before samples. Fields are Final because a frozen dataclass takes
    three times as long to make.
    """

    sequence: Final[Request]
    slot: Final[int]
    """llama.cpp's id of the sequence while it runs."""
    start: int
    """Tokens that the slot holds before it. The scheduler moves it on if the batch is computed again."""
    count: Final[int]
    samples: Final[bool]
    is_prompt: Final[bool] = False
    """The pending tokens are prefill: read for the first time, or again after a preemption."""
    decodes: Final[bool] = True
    """It fits a decode step, in which drafts may be verified: it has all pending tokens, and at most the last
    of them is a prompt token."""
    draft: Final[tuple[int, ...]] = ()
    scored: Final[range] = range(0)
    """Positions in the prompt whose next token needs a log-probability."""

    @property
    def n_tokens(self) -> int:
        return self.count + len(self.draft)

    @property
    def n_rows(self) -> int:
        """Rows of logits it needs: one after the last pending token, one after each draft token, and one for
        each of its `scored` positions."""
        return len(self.scored) + (1 + len(self.draft) if self.samples else 0)


@dataclass(slots=True)
class Placement:
    """The place of a chunk in llama.cpp's batch."""

    batch_indices: list[int]
    """Indices of its tokens."""
    rows: list[int] = field(default_factory=list)
    """Rows of logits that its tokens are sampled from, in order."""
    scored_rows: list[int] = field(default_factory=list)
    """Rows of logits of its `scored` positions."""


@dataclass(slots=True)
class Batch:
    """Decodes, perhaps with drafts, or chunks of prompts. The chunks are either all text or all pictures."""

    chunks: list[Chunk] = field(default_factory=list)
    draft_room: int = 0
    """Maximum draft tokens to add: the room left in llama.cpp's batch and in the free cells."""
    n_tokens: int = 0
    n_rows: int = 0
    prompt_tokens: int = 0
    """How many of its tokens are prefill."""
    of_pictures: bool = False
    """Its tokens are rows of pictures: a batch of llama.cpp holds either rows or tokens."""
    adapters: Adapters = ()
    """The adapters of all its sequences."""
    placements: list[Placement] = field(default_factory=list)
    """One for each chunk; the runner sets this."""
    one_pass: bool = False
    """Whether one pass has the whole batch; the runner sets this for decodes."""
    dropped: set[Request] = field(default_factory=set)
    """Sequences whose results do not count, since they turned out to have ended, or to start again, after the
    batch was launched."""
    guesses: Guesses | None = None
    """Computes the tokens of the chunks' drafts, which are UNREAD until `read_drafts`: one draft for each
    chunk that has one, in their order."""

    def add(self, sequence: Request, count: int) -> None:
        """Add the next `count` pending tokens of `sequence`: text or picture rows, like the batch."""
        slot = sequence.slot
        assert slot is not None
        self.of_pictures, self.adapters = sequence.reads_picture, sequence.adapters
        samples = count == sequence.pending
        chunk = Chunk(
            sequence,
            slot,
            sequence.computed,
            count,
            samples=samples,
            is_prompt=not sequence.decoding,
            decodes=samples and sequence.ready,
            scored=sequence.unscored(sequence.computed, count) if sequence.logprobs else range(0),
        )
        self.chunks.append(chunk)
        self.n_tokens += count
        self.n_rows += chunk.n_rows
        self.prompt_tokens += count if chunk.is_prompt else 0

    def add_draft(self, chunk: Chunk, tokens: Sequence[int]) -> None:
        """Add `tokens` as the chunk's draft, to be verified. The chunk must sample and have no draft yet."""
        self.chunks[self.chunks.index(chunk)] = replace(chunk, draft=tuple(tokens))
        self.n_tokens += len(tokens)
        self.n_rows += len(tokens)
        self.draft_room -= len(tokens)

    def read_drafts(self) -> None:
        """Put the tokens of drafts that are being computed in their places. Waits for them."""
        if (guesses := self.guesses) is None:
            return
        self.guesses, drafts = None, iter(guesses.read())
        for i, chunk in enumerate(self.chunks):
            if n := len(chunk.draft):
                self.chunks[i] = replace(chunk, draft=tuple(next(drafts)[:n]))

    def drop_drafts(self) -> None:
        """Remove all drafts."""
        self.guesses = None
        n = sum(len(chunk.draft) for chunk in self.chunks)
        self.chunks[:] = [replace(chunk, draft=()) if chunk.draft else chunk for chunk in self.chunks]
        self.n_tokens -= n
        self.n_rows -= n
        self.draft_room += n

    def drop(self, sequence: Request) -> None:
        """Have the results of `sequence`, if it is in the batch, not count."""
        if any(chunk.sequence is sequence for chunk in self.chunks):
            self.dropped.add(sequence)

    @property
    def is_decode(self) -> bool:
        """Whether it holds one generated token of each of its sequences and nothing else."""
        return self.n_tokens == self.n_rows == len(self.chunks) and not self.prompt_tokens


def shares(pending: Sequence[int], most: int) -> list[int]:
    """How many of their `pending` tokens sequences decode so that all fit into a batch of `most`; at least
    one each."""
    counts, room = [*pending], most - len(pending)
    if sum(counts) <= most:
        return counts
    for i, count in enumerate(counts):
        counts[i] = 1 + min(count - 1, room)
        room -= counts[i] - 1
    return counts
