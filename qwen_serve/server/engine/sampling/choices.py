"""Choices that are made together: each asks for tokens from rows, and all of them are sampled in one call."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, TypeVar

from qwen_serve.llamacpp.row_sampler import RowRequest, RowResult, sample_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

Choice = Generator[list[RowRequest], list[RowResult], T]
"""Yields requests, receives their results in the same order, and returns what was chosen."""


def choose(choices: Sequence[Choice[T]]) -> list[T]:
    """The results of all choices. What a choice raises ends them all."""
    found: dict[int, T] = {}
    answers: dict[int, list[RowResult] | None] = dict.fromkeys(range(len(choices)))
    while answers:
        asked = {}
        for i, answer in answers.items():
            try:
                asked[i] = next(choices[i]) if answer is None else choices[i].send(answer)
            except StopIteration as end:
                found[i] = end.value
        results = iter(sample_rows([one for requests in asked.values() for one in requests]) if asked else ())
        answers = {i: [next(results) for _ in requests] for i, requests in asked.items()}
    return [found[i] for i in range(len(choices))]
