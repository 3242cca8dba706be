"""The rows of one decode, as far as they came back to the host."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from . import ggml
from .readout import N_CANDIDATES, Readout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt


WIDTHS = {Readout.BEST: 3, Readout.TOP_K: 1, Readout.GUESS: 2}
"""How many figures a row has: see `Readouts._outputs`."""


class Rows:
    """Outputs of the last batch, in its order; valid until the next. What a row can tell depends on its kind.

    Not made anew for each batch: `fill` is called after every decode. Nothing is copied.
    """

    def __init__(self, context: int, n_vocab: int, n_real: int) -> None:
        """`n_real` of the `n_vocab` tokens are no padding."""
        self._n_real = n_real
        self.kinds: Sequence[Readout] = ()
        """Of each row."""
        self._n_candidates = min(N_CANDIDATES, n_vocab)
        self._indices: Sequence[int] = ()
        self._raw: npt.NDArray[np.float32] | None = None
        self._candidates = _Output(context, ggml.sampled_candidates, np.int32, n_vocab)
        self._logits = _Output(context, ggml.sampled_logits, np.float32, n_vocab)
        self._figures = _Output(context, ggml.sampled_probs, np.float32, n_vocab)

    def fill(
        self, kinds: Sequence[Readout], indices: Sequence[int], raw: npt.NDArray[np.float32] | None
    ) -> Rows:
        """Take over a batch: each row's kind and index in the batch; `raw` logits if nothing was read out."""
        self.kinds, self._indices, self._raw = kinds, indices, raw
        for output in (self._candidates, self._logits, self._figures):
            output.rows = None
        return self

    def __len__(self) -> int:
        return len(self.kinds)

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Shape [n_vocab], writable. For ROW."""
        whole = self._logits.of(self._indices, row) if self._raw is None else self._raw
        logits: npt.NDArray[np.float32] = whole[row]
        return logits

    def best(self, row: int) -> int:
        """For BEST and GUESS. Raises FloatingPointError when there are no usable logits."""
        return int(self._checked(row)[0])

    def best_but_end(self, row: int) -> int:
        """The best token that does not end a generation. For BEST. Raises as `best` does."""
        return int(self._checked(row)[1])

    def all_best(self) -> list[int] | None:
        """The best token of every row at once; None if a row has been read out in another way, or can not be
        used."""
        if not self.kinds:
            return None
        if self._raw is not None:
            ids = self._raw[:, : self._n_real].argmax(axis=1)
            usable = np.isfinite(self._raw[np.arange(len(ids)), ids]).all()  # a NaN anywhere wins
            return ids.tolist() if usable else None
        if max(self.kinds) > Readout.BEST:
            return None
        figures = self._figures.of(self._indices, 0)[: len(self), :3]
        if not np.isfinite(figures[:, 2]).all():
            return None
        best: list[int] = figures[:, 0].astype(np.int32).tolist()
        return best

    def candidates(self, row: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Ids and logits of the best tokens, in no order. For TOP_K. Raises as `best` does."""
        self._checked(row)
        n = self._n_candidates
        return (
            self._candidates.of(self._indices, row)[row, :n],
            self._logits.of(self._indices, row)[row, :n],
        )

    def probability(self, row: int) -> float:
        """How likely the best token is. For GUESS."""
        return float(self._figures.of(self._indices, row)[row, 1])

    def _checked(self, row: int) -> npt.NDArray[np.float32]:
        """The figures of a row, the last of which is finite if its logits are."""
        figures: npt.NDArray[np.float32] = self._figures.of(self._indices, row)[
            row, : WIDTHS[self.kinds[row]]
        ]
        if not math.isfinite(figures[-1]):
            raise FloatingPointError(f"the logits of a row come to {figures[-1]}")
        return figures


class _Output:
    """One of the three arrays that llama.cpp copies the results of samplers to: shape [rows, n_vocab]."""

    def __init__(self, context: int, getter: Callable[[int, int], Any], dtype: Any, n_vocab: int) -> None:
        self._context, self._getter = context, getter
        self._dtype, self._n_vocab = dtype, n_vocab
        self._address = 0
        self._memory: npt.NDArray[Any] = np.zeros((0, n_vocab), dtype)
        self.rows: npt.NDArray[Any] | None = None

    def of(self, indices: Sequence[int], row: int) -> npt.NDArray[Any]:
        """The whole array; `row` is one that has something in it, from which its place is found."""
        if self.rows is None:
            pointer = self._getter(self._context, indices[row])
            address = int(pointer) - 4 * self._n_vocab * row
            if address != self._address or len(indices) > len(self._memory):
                self._address, size = address, 4 * self._n_vocab * len(indices)
                memory = memoryview((ctypes.c_char * size).from_address(address))
                self._memory = np.ndarray((len(indices), self._n_vocab), self._dtype, memory)
            self.rows = self._memory
        return self.rows
