"""The values that blocks of llama.cpp's types can hold (ggml-common.h), as steps, offsets and codes.

A row of a k-quant is cut into super-blocks of 256 weights, and each of them into sub-blocks. A weight is `d *
scale * level[code] - dmin * minimum`. `d` and `dmin` are F16 numbers of the super-block, `scale` and
`minimum` small integers of the sub-block, and `code` is an integer of the weight.

Arrays here are transposed, [width, rows], so that a column is contiguous in memory.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf.quants import IQ4_NL

from qwen_serve.convert.compensation.arrays import Array, like, namespace


@dataclass(frozen=True)
class Grid:
    """The layout of one type's blocks.

    `levels`: the values of codes 0, 1, ... `scales`: the least and the largest scale, (1, 1) if `d` alone is
    the step. `minima`: the largest minimum, 0 for a type without minima.
    """

    block: int
    sub_block: int
    levels: tuple[int, ...]
    scales: tuple[int, int]
    minima: int

    @property
    def uniform(self) -> bool:
        """Whether adjacent levels are all 1 apart."""
        return self.levels[-1] - self.levels[0] == len(self.levels) - 1

    def codes(self, values: Array) -> Array:
        """The level (not its code) nearest to each value; values are in steps."""
        xp = namespace(values)
        if self.uniform:
            return xp.clip(xp.round(values), self.levels[0], self.levels[-1])
        levels = np.array(self.levels, np.float32)
        middles = like((levels[1:] + levels[:-1]) / 2, values)
        return like(levels, values)[xp.searchsorted(middles, values)]


def _span(first: int, last: int) -> tuple[int, ...]:
    return tuple(range(first, last + 1))


GRIDS: Final = {
    Type.Q2_K: Grid(256, 16, _span(0, 3), (0, 15), 15),
    Type.Q3_K: Grid(256, 16, _span(-4, 3), (-32, 31), 0),
    Type.Q4_K: Grid(256, 32, _span(0, 15), (0, 63), 63),
    Type.Q5_K: Grid(256, 32, _span(0, 31), (0, 63), 63),
    Type.Q6_K: Grid(256, 16, _span(-32, 31), (-128, 127), 0),
    Type.Q8_0: Grid(32, 32, _span(-127, 127), (1, 1), 0),
    Type.IQ4_XS: Grid(256, 32, tuple(int(v) for v in IQ4_NL.kvalues), (-32, 31), 0),
}


@dataclass
class Blocks:
    """Rows on a grid, transposed: `levels` [width, rows], `scales` and `minima` [sub-blocks, rows], `d` and
    `dmin` [blocks, rows]. All are integers except `d` and `dmin`, which are F16 values."""

    grid: Grid
    levels: Array
    scales: Array
    minima: Array
    d: Array
    dmin: Array

    def steps(self) -> Array:
        """[sub-blocks, rows], the step between adjacent levels."""
        return self._spread(self.d) * self.scales

    def offsets(self) -> Array:
        """[sub-blocks, rows], the offset that is subtracted."""
        return self._spread(self.dmin) * self.minima

    def values(self) -> Array:
        """[width, rows], as llama.cpp and gguf compute them."""
        width, rows = self.levels.shape
        cut = self.levels.reshape(-1, self.grid.sub_block, rows)
        values = self.steps()[:, None] * cut - self.offsets()[:, None]
        return values.reshape(width, rows)

    def _spread(self, of_blocks: Array) -> Array:
        """From [blocks, rows] to [sub-blocks, rows]."""
        each = self.grid.block // self.grid.sub_block
        blocks, rows = of_blocks.shape
        wide = of_blocks[:, None] + namespace(of_blocks).zeros_like(self.scales).reshape(blocks, each, rows)
        return wide.reshape(-1, rows)


def joined(parts: list[Blocks]) -> Blocks:
    """Concatenates super-blocks of the same rows."""
    xp = namespace(parts[0].levels)

    def join(name: str) -> Array:
        return xp.concatenate([getattr(part, name) for part in parts])

    return Blocks(parts[0].grid, *map(join, ("levels", "scales", "minima", "d", "dmin")))
