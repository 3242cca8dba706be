"""Rounding with compensation: a column's error is carried into the columns after it.

A matrix's loss is `trace(E G E')`: `E` is the rounding error, `G` the Gram matrix of its inputs. GPTQ
(Frantar et al. 2023) passes over the columns once. Afterwards scales, minima and codes are chosen again, one
at a time with all others fixed, each with the least loss.
"""

from typing import Final

import numpy as np

from qwen_serve.convert.compensation.arrays import Array, double, half, indices, like, namespace, on_host
from qwen_serve.convert.compensation.grids import Blocks, Grid, joined
from qwen_serve.convert.compensation.scales import divisors, nearest, search_blocks

DAMPING: Final = 0.01
"""This share of the mean of the Gram matrix's diagonal is added to the diagonal."""

SPAN: Final = 256
"""Columns whose scales are searched together: those of a super-block, whose columns may be rounded in any
order."""

LAZY: Final = 64
"""Columns whose errors are collected before one product carries them into all others."""

SWEEPS: Final = 3
"""Passes over scales and codes after GPTQ's pass over the columns."""


class Inputs:
    """The inputs of all matrices that read the same tensor, prepared once.

    Args:
        gram: [width, width]; replaced by the identity if all inputs were 0.
        moved: [width, width], the sum of products of each input with what the whole model's inputs are more,
            if that is known.
    """

    def __init__(self, gram: Array, moved: Array | None = None) -> None:
        width = len(gram)
        mean = float(gram.diagonal().sum()) / width
        self.gram = gram / (mean or 1.0)
        self._moved = moved / (mean or 1.0) if moved is not None else None
        self.gram.reshape(-1)[:: width + 1] += DAMPING if mean > 0 else 1.0
        self.diagonal = self.gram.diagonal()
        importance = on_host(self.diagonal, np.float32)
        falling = [np.argsort(-importance[i : i + SPAN], kind="stable") + i for i in range(0, width, SPAN)]
        order = np.concatenate(falling)
        self.order, self.back = indices(order, gram), indices(np.argsort(order), gram)
        linalg = namespace(gram).linalg
        inverse = linalg.inv(double(self.gram[self.order][:, self.order]))
        self.upper = like(linalg.cholesky(inverse).T, gram)

    def corrected(self, values: Array) -> Array:
        """`values` [width, rows] changed so that their products with these inputs are as near as possible to
        those of `values` with the whole model's inputs."""
        if self._moved is None:
            return values
        pulled = double(self._moved @ values)
        return values + like(namespace(values).linalg.solve(double(self.gram), pulled), values)


def round_compensated(values: Array, inputs: Inputs, grid: Grid, *, sweeps: int = SWEEPS) -> Blocks:
    """`values` [width, rows] on the grid, with the least loss found.

    A super-block's scales are searched after the errors of those before it have been carried into it.
    """
    rest = values[inputs.order]
    parts, width = [], len(rest)
    for first in range(0, width, SPAN):
        here = slice(first, min(first + SPAN, width))
        order, back = inputs.order[here] - first, inputs.back[here] - first
        part = search_blocks(rest[here][back], inputs.diagonal[here], grid)
        part.levels = _carry(rest, inputs.upper, part, here, order)[back]
        parts.append(part)
    blocks = joined(parts)
    for _ in range(sweeps):
        _fit_scales(blocks, values, inputs)
        _fit_levels(blocks, values, inputs)
    return blocks


def _carry(rest: Array, upper: Array, part: Blocks, here: slice, order: Array) -> Array:
    """The levels of these columns, rounded in `order`. Changes `rest`, the columns after them."""
    xp, grid = namespace(rest), part.grid
    sub = order // grid.sub_block
    steps, offsets = part.steps()[sub], part.offsets()[sub]
    by, levels = divisors(steps), xp.empty_like(steps)
    for first in range(here.start, here.stop, LAZY):
        last = min(first + LAZY, here.stop)
        errors = xp.empty_like(rest[first:last])
        for column in range(first, last):
            i, x = column - here.start, rest[column]
            levels[i] = level = nearest(x, by[i], offsets[i], grid)
            error = (x - (steps[i] * level - offsets[i])) / upper[column, column]
            errors[column - first] = error
            if column + 1 < last:
                rest[column + 1 : last] -= upper[column, column + 1 : last, None] * error[None]
        if last < len(rest):
            rest[last:] -= upper[first:last, last:].T @ errors
    return levels


def _fit_levels(blocks: Blocks, values: Array, inputs: Inputs) -> None:
    """Chooses each column's codes again, while all other columns are fixed."""
    xp, grid, gram = namespace(values), blocks.grid, inputs.gram
    current = blocks.values()
    pull = gram @ (values - current)
    steps, offsets = blocks.steps(), blocks.offsets()
    by = divisors(steps)
    for first in range(0, len(values), LAZY):
        last = min(first + LAZY, len(values))
        changes = xp.empty_like(values[first:last])
        for column in range(first, last):
            sub = column // grid.sub_block
            wanted = current[column] + pull[column] / inputs.diagonal[column]
            level = nearest(wanted, by[sub], offsets[sub], grid)
            changes[column - first] = change = steps[sub] * level - offsets[sub] - current[column]
            blocks.levels[column] = level
            pull[column:last] -= gram[column, column:last, None] * change[None]
        pull[last:] -= gram[last:, first:last] @ changes


def _fit_scales(blocks: Blocks, values: Array, inputs: Inputs) -> None:
    """Chooses scales, minima and the super-blocks' numbers again, one at a time, while the codes are
    fixed."""
    grid, gram = blocks.grid, inputs.gram
    pull = gram @ (values - blocks.values())
    each, rows = grid.block // grid.sub_block, values.shape[1]
    for block in range(len(blocks.d)):
        for sub in range(block * each, (block + 1) * each) if each > 1 else ():
            here = slice(sub * grid.sub_block, (sub + 1) * grid.sub_block)
            along = blocks.d[block][None] * blocks.levels[here]
            blocks.scales[sub] = _move(blocks.scales[sub], along, pull, gram, here, grid.scales)
            if grid.minima:
                along = -blocks.dmin[block][None] + 0 * along
                blocks.minima[sub] = _move(blocks.minima[sub], along, pull, gram, here, (0, grid.minima))
        here = slice(block * grid.block, (block + 1) * grid.block)
        subs = slice(block * each, (block + 1) * each)
        levels = blocks.levels[here].reshape(each, -1, rows)
        along = (blocks.scales[subs][:, None] * levels).reshape(-1, rows)
        blocks.d[block] = _move(blocks.d[block], along, pull, gram, here, None)
        if grid.minima:
            along = (-blocks.minima[subs][:, None] + 0 * levels).reshape(-1, rows)
            blocks.dmin[block] = _move(blocks.dmin[block], along, pull, gram, here, None)


def _move(
    amount: Array, along: Array, pull: Array, gram: Array, here: slice, bounds: tuple[int, int] | None
) -> Array:
    """The best `amount` [rows] of `along` [columns, rows]: an integer within bounds, or (None) an F16 number.

    Changes `pull`, the product of the Gram matrix with the remaining error.
    """
    xp = namespace(along)
    slope = xp.sum(along * pull[here], 0)
    curve = xp.sum(along * (gram[here, here] @ along), 0)
    wanted = amount + slope / xp.where(curve > 0, curve, xp.ones_like(curve))
    new = half(wanted) if bounds is None else xp.clip(xp.round(wanted), *bounds)
    change = new - amount
    # after rounding, it may be no better than the old value
    better = 2 * change * slope > change * change * curve
    new = xp.where(better, new, amount)
    pull -= gram[:, here] @ (along * (new - amount)[None])
    return new
