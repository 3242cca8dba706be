"""The first decodes: the shapes that the first requests need, and a test of what the device samples."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from qwen_serve.llamacpp import DeviceSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from qwen_serve.llamacpp import Context, Rows

log = logging.getLogger(__name__)

SHAPE_NOISE = 0.1
"""What a logit may lack to the best one, in standard deviations of a row, for its token to count as the best:
the same batch may be computed a little differently with a device sampler and without."""

LONG = 700
"""Tokens of a sequence whose rows are compared: kernels change at 512 cells."""

SHORT = 100
"""Tokens of the text behind which verifications are compared."""

COMPARED = 4
"""Rows at either end of a decode that are compared."""


def warm_up(context: Context, counts: Sequence[int], prefill: int) -> None:
    """Touch the weights and the shapes that the first requests need, then forget it all.

    These are prompts of `prefill` tokens, and decodes of each of `counts` sequences, the largest last. If
    rows are sampled on the device, its answers are compared with the host's first; where they are wrong, the
    host samples.
    """
    decode(context, 1, prefill)
    if context.samplers.active:
        _check(context, counts[-1])
    for count in counts:
        for _ in range(2):
            decode(context, count)
    context.clear()


def time_prompt(context: Context, length: int, clock: Callable[[], float]) -> float:
    """Seconds that a prompt of `length` tokens takes: the least of a few, which load kernels and graphs."""
    times = []
    for _ in range(3):
        started = clock()
        decode(context, 1, length)
        times.append(clock() - started)
    context.clear()
    return min(times)


def verified_lengths(*, on_gpu: bool) -> tuple[int, ...]:
    """Tokens of the verifications that are compared: kernels for few, some and many."""
    return (2, 4, 9, 17, 33, 63) if on_gpu else (2, 9, 17)


def rows_are_the_same(context: Context, counts: Sequence[int], lengths: Sequence[int] = ()) -> bool:
    """Whether sequences' logits have the same bits in a decode of one and of each of `counts` sequences, and
    token by token as in a decode of each of `lengths` tokens.

    For a long sequence beside short ones, as kernels choose by that, too. Each decode has other tokens, and
    several of its rows are compared: two ways to add up agree on many rows where matrices are small.
    """
    sampled = context.samplers.active
    context.set_samplers(None)
    length = min(LONG, context.n_batch, context.n_ubatch, context.n_ctx_seq - 1)

    def rows(ids: Sequence[int], tokens: Sequence[int], long: int) -> npt.NDArray[np.float32]:
        context.clear()
        if long in ids:
            _read(context, long, length)
        n = len(ids)
        context.tokens[:n] = tokens
        context.positions[:n] = [length if id_ == long else 0 for id_ in ids]
        context.sequences[:n] = ids
        context.outputs[:n] = 1
        context.decode(n)
        logits: npt.NDArray[np.float32] = context.logits(n).copy()
        return logits

    alone = rows([0], [0], 0)[0]  # the long sequence; its prompt is what takes time

    def same(n: int, long: int) -> bool:
        tokens = [0 if id_ == long else (31 * n + 7 * id_ + long) % 256 for id_ in range(n)]
        together = rows(range(n), tokens, long)
        ends = {*range(n)[:COMPARED], *range(n)[-COMPARED:]} - {long}
        return np.array_equal(alone, together[long], equal_nan=True) and all(
            np.array_equal(rows([id_], [tokens[id_]], long)[0], together[id_], equal_nan=True)
            for id_ in sorted(ends)
        )

    def verified(lengths: Sequence[int]) -> npt.NDArray[np.float32]:
        """Rows after each of so many tokens behind a text, in decodes of these lengths."""
        context.clear()
        _read(context, 0, SHORT)
        place, found = SHORT, []
        for n in lengths:
            context.tokens[:n] = 7 * np.arange(place, place + n) % 256
            context.positions[:n] = np.arange(place, place + n)
            context.sequences[:n], context.outputs[:n] = 0, 1
            context.decode(n)
            found.append(context.logits(n).copy())
            place += n
        return np.concatenate(found)

    found = all(same(n, long) for n in counts for long in {0, n - 1})
    if found and lengths:
        each = verified([1] * max(lengths))
        found = all(np.array_equal(verified([n]), each[:n], equal_nan=True) for n in lengths)
    context.clear()
    if sampled:
        context.set_samplers(DeviceSampler.BEST)
    return found


def _read(context: Context, slot: int, length: int) -> None:
    context.tokens[:length] = np.arange(length) % 256
    context.positions[:length] = np.arange(length)
    context.sequences[:length] = slot
    context.outputs[:length] = 0
    context.outputs[length - 1] = 1
    context.decode(length)


def _check(context: Context, n: int) -> None:
    """Leaves the device samplers on if `n` rows are right."""
    best = decode(context, n).all_best()
    context.set_samplers(None)
    if wrong := _wrong(decode(context, n), best, context.samplers.n_real):
        log.error(
            "%d of %d tokens found on the device are not the best ones: it is the host that samples. Please "
            "report this, with the card and llama-cpp-python's version",
            *(wrong, n),
        )
    else:
        context.set_samplers(DeviceSampler.BEST)


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


def decode(context: Context, n_sequences: int, length: int = 1) -> Rows:
    """The first `length` tokens of so many sequences, all different; a row at the end of each."""
    n = n_sequences * length
    context.clear()
    context.tokens[:n] = np.arange(n) % 256
    context.positions[:n] = np.tile(np.arange(length), n_sequences)
    context.sequences[:n] = np.repeat(np.arange(n_sequences), length)
    context.outputs[:n] = 0
    context.outputs[length - 1 : n : length] = 1
    context.decode(n)
    return context.rows(range(n_sequences), range(length - 1, n, length))
