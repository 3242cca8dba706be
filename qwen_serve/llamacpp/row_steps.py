"""Rows that are sampled where they are computed, and passes that read the tokens there."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from . import ggml
from .errors import LlamaError
from .memory import matrix
from .patches import ROW_SAMPLER, brings
from .row_results import RESULT, RowResults
from .row_sampler import HAS_ROW_SAMPLER, Bits, Place, RowRequest, asks

HAS_QUEUE = brings(ROW_SAMPLER, "llama_set_next_hidden")
"""Whether passes of a drafter can be begun behind each other."""

MOST_ROWS = 64
"""Most rows of a pass whose tokens the next step reads where they were sampled (LLAMA_ROW_MOST)."""

MOST_QUEUED = 1024
"""Most rows of passes behind each other whose tokens others read there (LLAMA_ROW_QUEUED)."""

if HAS_ROW_SAMPLER:
    _P, _I32 = ctypes.c_void_p, ctypes.c_int32
    _set_row_sampling = ggml.declare("llama_set_row_sampling", ctypes.c_bool, _P, _I32)
    _sample_rows = ggml.declare("llama_sample_rows", ctypes.c_bool, _P, _P, _I32, ctypes.c_bool)
    _row_results = ggml.declare("llama_row_results", _P, _P)
    _whole_row = ggml.quick("llama_whole_row", _P, _P, _I32)
    _set_next_rows = ggml.quick("llama_set_next_rows", ctypes.c_bool, _P, _P, _I32)
    _n_rows_in_order = ggml.quick("llama_n_rows_in_order", _I32, _P)
if HAS_QUEUE:
    _set_next_rows_of = ggml.quick("llama_set_next_rows_of", ctypes.c_bool, _P, _P, _P, _I32)
    _set_next_hidden = ggml.quick("llama_set_next_hidden", ctypes.c_bool, _P, _P, _I32)


class RowSteps:
    """Samples the rows of a context's batches, where they were computed."""

    outlive_batches = True
    """Whether another batch may be decoded before the results are read."""

    def __init__(self, context: int, n_vocab: int) -> None:
        self._context, self._n_vocab = context, n_vocab
        self._n = 0
        self._masks: list[Bits] = []
        """Those of the last requests, which are read when the rows are sampled."""

    def switch(self, place: Place | None) -> bool:
        """Leave the rows of further batches where they are computed, to be sampled there; with None, copy
        them to the host instead. Returns whether they stay. On a device without a sampler they are sampled on
        the host."""
        return bool(_set_row_sampling(self._context, 0 if place is None else place))

    def begin(self, requests: Sequence[RowRequest], indices: Sequence[int], *, now: bool) -> None:
        """Begin to sample the rows behind the tokens with these indices in the last batch or, without `now`,
        in the next one; their masks may not change until then. The results of the call before must have been
        read. Raises LlamaError."""
        self._n, self._masks = len(requests), []
        made = asks(requests, indices, self._masks)
        if not _sample_rows(self._context, made, self._n, now):
            raise LlamaError(f"no room for the requests of {self._n} rows")

    def results(self) -> RowResults:
        """The results of the last requests. Waits for them."""
        address = _row_results(self._context)
        memory = (ctypes.c_char * (self._n * RESULT.itemsize)).from_address(address)
        return RowResults(np.frombuffer(memoryview(memory), RESULT).copy(), self._whole_row)

    def read_next(self, rows: npt.NDArray[np.int32], source: RowSteps | None = None) -> bool:
        """Make the next decode read each of its tokens from a row of the last pass of `source`, or of this
        context, as it was sampled, or, for -1, from the batch. Rows count on over all batches of the last
        `begin`. Returns False if the token embedding is on another device."""
        other = () if source is None else (source._context,)
        read = _set_next_rows_of if other else _set_next_rows
        return bool(read(self._context, *other, rows.ctypes.data, rows.size))

    def read_hidden(self, rows: npt.NDArray[np.int32]) -> bool:
        """Make an MTP context's next decode, which also has `read_next`, read each hidden row from that of a
        token of the last batch, by its index. Returns False if the head is on another device."""
        return bool(_set_next_hidden(self._context, rows.ctypes.data, rows.size))

    @property
    def n_in_order(self) -> int:
        """Rows of the last batch if one pass computed all of them in the batch's order; otherwise 0."""
        return int(_n_rows_in_order(self._context))

    def _whole_row(self, i: int) -> npt.NDArray[np.float32]:
        row: npt.NDArray[np.float32] = matrix(_whole_row(self._context, i), 1, self._n_vocab)[0]
        return row
