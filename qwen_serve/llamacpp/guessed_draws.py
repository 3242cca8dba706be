"""The device guesses which of a row's candidates the host is going to draw, so that the next step can be
launched with that token before the host has drawn.

Both take the candidates in the same order and the same random number. The device's sums of probabilities
round differently, so the guess may be wrong where the random number is at the border of two tokens. The host
compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from . import ggml
from .top_k import at_places

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

STEPS = 32
"""Steps whose random numbers are on the device. Each step takes the next ones by itself."""

SCALE, TOP_P, MIN_P, GUESSED, NO_ENDS, STEP = range(STEPS, STEPS + 6)
"""Lines of the table after the random numbers. SCALE: 1 / temperature. GUESSED: 1 if the row has TOP_K, 0 if
it has BEST. NO_ENDS: 1 if the tokens that end a generation are excluded. The first number of STEP
is the line of the next random numbers."""

LINES = STEP + 1

FAR = -1e30
"""Added to the logits of excluded candidates. Finite, since it is multiplied by NO_ENDS."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How a row's token is drawn: by top-k, temperature, top-p and min-p, in this order."""

    top_k: int
    temperature: float
    top_p: float
    min_p: float
    no_ends: bool
    """Whether the tokens that end a generation are excluded."""


Drawn = tuple[Draw, "npt.NDArray[np.float64]"]
"""How a row's tokens are drawn, and the random numbers of the next STEPS draws."""


class DrawTable:
    """Tensors on the device: `table`, F32 [rows, LINES], and `cut`, F32 [k, rows], which is 0 for the top-k
    of a row's sorted candidates and -inf for the others."""

    def __init__(self, table: int, cut: int, rows: int, k: int) -> None:
        self.table, self.cut = table, cut
        self._rows, self._k = rows, k

    def arrays(self, drawn: Mapping[int, Drawn]) -> list[tuple[int, npt.NDArray[np.float32]]]:
        """What to write to which tensor before the next STEPS steps. Rows not in `drawn` have BEST."""
        table, cut = np.zeros((LINES, self._rows), np.float32), np.zeros((self._rows, self._k), np.float32)
        for row, (draw, numbers) in drawn.items():
            table[:STEPS, row] = numbers
            # a top-p of 1 keeps all, though the device's sum may exceed 1
            top_p, min_p = draw.top_p if draw.top_p < 1 else 2, draw.min_p * (1 - 1e-6)
            table[SCALE:STEP, row] = 1 / draw.temperature, top_p, min_p, 1, draw.no_ends
            cut[row, draw.top_k :] = -np.inf
        return [(self.table, table), (self.cut, cut)]


def guess(
    memory: int, ids: int, values: int, k: int, n: int, constants: tuple[int, int, int], best: int
) -> tuple[int, int]:
    """The tokens F32 [1, n, 1] of `n` rows: guessed draws from the `k` candidates of each, their `ids` I32
    [k, n] and logits `values` F32 [k, n]; for other rows, those of `best`, if that is not 0. And the tensor
    that sets STEP for the next step.

    `constants`: the table, the cut, and F32 [n_vocab] with -inf for the tokens that end a generation, or 0.
    """
    table, cut, no_end = constants
    rows = ggml.Tensor.from_address(table).ne[0]

    def line(number: int) -> int:
        return int(ggml.view_2d(memory, table, 1, n, 4, 4 * rows * number))

    values = ggml.reshape_3d(memory, values, k, n, 1)
    if no_end:
        size = ggml.Tensor.from_address(no_end).ne[0]
        flat = ggml.reshape_3d(memory, ids, k * n, 1, 1)
        bans = ggml.get_rows(memory, ggml.reshape_3d(memory, no_end, 1, size, 1), flat)
        bans = ggml.clamp(memory, ggml.reshape_3d(memory, bans, k, n, 1), FAR, 0.0)
        values = ggml.add(memory, values, ggml.mul(memory, bans, line(NO_ENDS)))
    order = ggml.argsort(memory, values, ggml.DESCENDING)
    ordered = ggml.get_rows(memory, ggml.reshape_3d(memory, values, 1, k, n), order)
    ordered = ggml.mul(memory, ggml.reshape_3d(memory, ordered, k, n, 1), line(SCALE))
    chances = ggml.soft_max_ext(memory, ordered, ggml.view_2d(memory, cut, k, n, 4 * k, 0), 1.0, 0.0)
    sums = ggml.cumsum(memory, chances)
    # top-p keeps a candidate if the sum of those before it is below top-p
    below = ggml.step(memory, ggml.add(memory, ggml.sub(memory, chances, sums), line(TOP_P)))
    highest = ggml.view_2d(memory, chances, 1, n, 4 * k, 0)
    likely = ggml.sub(memory, chances, ggml.mul(memory, highest, line(MIN_P)))
    kept = ggml.mul(memory, chances, ggml.mul(memory, below, ggml.step(memory, likely)))
    # the first candidate whose sum reaches the random number's share of all that are kept
    at = ggml.view_1d(memory, table, 1, 4 * rows * STEP)
    now = ggml.cast(memory, ggml.clamp(memory, at, 0.0, STEPS - 1.0), ggml.I32)
    number = ggml.get_rows(memory, ggml.view_2d(memory, table, rows, STEPS, 4 * rows, 0), now)
    number = ggml.view_2d(memory, number, 1, n, 4, 0)
    share = ggml.mul(memory, ggml.sum_rows(memory, kept), number)
    above = ggml.sum_rows(memory, ggml.step(memory, ggml.sub(memory, sums, share)))
    place = ggml.clamp(memory, ggml.scale_bias(memory, above, -1.0, float(k)), 0.0, k - 1.0)
    place = ggml.reshape_3d(memory, ggml.cast(memory, place, ggml.I32), 1, n, 1)
    found = at_places(
        memory, ids, k, n, ggml.reshape_3d(memory, at_places(memory, order, k, n, place), 1, n, 1)
    )
    tokens = ggml.reshape_3d(memory, ggml.cast(memory, found, ggml.F32), 1, n, 1)
    if best:  # ids are exact in F32, and so are their differences
        change = ggml.mul(memory, ggml.sub(memory, tokens, best), line(GUESSED))
        tokens = ggml.add(memory, best, change)
    return tokens, int(ggml.cpy(memory, ggml.scale_bias(memory, at, 1.0, 1.0), at))
