"""Tracks when a sequence may be rolled back to one of llama.cpp's snapshots of recurrent states.

With `n_rs_seq` = n, a call keeps a sequence's newest state and, as snapshots, the states before each of its
last n tokens. After `llama_memory_seq_rm` of at most n tokens, the sequence's next call begins at a snapshot.
llama-memory-recurrent.cpp leaves three things unchecked:

- Snapshots are those of the last call only. A call of fewer than n tokens leaves fewer snapshots.
- If a call has several sequences, it may move a sequence's newest state without its snapshots.
- Until the next call, a copy of a sequence that was rolled back gets its newest state, not the snapshot.

Therefore only a sequence that was alone in the last call is rolled back. Stock llama.cpp has room for n
snapshots of every sequence; with the patch shared-snapshots there is room for one sequence's.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from .errors import LlamaError
from .patches import SHARED_SNAPSHOTS, brings

SHARED: Final = brings(SHARED_SNAPSHOTS, "llama_rs_seq_shared")
"""Whether this llama.cpp can keep the snapshots of one sequence only."""

SHARED_FLAG: Final = 0x80000000
"""LLAMA_RS_SEQ_SHARED of its src/llama-ext.h, a bit of `n_rs_seq`."""


def n_rs_seq(n_snapshots: int) -> int:
    """The context parameter for this many snapshots."""
    return n_snapshots | SHARED_FLAG if SHARED and n_snapshots else n_snapshots


class Snapshots:
    """Tracks a context's calls and rejects unsafe ones. At most `most` tokens can be taken back."""

    def __init__(self, most: int, n_ubatch: int) -> None:
        self.most, self._n_ubatch = most, n_ubatch
        self.pending: set[int] = set()
        """Sequences that were rolled back to a snapshot, from which their next call continues."""
        self._last, self._reach = -1, 0
        """The sequence that was alone in the last call, and how many of its tokens can be taken back."""

    def disturbed(self, sequences: npt.NDArray[np.int32]) -> set[int]:
        """Sequences in `pending` that must be materialized before a call with tokens of `sequences`."""
        return {one for one in self.pending if (sequences != one).any()} if self.pending else self.pending

    def decoded(self, sequences: npt.NDArray[np.int32]) -> None:
        """Records a call with tokens of these sequences."""
        first, n = int(sequences[0]), len(sequences)
        alone = n <= self._n_ubatch and not (sequences != first).any()
        self._last, self._reach = (first, min(n - 1, self.most)) if alone else (-1, 0)
        self.pending.clear()

    def went_back(self, sequence: int, n_tokens: int) -> None:
        """Records that a sequence's last `n_tokens` are taken back. Raises LlamaError if that is not safe."""
        if sequence != self._last or n_tokens > self._reach:
            reach = self._reach if sequence == self._last else 0
            raise LlamaError(f"sequence {sequence} can go back by {reach} tokens, not by {n_tokens}")
        self._reach = 0
        self.pending.add(sequence)

    def gone(self, sequence: int) -> None:
        """Records that a sequence was emptied, or its state materialized."""
        self.pending.discard(sequence)
        if sequence == self._last:
            self._last, self._reach = -1, 0

    def clear(self) -> None:
        """Records that all sequences were emptied."""
        self.pending.clear()
        self._last, self._reach = -1, 0
