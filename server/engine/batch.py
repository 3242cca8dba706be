"""What one call of llama_decode computes, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence as ListLike

    from .sequence import Adapters, Sequence


@dataclass(slots=True, eq=False)
class Chunk:
    """The next `count` pending tokens of a sequence, then a `draft` of what may follow them.

    With `samples`, they are all that is pending; then, and only then, there may be a draft. The fields are
    Final: a frozen dataclass takes three times as long to make.
    """

    sequence: Final[Sequence]
    count: Final[int]
    samples: Final[bool]
    is_prompt: Final[bool] = False
    """The pending tokens are prefill: read for the first time, or again after a preemption."""
    decodes: Final[bool] = True
    """It takes part in a step that decodes, where drafts may be verified: all that is pending gives a token,
    and of a prompt only the last token is."""
    draft: Final[tuple[int, ...]] = ()
    scored: Final[range] = range(0)
    """Positions in its sequence, which is a prompt there, after which the next token's log-probability is
    wanted."""

    @property
    def start(self) -> int:
        """Tokens that its sequence's slot holds, until the step is committed."""
        return self.sequence.computed

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
class Placement:
    """Where a chunk is in llama.cpp's batch."""

    batch_indices: list[int]
    """Of its tokens."""
    rows: list[int] = field(default_factory=list)
    """Rows of logits that its tokens are sampled from, in order."""
    scored_rows: list[int] = field(default_factory=list)
    """Rows of logits after its `scored` positions."""


@dataclass(slots=True)
class Batch:
    """Either decodes, perhaps with drafts, or chunks of prompts: of their text, or of pictures in them."""

    chunks: list[Chunk] = field(default_factory=list)
    draft_room: int = 0
    """Most draft tokens that it may be given: what is left of llama.cpp's batch and of the free cells."""
    n_tokens: int = 0
    n_rows: int = 0
    prompt_tokens: int = 0
    """Those of its tokens that are prefill."""
    of_pictures: bool = False
    """Its tokens are rows of pictures: llama.cpp takes these or tokens."""
    placements: list[Placement] = field(default_factory=list)
    """One for each chunk; the runner writes this."""
    greedy: bool = False
    """All requests are greedy and have no stop tokens of their own. The runner sets this."""

    def add(self, sequence: Sequence, count: int) -> None:
        """Read the next `count` pending tokens of `sequence`: text or a picture, as those already in it."""
        self.of_pictures = sequence.reads_picture
        samples = count == sequence.pending
        chunk = Chunk(
            sequence,
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

    def add_draft(self, chunk: Chunk, tokens: ListLike[int]) -> None:
        """Have `tokens` verified behind the chunk's own; it has no draft yet, and samples."""
        self.chunks[self.chunks.index(chunk)] = replace(chunk, draft=tuple(tokens))
        self.n_tokens += len(tokens)
        self.n_rows += len(tokens)
        self.draft_room -= len(tokens)

    def drop_drafts(self) -> None:
        """Verify nothing after all."""
        n = sum(len(chunk.draft) for chunk in self.chunks)
        self.chunks[:] = [replace(chunk, draft=()) if chunk.draft else chunk for chunk in self.chunks]
        self.n_tokens -= n
        self.n_rows -= n
        self.draft_room += n

    @property
    def adapters(self) -> Adapters:
        """Those of all its sequences."""
        return self.chunks[0].sequence.adapters if self.chunks else ()

    @property
    def is_decode(self) -> bool:
        """Whether it takes one generated token of each of its sequences, and nothing else."""
        return self.n_tokens == self.n_rows == len(self.chunks) and not self.prompt_tokens
