"""The ubatches of a batch whose sequences have different numbers of tokens, as llama.cpp splits it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Pass = list[tuple[int, int]]
"""Sequences, by index, and how many tokens each of them has in a pass, in order."""


def ubatches(lengths: Sequence[int], n_ubatch: int, tail: int = 0, most_lengths: int = 1) -> Iterator[Pass]:
    """Splits a batch into ubatches (passes over the weights), as llama.cpp does with one pool of cells.

    llama.cpp returns outputs in this order, so batches are written in it; otherwise it swaps their rows. Only
    speed depends on this: where a row was computed is asked of llama.cpp. A pass takes all that is left, the
    shortest sequence first, if that fits and has at most `most_lengths` different numbers of tokens
    (`split_runs`, llama-batch.cpp, of the patch ragged-passes). Otherwise it takes the same number of tokens
    from each sequence, and ends where the shortest sequence ends (`split_equal`). The shortest sequences come
    first. With `tail` above 0 the last `tail` tokens of a sequence stay in one pass: a sequence that would be
    split there waits for the next pass, and so do all sequences after it.
    """
    left = dict(enumerate(lengths))
    if tail:
        left = dict(sorted(left.items(), key=lambda item: item[1]))
    while left:
        if sum(left.values()) <= n_ubatch and 1 < len(set(left.values())) <= most_lengths:
            yield sorted(left.items(), key=lambda item: item[1])
            return
        length = min(min(left.values()), max(1, n_ubatch // len(left)))
        taken = list(left)
        if tail:
            parted = (k for k, n in enumerate(left.values()) if 0 < n - length < tail)
            taken = taken[: next(parted, len(taken))]
            if not taken:  # the end of a long prompt
                taken = list(left)[:1]
                whole = left[taken[0]]
                length = whole if whole <= n_ubatch else whole - tail
        yield [(index, length) for index in taken]
        for index in taken:
            left[index] -= length
            if not left[index]:
                del left[index]
