"""Carries out a step: fills llama.cpp's batch, decodes it, samples what is ready."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from .llama import Context
    from .scheduler import Chunk, Step

Sampled = list[int] | Exception | None
"""What a step gave one chunk: new tokens, what its sampler raised, or nothing, where the prompt goes on."""


class Runner:
    """The only user of the context while the engine runs."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._offsets = np.arange(context.n_batch, dtype=np.int32)

    def run(self, step: Step) -> list[Sampled]:
        """One entry a chunk: the accepted part of its draft and the token after that.

        A token of the draft is accepted if the request's own sampler chooses it from the row that it stands
        for: for a proposal that is certain of its token that is speculative sampling (Leviathan et al. 2023,
        section 2.3), so the distribution of the output does not change, whatever the sampler. Raises
        LlamaError when the step as a whole failed.
        """
        rows = self._fill(step)
        context = self._context
        context.decode(step.n_tokens)
        logits = context.logits(sum(chunk.n_rows for chunk in step.chunks))
        return [
            self._sample(chunk, places, logits) if chunk.samples else None
            for chunk, places in zip(step.chunks, rows, strict=True)
        ]

    def _sample(
        self, chunk: Chunk, rows: list[tuple[int, int]], logits: npt.NDArray[np.float32]
    ) -> list[int] | Exception:
        """`rows` are pairs: a row's index in `logits`, its token's index in the batch."""
        new: list[int] = []
        sampler = chunk.sequence.sampler
        try:
            for (row, index), guess in zip(rows, [*chunk.draft, None], strict=True):
                token = sampler.sample(self._context, index, logits[row])
                new.append(token)
                if token != guess:
                    break
        except Exception as error:  # one sequence's trouble is not its batch mates'
            return error
        return new

    def warm_up(self, slots: int, prefill: int) -> None:
        """Touch the weights and every shape that the first requests need, then forget it all.

        A decode of one and of all `slots` sequences, and a prompt of `prefill` tokens.
        """
        for n_sequences, length in ((1, prefill), (1, 1), (slots, 1)):
            n = n_sequences * length
            context = self._context
            context.tokens[:n] = 0
            context.positions[:n] = range(length) if n_sequences == 1 else 0
            context.sequences[:n] = 0 if n_sequences == 1 else range(n_sequences)
            context.outputs[:n] = n_sequences > 1
            context.outputs[n - 1] = 1
            context.decode(n)
            context.logits(n_sequences)
            context.clear()

    def forget(self, slot: int) -> None:
        """Free the cells and the recurrent state of a slot."""
        self._context.remove(slot)

    def _fill(self, step: Step) -> list[list[tuple[int, int]]]:
        """Lay the batch out; returns each chunk's rows: index among the outputs, index in the batch."""
        if step.n_tokens == len(step.chunks):
            return self._fill_decodes(step.chunks)
        return self._fill_rounds(step.chunks)

    def _fill_decodes(self, chunks: list[Chunk]) -> list[list[tuple[int, int]]]:
        """A token of each."""
        context, n = self._context, len(chunks)
        context.tokens[:n] = [chunk.sequence.tokens[chunk.sequence.cached] for chunk in chunks]
        context.positions[:n] = [chunk.sequence.cached for chunk in chunks]
        context.sequences[:n] = [chunk.sequence.slot or 0 for chunk in chunks]
        context.outputs[:n] = [chunk.samples for chunk in chunks]
        rows = iter(range(n))
        return [[(next(rows), index)] if chunk.samples else [] for index, chunk in enumerate(chunks)]

    def _fill_rounds(self, chunks: list[Chunk]) -> list[list[tuple[int, int]]]:
        """Round by round, as many tokens of each as the shortest has left: in the order of computation.

        That is how `split_equal` (llama-batch.cpp) cuts a batch for recurrent layers. Outputs that came in
        another order would have to be swapped back, row by row.
        """
        context = self._context
        rows: list[list[tuple[int, int]]] = [[] for _ in chunks]
        tokens = [
            chunk.sequence.tokens[chunk.sequence.cached : chunk.sequence.cached + chunk.count] + chunk.draft
            for chunk in chunks
        ]
        done = [0] * len(chunks)
        start = row = 0
        while left := [i for i, mine in enumerate(tokens) if done[i] < len(mine)]:
            length = min(len(tokens[i]) - done[i] for i in left)
            length = min(length, max(1, context.n_ubatch // len(left)))
            for i in left:
                sequence, first, end = chunks[i].sequence, done[i], start + length
                context.tokens[start:end] = tokens[i][first : first + length]
                context.positions[start:end] = self._offsets[:length]
                context.positions[start:end] += sequence.cached + first
                context.sequences[start:end] = sequence.slot or 0
                context.outputs[start:end] = 0
                if chunks[i].samples:
                    for index in range(start + max(0, chunks[i].count - 1 - first), end):
                        context.outputs[index] = 1
                        rows[i].append((row, index))
                        row += 1
                done[i] += length
                start = end
        return rows
