"""The ubatches of a batch whose sequences have different numbers of tokens, as llama.cpp splits it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def ubatches(lengths: Sequence[int], n_ubatch: int, tail: int = 0) -> Iterator[tuple[int, list[int]]]:
    """Splits a batch into ubatches (passes over the weights), like llama.cpp: yields the number of tokens
    that each sequence has in the pass, and the indices of these sequences.

    llama.cpp returns outputs in this order, so batches are written in it. The recurrent layers need the same
    number of tokens from each sequence, so a pass ends where the shortest sequence ends (`split_equal`,
    llama-batch.cpp). The shortest sequences come first. With `tail` above 0 the last `tail` tokens of a
    sequence stay in one pass: a sequence that would be split there waits for the next pass, and so do all
    sequences after it.
    """
    left = dict(enumerate(lengths))
    if tail:
        left = dict(sorted(left.items(), key=lambda item: item[1]))
    while left:
        length = min(min(left.values()), max(1, n_ubatch // len(left)))
        taken = list(left)
        if tail:
            parted = (k for k, n in enumerate(left.values()) if 0 < n - length < tail)
            taken = taken[: next(parted, len(taken))]
            if not taken:  # the end of a long prompt
                taken = list(left)[:1]
                whole = left[taken[0]]
                length = whole if whole <= n_ubatch else whole - tail
        yield length, taken
        for index in taken:
            left[index] -= length
            if not left[index]:
                del left[index]
