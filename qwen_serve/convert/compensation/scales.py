"""Searches the scales and minima of super-blocks, as the file can hold them, for the least weighted error.

First it fits each sub-block alone: for several steps around the range of its weights it finds the codes, and
the step and offset that fit these codes best by least squares (like llama.cpp's `make_qkx3_quants` and
`make_qx_quants`). Then it finds the super-block's F16 numbers, of which scales and minima are small
multiples. Last it compares each multiple with its neighbours.
"""

from typing import Final

import numpy as np

from qwen_serve.convert.compensation.arrays import Array, half, namespace
from qwen_serve.convert.compensation.grids import Blocks, Grid

STRETCHES: Final = tuple(np.linspace(-0.12, 0.36, 13).tolist())
"""Changes of the step, relative to the step that exactly spans the weights."""

SHRINKS: Final = (1.0, 0.96, 0.92, 1.04, 0.88, 0.84)
"""Factors on the number of the super-block with which the largest scale exactly reaches its maximum."""

TINY: Final = 1e-20


def search_blocks(values: Array, importance: Array, grid: Grid) -> Blocks:
    """The grid's blocks nearest to `values` [width, rows]; squared errors are weighed by `importance` [width]
    and the weights' size."""
    xp = namespace(values)
    width, rows = values.shape
    x = values.reshape(-1, grid.sub_block, rows)
    # large weights count more, as in llama.cpp, for inputs that the calibration text does not have
    blocks = values.reshape(-1, grid.block, rows) ** 2
    size = xp.sqrt(xp.sum(blocks, 1)[:, None] / grid.block + blocks).reshape(x.shape)
    w = importance.reshape(-1, grid.sub_block, 1) * size
    step, offset = _fit_each(x, w, grid)
    subs, each = len(x), grid.block // grid.sub_block
    zeros = xp.zeros_like(step)
    best = Blocks(grid, values, zeros, zeros, step[::each] * 0, step[::each] * 0)
    least = None
    for shrink in SHRINKS if each > 1 else (1.0,):
        trial = _multiples(step, offset, grid, shrink)
        trial.levels = _round(x, trial, grid)
        error = _errors(x, w, trial).reshape(-1, each, rows).sum(1)
        if least is None:
            best, least = trial, error
            continue
        better = error < least
        least = xp.where(better, error, least)
        _take(best, trial, better, each, subs)
    if each > 1:
        for _ in range(2):
            best = _neighbours(x, w, best)
    best.levels = best.levels.reshape(width, rows)
    return best


def _fit_each(x: Array, w: Array, grid: Grid) -> tuple[Array, Array]:
    """[sub-blocks, rows] steps and offsets, as real numbers."""
    xp = namespace(x)
    top, bottom = grid.levels[-1], grid.levels[0]
    if grid.minima:
        low = xp.clip(xp.amin(x, 1), None, 0)
        span = (xp.amax(x, 1) - low) / (top - bottom)
    else:
        low = xp.zeros_like(x[:, 0])
        largest, least = xp.amax(x, 1), xp.amin(x, 1)
        # the weight with the largest magnitude is on the longer side of the levels
        span = xp.where(largest > -least, largest, least) / bottom
    span = xp.where(xp.abs(span) < TINY, TINY, span)
    total = xp.sum(w, 1)
    best = least_error = None
    signs = (1.0,) if grid.minima or grid.scales[0] > 0 else (1.0, -1.0)
    for stretch in [sign * (1 - s) for sign in signs for s in STRETCHES]:
        step, offset = span * stretch, -low
        for _ in range(2):
            levels = grid.codes((x + offset[:, None]) / step[:, None])
            step, offset = _least_squares(x, w, levels, total, step, offset, bool(grid.minima))
        levels = grid.codes((x + offset[:, None]) / step[:, None])
        error = xp.sum(w * (step[:, None] * levels - offset[:, None] - x) ** 2, 1)
        if best is None:
            best, least_error = (step, offset), error
            continue
        better = error < least_error
        least_error = xp.where(better, error, least_error)
        best = xp.where(better, step, best[0]), xp.where(better, offset, best[1])
    assert best is not None, "there are stretches"
    return best


def _least_squares(
    x: Array, w: Array, levels: Array, total: Array, step: Array, offset: Array, minima: bool
) -> tuple[Array, Array]:
    """The step and the offset (not below 0) that fit these levels best; the old ones if none fit."""
    xp = namespace(x)
    wl = w * levels
    ll, lx = xp.sum(wl * levels, 1), xp.sum(wl * x, 1)
    alone = xp.where(ll > TINY, lx / xp.clip(ll, TINY, None), step)
    if not minima:
        return xp.where(xp.abs(alone) < TINY, TINY, alone), offset
    ls, xs = xp.sum(wl, 1), xp.sum(w * x, 1)
    determinant = total * ll - ls * ls
    fits = determinant > 1e-6 * total * ll
    safe = xp.where(fits, determinant, xp.ones_like(determinant))
    both = xp.where(fits, (total * lx - xs * ls) / safe, step)
    below = xp.where(fits, (ls * lx - ll * xs) / safe, offset)
    positive = below > 0
    found = xp.where(positive, both, alone)
    return xp.where(found < TINY, TINY, found), xp.where(positive, below, xp.zeros_like(below))


def _multiples(step: Array, offset: Array, grid: Grid, shrink: float) -> Blocks:
    """Steps and offsets as multiples of a super-block's numbers; levels are not chosen yet."""
    xp = namespace(step)
    rows, each = step.shape[1], grid.block // grid.sub_block
    if each == 1:
        return Blocks(grid, step, xp.ones_like(step), xp.zeros_like(step), half(step), half(step * 0))
    blocks = step.reshape(-1, each, rows)
    largest, least = xp.amax(blocks, 1), xp.amin(blocks, 1)
    if grid.scales[0] < 0:
        extreme = xp.where(largest > -least, largest, least) / grid.scales[0]
    else:
        extreme = largest / grid.scales[1]
    d = half(extreme * shrink)
    scales = _whole(blocks, d, *grid.scales)
    dmin, minima = xp.zeros_like(d), xp.zeros_like(step)
    if grid.minima:
        below = offset.reshape(-1, each, rows)
        dmin = half(xp.amax(below, 1) / grid.minima * shrink)
        minima = _whole(below, dmin, 0, grid.minima)
    return Blocks(grid, step, scales, minima.reshape(-1, rows), d, dmin)


def _whole(amounts: Array, unit: Array, low: int, high: int) -> Array:
    xp = namespace(amounts)
    safe = xp.where(unit == 0, xp.ones_like(unit), unit)[:, None]
    found = xp.clip(xp.round(amounts / safe), low, high)
    return xp.where(unit[:, None] == 0, xp.zeros_like(found), found).reshape(-1, amounts.shape[-1])


def _round(x: Array, blocks: Blocks, grid: Grid) -> Array:
    """[sub-blocks, weights, rows]: the nearest levels."""
    return nearest(x, divisors(blocks.steps())[:, None], blocks.offsets()[:, None], grid)


def divisors(step: Array) -> Array:
    """The steps that `nearest` divides by. With a step of 0 every weight gets the level nearest to 0."""
    xp = namespace(step)
    return xp.where(step == 0, xp.inf, step)


def nearest(x: Array, divisor: Array, offset: Array, grid: Grid) -> Array:
    """The levels nearest to `x` at these steps (as `divisors`) and offsets."""
    return grid.codes((x + offset) / divisor)


def _errors(x: Array, w: Array, blocks: Blocks) -> Array:
    """[sub-blocks, rows]."""
    off = blocks.steps()[:, None] * blocks.levels - blocks.offsets()[:, None] - x
    return namespace(x).sum(w * off * off, 1)


def _take(best: Blocks, trial: Blocks, better: Array, each: int, subs: int) -> None:
    """Takes whole super-blocks of `trial` where they are better [blocks, rows]."""
    xp = namespace(better)
    wide = xp.broadcast_to(better[:, None], (len(better), each, better.shape[1])).reshape(subs, -1)
    best.d, best.dmin = xp.where(better, trial.d, best.d), xp.where(better, trial.dmin, best.dmin)
    best.scales = xp.where(wide, trial.scales, best.scales)
    best.minima = xp.where(wide, trial.minima, best.minima)
    best.levels = xp.where(wide[:, None], trial.levels, best.levels)


def _neighbours(x: Array, w: Array, best: Blocks) -> Blocks:
    """Tries each sub-block with a scale or a minimum of one more or less, and keeps the better."""
    xp, grid = namespace(x), best.grid
    least = _errors(x, w, best)
    moves = [(-1, 0), (1, 0)]
    if grid.minima:
        moves += [(0, -1), (0, 1), (1, 1), (-1, -1)]
    for scale, minimum in moves:
        scales = xp.clip(best.scales + scale, *grid.scales)
        minima = xp.clip(best.minima + minimum, 0, grid.minima)
        trial = Blocks(grid, best.levels, scales, minima, best.d, best.dmin)
        trial.levels = _round(x, trial, grid)
        error = _errors(x, w, trial)
        better = error < least
        least = xp.where(better, error, least)
        best = Blocks(
            grid,
            xp.where(better[:, None], trial.levels, best.levels),
            xp.where(better, trial.scales, best.scales),
            xp.where(better, trial.minima, best.minima),
            best.d,
            best.dmin,
        )
    return best
