"""The first decodes: all shapes that the first requests need, a test of what the device samples, its pace."""

from __future__ import annotations

import logging
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from .llama import DeviceSampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from .llama import Context, Rows

log = logging.getLogger(__name__)

TURNS, TRIALS, UNTIMED = 3, 3, 4
"""Each way of sampling has so many turns, lest what holds the machine up for a while decide it; steps timed
in each, after some that load kernels, build graphs and capture them."""

TOLERATED = 1.1
"""How much longer a step may take with the device. A verified draft brings so many rows that the host, which
copies them all, is far behind: no reason to take it for a few per cent."""

SHAPE_NOISE = 0.1
"""What a logit may lack to the best one, in standard deviations of a row, for its token to count as the best:
the same batch may be computed a little differently with a device sampler and without."""

LONG = 700
"""Tokens of a sequence whose rows are compared: kernels change at 512 cells."""

LEAST_PREFILL = 16
"""Prompt tokens that a step reads in any case."""


def warm_up(
    context: Context,
    counts: Sequence[int],
    prefill: int,
    *,
    choose: bool,
    known: bool | None = None,
) -> None:
    """Touch the weights and the shapes that the first requests need, then forget it all.

    These are prompts of `prefill` tokens, and decodes of each of `counts` sequences, the largest last. If
    rows are to be read out on the device, its answers are compared with the host's first. With `choose`,
    the faster of the two, for one row and for as many as that, is measured and kept. An earlier start's
    answer, where it is `known`, is taken for that.
    """
    decode(context, 1, prefill)
    if known is False:
        context.set_samplers(None)
    elif context.samplers.active and known is None:
        _check(context, counts[0], counts[-1], choose=choose)
    for count in counts:
        for _ in range(2):
            decode(context, count)
    context.clear()


def time_prompt(context: Context, length: int) -> float:
    """Seconds that a prompt of `length` tokens takes: the least of a few, which load kernels and graphs."""
    times = []
    for _ in range(3):
        started = perf_counter()
        decode(context, 1, length)
        times.append(perf_counter() - started)
    context.clear()
    return min(times)


def prefill_budget(seconds: float, each: float, ubatch: int, most: int) -> int:
    """Prompt tokens for a step of so many seconds, `each` taking so long; at most `most`.

    More than a `ubatch` is rounded down to whole ones: a part of one takes as many launches.
    """
    tokens = int(seconds / each)
    if tokens > ubatch:
        tokens -= tokens % ubatch
    return min(max(tokens, LEAST_PREFILL), most)


def rows_are_the_same(context: Context, counts: Sequence[int]) -> bool:
    """Whether a sequence's logits have the same bits in a decode of one and of each of `counts` sequences.

    For a long sequence beside short ones, as kernels choose by that, too.
    """
    sampled = context.samplers.active
    context.set_samplers(None)
    length = min(LONG, context.n_batch, context.n_ubatch, context.n_ctx_seq - 1)

    def row(slot: int, others: range) -> npt.NDArray[np.float32]:
        context.clear()
        _read(context, slot, length)
        ids = sorted({slot, *others})
        n = len(ids)
        context.tokens[:n] = [id_ % 256 for id_ in ids]
        context.tokens[ids.index(slot)] = 0
        context.positions[:n] = [length if id_ == slot else 0 for id_ in ids]
        context.sequences[:n] = ids
        context.outputs[:n] = 1
        context.decode(n)
        logits: npt.NDArray[np.float32] = context.logits(n)[ids.index(slot)].copy()
        return logits

    alone = row(0, range(0))
    same = all(
        np.array_equal(alone, row(slot, range(n)), equal_nan=True) for n in counts for slot in {0, n - 1}
    )
    context.clear()
    if sampled:
        context.set_samplers(DeviceSampler.BEST)
    return same


def _read(context: Context, slot: int, length: int) -> None:
    context.tokens[:length] = np.arange(length) % 256
    context.positions[:length] = np.arange(length)
    context.sequences[:length] = slot
    context.outputs[:length] = 0
    context.outputs[length - 1] = 1
    context.decode(length)


def _check(context: Context, few: int, many: int, *, choose: bool) -> None:
    """Leaves the device samplers on if they are right and, with `choose`, no slower than the host."""
    best = decode(context, many).all_best()
    context.set_samplers(None)
    wrong = _wrong(decode(context, many), best, context.samplers.n_real)
    device, host = (np.inf, np.inf), (np.inf, np.inf)
    for turn in range(TURNS if choose else 1):
        if turn:
            context.set_samplers(None)
        host = min(host[0], _time(context, few)), min(host[1], _time(context, many))
        context.set_samplers(DeviceSampler.BEST)
        device = min(device[0], _time(context, few)), min(device[1], _time(context, many))
    if wrong:
        log.error(
            "%d of %d tokens found on the device are not the best ones: it is the host that samples. Please "
            "report this, with the card and llama-cpp-python's version",
            *(wrong, many),
        )
    if wrong or (choose and (device[0] > TOLERATED * host[0] or device[1] > TOLERATED * host[1])):
        context.set_samplers(None)
    log.debug(
        "best tokens are found on the %s: steps of %d and %d rows took %.2f and %.2f ms with the device, "
        "%.2f and %.2f ms with the host",
        "device" if context.samplers.active else "host",
        *(few, many),
        *(1000 * seconds for seconds in (*device, *host)),
    )


def _wrong(rows: Rows, best: list[int] | None, n_real: int) -> int:
    """How many of the tokens found on the device the logits on the host contradict."""
    if best is None:
        return len(rows)
    wrong = 0
    for row, token in enumerate(best):
        logits = rows.logits(row)[:n_real]
        lack = float(logits.max() - logits[token]) if 0 <= token < n_real else np.inf
        wrong += lack > SHAPE_NOISE * float(logits.std())
    return wrong


def _time(context: Context, count: int) -> float:
    """Seconds of a step that decodes and samples a token of each of `count` sequences, the least."""
    times = []
    for _ in range(UNTIMED + TRIALS):
        started = perf_counter()
        decode(context, count)
        times.append(perf_counter() - started)
    return min(times[UNTIMED:])


def decode(context: Context, n_sequences: int, length: int = 1, *, take: bool = True) -> Rows:
    """The first `length` tokens of so many sequences, all different; a row at the end of each.

    With `take`, the best token of each row is looked for where it has to be looked for.
    """
    n = n_sequences * length
    context.clear()
    context.tokens[:n] = np.arange(n) % 256
    context.positions[:n] = np.tile(np.arange(length), n_sequences)
    context.sequences[:n] = np.repeat(np.arange(n_sequences), length)
    context.outputs[:n] = 0
    context.outputs[length - 1 : n : length] = 1
    context.decode(n)
    rows = context.rows(range(n_sequences), range(length - 1, n, length))
    if take and rows.all_best() is None:
        for row, kind in enumerate(rows.kinds):
            if kind is DeviceSampler.ROW:
                rows.logits(row).argmax()
    return rows
