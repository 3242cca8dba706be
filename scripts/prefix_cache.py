"""``python scripts/prefix_cache.py``: costs of keeping, sharing and restoring states."""

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from script import UNTIMED, Timings, loaded, make_context, run

from qwen_serve.bench.arguments import Positive, Positives
from qwen_serve.llamacpp import Model

STREAMS = 8
"""Number of sequences that decode together."""

TOKEN = 300
"""A token; its value does not affect the time of a step."""

RESTORES = 3


class Bench:
    """A context whose sequences share one pool of cells, and the number of tokens of each sequence."""

    def __init__(self, model: Model, timings: Timings, *, cells: int, sequences: int, ubatch: int) -> None:
        self.context = make_context(
            model,
            n_ctx=cells,
            n_seq=sequences,
            n_batch=max(2048, ubatch),
            n_ubatch=ubatch,
            n_outputs=max(16, sequences),
        )
        self._timings = timings
        self._lengths = [0] * sequences

    def run(self, sequences: Sequence[int], length: int = 1, rows: int = 1) -> float:
        """Decode ``length`` tokens of each sequence, with logits for the last ``rows`` of each. Returns
        milliseconds."""
        context, n = self.context, 0
        for sequence in sequences:
            start = self._lengths[sequence]
            context.positions[n : n + length] = range(start, start + length)
            context.sequences[n : n + length] = sequence
            context.outputs[n : n + length] = 0
            context.outputs[n + length - rows : n + length] = 1
            self._lengths[sequence] += length
            n += length
        context.tokens[:n] = TOKEN
        started = perf_counter()
        context.decode(n)
        context.logits(rows * len(sequences))
        return 1000 * (perf_counter() - started)

    def time(
        self,
        cell: str,
        sequences: Sequence[int],
        times: int,
        *,
        length: int = 1,
        rows: int = 1,
        forget: bool = False,
    ) -> None:
        """Add several runs after some untimed ones. ``forget``: remove the sequences after each run."""
        for round in range(1 - UNTIMED, times + 1):
            spent = self.run(sequences, length, rows)
            if round >= 1:
                self._timings.add(cell, spent)
            for sequence in sequences if forget else ():
                self.remove(sequence)

    def fill(self, sequence: int, count: int) -> None:
        """Add ``count`` tokens to a sequence."""
        for start in range(0, count, self.context.n_batch):
            self.run([sequence], min(count - start, self.context.n_batch))

    def copy(self, source: int, target: int) -> None:
        self.context.copy(source, target)
        self._lengths[target] = self._lengths[source]

    def remove(self, sequence: int) -> None:
        self.context.remove(sequence)
        self._lengths[sequence] = 0


def prefix_cache(
    gguf: Path,
    /,
    *,
    resident: Positives = (8192, 16384, 32768, 65536, 131072),
    piece: Positive = 8192,
    ubatch: Positive = 512,
    times: Positive = 20,
) -> None:
    """Time decode steps by the number of occupied cells that they do not use, prompts, and copying, saving
    and restoring a sequence, in milliseconds.

    - `python scripts/prefix_cache.py model.gguf --resident 8192,65536`

    The defaults of the prefix cache's settings are based on these figures.

    Parameters
    ----------
    gguf
        The model's GGUF.
    resident
        Numbers of occupied cells that a step does not use, multiples of --piece; 0 is always measured, too.
    piece
        Tokens of a checkpoint.
    ubatch
        Maximum tokens of a pass (ubatch).
    times
        Timed steps of each case.
    """
    with loaded(gguf) as (model, timings):
        _measure(model, timings, sorted(resident), piece, ubatch, times)


def _measure(
    model: Model, timings: Timings, resident: Sequence[int], piece: int, ubatch: int, times: int
) -> None:
    """Time steps by the number of cells that checkpoints occupy, and costs of sharing, saving and restoring
    one."""
    pieces = resident[-1] // piece
    first = STREAMS + 4
    cells = resident[-1] + piece + 256 * first + 4 * 2048
    bench = Bench(model, timings, cells=cells, sequences=first + pieces, ubatch=ubatch)
    every = range(STREAMS)
    try:
        prompt, holder, twin = STREAMS, STREAMS + 1, STREAMS + 2
        for stream in every:
            bench.fill(stream, 64)
        bench.time(f"prompt of {ubatch}", [prompt], max(1, times // 5), length=ubatch, forget=True)
        bench.fill(holder, piece)
        saved = bench.context.save(holder)
        print(f"{piece} tokens are {saved.nbytes / 2**20:.1f} MiB")
        for _ in range(RESTORES):
            for what, action in (
                ("share", lambda: bench.copy(holder, twin)),
                ("remove", lambda: bench.remove(twin)),
                ("save", lambda: bench.context.save(holder)),
            ):
                timings.once(f"{what} {piece} tokens", action)
        bench.remove(holder)
        for count in range(pieces + 1):
            if count:
                at = first + count - 1
                timings.once(f"restore {piece} tokens", lambda: bench.context.restore(at, saved))  # noqa: B023
            if count * piece in (0, *resident):
                beside = f"beside {count * piece} cells"
                bench.time(f"1 sequence {beside}", [0], times)
                bench.time(f"{STREAMS} sequences {beside}", every, times)
                bench.time(f"16 rows of a sequence {beside}", [0], times, length=16, rows=16)
    finally:
        bench.context.close()


if __name__ == "__main__":
    run(prefix_cache)
