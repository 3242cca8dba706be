"""Carries out a step: fills llama.cpp's batch, decodes it, samples what is ready."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .llama import Context
    from .scheduler import Step


class Runner:
    """The only user of the context while the engine runs."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def run(self, step: Step) -> list[int | Exception | None]:
        """One entry a chunk: the sampled token, None where the prompt goes on, or what its sampler raised.

        Raises LlamaError when the step as a whole failed.
        """
        self._fill(step)
        context = self._context
        context.decode(step.n_tokens)
        logits = context.logits(sum(chunk.samples for chunk in step.chunks))
        sampled: list[int | Exception | None] = []
        row = end = 0
        for chunk in step.chunks:
            end += chunk.count
            if not chunk.samples:
                sampled.append(None)
                continue
            try:
                sampled.append(chunk.sequence.sampler.sample(context, end - 1, logits[row]))
            except Exception as error:  # one sequence's trouble is not its batch mates'
                sampled.append(error)
            row += 1
        return sampled

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

    def _fill(self, step: Step) -> None:
        context = self._context
        decodes = 0
        for chunk in step.chunks:
            if chunk.count > 1:
                break
            decodes += 1
        if decodes:
            single = [chunk.sequence for chunk in step.chunks[:decodes]]
            context.tokens[:decodes] = [sequence.tokens[sequence.cached] for sequence in single]
            context.positions[:decodes] = [sequence.cached for sequence in single]
            context.sequences[:decodes] = [sequence.slot or 0 for sequence in single]
            context.outputs[:decodes] = [chunk.samples for chunk in step.chunks[:decodes]]
        start = decodes
        for chunk in step.chunks[decodes:]:
            sequence, end = chunk.sequence, start + chunk.count
            context.tokens[start:end] = sequence.tokens[sequence.cached : sequence.cached + chunk.count]
            context.positions[start:end] = np.arange(sequence.cached, sequence.cached + chunk.count)
            context.sequences[start:end] = sequence.slot or 0
            context.outputs[start:end] = 0
            context.outputs[end - 1] = chunk.samples
            start = end
