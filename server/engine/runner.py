"""Carries out a step: fills llama.cpp's batch, decodes it, samples what is ready."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from .llama import Readout
from .rounds import rounds
from .scheduler import Step
from .sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Sequence as ListLike

    from .llama import Context, Rows
    from .profile import StepProfile
    from .sampling import Sampler
    from .scheduler import Chunk, Sampled
    from .speculation import Speculator

PATIENCE = 400
"""Rows that may be read out more widely than needed before slots get narrower readouts: what a change costs,
all graphs being planned anew, over what a whole row costs (`python -m server.engine.sampling_cost`)."""


@dataclass(slots=True)
class Layout:
    """Where the rows of a batch are: sequence id and index in the batch of each, and each chunk's rows."""

    slots: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    places: list[list[int]] = field(default_factory=list)
    """Where each chunk's tokens are in the batch."""


class Runner:
    """The only user of the context while the engine runs.

    `ends` are the tokens that end a generation; `device_runs_alone` says that llama_decode returns before
    what it started is computed.
    """

    def __init__(
        self,
        context: Context,
        ends: frozenset[int],
        profile: StepProfile,
        speculator: Speculator | None = None,
        *,
        device_runs_alone: bool = False,
    ) -> None:
        self._context = context
        self._ends = ends
        self._profile = profile
        self._speculator = speculator
        self._launched = 0.0
        self._layout = Layout()
        self._filled: Step | None = None
        self._fits = self._greedy = False
        self._device_runs_alone = device_runs_alone
        self._device_is_idle = True
        self._shape: tuple[int, list[int]] = 0, []
        self._offsets = np.arange(context.n_batch, dtype=np.int32)
        self._wasted = 0
        self.readout_changes = 0
        """How often a slot had to be given another readout for a request."""

    def prepare(self, step: Step) -> None:
        """Write the step's batch; after the same step, only what has changed."""
        if step is self._filled:
            n, context = step.n_tokens, self._context
            context.tokens[:n] = [chunk.sequence.tokens[-1] for chunk in step.chunks]
            context.positions[:n] += 1
            if not self._fits:
                self._fits = self._set_readouts(step)
            return
        self._fits = self._set_readouts(step)
        self._greedy = all(chunk.sequence.sampler.need is Readout.BEST for chunk in step.chunks)
        self._layout = self._fill(step)
        self._filled = step if step.is_decode else None

    def launch(self, step: Step) -> None:
        """Start to compute what was prepared. On a GPU this returns at once, without one when it is done.

        Raises NoMemorySlot or LlamaError; nothing of the step was computed then.
        """
        if self._speculator is not None:
            self._speculator.prepare(step)
        self._launched = perf_counter()
        if self._builds_a_graph(step):
            self._context.decode(step.n_tokens, hold=True)
        else:
            self._context.decode(step.n_tokens)
        self._device_is_idle = False

    def _builds_a_graph(self, step: Step) -> bool:
        """Whether the call will be short, but call back for the readout of every slot.

        It is short in one pass: before another, it would wait for the device.
        """
        shape = step.n_tokens, self._layout.slots
        changed, self._shape = shape != self._shape, shape
        return (
            changed
            and self._device_runs_alone
            and self._device_is_idle
            and self._context.readouts.active
            and step.n_tokens == len(step.chunks) * step.chunks[0].n_tokens <= self._context.n_ubatch
        )

    def collect(self, step: Step) -> list[Sampled]:
        """Wait for the step that was launched, and sample: for each chunk, what is accepted of its draft and
        the token after that.

        A token of the draft is accepted if the request's own sampler chooses it from the row that it stands
        for: for a proposal that is certain of its token that is speculative sampling (Leviathan et al. 2023,
        section 2.3), so the distribution of the output does not change, whatever the sampler. Nothing is
        accepted behind the end of a generation. Raises LlamaError when the step as a whole failed.
        """
        layout = self._layout
        sampled: list[Sampled] = [None] * len(step.chunks)
        if layout.slots:  # else chunks of prompts: the next step may follow at once
            rows = self._context.rows(layout.slots, layout.indices)
            self._device_is_idle = True
            self._profile.lap("wait")
            sampled = self._sample_all(step, layout, rows)
            self._profile.lap("sample")
        elif self._speculator is not None and self._speculator.reads(step):
            self._context.wait()
            self._profile.lap("wait")
        if self._speculator is not None:
            seconds = perf_counter() - self._launched
            self._speculator.conclude(step, layout.places, sampled, seconds)
            self._profile.lap("settle")
        return sampled

    def place(self, sequence: Sequence, free: ListLike[int]) -> int:
        """The slot for a sequence: one whose readout is what it needs, or tells enough, or the first."""
        if not self._context.readouts.active:
            return free[0]
        kinds, need = self._context.readouts.kinds, sequence.sampler.need
        return min(free, key=lambda slot: 0 if kinds[slot] is need else 1 if kinds[slot].serves(need) else 2)

    def forget(self, slot: int) -> None:
        """Free the cells and the recurrent state of a slot."""
        self._context.remove(slot)
        if self._speculator is not None:
            self._speculator.empty(slot)

    def rehearse(self, sampler: Sampler, n: int, length: int) -> None:
        """Verify `length` - 1 made-up tokens for each of `n` sequences, and forget it all."""
        step = Step()
        for slot in range(n):
            sequence = Sequence([0], length, sampler)
            sequence.slot = slot
            step.add(sequence, 1, [0] * (length - 1))
        self.prepare(step)
        self.launch(step)
        self.collect(step)
        for slot in range(n):
            self.forget(slot)

    # --- sampling ------------------------------------------------------------------------------------------

    def _set_readouts(self, step: Step) -> bool:
        """Have enough read out of each slot for the request that is in it, and in the long run no more.

        Whether that holds already of the long run.
        """
        readouts = self._context.readouts
        if not readouts.active:
            return True
        patience, fits = self._wasted < PATIENCE, True
        for chunk in step.chunks:
            slot, need = chunk.sequence.slot or 0, chunk.sequence.sampler.need
            kind = readouts.kinds[slot]
            if kind is need or not chunk.samples:
                continue
            if kind.serves(need) and patience:
                self._wasted += 1
                fits = False
            else:
                self._context.set_readout(slot, need)
                self.readout_changes += 1
                self._wasted = 0
        return fits

    def _sample_all(self, step: Step, layout: Layout, rows: Rows) -> list[Sampled]:
        best = rows.all_best() if self._greedy else None
        if best is not None and self._ends.isdisjoint(best):  # an end may have to be ignored
            if step is self._filled:
                return [[token] for token in best]
            return [
                self._accept(chunk.draft, [best[row] for row in own]) if own else None
                for chunk, own in zip(step.chunks, layout.rows, strict=True)
            ]
        return [
            self._sample(chunk, own, rows) if own else None
            for chunk, own in zip(step.chunks, layout.rows, strict=True)
        ]

    def _accept(self, draft: list[int], best: list[int]) -> list[int]:
        """What `_sample` gives where each row's token is known already."""
        for n, (token, guess) in enumerate(zip(best, draft, strict=False)):
            if token != guess:
                return best[: n + 1]
        return best

    def _sample(self, chunk: Chunk, own: list[int], rows: Rows) -> Sampled:
        new: list[int] = []
        sampler = chunk.sequence.sampler
        try:
            for row, guess in zip(own, [*chunk.draft, None], strict=True):
                token = sampler.sample(rows, row)
                new.append(token)
                if token != guess or token in self._ends:
                    break
        except Exception as error:  # one sequence's trouble is not its batch mates'
            return error
        return new

    # --- the batch -----------------------------------------------------------------------------------------

    def _fill(self, step: Step) -> Layout:
        if step.n_tokens == len(step.chunks):
            return self._fill_decodes(step.chunks)
        return self._fill_rounds(step.chunks)

    def _fill_decodes(self, chunks: list[Chunk]) -> Layout:
        """A token of each."""
        context, n = self._context, len(chunks)
        slots = [chunk.sequence.slot or 0 for chunk in chunks]
        cached = [chunk.sequence.cached for chunk in chunks]
        context.tokens[:n] = [
            chunk.sequence.tokens[place] for chunk, place in zip(chunks, cached, strict=True)
        ]
        context.positions[:n] = cached
        context.sequences[:n] = slots
        samples = [chunk.samples for chunk in chunks]
        context.outputs[:n] = samples
        if all(samples):
            own = [[index] for index in range(n)]
            return Layout(slots, list(range(n)), own, own)
        layout = Layout(places=[[index] for index in range(n)])
        for index, chunk in enumerate(chunks):
            layout.rows.append([])
            if chunk.samples:
                self._add_row(layout, len(layout.rows) - 1, slots[index], index)
        return layout

    def _fill_rounds(self, chunks: list[Chunk]) -> Layout:
        """In the order of computation: outputs that came in another would be swapped back, row by row."""
        context = self._context
        layout = Layout(rows=[[] for _ in chunks], places=[[] for _ in chunks])
        tokens = [
            chunk.sequence.tokens[chunk.sequence.cached : chunk.sequence.cached + chunk.count] + chunk.draft
            for chunk in chunks
        ]
        done, start = [0] * len(chunks), 0
        tail = context.n_snapshots + 1 if context.n_snapshots else 0
        for length, taken in rounds([len(mine) for mine in tokens], context.n_ubatch, tail):
            for i in taken:
                sequence, first, end = chunks[i].sequence, done[i], start + length
                context.tokens[start:end] = tokens[i][first : first + length]
                context.positions[start:end] = self._offsets[:length]
                context.positions[start:end] += sequence.cached + first
                context.sequences[start:end] = sequence.slot or 0
                context.outputs[start:end] = 0
                layout.places[i] += range(start, end)
                if chunks[i].samples:
                    for index in range(start + max(0, chunks[i].count - 1 - first), end):
                        context.outputs[index] = 1
                        self._add_row(layout, i, sequence.slot or 0, index)
                done[i] += length
                start = end
        return layout

    @staticmethod
    def _add_row(layout: Layout, chunk: int, slot: int, index: int) -> None:
        layout.rows[chunk].append(len(layout.slots))
        layout.slots.append(slot)
        layout.indices.append(index)
