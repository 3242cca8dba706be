"""The warm-up decodes: the shapes that the first requests need, and a test of sampling on the device."""

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
"""A token counts as the best if its logit is at most this far below the best one, in standard deviations of a
row, since logits differ slightly with and without a device sampler."""


def warm_up(context: Context, counts: Sequence[int], prefill: int) -> None:
    """Run the shapes that the first requests need, which also loads the weights, then clear the context.

    These are prompts of `prefill` tokens, and decodes of each of `counts` sequences, the largest last. If
    rows are sampled on the device, its results are first compared with the host's; if they are wrong, the
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
    """Seconds of a prompt of `length` tokens: the minimum of a few runs, since the first one loads
    kernels."""
    times = []
    for _ in range(3):
        started = clock()
        decode(context, 1, length)
        times.append(clock() - started)
    context.clear()
    return min(times)


def _check(context: Context, n: int) -> None:
    """Keep the device samplers on only if `n` rows are right."""
    best = decode(context, n).all_best()
    context.set_samplers(None)
    if wrong := _wrong(decode(context, n), best, context.samplers.n_real):
        log.error(
            "%d of %d tokens found on the device are not the best ones; the host samples instead. Please "
            "report this, with the card and llama-cpp-python's version",
            *(wrong, n),
        )
    else:
        context.set_samplers(DeviceSampler.BEST)


def _wrong(rows: Rows, best: list[int] | None, n_real: int) -> int:
    """How many of the device's tokens are not the best by the host's logits."""
    if best is None:
        return len(rows)
    wrong = 0
    for row, token in enumerate(best):
        logits = rows.logits(row)[:n_real]
        lack = float(logits.max() - logits[token]) if 0 <= token < n_real else np.inf
        wrong += lack > SHAPE_NOISE * float(logits.std())
    return wrong


def decode(context: Context, n_sequences: int, length: int = 1) -> Rows:
    """Decode the first `length` tokens of `n_sequences` different sequences, each with a row at its end."""
    n = n_sequences * length
    context.clear()
    context.tokens[:n] = np.arange(n) % 256
    context.positions[:n] = np.tile(np.arange(length), n_sequences)
    context.sequences[:n] = np.repeat(np.arange(n_sequences), length)
    context.outputs[:n] = 0
    context.outputs[length - 1 : n : length] = 1
    context.decode(n)
    return context.rows(range(n_sequences), range(length - 1, n, length))
