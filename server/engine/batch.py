"""What one call of llama_decode computes, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .sequence import Sequence

Sampled = list[int] | Exception | None
"""What a step gave one chunk: its new tokens, the accepted part of a draft and one more; what its sampler
raised; or nothing, where a prompt goes on."""


@dataclass(slots=True)
class Chunk:
    """The next `count` pending tokens of a sequence, then a `draft` of what may follow them."""

    sequence: Sequence
    start: int
    """Tokens that its slot held when the batch was scheduled."""
    count: int
    samples: bool
    """They are all that is pending: a row of logits follows the last of them."""
    is_prompt: bool
    draft: list[int] = field(default_factory=list)
    """Only where it `samples`."""
    drafter: str = ""
    """Who proposed it."""
    places: list[int] = field(default_factory=list)
    """Indices of its tokens in llama.cpp's batch."""

    @property
    def n_tokens(self) -> int:
        """What it adds to the batch."""
        return self.count + len(self.draft)

    @property
    def n_rows(self) -> int:
        """Rows of logits it needs: one after the last pending token, one after each token of the draft."""
        return 1 + len(self.draft) if self.samples else 0


@dataclass(slots=True)
class Batch:
    """Chunks that are decoded together."""

    chunks: list[Chunk]
    draft_room: int
    """Most draft tokens that fit: the batch's size and free cells."""

    @property
    def n_tokens(self) -> int:
        """Tokens in all."""
        return sum(chunk.n_tokens for chunk in self.chunks)

    @property
    def n_rows(self) -> int:
        """Rows of logits in all."""
        return sum(chunk.n_rows for chunk in self.chunks)

    @property
    def is_decode(self) -> bool:
        """Whether it takes one token of each of its sequences: no drafts, no prompts."""
        return all(chunk.n_tokens == 1 and chunk.samples and not chunk.is_prompt for chunk in self.chunks)
