"""The figures that several benchmarks draw from their runs."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any, Self

import numpy as np

from bench.load.client import Completion
from bench.results import Record

# Re-tokenizing a text may legitimately give a few tokens more or fewer than were generated.
COUNT_TOLERANCE = 0.02


class Spread(Record):
    """Percentiles of one quantity over the runs, in its own unit."""

    p10: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Self | None:
        """Of all values that are known; None when there are none."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        p10, p50, p90, p99 = (float(value) for value in np.percentile(known, (10, 50, 90, 99)))
        return cls(p10=p10, p50=p50, p90=p90, p99=p99)


class Tokens(Record):
    """One request's tokens as the server claims them, and as the tokenizer counts its text again."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    recounted_tokens: int | None = None
    finish_reason: str | None = None


def claims(answer: Completion) -> dict[str, Any]:
    """The fields of `Tokens` that the server itself fills."""
    usage = answer.usage
    counts = {} if usage is None else asdict(usage)
    return {**counts, "finish_reason": answer.finish_reason}


def median_known(values: Iterable[float | None]) -> float | None:
    """The median of all values that are known."""
    known = [value for value in values if value is not None]
    return float(median(known)) if known else None


def is_miscounted(claimed: int | None, recounted: int | None) -> bool:
    """Whether a claimed token count and the tokenizer's differ by more than 2% (and by more than 2)."""
    if claimed is None or recounted is None:
        return False
    return abs(recounted - claimed) > max(2, COUNT_TOLERANCE * claimed)


def cached_share(counts: Sequence[tuple[int | None, int | None]]) -> float | None:
    """Of (prompt tokens, cached tokens): the share that came from a cache, None where no server said so."""
    known = [(prompt, cached) for prompt, cached in counts if prompt and cached is not None]
    return sum(cached for _, cached in known) / sum(prompt for prompt, _ in known) if known else None
