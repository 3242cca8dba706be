"""What each way to the next tokens costs: a step that decodes a token of each of so many sequences."""

from collections.abc import Sequence
from pathlib import Path

from bench.arguments import Positive, Positives, StoreOptions
from bench.engine.chains import detach, greedy_chains, sampled_tokens
from bench.engine.recording import Recorder, make_context, recorded
from server.engine.llama import Context, DeviceSampler, Model, Rows
from server.engine.warmup import decode

CELLS_EACH = 256


def sampling_cost(
    gguf: Path,
    /,
    *,
    rows: Positives = (1, 8, 64),
    times: Positive = 10,
    store: StoreOptions = StoreOptions(),
) -> int:
    """Milliseconds of a step that ends with a token of each sequence on the host, by the way it gets there.

    From raw rows, from each device sampler, from llama.cpp's own greedy samplers; with one request among them
    that needs its whole row, read out or copied with all the others; and what another device sampler for a
    slot costs.

    Parameters
    ----------
    gguf
        The model.
    rows
        Sequences in a step.
    times
        Timed steps of each.
    """
    settings = {"rows": rows, "times": times}
    with recorded(gguf, "sampling-cost", "sampling", store, settings) as (model, recorder):
        _raw(model, recorder, sorted(rows), times)
        _by_readout(model, recorder, sorted(rows), times)
        _greedy_samplers(model, recorder, sorted(rows), times)
    return 0


def _raw(model: Model, recorder: Recorder, counts: Sequence[int], times: int) -> None:
    """Rows copied to the host, and numpy's argmax."""
    context = _context(model, counts, samplers=False)
    try:
        _each(context, recorder, "whole rows, argmax on the host", counts, times)
    finally:
        context.close()


def _by_readout(model: Model, recorder: Recorder, counts: Sequence[int], times: int) -> None:
    context, most = _context(model, counts, samplers=True), counts[-1]
    try:
        if context.samplers.refused:
            recorder.run.note(f"no device samplers: {context.samplers.refused}")
            return
        _each(context, recorder, "device sampler BEST", counts, times)
        context.set_sampler(most - 1, DeviceSampler.ROW)
        recorder.time(f"device sampler BEST and one ROW, {most} rows", lambda: decode(context, most), times)
        detach(context, most - 1)
        cell = f"device sampler BEST and one row without a sampler, {most} rows"
        recorder.time(cell, lambda: decode(context, most, take=False), times)
        context.set_samplers(DeviceSampler.BEST)
        decode(context, most)
        context.set_sampler(most - 1, DeviceSampler.TOP_K)
        recorder.once(
            f"first step after a change of device sampler, {most} rows", lambda: decode(context, most)
        )
        for kind in (DeviceSampler.TOP_K, DeviceSampler.GUESS, DeviceSampler.ROW):
            context.set_samplers(kind)
            _each(context, recorder, f"device sampler {kind.name}", counts, times)
    finally:
        context.close()


def _each(context: Context, recorder: Recorder, what: str, counts: Sequence[int], times: int) -> None:
    for n in counts:
        recorder.time(f"{what}, {n} rows", lambda n=n: _take(decode(context, n)), times)  # type: ignore[misc]


def _greedy_samplers(model: Model, recorder: Recorder, counts: Sequence[int], times: int) -> None:
    context = _context(model, counts, samplers=False)
    with greedy_chains(context, counts[-1]):

        def step(n: int) -> None:
            decode(context, n, take=False)
            sampled_tokens(context, range(n))

        for n in counts:
            recorder.time(f"llama.cpp's greedy sampler, {n} rows", lambda n=n: step(n), times)  # type: ignore[misc]


def _context(model: Model, counts: Sequence[int], *, samplers: bool) -> Context:
    most = counts[-1]
    return make_context(model, n_seq=most, n_ctx=CELLS_EACH * most, n_samplers=most if samplers else 0)


def _take(rows: Rows) -> None:
    """What a sampler reads of each row."""
    for row, kind in enumerate(rows.kinds):
        if kind is DeviceSampler.TOP_K:
            rows.candidates(row)
        elif kind is DeviceSampler.GUESS:
            rows.best(row)
