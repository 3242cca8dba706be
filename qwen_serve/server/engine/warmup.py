"""The warm-up decodes: the shapes that the first requests need, and a test of sampling on the device."""

import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from qwen_serve.llamacpp import Context
from qwen_serve.llamacpp.row_sampler import Filters, RowRequest, RowSampler, sample_rows

from .batch import Batch
from .request import Request, RequestStatus
from .runner import Runner
from .sampling import Sampler, SamplingParams
from .verification import sample
from .vocab import Vocab

log = logging.getLogger(__name__)


def warm_up(context: Context, counts: Sequence[int], prefill: int, n_real: int) -> None:
    """Run the shapes that the first requests need, which also loads the weights, then clear the context.

    These are prompts of `prefill` tokens, and decodes of each of `counts` sequences, the largest last. If
    rows are sampled on the device, its results are first compared with the host's; if they differ, the host
    samples.
    """
    decode(context, 1, prefill)
    if context.samples_on_device:
        _check(context, counts[-1], n_real)
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


def time_verification(
    context: Context, runner: Runner, vocab: Vocab, clock: Callable[[], float], n: int, rows: int
) -> float:
    """Seconds to verify `rows` - 1 arbitrary draft tokens for each of `n` sequences. These are in the first
    slots, which are empty again afterwards."""
    sampler, batch = Sampler(SamplingParams(), vocab, []), Batch()
    for slot in range(n):
        sequence = Request([0], rows, sampler)
        sequence.slot, sequence.status = slot, RequestStatus.DECODE
        batch.add(sequence, 1)
        if rows > 1:
            batch.add_draft(batch.chunks[-1], [0] * (rows - 1))
    started = clock()
    step = runner.launch(batch)
    runner.sample(step)
    sample(step.batch, runner.collect(step), vocab.eog_ids)
    seconds = clock() - started
    for slot in range(n):
        context.remove(slot)
    return seconds


def _check(context: Context, n: int, n_real: int) -> None:
    """Sample on the device only if it chooses the tokens that the host chooses from the same `n` rows."""
    decode(context, n)
    assert context.row_steps is not None
    requests = list(_requests(n, n_real))
    context.row_steps.begin(requests, range(n), now=True)
    found = context.row_steps.results()
    context.row_steps.begin([RowRequest(None)] * n, range(n), now=True)
    rows = context.row_steps.results()
    right = sample_rows(requests, [rows.whole(i).copy() for i in range(n)])
    if wrong := sum(found[i].differs(right[i]) for i in range(n)):
        log.error(
            "%d of %d tokens sampled on the device are not those that the host samples; the host samples "
            "instead. Please report this, with the card and llama-cpp-python's version",
            *(wrong, n),
        )
        context.sample_on_host()


def _requests(n: int, n_real: int) -> Iterator[RowRequest]:
    """Requests of several kinds, in turns."""
    order = ("top_k", "temperature", "top_p")
    for i in range(n):
        card = Filters(order, i, temperature=0.7, top_k=20, top_p=0.8)
        sampler = RowSampler((Filters(("best",)), card, Filters(("top_p",), i, top_p=0.95))[i % 3], n_real)
        if i % 2:
            sampler.penalise(1.1, 1.5, 0.5, None, range(min(64, n_real)))
        yield RowRequest(sampler, n_top=20 if i % 4 == 0 else -1)


def decode(context: Context, n_sequences: int, length: int = 1, *, wait: bool = True) -> None:
    """Decode the first `length` tokens of `n_sequences` different sequences, each with a row at its end, and
    wait for them, or not."""
    n = n_sequences * length
    context.clear()
    context.tokens[:n] = np.arange(n) % 256
    context.positions[:n] = np.tile(np.arange(length), n_sequences)
    context.sequences[:n] = np.repeat(np.arange(n_sequences), length)
    context.outputs[:n] = 0
    context.outputs[length - 1 : n : length] = 1
    context.decode(n)
    if wait:
        context.wait()
