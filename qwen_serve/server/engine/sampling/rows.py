"""The rows of one step, as samplers read them."""

from collections.abc import Sequence
from typing import Protocol

from qwen_serve.llamacpp.row_results import RowResult, RowResults


class Rows(Protocol):
    """Rows of logits, in the batch's order; valid until the next step's are read."""

    def result(self, row: int) -> RowResult:
        """What `RowSampler` chose. Raises what the row's request could not be made for."""


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
