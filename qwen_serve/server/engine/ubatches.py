"""The ubatches of a batch whose sequences have different numbers of tokens, as llama.cpp splits it."""

from collections.abc import Iterator, Sequence

Pass = list[tuple[int, int]]
"""Sequences, by index, and how many tokens each of them has in a pass, in order."""

TILES = 512
"""Matrix products on a GPU are computed in tiles, of which this many tokens are whole ones."""


def usual_pass(n_ubatch: int) -> int:
    """Tokens of a pass behind which other passes read more of the same prompts. The last pass may have up to
    `n_ubatch`, so that a small rest has no pass of its own, which costs as much as reading 100 tokens."""
    return n_ubatch // TILES * TILES or n_ubatch


def ubatches(lengths: Sequence[int], n_ubatch: int, tail: int = 0, *, ragged: bool = False) -> Iterator[Pass]:
    """Splits a batch into ubatches (passes over the weights), as llama.cpp does with one pool of cells.

    llama.cpp returns outputs in this order, so batches are written in it; otherwise it swaps their rows. Only
    speed depends on this: where a row was computed is asked of llama.cpp. With `ragged` a pass takes the
    sequences one after the other, as many tokens as fit (`split_offsets`, llama-batch.cpp, of the patch
    ragged-passes). Otherwise it takes the same number of tokens from each sequence, and ends where the
    shortest sequence ends (`split_equal`). With `tail` above 0 the last `tail` tokens of a sequence stay in
    one pass. Then `split_equal` has the shortest sequences come first: a sequence that would be split there
    waits for the next pass, and so do all sequences after it.
    """
    if ragged:
        yield from _ragged(lengths, n_ubatch, tail)
        return
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
        yield [(index, length) for index in taken]
        for index in taken:
            left[index] -= length
            if not left[index]:
                del left[index]


def _ragged(lengths: Sequence[int], n_ubatch: int, tail: int) -> Iterator[Pass]:
    one: Pass = []
    room = n_ubatch
    for index, whole in enumerate(lengths):
        left = whole
        while left:
            taken = min(left, room)
            if 0 < left - taken < tail:
                taken = max(0, left - tail)
            if taken:
                one.append((index, taken))
            left -= taken
            room -= taken
            if left or not room:
                yield one
                one, room = [], n_ubatch
    if one:
        yield one
