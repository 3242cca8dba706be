"""Computes batches: fills llama.cpp's batch, decodes it and waits for its rows. Drafters and the prefix cache
are not its concern."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qwen_serve.llamacpp import DeviceSampler
from qwen_serve.llamacpp.ahead import MOST_ROWS
from qwen_serve.llamacpp.errors import NoMemorySlot
from qwen_serve.llamacpp.guessed_draws import STEPS

from .batch import Placement
from .ubatches import ubatches

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as ListLike

    import numpy.typing as npt

    from qwen_serve.llamacpp import Context, LoraAdapter, Rows
    from qwen_serve.llamacpp.ahead import Outputs

    from .batch import Batch, Chunk
    from .profile import StepProfile
    from .sequence import Adapters, Sequence
    from .ubatches import Pass
    from .verification import SampleResult

PATIENCE = 400
"""After this many rows that return more than needed, slots get narrower device samplers. That change plans
all graphs again, and costs as much as copying this many whole rows (defaults.md)."""


@dataclass(slots=True, eq=False)
class Launched:
    """A batch that is being computed."""

    batch: Batch
    slots: list[int]
    """The slot of each row of logits; `indices` has its index in the batch."""
    indices: list[int]
    outputs: Outputs | None
    """Addresses of its rows; None if the rows must be read before the next batch is launched."""
    chosen: bool
    """Whether its tokens are chosen on the device, where the next step can read them."""
    at: float = 0.0
    """When it was launched, by the clock of steps."""


class Runner:
    """While the engine runs, only this class decodes in the context; rehearsals do so before the start."""

    def __init__(
        self,
        context: Context,
        profile: StepProfile,
        adapters: ListLike[LoraAdapter] = (),
        *,
        exact: bool = False,
    ) -> None:
        """`adapters` are in the order of their numbers. `exact`: each slot always has exactly the device
        sampler that its request needs, since others sum in another order."""
        self._exact, self._adapters = exact, adapters
        self._applied: Adapters = ()
        """The adapters that the context applies now."""
        self._context, self._profile = context, profile
        self._slots: list[int] = []
        """The slot of each row of logits; `_indices` has its index in the batch."""
        self._indices: list[int] = []
        self._filled: Batch | None = None
        """The batch in the context's arrays, if it only decodes."""
        self._fits = False
        """Whether its slots have exactly the device samplers that their requests need."""
        self._most_ahead = min(MOST_ROWS, context.n_ubatch, context.most_ahead)
        """Most sequences of a step that can be launched again before its rows are read."""
        self._chosen = False
        """Whether the device chooses or guesses its tokens."""
        self._known_steps = math.inf
        """Further steps for which the device has random numbers."""
        self._tail = context.n_snapshots + 1 if context.n_snapshots else 0
        """How many of a sequence's last tokens stay in one pass."""
        self._offsets = np.arange(context.n_batch, dtype=np.int32)
        self._wasted = 0
        self.sampler_changes = 0
        """How often a slot got another device sampler for a request."""

    def launch(self, batch: Batch, behind: Launched | None = None) -> Launched:
        """Start to compute a batch. On a GPU this returns when the last batch is computed, on a CPU when this
        one is. `behind`: the last batch, if its rows are not read yet. Then a batch that decodes reads on the
        device the tokens that `behind` has `chosen` there; it must be `in_one_pass`. Others must be what
        `can_precede` allows.

        Raises NoMemorySlot or LlamaError; then nothing of the batch was computed.
        """
        self.apply(batch.adapters)
        rows = None
        if behind is not None and batch.is_decode:
            rows = self._follow(behind, batch)
        else:
            self._fill(batch, behind)
        self._profile.lap("fill")
        try:
            self._context.decode(
                batch.n_tokens, of_pictures=batch.of_pictures, next_rows=rows, keep=batch.fetches
            )
        except NoMemorySlot:
            self._filled = None
            raise
        self._profile.lap("decode")
        self._known_steps -= 1
        few = batch.n_rows <= self._context.most_ahead
        outputs = self._context.outputs_ahead() if few else None
        chosen = self._chosen and outputs is not None and outputs.n_last == batch.n_rows
        return Launched(batch, self._slots, self._indices, outputs, chosen)

    def can_precede(self, step: Launched, batch: Batch) -> bool:
        """Whether `batch` can be launched before the rows of this step are read. It must be a single pass,
        since launching a second pass would wait for the first."""
        return (
            step.outputs is not None
            and batch.n_rows <= self._context.most_ahead
            and self.in_one_pass(batch)
            and len(list(self._ubatches(batch))) == 1
        )

    def in_one_pass(self, batch: Batch) -> bool:
        """Whether one pass can have the sequences of `batch`."""
        return self._context.in_one_pass([chunk.slot for chunk in batch.chunks])

    def compare(self, step: Launched, rows: Rows | None, sampled: ListLike[SampleResult]) -> None:
        """Mark what is `sampled` as astray where the next step, if it decodes, reads another token on the
        device."""
        if rows is not None and step.chosen and max(rows.kinds) is not DeviceSampler.BEST:
            tokens = rows.next_tokens()
            for new, placement in zip(sampled, step.batch.placements, strict=True):
                new.astray = bool(new.tokens) and new.tokens[0] != tokens[placement.rows[0]]

    def apply(self, adapters: Adapters) -> None:
        """Have the context apply exactly these adapters. A change is slow: all graphs are planned again."""
        if adapters != self._applied:
            self._context.set_adapters([(self._adapters[index], scale) for index, scale in adapters])
            self._applied = adapters

    def each_adapter(self) -> Iterator[None]:
        """Apply each adapter alone, one after the other, and last none."""
        for adapters in (*(((index, 1.0),) for index in range(len(self._adapters))), ()):
            self.apply(adapters)
            yield

    def collect(self, step: Launched) -> Rows | None:
        """Wait for the rows of the batch. None if it has no rows; then the next batch can be launched at
        once.

        Raises LlamaError if the batch as a whole failed.
        """
        if not step.slots:
            return None
        rows = self._context.rows(step.slots, step.indices, step.outputs, chosen=step.chosen)
        self._profile.lap("wait")
        return rows

    def place(self, sequence: Sequence, free: ListLike[int]) -> int:
        """Choose a free slot: one with exactly the device sampler that the sequence needs, or one whose
        sampler returns at least as much, or the first."""
        if not self._context.samplers.active:
            return free[0]
        kinds, need = self._context.samplers.kinds, sequence.sampler.need
        return min(free, key=lambda slot: 0 if kinds[slot] is need else 1 if kinds[slot].serves(need) else 2)

    def _set_samplers(self, batch: Batch) -> bool:
        """Give each slot a device sampler that serves its request and, after PATIENCE rows, no wider one.

        Return whether each slot has exactly the one that it needs.
        """
        samplers = self._context.samplers
        if not samplers.active:
            return True
        patience, fits = not self._exact and self._wasted < PATIENCE, True
        for chunk in batch.chunks:
            slot, need = chunk.slot, chunk.sequence.sampler.need
            kind = samplers.kinds[slot]
            if kind is need or not chunk.n_rows:
                continue
            if kind.serves(need) and patience:
                self._wasted += 1
                fits = False
            else:
                self._context.set_sampler(slot, need)
                self.sampler_changes += 1
                self._wasted = 0
        return fits

    # --- llama.cpp's batch ---------------------------------------------------------------------------------

    def _follow(self, step: Launched, batch: Batch) -> npt.NDArray[np.int32]:
        """Write llama.cpp's batch for one whose sequences read the tokens of `step` on the device; return the
        row of each token there, or -1 if the host knows it."""
        if batch is step.batch:
            self._context.positions[: batch.n_tokens] += 1
            self._chosen = self._known_steps > 0 or self._choose_on_device(batch, step)
            return self._offsets[: batch.n_tokens]
        chosen = {
            chunk.sequence: (placement.rows[0], chunk.count)
            for chunk, placement in zip(step.batch.chunks, step.batch.placements, strict=True)
            if chunk.samples
        }
        rows, unread = zip(*(chosen.get(chunk.sequence, (-1, 0)) for chunk in batch.chunks), strict=True)
        self._slots, self._indices = [], []
        batch.placements = self._fill_decodes(batch.chunks, unread)
        batch.greedy, batch.fetches = _is_greedy(batch), _fetches(batch)
        self._fits = self._chosen = self._choose_on_device(batch, step)
        self._filled = batch
        return np.array(rows, np.int32)

    def _fill(self, batch: Batch, behind: Launched | None) -> None:
        """Write llama.cpp's batch; if it is the same batch as before, only what has changed."""
        if batch is self._filled and batch.is_decode:
            n, context = batch.n_tokens, self._context
            context.tokens[:n] = [chunk.sequence.tokens[-1] for chunk in batch.chunks]
            context.positions[:n] += 1
            if not (self._fits and self._known_steps > 0):
                self._fits = self._set_samplers(batch)
                self._chosen = self._choose_on_device(batch)
            return
        self._fits = self._set_samplers(batch)
        batch.greedy, batch.fetches = _is_greedy(batch), _fetches(batch)
        self._slots, self._indices = [], []
        if batch.n_tokens == len(batch.chunks) and not batch.of_pictures:
            batch.placements = self._fill_decodes(batch.chunks)
        else:
            batch.placements = self._fill_ubatches(batch)
        self._chosen = self._choose_on_device(batch, behind)
        self._filled = batch if batch.is_decode else None

    def _choose_on_device(self, batch: Batch, behind: Launched | None = None) -> bool:
        """Have the device choose or guess the tokens of the batch's next steps, if it can. `behind`: the step
        that is being computed, whose draws are not done yet."""
        sampling = [
            (placement.rows[0], chunk)
            for chunk, placement in zip(batch.chunks, batch.placements, strict=True)
            if chunk.samples
        ]
        if not 0 < batch.n_rows == len(sampling) <= self._most_ahead or not self.in_one_pass(batch):
            return False
        if not batch.is_decode and len(list(self._ubatches(batch))) > 1:
            return False
        next_tokens, kinds = self._context.samplers.next_tokens, self._context.samplers.kinds
        assert next_tokens is not None
        undone = set(behind.batch.sampling) if behind is not None else ()
        ignoring, drawn = [False] * len(sampling), {}
        for row, chunk in sampling:
            sampler = chunk.sequence.sampler
            ignoring[row] = sampler.ignores_ends
            if kinds[chunk.slot] is DeviceSampler.TOP_K and sampler.draw is not None:
                if chunk.sequence.stops:
                    return False
                skipped = int(chunk.sequence in undone)
                drawn[row] = sampler.draw, sampler.numbers(skipped + STEPS)[skipped:]
            elif not self._is_best(chunk):
                return False
        if drawn and (self._exact or len(sampling) == 1):
            return False  # the device guesses none of these (`DeviceSamplers`)
        next_tokens.write(ignoring, drawn)
        self._known_steps = STEPS if drawn else math.inf
        return True

    def _is_best(self, chunk: Chunk) -> bool:
        """Whether the best token is the one that the chunk's request takes, and only that is computed."""
        kind, sequence = self._context.samplers.kinds[chunk.slot], chunk.sequence
        return kind is sequence.sampler.need is DeviceSampler.BEST and not sequence.stops

    def _fill_decodes(self, chunks: list[Chunk], unread: ListLike[int] = ()) -> list[Placement]:
        """Write one token of each chunk: the one behind the `unread` tokens, which are being computed and not
        committed yet. It is not known either; any token is written for it."""
        context, n = self._context, len(chunks)
        slots = [chunk.slot for chunk in chunks]
        at = [chunk.start + more for chunk, more in zip(chunks, unread or [0] * n, strict=True)]
        found = [(chunk.sequence, start) for chunk, start in zip(chunks, at, strict=True)]
        context.tokens[:n] = [one.tokens[min(start, len(one.tokens) - 1)] for one, start in found]
        context.positions[:n] = [one.pictures.position(start) for one, start in found]
        context.sequences[:n] = slots
        context.outputs[:n] = [chunk.n_rows for chunk in chunks]
        placements = []
        for index, chunk in enumerate(chunks):
            placements.append(placement := Placement([index]))
            if chunk.samples:
                self._add_row(chunk, index, placement.rows)
            elif chunk.scored:
                self._add_row(chunk, index, placement.scored_rows)
        return placements

    def _ubatches(self, batch: Batch) -> Iterator[Pass]:
        lengths = [chunk.n_tokens for chunk in batch.chunks]
        context = self._context
        return ubatches(lengths, context.n_ubatch, self._tail, ragged=context.ragged_passes)

    def _fill_ubatches(self, batch: Batch) -> list[Placement]:
        """Write tokens in the order of ubatches; llama.cpp would swap outputs of another order row by row."""
        context, chunks = self._context, batch.chunks
        write = self._write_rows if batch.of_pictures else self._write_tokens
        placements = [Placement([]) for _ in chunks]
        done, start = [0] * len(chunks), 0
        for one in self._ubatches(batch):
            for i, length in one:
                chunk, placement, first, end = chunks[i], placements[i], done[i], start + length
                write(chunk, first, start, end)
                context.sequences[start:end] = chunk.slot
                context.outputs[start:end] = 0
                placement.batch_indices.extend(range(start, end))
                for position in chunk.scored:
                    if first <= position - chunk.start < first + length:
                        index = start + position - chunk.start - first
                        context.outputs[index] = 1
                        self._add_row(chunk, index, placement.scored_rows)
                if chunk.samples:
                    for index in range(start + max(0, chunk.count - 1 - first), end):
                        context.outputs[index] = 1
                        self._add_row(chunk, index, placement.rows)
                done[i] += length
                start = end
        return placements

    def _write_tokens(self, chunk: Chunk, first: int, start: int, end: int) -> None:
        """Write the chunk's tokens from its `first` on to [start, end) of the batch."""
        context, sequence, length = self._context, chunk.sequence, end - start
        at = chunk.start + first
        tokens = sequence.tokens[at : min(at + length, chunk.start + chunk.count)]
        context.tokens[start : start + len(tokens)] = tokens
        if len(tokens) < length:
            drafted = first + len(tokens) - chunk.count
            context.tokens[start + len(tokens) : end] = chunk.draft[drafted : drafted + length - len(tokens)]
        context.positions[start:end] = self._offsets[:length]
        context.positions[start:end] += sequence.pictures.position(chunk.start) + first

    def _write_rows(self, chunk: Chunk, first: int, start: int, end: int) -> None:
        """Write the chunk's picture rows from its `first` on to [start, end) of the batch."""
        place = chunk.sequence.pictures.at(chunk.start)
        assert place is not None
        picture, at = place.picture, chunk.start + first - place.start
        taken = slice(at, at + end - start)
        self._context.embeddings[start:end] = picture.rows[taken]
        planes = self._context.planes[:, start:end]
        planes[:] = picture.positions[:, taken]
        planes[:-1] += place.position

    def _add_row(self, chunk: Chunk, index: int, rows: list[int]) -> None:
        rows.append(len(self._slots))
        self._slots.append(chunk.slot)
        self._indices.append(index)


def _is_greedy(batch: Batch) -> bool:
    return all(
        chunk.sequence.sampler.need is DeviceSampler.BEST and not chunk.sequence.stops
        for chunk in batch.chunks
    )


def _fetches(batch: Batch) -> bool:
    """Whether whole rows may be read: for a choice, or for log-probabilities of logits that are equal."""
    sampled = (chunk.sequence for chunk in batch.chunks if chunk.samples)
    return any(one.logprobs is not None or not one.sampler.never_fetches for one in sampled)
