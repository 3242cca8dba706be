"""When llama.cpp's snapshots of recurrent states may be gone back to.

With `n_rs_seq` = n, a call leaves beside a sequence's newest state those before its last n tokens, and
`llama_memory_seq_rm` of so few tokens makes the sequence's next call begin at one of them. What
llama-memory-recurrent.cpp does not check: the states are those of the last call alone, so fewer tokens leave
fewer of them; other sequences of the call may move the newest state and leave the others behind; and until
the next call, copies of the sequence get its newest state, not the one that it went back to.

Stock llama.cpp has room for n snapshots of every sequence. With the patch shared-snapshots there are those of
one, of the one that was alone in the last call, which is all that is ever gone back to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .errors import LlamaError
from .patches import SHARED_SNAPSHOTS, brings

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


SHARED: Final = brings(SHARED_SNAPSHOTS, "llama_rs_seq_shared")
"""Whether this llama.cpp can have the snapshots of one sequence only."""

SHARED_FLAG: Final = 0x80000000
"""LLAMA_RS_SEQ_SHARED of its src/llama-ext.h: or-ed to `n_rs_seq`."""


def n_rs_seq(n_snapshots: int) -> int:
    """The parameter of a context with so many snapshots."""
    return n_snapshots | SHARED_FLAG if SHARED and n_snapshots else n_snapshots


class Snapshots:
    """Follows what a context does, and says what must not be done now. At most `most` tokens go."""

    def __init__(self, most: int, n_ubatch: int) -> None:
        self.most, self._n_ubatch = most, n_ubatch
        self.pending: set[int] = set()
        """Sequences that went back, and begin there with their next call."""
        self._last, self._reach = -1, 0
        """The sequence that was alone in the last call, and how many of its tokens can be taken back."""

    def disturbed(self, sequences: npt.NDArray[np.int32]) -> set[int]:
        """Who went back and must be materialized there before a call with tokens of these sequences."""
        return {one for one in self.pending if (sequences != one).any()} if self.pending else self.pending

    def decoded(self, sequences: npt.NDArray[np.int32]) -> None:
        """A call with tokens of these sequences was begun."""
        first, n = int(sequences[0]), len(sequences)
        alone = n <= self._n_ubatch and not (sequences != first).any()
        self._last, self._reach = (first, min(n - 1, self.most)) if alone else (-1, 0)
        self.pending.clear()

    def went_back(self, sequence: int, n_tokens: int) -> None:
        """The last `n_tokens` of a sequence are taken back. Raises LlamaError where that is not safe."""
        if sequence != self._last or n_tokens > self._reach:
            reach = self._reach if sequence == self._last else 0
            raise LlamaError(f"sequence {sequence} can go back by {reach} tokens, not by {n_tokens}")
        self._reach = 0
        self.pending.add(sequence)

    def gone(self, sequence: int) -> None:
        """A sequence was emptied, or its state was materialized."""
        self.pending.discard(sequence)
        if sequence == self._last:
            self._last, self._reach = -1, 0

    def clear(self) -> None:
        """All sequences were emptied."""
        self.pending.clear()
        self._last, self._reach = -1, 0
