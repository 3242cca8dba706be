"""What our sampler (row_sampler.py) has chosen, and log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

MOST_TOP = 20
"""Most likeliest tokens with log-probabilities (LLAMA_ROW_MAX_TOP)."""


class Status(IntEnum):
    """What came of a row."""

    OK = 0
    NOT_FINITE = 1
    ZERO = 2
    NONE_LEFT = 3
    """Rules and mask leave no token."""
    MISSING = 4
    """The row was not kept."""


_STATUSES = tuple(Status)


RESULT = np.dtype(
    [
        *((name, np.int32) for name in ("status", "token", "rank", "n_top")),
        *((name, np.float32) for name in ("logit", "best")),
        *((name, np.int32) for name in ("surprise", "unused")),
        ("mass", np.uint64),
        ("top", np.int32, MOST_TOP),
        ("top_logits", np.float32, MOST_TOP),
    ]
)
"""`struct llama_row_result`."""

LOG_ONE = 44 * math.log(2)
"""Masses are in 2^-44 of the likeliest token's."""


@dataclass(slots=True, eq=False)
class TokenLogprobs:
    """Natural logarithms of probabilities at one place of a text: those of the row as the model computed it,
    padding included.

    Not frozen, since a frozen one takes twice as long to make.
    """

    token: int
    """The token at this place."""
    logprob: float
    rank: int
    """1 for the likeliest token; of equally likely ones the lowest id comes first."""
    best: npt.NDArray[np.int32]
    """The likeliest tokens at this place, best first; of equally likely ones the lowest id."""
    best_logprobs: npt.NDArray[np.float32]
    """Their log-probabilities. These are arrays because pairs would take ten times the memory, and ten times
    as long to free."""

    @property
    def top(self) -> list[tuple[int, float]]:
        """The likeliest tokens and their log-probabilities, best first."""
        return list(zip(self.best.tolist(), self.best_logprobs.tolist(), strict=True))


@dataclass(slots=True, eq=False)
class RowResult(TokenLogprobs):
    """What came of a row's request; without log-probabilities only the token counts."""

    status: Status
    surprise: int
    """Of the token among those that Mirostat left, in 2^-24 bits."""

    def differs(self, other: RowResult) -> bool:
        """Whether any bit of it is another."""
        same = (self.status, self.token) == (other.status, other.token)
        same = same and (self.rank, self.surprise) == (other.rank, other.surprise)
        same = same and np.array_equal(self.logprob, other.logprob, equal_nan=True)
        pairs = ((self.best, other.best), (self.best_logprobs, other.best_logprobs))
        return not (same and all(np.array_equal(*pair) for pair in pairs))


NO_LOGPROBS = math.nan, 0, np.zeros(0, np.int32), np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class _Scores:
    """Of all rows together."""

    n_top: list[int]
    """-1 where no log-probabilities are wanted."""
    logprobs: list[float]
    ranks: list[int]
    top: npt.NDArray[np.float32]


class RowResults:
    """The results of a step's requests, in their order."""

    def __init__(self, array: npt.NDArray[Any], whole: Callable[[int], npt.NDArray[np.float32]]) -> None:
        """`array`: of `RESULT`."""
        self._array, self._whole = array, whole
        self.statuses: list[int] = array["status"].tolist()
        self.tokens: list[int] = array["token"].tolist()
        self._surprises: list[int] = array["surprise"].tolist()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> RowResult:
        found, token = self._scores, self.tokens[i]
        what = _STATUSES[self.statuses[i]], self._surprises[i]
        if (n := found.n_top[i]) < 0:
            return RowResult(token, *NO_LOGPROBS, *what)
        best = self._array["top"][i, :n], found.top[i, :n]
        return RowResult(token, found.logprobs[i], found.ranks[i], *best, *what)

    @cached_property
    def _scores(self) -> _Scores:
        array = self._array
        scored = array["mass"] > 0
        sums = array["best"] + np.log(np.maximum(array["mass"], 1).astype(np.float64)) - LOG_ONE
        return _Scores(
            np.where(scored, array["n_top"], -1).tolist(),
            (array["logit"] - sums).astype(np.float32).tolist(),
            array["rank"].tolist(),
            (array["top_logits"] - sums[:, None]).astype(np.float32),
        )

    def whole(self, i: int) -> npt.NDArray[np.float32]:
        """The row [n_vocab] of a request without a sampler, writable. Valid until the next step's."""
        return self._whole(i)
