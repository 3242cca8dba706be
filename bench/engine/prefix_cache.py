"""What holding and sharing states costs, with one pool of cells for all sequences and with cells for each."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter

from bench.arguments import Positive, Positives, StoreOptions
from bench.engine.recording import UNTIMED, Recorder, make_context, recorded
from server.engine.llama import Model

STREAMS = 8
"""Sequences that decode side by side."""

TOKEN = 300
"""Any token does: no step's time depends on what it says."""

RESTORES = 3


class Bench:
    """A context, and how many tokens each of its sequences has."""

    def __init__(self, model: Model, *, cells: int, sequences: int, unified: bool, ubatch: int) -> None:
        self.context = make_context(
            model,
            n_ctx=cells,
            n_seq=sequences,
            n_batch=max(2048, ubatch),
            n_ubatch=ubatch,
            n_outputs=max(16, sequences),
            n_outputs_per_seq=16,
            unified=unified,
        )
        self._lengths: dict[int, int] = {}

    def run(self, counts: Mapping[int, int], rows: int = 1) -> float:
        """Milliseconds to decode so many tokens of each sequence, with logits for the last `rows` of each.

        The longer prompts' surplus comes last, as llama.cpp computes it.
        """
        context, n = self.context, 0
        done = dict.fromkeys(counts, 0)
        while left := [sequence for sequence in counts if done[sequence] < counts[sequence]]:
            length = min(counts[sequence] - done[sequence] for sequence in left)
            length = min(length, max(1, context.n_ubatch // len(left)))
            for sequence in left:
                start = self._lengths.get(sequence, 0) + done[sequence]
                context.positions[n : n + length] = range(start, start + length)
                context.sequences[n : n + length] = sequence
                done[sequence] += length
                wanted = max(0, min(length, done[sequence] - (counts[sequence] - rows)))
                context.outputs[n : n + length] = 0
                context.outputs[n + length - wanted : n + length] = 1
                n += length
        context.tokens[:n] = TOKEN
        started = perf_counter()
        context.decode(n)
        context.logits(rows * len(counts))
        elapsed = perf_counter() - started
        for sequence, count in counts.items():
            self._lengths[sequence] = self._lengths.get(sequence, 0) + count
        return 1000 * elapsed

    def time(
        self,
        recorder: Recorder,
        cell: str,
        counts: Mapping[int, int],
        times: int,
        *,
        rows: int = 1,
        forget: Sequence[int] = (),
    ) -> None:
        """Record several runs after some others, each followed by forgetting these sequences."""
        for at in range(-UNTIMED, times):
            spent = self.run(counts, rows)
            if at >= 0:
                recorder.add(cell, at + 1, "step_time", spent)
            for sequence in forget:
                self.remove(sequence)

    def fill(self, sequence: int, count: int) -> None:
        """Give a sequence so many tokens more."""
        while count > 0:
            self.run({sequence: min(count, self.context.n_batch)})
            count -= self.context.n_batch

    def copy(self, source: int, target: int) -> None:
        """A copy of a sequence."""
        self.context.copy(source, target)
        self._lengths[target] = self._lengths[source]

    def remove(self, sequence: int) -> None:
        """Forget a sequence."""
        self.context.remove(sequence)
        self._lengths.pop(sequence, None)


def prefix_cost(
    gguf: Path,
    /,
    *,
    resident: Positives = (8192, 16384, 32768, 65536, 131072),
    piece: Positive = 8192,
    ubatch: Positive = 512,
    times: Positive = 20,
    store: StoreOptions = StoreOptions(),
) -> int:
    """Milliseconds of a decode step by the cells that are occupied but not used by it; of copying, saving and
    restoring a sequence; of steps that decode and read a prompt, together and apart.

    With one pool of cells for all sequences, and with a stream of cells for each. The defaults of the prefix
    cache's settings come from these figures.

    Parameters
    ----------
    gguf
        The model.
    resident
        Cells occupied beside a step, multiples of --piece; none, too, is measured.
    piece
        Tokens of a checkpoint.
    ubatch
        Tokens of a pass.
    times
        Timed steps of each.
    """
    settings = {"resident": resident, "piece": piece, "ubatch": ubatch, "times": times}
    with recorded(gguf, "prefix-cost", "prefix cache", store, settings) as (model, recorder):
        _one_pool(model, recorder, sorted(resident), piece, ubatch, times)
        _streams(model, recorder, piece, ubatch, times)
    return 0


def _one_pool(
    model: Model, recorder: Recorder, resident: Sequence[int], piece: int, ubatch: int, times: int
) -> None:
    """Steps, by what checkpoints occupy beside them; what it takes to share, save and restore one."""
    pieces = resident[-1] // piece
    first = STREAMS + 4
    cells = resident[-1] + piece + 256 * first + 4 * 2048
    bench = Bench(model, cells=cells, sequences=first + pieces, unified=True, ubatch=ubatch)
    try:
        holder, twin = STREAMS + 1, STREAMS + 2
        for stream in range(STREAMS):
            bench.fill(stream, 64)
        _shapes(bench, recorder, ubatch, times)
        bench.fill(holder, piece)
        saved = bench.context.save(holder)
        recorder.add(f"save {piece} tokens", 1, "copy_size", saved.nbytes / 2**20)
        for round in range(1, RESTORES + 1):
            for what, action in (
                ("share", lambda: bench.copy(holder, twin)),
                ("remove", lambda: bench.remove(twin)),
                ("save", lambda: bench.context.save(holder)),
            ):
                recorder.once(f"{what} {piece} tokens", action, round, metric="copy_time")
        bench.remove(holder)
        for count in range(pieces + 1):
            if count:
                recorder.once(
                    f"restore {piece} tokens",
                    lambda at=first + count - 1: bench.context.restore(at, saved),  # type: ignore[misc]
                    count,
                    metric="copy_time",
                )
            if count * piece in (0, *resident):
                beside = f"beside {count * piece} cells"
                bench.time(recorder, f"1 sequence {beside}", {0: 1}, times)
                every = dict.fromkeys(range(STREAMS), 1)
                bench.time(recorder, f"{STREAMS} sequences {beside}", every, times)
                bench.time(recorder, f"16 rows of a sequence {beside}", {0: 16}, times, rows=16)
    finally:
        bench.context.close()


def _shapes(bench: Bench, recorder: Recorder, ubatch: int, times: int) -> None:
    """Eight decodes, a stretch of a prompt, and both in one call."""
    decodes, prompt = dict.fromkeys(range(STREAMS), 1), STREAMS
    bench.time(recorder, f"{STREAMS} decodes", decodes, times)
    few = max(1, times // 5)
    for count in sorted({min(ubatch, 2048) // 4, min(ubatch, 2048)}):
        bench.time(recorder, f"prompt of {count}", {prompt: count}, few, forget=[prompt])
        both = {**decodes, prompt: count}
        bench.time(recorder, f"{STREAMS} decodes and a prompt of {count}", both, few, forget=[prompt])


def _streams(model: Model, recorder: Recorder, piece: int, ubatch: int, times: int) -> None:
    """The same with cells of its own for each sequence: nothing is shared, a copy copies all of them."""
    sequences = STREAMS + 2
    bench = Bench(model, cells=2 * piece * sequences, sequences=sequences, unified=False, ubatch=ubatch)
    try:
        bench.fill(0, 64)
        bench.time(recorder, "own cells: 1 sequence", {0: 1}, times)
        bench.fill(1, piece)
        for target in range(2, sequences):
            bench.copy(1, target)
        bench.run({0: 1})
        bench.time(recorder, f"own cells: 1 sequence, {piece} tokens in all others", {0: 1}, times)

        def copy_and_step() -> None:
            bench.remove(2)
            bench.copy(1, 2)
            bench.run({0: 1})

        for round in range(1, RESTORES + 1):
            recorder.once(f"own cells: copy {piece} tokens, and a step", copy_and_step, round)
        for slot in range(1, STREAMS):
            bench.remove(slot)
            bench.fill(slot, 64)
        for what, slots in (("neighbouring", (0, 1, 2, 3)), ("scattered", (0, 2, 4, 6))):
            bench.time(recorder, f"own cells: 4 {what} sequences", dict.fromkeys(slots, 1), times)
    finally:
        bench.context.close()
