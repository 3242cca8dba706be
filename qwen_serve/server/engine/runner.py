"""Computes batches: fills llama.cpp's batch, decodes it and waits for its rows. Drafters and the prefix cache
are not its concern."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from qwen_serve.llamacpp.errors import NoMemorySlot
from qwen_serve.llamacpp.row_steps import MOST_ROWS

from .batch import Placement
from .sampling.grammar import MaskWriter
from .sampling.rows import RawRows, SampledRows
from .ubatches import ubatches
from .verification import requests_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from qwen_serve.llamacpp import Context, LoraAdapter

    from .batch import Batch, Chunk
    from .profile import StepProfile
    from .request import Adapters
    from .sampling.rows import Rows
    from .speculation.base import Guesses
    from .ubatches import Pass


@dataclass(slots=True, eq=False)
class Launched:
    """A batch that is being computed."""

    batch: Batch
    indices: list[int]
    """Each row's index in the batch."""
    in_order: bool
    """Whether the next step can read its tokens where they are sampled."""
    at: float = 0.0
    """When it was launched, by the clock of steps."""
    asked: list[int] | None = None
    """The rows that are sampled, in the order of their requests; None before that is begun."""
    errors: dict[int, Exception] = field(default_factory=dict)
    """What a request could not be made for, by its row."""


class Runner:
    """While the engine runs, only this class decodes in the context; rehearsals do so before the start."""

    def __init__(self, context: Context, profile: StepProfile, adapters: Sequence[LoraAdapter] = ()) -> None:
        """`adapters` are in the order of their numbers."""
        self._adapters = adapters
        self._applied: Adapters = ()
        """The adapters that the context applies now."""
        self._context, self._profile = context, profile
        self._masks = MaskWriter()
        self._indices: list[int] = []
        """The index in the batch of each row of logits."""
        self._filled: Batch | None = None
        """The batch in the context's arrays, if it only decodes."""
        self._most_ahead = min(MOST_ROWS, context.n_ubatch) if context.runs_ahead else 0
        """Most sequences of a step that can be launched again before its tokens are read."""
        self._tail = context.n_snapshots + 1 if context.n_snapshots else context.n_operands
        """How many of a sequence's last tokens stay in one pass."""
        self._offsets = np.arange(context.n_batch, dtype=np.int32)

    def launch(self, batch: Batch, behind: Launched | None = None) -> Launched:
        """Start to compute a batch. On a GPU this returns when the last batch is computed, on a CPU when this
        one is. `behind`: the last batch, if its tokens are not read yet, which is being sampled. Then a batch
        that decodes reads them where they are sampled; it must be `in_one_pass`. Others must be what
        `can_precede` allows.

        Raises NoMemorySlot or LlamaError; then nothing of the batch was computed.
        """
        self.apply(batch.adapters)
        rows = source = None
        decodes = batch.is_decode or batch.guesses is not None
        alone = behind is None and decodes and self._in_one_ubatch(batch)
        in_order = self._context.ragged_passes or len(batch.chunks) == 1
        if not (alone and in_order and self._context.runs_ahead):
            batch.read_drafts()
        if behind is not None and batch.is_decode:
            rows = self._follow(behind, batch)
        else:
            self._fill(batch)
        if batch.guesses is not None:
            rows, source = self._draft_rows(batch, batch.guesses), batch.guesses.context
        step = Launched(batch, self._indices, in_order=False)
        if behind is None and not (alone and (batch.is_decode or rows is not None)):
            self._begin(step, now=False)  # a pass's rows are written over by those of the next one
        self._profile.lap("fill")
        try:
            self._context.decode(
                batch.n_tokens, of_pictures=batch.of_pictures, next_rows=rows, sampled_by=source
            )
        except NoMemorySlot:
            self._filled = None
            raise
        self._profile.lap("decode")
        if 0 < batch.n_rows == len(batch.chunks) <= self._most_ahead and self._context.row_steps is not None:
            step.in_order = self._context.row_steps.n_in_order == batch.n_rows
        return step

    def sample(self, step: Launched) -> None:
        """Begin to sample the rows of a batch, behind its computation. All tokens of the steps before it must
        be known; those of its drafts are read. Call it before another batch is launched."""
        if step.asked is None:
            step.batch.read_drafts()
            self._begin(step, now=True)

    def _begin(self, step: Launched, *, now: bool) -> None:
        step.asked = []
        if self._context.row_steps is None or not step.indices:
            return
        requests = []
        for row, request in requests_of(step.batch, step.errors, self._masks):
            step.asked.append(row)
            requests.append(request)
        self._context.row_steps.begin(requests, [step.indices[row] for row in step.asked], now=now)
        self._profile.lap("sample")

    def can_precede(self, step: Launched, batch: Batch) -> bool:
        """Whether `batch` can be launched before the rows of this step are read. It must be a single pass,
        since launching a second pass would wait for the first."""
        return (
            step.asked is not None
            and self._context.row_steps is not None
            and self.in_one_pass(batch)
            and len(list(self._ubatches(batch))) == 1
        )

    def _in_one_ubatch(self, batch: Batch) -> bool:
        """Whether one pass has the whole batch; batches are then decodes, with drafts or without."""
        ragged = self._context.ragged_passes
        alike = ragged or len({chunk.n_tokens for chunk in batch.chunks}) == 1
        return batch.n_tokens <= self._context.n_ubatch and alike and self.in_one_pass(batch)

    def in_one_pass(self, batch: Batch) -> bool:
        """Whether one pass can have the sequences of `batch`."""
        return self._context.in_one_pass([chunk.slot for chunk in batch.chunks])

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
        if not step.indices:
            return None
        if self._context.row_steps is None:
            rows: Rows = RawRows(self._context.logits(len(step.indices)))
        else:
            assert step.asked is not None
            rows = SampledRows(self._context.row_steps.results(), step.asked, step.errors)
        self._profile.lap("wait")
        return rows

    # --- llama.cpp's batch ---------------------------------------------------------------------------------

    def _follow(self, step: Launched, batch: Batch) -> npt.NDArray[np.int32]:
        """Write llama.cpp's batch for one whose sequences read the tokens of `step` where they are sampled;
        return the row of each token there, or -1 if the host knows it."""
        if batch is step.batch:
            self._context.positions[: batch.n_tokens] += 1
            return self._offsets[: batch.n_tokens]
        sampled = {
            chunk.sequence: (placement.rows[0], chunk.count)
            for chunk, placement in zip(step.batch.chunks, step.batch.placements, strict=True)
            if chunk.samples
        }
        rows, unread = zip(*(sampled.get(chunk.sequence, (-1, 0)) for chunk in batch.chunks), strict=True)
        self._indices = []
        batch.placements = self._fill_decodes(batch.chunks, unread)
        self._filled = batch
        return np.array(rows, np.int32)

    def _fill(self, batch: Batch) -> None:
        """Write llama.cpp's batch; if it is the same batch as before, only what has changed."""
        if batch is self._filled and batch.is_decode:
            n, context = batch.n_tokens, self._context
            context.tokens[:n] = [chunk.sequence.tokens[-1] for chunk in batch.chunks]
            context.positions[:n] += 1
            return
        self._indices = []
        if batch.n_tokens == len(batch.chunks) and not batch.of_pictures:
            batch.placements = self._fill_decodes(batch.chunks)
        else:
            batch.placements = self._fill_ubatches(batch)
        self._filled = batch if batch.is_decode else None

    def _draft_rows(self, batch: Batch, guesses: Guesses) -> npt.NDArray[np.int32]:
        """The row of each token of the batch where the drafter chooses it, or -1 if the host knows it."""
        rows = np.full(batch.n_tokens, -1, np.int32)
        drafts = iter(guesses.rows)
        for chunk, placement in zip(batch.chunks, batch.placements, strict=True):
            if n := len(chunk.draft):
                rows[placement.batch_indices[chunk.count :]] = next(drafts)[:n]
        self._context.tokens[: batch.n_tokens][rows >= 0] = 0  # any that exists
        return rows

    def _fill_decodes(self, chunks: list[Chunk], unread: Sequence[int] = ()) -> list[Placement]:
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
                self._add_row(index, placement.rows)
            elif chunk.scored:
                self._add_row(index, placement.scored_rows)
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
                        self._add_row(index, placement.scored_rows)
                if chunk.samples:
                    for index in range(start + max(0, chunk.count - 1 - first), end):
                        context.outputs[index] = 1
                        self._add_row(index, placement.rows)
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

    def _add_row(self, index: int, rows: list[int]) -> None:
        rows.append(len(self._indices))
        self._indices.append(index)
