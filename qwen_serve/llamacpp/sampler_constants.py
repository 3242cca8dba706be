"""What the graphs of device samplers read beside the logits, and where they leave the next step's tokens."""

from __future__ import annotations

from typing import NamedTuple


class Constants(NamedTuple):
    """Tensors on the device; 0 if nothing is banned, or there are no end tokens."""

    ids: int
    """All token ids in order: I32 [n_vocab]."""
    starts: int
    """The first token of each block; far below 0 if all of them are banned: F32 [blocks]."""
    no_padding: int = 0
    """Added to logits: -inf for tokens that pad the vocabulary. F32 [n_vocab]."""
    no_end: int = 0
    """The same, with -inf also for end tokens."""
    ends: int = 0
    """The end tokens, repeated for each row of a slab: F32 [n_ends, SLAB]."""
    next_tokens: int = 0
    """BEST and TOP_K write each row's token for the next step here: I32 [SLAB]; 0 if no step can read it."""
    bans: int = 0
    """Added to the logits that BEST chooses the next token from: -inf for the end tokens of rows that ignore
    them. F32 [n_ends + blocks, SLAB]."""
    table: int = 0
    """What TOP_K guesses draws from, and `cut` (`DrawTable`)."""
    cut: int = 0
