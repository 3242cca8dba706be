"""``python scripts/sampling.py``: what ways to sample add to a step."""

from collections.abc import Callable
from pathlib import Path

from script import loaded, make_context, run

from qwen_serve.bench.arguments import Positive, Positives
from qwen_serve.llamacpp import Context, Model
from qwen_serve.llamacpp.row_sampler import HAS_ROW_SAMPLER, Place
from qwen_serve.server.engine import SamplingParams, Vocab
from qwen_serve.server.engine.sampling import Sampler
from qwen_serve.server.engine.warmup import decode

CELLS_EACH = 256

KINDS = {
    "greedy": SamplingParams(),
    "top-k 20, top-p 0.95": SamplingParams(temperature=1.0, top_k=20, top_p=0.95),
    "top-k 20, top-p 0.95, presence penalty 1.5": SamplingParams(
        temperature=1.0, top_k=20, top_p=0.95, presence_penalty=1.5
    ),
    "top-p 0.95": SamplingParams(temperature=1.0, top_p=0.95),
    "20 log-probabilities": SamplingParams(logprobs=20),
    "one logit_bias": SamplingParams(logit_bias=((300, 1.0),)),
}
"""What all requests of a step ask for."""


def sampling(
    gguf: Path,
    /,
    *,
    rows: Positives = (1, 8, 64),
    times: Positive = 10,
) -> None:
    """Time a step until a token of each sequence is on the host, by what its requests ask for, in
    milliseconds.

    - `python scripts/sampling.py model.gguf --rows 1,64`

    Rows are sampled on the device, by the host (without our sampler in llama.cpp by numpy), or copied
    to the host for an argmax.

    Parameters
    ----------
    gguf
        The model's GGUF.
    rows
        Numbers of sequences in a step.
    times
        Timed steps of each case.
    """
    most = max(rows)
    with loaded(gguf) as (model, timings):

        def each(what: str, step: Callable[[int], object]) -> None:
            for n in sorted(rows):
                timings.time(f"{what}, {n} rows", lambda n=n: step(n), times)  # type: ignore[misc]

        for place in (None, Place.HOST, Place.DEVICE):
            context = make_context(model, n_seq=most, n_ctx=CELLS_EACH * most, row_sampling=place)
            try:
                if place is None:
                    each("whole rows, argmax on the host", lambda n: _argmax(context, n))  # noqa: B023
                elif place is Place.DEVICE and not HAS_ROW_SAMPLER:
                    print("this llama.cpp has no row sampler")
                else:
                    for what, params in KINDS.items():
                        step = _step(context, model, params, most)
                        each(f"{place.name.lower()}, {what}", step)
            finally:
                context.close()


def _argmax(context: Context, n: int) -> None:
    decode(context, n)
    context.logits(n).argmax(axis=1)


def _step(context: Context, model: Model, params: SamplingParams, most: int) -> Callable[[int], object]:
    vocab = Vocab(model)
    samplers = [Sampler(params, vocab, []) for _ in range(most)]
    n_top = -1 if params.logprobs is None else params.logprobs

    def step(n: int) -> list[int]:
        decode(context, n, wait=False)
        assert context.row_steps is not None
        requests = [request for one in samplers[:n] for request in one.requests((), n_top, ())]
        context.row_steps.begin(requests, range(n), now=True)
        return context.row_steps.results().tokens

    return step


if __name__ == "__main__":
    run(sampling)
