"""Computes batches: fills llama.cpp's batch, decodes it and waits for its rows. Drafters and the prefix cache
are not its concern."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from qwen_serve.llamacpp import Context, LoraAdapter
from qwen_serve.llamacpp.errors import NoMemorySlot
from qwen_serve.llamacpp.row_steps import MOST_ROWS

from .batch import Batch, Chunk, Placement
from .profile import StepProfile
from .request import Adapters
from .sampling.grammar import MaskWriter
from .sampling.rows import Rows, SampledRows
from .speculation.base import Guesses
from .ubatches import ubatches
from .verification import requests_of


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
    """While the engine runs, only this class decodes in the context; the warm-up does so before the start."""

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
        one is. `behind`: the last batch, if its rows are not read yet, and if `can_follow` allows it. Then
        the tokens of placeholders are read where these rows are sampled.

        Raises NoMemorySlot or LlamaError; then nothing of the batch was computed.
        """
        self.apply(batch.adapters)
        if not (batch is self._filled and batch.is_decode):
            decodes = batch.is_decode or batch.guesses is not None
            batch.one_pass = decodes and self._in_one_ubatch(batch)
        alone = behind is None and batch.one_pass
        if batch.guesses is not None:
            in_order = self._context.ragged_passes or len(batch.chunks) == 1
            if not (alone and in_order and self._context.runs_ahead):
                batch.read_drafts()
        rows, source = self._fill(batch, behind), None
        if batch.guesses is not None:
            rows, source = self._draft_rows(batch, batch.guesses), batch.guesses.context
        step = Launched(batch, self._indices, in_order=False)
        if behind is None and not (alone and (batch.is_decode or rows is not None)):
            self.sample(step, now=False)  # a pass's rows are written over by those of the next one
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

    def sample(self, step: Launched, *, now: bool = True) -> None:
        """Begin to sample the rows of a batch, behind its computation or, without `now`, within it, unless
        that is begun. All tokens of the steps before it must be known, and those of its drafts. Call it
        before another batch is launched."""
        if step.asked is not None:
            return
        step.asked = []
        if not step.indices:
            return
        assert self._context.row_steps is not None
        found = [*requests_of(step.batch, step.errors, self._masks)]
        step.asked += [row for row, _ in found]
        indices = [step.indices[row] for row in step.asked]
        self._context.row_steps.begin([request for _, request in found], indices, now=now)
        self._profile.lap("sample")

    def can_be_followed(self, step: Launched) -> bool:
        """Whether another batch can be launched before the rows of this step are read: they are being
        sampled, and no draft is rolled back."""
        batch = step.batch
        steps = self._context.row_steps
        sampled_behind = batch.n_rows > 0 and steps is not None and steps.outlive_batches
        return sampled_behind and (batch.is_decode or not any(chunk.draft for chunk in batch.chunks))

    def can_follow(self, step: Launched, batch: Batch) -> bool:
        """Whether `batch` can be launched before the rows of this step, which `can_be_followed`, are read.
        It must be a single pass, since launching a second pass would wait for the first. If its tokens are
        placeholders, this step must be a single pass, too."""
        if batch is step.batch:
            return step.in_order
        if batch.adapters != step.batch.adapters or not self._in_one_ubatch(batch):
            return False
        if batch.is_decode and step.in_order:
            return True
        return all(chunk.start + chunk.count <= len(chunk.sequence.tokens) for chunk in batch.chunks)

    def _in_one_ubatch(self, batch: Batch) -> bool:
        """Whether one pass has the whole batch."""
        alike = self._context.ragged_passes or len({chunk.n_tokens for chunk in batch.chunks}) == 1
        whole = alike and batch.n_tokens <= self._context.n_ubatch
        return whole and self._context.in_one_pass([chunk.slot for chunk in batch.chunks])

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
        assert self._context.row_steps is not None
        assert step.asked is not None
        rows = SampledRows(self._context.row_steps.results(), step.asked, step.errors)
        self._profile.lap("wait")
        return rows

    # --- llama.cpp's batch ---------------------------------------------------------------------------------

    def _fill(self, batch: Batch, behind: Launched | None) -> npt.NDArray[np.int32] | None:
        """Write llama.cpp's batch; if it is the same batch as before, only what has changed. Return for each
        token the row of the step `behind` in which it is sampled, or -1 if the host knows it; None if it
        knows all."""
        n, context = batch.n_tokens, self._context
        if batch is self._filled and batch.is_decode:
            context.positions[:n] += 1
            if behind is not None:
                return self._offsets[:n]
            context.tokens[:n] = [chunk.sequence.tokens[-1] for chunk in batch.chunks]
            return None
        self._indices = []
        if n == len(batch.chunks) and not batch.of_pictures:
            batch.placements = self._fill_decodes(batch.chunks)
        else:
            batch.placements = self._fill_ubatches(batch)
        self._filled = batch if batch.is_decode else None
        if behind is None or not batch.is_decode:
            return None
        sampled = zip(behind.batch.chunks, behind.batch.placements, strict=True)
        row_of = {chunk.sequence: placement.rows[0] for chunk, placement in sampled if chunk.samples}
        rows = [row_of.get(chunk.sequence, -1) for chunk in batch.chunks]
        return np.array(rows, np.int32) if max(rows) >= 0 else None

    def _draft_rows(self, batch: Batch, guesses: Guesses) -> npt.NDArray[np.int32]:
        """The row of each token of the batch where the drafter chooses it, or -1 if the host knows it."""
        rows = np.full(batch.n_tokens, -1, np.int32)
        drafts = iter(guesses.rows)
        for chunk, placement in zip(batch.chunks, batch.placements, strict=True):
            if n := len(chunk.draft):
                rows[placement.batch_indices[chunk.count :]] = next(drafts)[:n]
        self._context.tokens[: batch.n_tokens][rows >= 0] = 0  # any that exists
        return rows

    def _fill_decodes(self, chunks: list[Chunk]) -> list[Placement]:
        """Write one token of each chunk; any token for a placeholder."""
        context, n = self._context, len(chunks)
        found = [(chunk.sequence, chunk.start) for chunk in chunks]
        context.tokens[:n] = [one.tokens[min(start, len(one.tokens) - 1)] for one, start in found]
        context.positions[:n] = [one.pictures.position(start) for one, start in found]
        context.sequences[:n] = [chunk.slot for chunk in chunks]
        context.outputs[:n] = [chunk.n_rows for chunk in chunks]
        placements = []
        for index, chunk in enumerate(chunks):
            placements.append(placement := Placement([index]))
            if chunk.samples:
                self._add_row(index, placement.rows)
            elif chunk.scored:
                self._add_row(index, placement.scored_rows)
        return placements

    def _fill_ubatches(self, batch: Batch) -> list[Placement]:
        """Write tokens in the order of ubatches; llama.cpp would swap outputs of another order row by row."""
        context, chunks = self._context, batch.chunks
        write = self._write_rows if batch.of_pictures else self._write_tokens
        placements = [Placement([]) for _ in chunks]
        done, start = [0] * len(chunks), 0
        lengths = [chunk.n_tokens for chunk in chunks]
        for one in ubatches(lengths, context.n_ubatch, self._tail, ragged=context.ragged_passes):
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
