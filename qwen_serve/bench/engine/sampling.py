"""``qwen-bench engine sampling``: costs of sampling on the device and on the host."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import thread_time

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API

from qwen_serve.bench.arguments import Positive, Positives, StoreOptions
from qwen_serve.bench.engine.recording import UNTIMED, Recorder, make_context, recorded
from qwen_serve.llamacpp import Context, DeviceSampler, Model, Rows
from qwen_serve.server.engine import SamplingParams, Vocab
from qwen_serve.server.engine.sampling import Sampler
from qwen_serve.server.engine.warmup import decode

CELLS_EACH = 256

DRAWS = {
    "top-k 20, top-p 0.95": SamplingParams(temperature=1.0, top_k=20, top_p=0.95),
    "top-k 20, top-p 0.95, presence penalty 1.5": SamplingParams(
        temperature=1.0, top_k=20, top_p=0.95, presence_penalty=1.5
    ),
    "top-p 0.95": SamplingParams(temperature=1.0, top_p=0.95),
}
"""Name -> sampling parameters at temperature 1. The last one needs whole rows, the others only candidates."""


def sampling(
    gguf: Path,
    /,
    *,
    rows: Positives = (1, 8, 64),
    times: Positive = 10,
    store: StoreOptions = StoreOptions(),
) -> int:
    """Time a step until a token of each sequence is on the host, by where it is sampled, in milliseconds.

    - `qwen-bench engine sampling model.gguf --rows 1,64`

    Tokens come from raw rows, from each device sampler, or from llama.cpp's greedy samplers. Two further
    cases: one request needs its whole row, which is read alone or with all others; and a slot changes its
    device sampler. The host's CPU time to sample the tokens is measured, too.

    Parameters
    ----------
    gguf
        The model's GGUF.
    rows
        Numbers of sequences in a step.
    times
        Timed steps of each case.
    """
    settings, most = {"rows": rows, "times": times}, max(rows)
    with recorded(gguf, "sampling", "sampling", store, settings) as (model, recorder):

        def each(what: str, step: Callable[[int], object]) -> None:
            for n in sorted(rows):
                recorder.time(f"{what}, {n} rows", lambda n=n: step(n), times)  # type: ignore[misc]

        with _context(model, most, samplers=False) as context:
            each("whole rows, argmax on the host", lambda n: _take(decode(context, n)))
        with _context(model, most, samplers=True) as context:
            if context.samplers.refused:
                recorder.run.note(f"no device samplers: {context.samplers.refused}")
            else:
                each("device sampler BEST", lambda n: _take(decode(context, n)))
                _one_other(context, recorder, most, times)
                others = (DeviceSampler.TOP_K, DeviceSampler.LOGPROBS, DeviceSampler.GUESS, DeviceSampler.ROW)
                for kind in others:
                    context.set_samplers(kind)
                    each(f"device sampler {kind.name}", lambda n: _take(decode(context, n)))
                _draw(context, Vocab(model), recorder, rows, times)
        with _context(model, most, samplers=False) as context, _greedy_chains(context, most):
            each("llama.cpp's greedy sampler", lambda n: _sampled_by_llama_cpp(context, n))
    return 0


def _draw(context: Context, vocab: Vocab, recorder: Recorder, rows: Positives, times: int) -> None:
    """Record the host's CPU time to sample a step's tokens at a temperature, each with a sampler of its
    own."""
    for what, params in DRAWS.items():
        for n in sorted(rows):
            samplers = [Sampler(params, vocab, []) for _ in range(n)]
            context.set_samplers(samplers[0].need)
            for round in range(1 - UNTIMED, 1 + times):
                found = decode(context, n)
                began = thread_time()
                for row, sampler in enumerate(samplers):
                    sampler.sample(found, row)
                if round > 0:
                    recorder.add(f"{what}, {n} rows", round, "sample_time", 1000 * (thread_time() - began))
            for sampler in samplers:
                sampler.close()


def _one_other(context: Context, recorder: Recorder, most: int, times: int) -> None:
    """Time steps in which one request needs its whole row, and changes of the device sampler."""
    context.set_sampler(most - 1, DeviceSampler.ROW)
    recorder.time(f"device sampler BEST and one ROW, {most} rows", lambda: decode(context, most), times)
    # if one sequence id has no sampler, llama.cpp copies the whole rows of all ids to the host
    C.llama_set_sampler(context._handle, most - 1, None)
    cell = f"device sampler BEST and one row without a sampler, {most} rows"
    recorder.time(cell, lambda: decode(context, most), times)
    context.set_samplers(DeviceSampler.BEST)
    decode(context, most)
    context.set_sampler(most - 1, DeviceSampler.TOP_K)
    recorder.once(f"first step after a change of device sampler, {most} rows", lambda: decode(context, most))


@contextmanager
def _context(model: Model, most: int, *, samplers: bool) -> Iterator[Context]:
    context = make_context(model, n_seq=most, n_ctx=CELLS_EACH * most, n_samplers=most if samplers else 0)
    try:
        yield context
    finally:
        context.close()


@contextmanager
def _greedy_chains(context: Context, n: int) -> Iterator[None]:
    """Set llama.cpp's greedy sampler on the first ``n`` sequence ids of a context without device samplers, as
    llama-server's ``--backend-sampling`` does. At the end the context is closed before the samplers."""
    chains = []
    for sequence in range(n):
        chain = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
        C.llama_sampler_chain_add(chain, C.llama_sampler_init_greedy())
        C.llama_set_sampler(context._handle, sequence, chain)
        chains.append(chain)
    try:
        yield
    finally:
        context.close()
        for chain in chains:
            C.llama_sampler_free(chain)


def _sampled_by_llama_cpp(context: Context, n: int) -> None:
    decode(context, n)
    for index in range(n):
        C.llama_get_sampled_token_ith(context._handle, index)


def _take(rows: Rows) -> None:
    """Read the part of each row that a sampler needs."""
    for row, kind in enumerate(rows.kinds):
        if kind in (DeviceSampler.TOP_K, DeviceSampler.LOGPROBS):
            rows.candidates(row)
        elif kind is DeviceSampler.GUESS:
            rows.best(row)
