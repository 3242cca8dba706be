"""What one call of llama_decode computes, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .sequence import Sequence

Sampled = list[int] | Exception | None
"""What a step gave one chunk: the draft tokens that were accepted and one more, what its sampler raised, or
None where the prompt goes on. RowNotKept is no failure: the sequence computes what is pending again."""


@dataclass(slots=True)
class Chunk:
    """The next `count` pending tokens of a sequence, then a `draft` of what may follow them.

    With `samples`, they are all that is pending; then, and only then, there may be a draft.
    """

    sequence: Sequence
    start: int
    """Tokens that the sequence's slot held when the batch was scheduled."""
    count: int
    samples: bool
    is_prompt: bool = False
    """The pending tokens are prefill: read for the first time, or again after a preemption."""
    decodes: bool = True
    """It takes part in a step that decodes, where drafts may be verified: all that is pending gives a token,
    and of a prompt only the last token is."""
    draft: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    """Where its tokens are in llama.cpp's batch; the runner writes this."""
    rows: list[int] = field(default_factory=list)
    """Which rows of logits its tokens are sampled from, in order; the runner writes this."""
    scored: range = range(0)
    """Positions in its sequence, which is a prompt there, after which the next token's log-probability is
    wanted."""
    scored_rows: list[int] = field(default_factory=list)
    """The rows of logits of those; the runner writes this."""

    @property
    def n_tokens(self) -> int:
        return self.count + len(self.draft)

    @property
    def n_rows(self) -> int:
        """Rows of logits it needs: one after the last pending token, one after each token of the draft, and
        those of a prompt that is scored."""
        return len(self.scored) + (1 + len(self.draft) if self.samples else 0)

    @property
    def slot(self) -> int:
        """llama.cpp's id of its sequence, which runs."""
        slot = self.sequence.slot
        assert slot is not None
        return slot


@dataclass(slots=True)
class Batch:
    """Either decodes, perhaps with drafts, or chunks of prompts."""

    chunks: list[Chunk] = field(default_factory=list)
    draft_room: int = 0
    """Most draft tokens that it may be given: what is left of llama.cpp's batch and of the free cells."""
    n_tokens: int = 0
    n_rows: int = 0
    prompt_tokens: int = 0
    """Those of its tokens that are prefill."""
    greedy: bool = False
    """Every row's best token is what its request wants, and none but the usual ones end it; the runner writes
    this."""

    def add(self, sequence: Sequence, count: int) -> None:
        """Read the next `count` pending tokens of `sequence`."""
        chunk = Chunk(
            sequence,
            sequence.computed,
            count,
            samples=count == sequence.pending,
            is_prompt=not sequence.decoding,
            decodes=sequence.ready and count == sequence.pending,
            scored=sequence.unscored(sequence.computed, count) if sequence.logprobs else range(0),
        )
        self.chunks.append(chunk)
        self.n_tokens += count
        self.n_rows += chunk.n_rows
        self.prompt_tokens += count if chunk.is_prompt else 0

    def add_draft(self, chunk: Chunk, tokens: list[int]) -> None:
        """Have `tokens` verified behind the chunk's own; it has no draft yet, and samples."""
        chunk.draft = tokens
        self.n_tokens += len(tokens)
        self.n_rows += len(tokens)
        self.draft_room -= len(tokens)

    def drop_drafts(self) -> None:
        """Verify nothing after all."""
        for chunk in self.chunks:
            n = len(chunk.draft)
            chunk.draft = []
            self.n_tokens -= n
            self.n_rows -= n
            self.draft_room += n

    @property
    def is_decode(self) -> bool:
        """Whether it takes one generated token of each of its sequences, and nothing else."""
        return self.n_tokens == self.n_rows == len(self.chunks) and not self.prompt_tokens
