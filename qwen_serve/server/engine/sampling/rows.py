"""The rows of one step, as samplers read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from qwen_serve.llamacpp.row_results import RowResult, RowResults


class Rows(Protocol):
    """Rows of logits, in the batch's order; valid until the next step's are read."""

    def result(self, row: int) -> RowResult:
        """What `RowSampler` chose. Raises what the row's request could not be made for."""

    def whole(self, row: int) -> npt.NDArray[np.float32]:
        """The logits of a row that `RowSampler` does not sample: shape [n_vocab], writable."""


class SampledRows:
    """Rows that were sampled where they were computed."""

    def __init__(self, results: RowResults, asked: Sequence[int], errors: dict[int, Exception]) -> None:
        self._results, self._errors = results, errors
        self._places = {row: place for place, row in enumerate(asked)}

    def result(self, row: int) -> RowResult:
        """As of `Rows`."""
        if (error := self._errors.get(row)) is not None:
            raise error
        return self._results[self._places[row]]

    def whole(self, row: int) -> npt.NDArray[np.float32]:
        """As of `Rows`."""
        raise RuntimeError(f"row {row} is sampled by RowSampler")


class RawRows:
    """Rows that were copied to the host, in a llama.cpp without our sampler."""

    def __init__(self, logits: npt.NDArray[np.float32]) -> None:
        self._logits = logits

    def result(self, row: int) -> RowResult:
        """As of `Rows`."""
        raise RuntimeError(f"row {row} is not sampled by RowSampler")

    def whole(self, row: int) -> npt.NDArray[np.float32]:
        """As of `Rows`."""
        logits: npt.NDArray[np.float32] = self._logits[row]
        return logits
