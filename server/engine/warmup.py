"""The first decodes: the shapes that the first requests need, and a test of what the device samples."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from qwen_serve.llamacpp import DeviceSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from qwen_serve.llamacpp import Context, Rows

log = logging.getLogger(__name__)

SHAPE_NOISE = 0.1
"""What a logit may lack to the best one, in standard deviations of a row, for its token to count as the best:
the same batch may be computed a little differently with a device sampler and without."""


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
