"""The k best of long rows, for all rows at once, by small sorts.

CUDA sorts a whole row of 248,320 numbers to find a few. But the k best are in the k blocks with the highest
maxima: an element outside of them would have k elements above it. So the graph finds each block's maximum,
sorts the maxima, and continues in the k best blocks only, until the rest is short enough for one thread
block.
"""

from __future__ import annotations

from . import ggml

SORTABLE = 1024
"""Numbers that one thread block sorts (`argsort.cu`)."""

OUTWEIGHING = 2.0**100
"""Times this, any difference between two logits is more than a token id."""


def top_k(memory: int, rows: int, ids: int, k: int) -> tuple[int, int]:
    """Ids [k, n] and values [1, k, n] of the `k` highest numbers of each row, in no order.

    `rows` is [size, n], and `ids` [size] has the id of each number of a row. The size must be at least `k`.
    """
    tensor = ggml.Tensor.from_address(rows)
    size, n = tensor.ne[0], tensor.ne[1]
    shared = True  # one list of ids for all rows
    while size > SORTABLE and (width := _block(size, k)):
        blocks = size // width
        top = ggml.top_k(memory, _maxima(memory, rows, width, blocks, n), k)
        rows = ggml.get_rows(memory, ggml.reshape_3d(memory, rows, width, blocks, n), top)
        if shared:
            table, which = ggml.reshape_3d(memory, ids, width, blocks, 1), _flat(memory, top, k * n)
        else:
            table, which = ggml.reshape_3d(memory, ids, width, blocks, n), top
        size, shared = width * k, False
        rows = ggml.reshape_3d(memory, rows, size, n, 1)
        ids = ggml.reshape_3d(memory, ggml.get_rows(memory, table, which), size, n, 1)
    top = ggml.top_k(memory, rows, k)
    values = ggml.get_rows(memory, ggml.reshape_3d(memory, rows, 1, size, n), top)
    if shared:
        return top, values
    return ggml.get_rows(memory, ggml.reshape_3d(memory, ids, 1, size, n), top), values


def _block(size: int, k: int) -> int:
    """The smallest power of two that cuts `size` into few enough blocks to sort; 0 if that gains nothing."""
    width = 2
    while size % width == 0:
        if size // width <= SORTABLE:
            return width if size // width >= k and width * k < size else 0
        width *= 2
    return 0


def _maxima(memory: int, rows: int, width: int, blocks: int, n: int) -> int:
    """The highest number of each block: shape [blocks, n]."""
    _, places = best_places(memory, rows, width, blocks * n)
    return int(ggml.reshape_3d(memory, at_places(memory, rows, width, blocks * n, places), blocks, n, 1))


def best_places(memory: int, rows: int, width: int, n: int) -> tuple[int, int]:
    """Positions of the highest number in each of the `n` blocks of `width` numbers: F32 [n], and I32 for
    `at_places`."""
    best = ggml.argmax(memory, ggml.reshape_3d(memory, rows, width, n, 1))
    # argmax returns -1 if all are -inf or NaN
    best = ggml.clamp(memory, ggml.cast(memory, best, ggml.F32), 0.0, float(width - 1))
    return best, ggml.reshape_3d(memory, ggml.cast(memory, best, ggml.I32), 1, n, 1)


def at_places(memory: int, rows: int, width: int, n: int, places: int) -> int:
    """The number at each block's position: shape [1, 1, n]."""
    return int(ggml.get_rows(memory, ggml.reshape_3d(memory, rows, 1, width, n), places))


def lowest_of_best(memory: int, rows: int, ids: int, width: int, n: int) -> int:
    """Positions, for `at_places`, of the lowest of those `ids` [width, n] whose numbers in `rows` are the
    highest. Among equal numbers argmax may return any."""
    _, places = best_places(memory, rows, width, n)
    highest = ggml.reshape_3d(memory, at_places(memory, rows, width, n, places), 1, n, 1)
    below = ggml.scale(memory, ggml.sub(memory, rows, highest), OUTWEIGHING)
    return best_places(memory, ggml.sub(memory, below, ids), width, n)[1]


def _flat(memory: int, top: int, length: int) -> int:
    return int(ggml.reshape_3d(memory, top, length, 1, 1))
