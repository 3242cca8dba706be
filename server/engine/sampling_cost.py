"""What each way to the next tokens costs on this machine: `python -m server.engine.sampling_cost GGUF`.

Milliseconds of a step that decodes a token of each of so many sequences and ends with a token of each on the
host: from raw rows, from each readout, from llama.cpp's own greedy samplers; with one request among them that
needs its whole row, read out or copied with all the others; and what another readout for a slot costs.
"""

from __future__ import annotations

import sys
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from .llama import Context, ContextOptions, Readout
from .llama.chains import GreedyChains, detach
from .measuring import cost_parser, publish
from .warmup import decode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .llama import Model, Rows


def make(model: Model, most: int, readouts: bool) -> Context:
    """A context for `most` sequences."""
    return Context(
        model,
        ContextOptions(
            n_ctx=256 * most,
            n_seq=most,
            n_batch=512,
            n_ubatch=512,
            n_outputs=most,
            threads=1,
            threads_batch=1,
            flash_attn="auto",
            type_k="f16",
            type_v="f16",
            n_readouts=most if readouts else 0,
        ),
    )


def milliseconds(step: Callable[[], object], times: int) -> float:
    """The median of some runs, after two that build graphs."""
    for _ in range(2):
        step()
    spent = []
    for _ in range(times):
        started = perf_counter()
        step()
        spent.append(1000 * (perf_counter() - started))
    return round(median(spent), 3)


def take(rows: Rows) -> None:
    """What a sampler reads of each row."""
    for row, kind in enumerate(rows.kinds):
        if kind is Readout.TOP_K:
            rows.candidates(row)
        elif kind is Readout.GUESS:
            rows.best(row)


def by_readout(model: Model, counts: Sequence[int], times: int) -> dict[str, Any]:
    """Everything that starts from the readouts."""
    context, most = make(model, max(counts), readouts=True), max(counts)
    found: dict[str, Any] = {"refused": context.readouts.refused}

    def steps() -> dict[int, float]:
        return {n: milliseconds(lambda n=n: take(decode(context, n)), times) for n in counts}  # type: ignore[misc]

    found["best"] = steps()
    context.set_readout(most - 1, Readout.ROW)
    found["one_whole_row"] = {most: milliseconds(lambda: decode(context, most), times)}
    detach(context, most - 1)
    found["one_without_a_sampler"] = {most: milliseconds(lambda: decode(context, most, take=False), times)}
    context.set_readouts(Readout.BEST)
    decode(context, most)
    started = perf_counter()
    context.set_readout(most - 1, Readout.TOP_K)
    decode(context, most)
    found["another_readout"] = round(1000 * (perf_counter() - started) - found["best"][most], 3)
    for kind in (Readout.TOP_K, Readout.GUESS, Readout.ROW):
        context.set_readouts(kind)
        found[kind.name.lower()] = steps()
    context.close()
    return found


def raw(model: Model, counts: Sequence[int], times: int) -> dict[int, float]:
    """Rows copied to the host, and numpy's argmax."""
    context = make(model, max(counts), readouts=False)
    found = {n: milliseconds(lambda n=n: decode(context, n), times) for n in counts}  # type: ignore[misc]
    context.close()
    return found


def greedy_chains(model: Model, counts: Sequence[int], times: int) -> dict[int, float]:
    """llama.cpp's greedy sampler on every sequence id."""
    context = make(model, max(counts), readouts=False)
    chains = GreedyChains(context, max(counts))

    def step(n: int) -> None:
        decode(context, n, take=False)
        chains.tokens(range(n))

    found = {n: milliseconds(lambda n=n: step(n), times) for n in counts}  # type: ignore[misc]
    context.close()
    chains.close()
    return found


def main(arguments: Sequence[str]) -> None:
    """Measure, print, and write JSON where `--out` says."""
    parser = cost_parser("python -m server.engine.sampling_cost", __doc__, times=10)
    parser.add_argument("--rows", default="1,8,64", metavar="N,...", help="sequences in a step")
    flags = parser.parse_args(arguments)
    counts = sorted(int(count) for count in flags.rows.split(","))

    def measure(model: Model) -> dict[str, Any]:
        return {
            "raw_rows": raw(model, counts, flags.times),
            "readouts": by_readout(model, counts, flags.times),
            "greedy_samplers_of_llama_cpp": greedy_chains(model, counts, flags.times),
        }

    publish(flags, measure)


if __name__ == "__main__":
    main(sys.argv[1:])
