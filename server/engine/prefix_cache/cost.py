"""What holding and sharing states costs on this machine: `python -m server.engine.prefix_cache.cost GGUF`.

Milliseconds of a decode step by the number of cells that are occupied but not used by it, with one pool of
cells for all sequences and with a stream of cells for each; of copying, saving and restoring a sequence; and
of steps that decode and read a prompt, together and apart. The settings' defaults come from these figures.
"""

from __future__ import annotations

import sys
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from server.engine.llama import Context, ContextOptions
from server.engine.measuring import cost_parser, publish

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from server.engine.llama import Model

STREAMS = 8
"""Sequences that decode side by side."""

TOKEN = 300
"""Any token does: no step's time depends on what it says."""


class Bench:
    """A context, how many tokens each of its sequences has, and a clock."""

    def __init__(self, model: Model, *, cells: int, sequences: int, unified: bool, ubatch: int) -> None:
        options = ContextOptions(
            n_ctx=cells,
            n_seq=sequences,
            n_batch=max(2048, ubatch),
            n_ubatch=ubatch,
            n_outputs=max(16, sequences),
            n_outputs_per_seq=16,
            threads=1,
            threads_batch=1,
            flash_attn="auto",
            type_k="f16",
            type_v="f16",
            unified=unified,
        )
        self.context = Context(model, options)
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

    def typical(self, counts: Mapping[int, int], *, times: int, rows: int = 1, forget: bool = False) -> float:
        """The median of several runs after three others; with `forget`, each from an empty sequence."""
        taken = []
        for _ in range(times + 3):
            taken.append(self.run(counts, rows))
            for sequence in counts if forget else ():
                self.remove(sequence)
        return round(median(taken[3:]), 3)

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


def timed(action: Callable[[], object]) -> float:
    """Milliseconds that it takes."""
    started = perf_counter()
    action()
    return round(1000 * (perf_counter() - started), 3)


def one_pool(model: Model, resident: Sequence[int], piece: int, ubatch: int, times: int) -> dict[str, Any]:
    """Steps, by what checkpoints occupy beside them; what it takes to share, save and restore one."""
    pieces = max(resident) // piece
    first = STREAMS + 4
    cells = max(resident) + piece + 256 * (STREAMS + 4) + 4 * 2048
    bench = Bench(model, cells=cells, sequences=first + pieces, unified=True, ubatch=ubatch)
    try:
        holder, twin = STREAMS + 1, STREAMS + 2
        for stream in range(STREAMS):
            bench.fill(stream, 64)
        found: dict[str, Any] = {"shapes_ms": shapes(bench, ubatch, times)}
        bench.fill(holder, piece)
        saved = bench.context.save(holder)
        found["checkpoint"] = {
            "tokens": piece,
            "mib": round(saved.nbytes / 2**20, 1),
            "share_ms": timed(lambda: bench.copy(holder, twin)),
            "remove_ms": timed(lambda: bench.remove(twin)),
            "save_ms": timed(lambda: bench.context.save(holder)),
        }
        bench.remove(holder)
        restores, steps = [], []
        for count in range(pieces + 1):
            if count:
                target = first + count - 1
                restores.append(timed(lambda target=target: bench.context.restore(target, saved)))  # type: ignore[misc]
            if count * piece in resident:
                steps.append(
                    {
                        "cells": count * piece,
                        "one_ms": bench.typical({0: 1}, times=times),
                        "eight_ms": bench.typical(dict.fromkeys(range(STREAMS), 1), times=times),
                        "sixteen_rows_ms": bench.typical({0: 16}, times=times, rows=16),
                    }
                )
        found["checkpoint"]["restore_ms"] = round(median(restores), 3) if restores else None
        return {**found, "steps": steps}
    finally:
        bench.context.close()


def shapes(bench: Bench, ubatch: int, times: int) -> dict[str, float]:
    """Eight decodes, a stretch of a prompt, and both in one call."""
    decodes, prompt = dict.fromkeys(range(STREAMS), 1), STREAMS
    found = {"decodes": bench.typical(decodes, times=times)}
    for count in sorted({min(ubatch, 2048) // 4, min(ubatch, 2048)}):
        found[f"prompt {count}"] = bench.typical({prompt: count}, times=3, forget=True)
        both = []
        for _ in range(4):
            both.append(bench.run({**decodes, prompt: count}))
            bench.remove(prompt)
        found[f"decodes + prompt {count}"] = round(median(both[1:]), 3)
    return found


def streams(model: Model, piece: int, ubatch: int, times: int) -> dict[str, Any]:
    """The same with cells of its own for each sequence: nothing is shared, a copy copies all of them."""
    sequences = STREAMS + 2
    bench = Bench(model, cells=2 * piece * sequences, sequences=sequences, unified=False, ubatch=ubatch)
    try:
        bench.fill(0, 64)
        found: dict[str, Any] = {"cells_each": 2 * piece, "one_ms": bench.typical({0: 1}, times=times)}
        bench.fill(1, piece)
        for target in range(2, sequences):
            bench.copy(1, target)
        bench.run({0: 1})
        found["one_ms_all_full"] = bench.typical({0: 1}, times=times)

        def copy_and_step() -> None:
            bench.remove(2)
            bench.copy(1, 2)
            bench.run({0: 1})

        found["copy_and_step_ms"] = median(timed(copy_and_step) for _ in range(3))
        for slot in range(1, STREAMS):
            bench.remove(slot)
            bench.fill(slot, 64)
        found["four_neighbours_ms"] = bench.typical(dict.fromkeys((0, 1, 2, 3), 1), times=times)
        found["four_others_ms"] = bench.typical(dict.fromkeys((0, 2, 4, 6), 1), times=times)
        return found
    finally:
        bench.context.close()


def main(arguments: Sequence[str]) -> None:
    """Measure, print, and write JSON where `--out` says."""
    parser = cost_parser("python -m server.engine.prefix_cache.cost", __doc__, times=20)
    parser.add_argument(
        "--resident",
        default="0,8192,16384,32768,65536,131072",
        metavar="CELLS,...",
        help="occupied beside a step; whole checkpoints",
    )
    parser.add_argument("--piece", type=int, default=8192, metavar="N", help="tokens of a checkpoint")
    parser.add_argument("--ubatch", type=int, default=512, metavar="N", help="tokens of a pass")
    flags = parser.parse_args(arguments)
    resident = sorted(int(count) for count in flags.resident.split(","))

    def measure(model: Model) -> dict[str, Any]:
        return {
            "one_pool": one_pool(model, resident, flags.piece, flags.ubatch, flags.times),
            "streams": streams(model, flags.piece, flags.ubatch, flags.times),
        }

    publish(flags, measure)


if __name__ == "__main__":
    main(sys.argv[1:])
