"""Rounds a quantized file's matrices again with compensation, in the order in which a token passes them.

The file keeps its types and its size; new blocks replace llama.cpp's. The inputs of a matrix are computed
from the calibration text with the matrices before it, which are compensated already. The whole model reads
the text beside it: a matrix is to give, of its own inputs, what the whole model's gives of the whole model's
(GPTAQ, Li et al. 2025).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from qwen_serve.convert.chunks import decode_chunks, decode_drafts, read_chunks
from qwen_serve.convert.compensation.arrays import Bring, backend, on_host, release, transposed
from qwen_serve.convert.compensation.gram import EnoughError, Grams, Order
from qwen_serve.convert.compensation.grids import GRIDS
from qwen_serve.convert.compensation.packing import pack
from qwen_serve.convert.compensation.rounding import Inputs, round_compensated
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.progress import Progress
from qwen_serve.llamacpp.devices import row_bytes
from qwen_serve.llamacpp.evaluation import ContextKind, EvalContext, Runtime
from qwen_serve.llamacpp.gguf import TensorInfo, read_header
from qwen_serve.llamacpp.model import Model
from qwen_serve.llamacpp.probe import Floats, Observer, Probe
from qwen_serve.llamacpp.weights import Weights

CHUNKS_PER_BATCH: Final = 4
PIECE_BYTES: Final = 256 * 2**20
"""Bytes of rows rounded together; the working memory is a few times as much."""

HIDDEN_BYTES: Final = 4 * 2**30
"""Most bytes of the text's hidden rows, which are kept for head and MTP block: 400,000 tokens of width
2,560."""

EMBEDDING, HEAD = "token_embd.weight", "output.weight"


def compensate(base: Path, quantized: Path, *, text: Path, runtime: Runtime) -> None:
    """Replaces the blocks in `quantized`, made from `base` by llama.cpp, with compensated ones for the types
    in `GRIDS`.

    Args:
        text: for the Gram matrices, read in chunks of 512 tokens.
        runtime: where the model runs; with layers on a GPU, torch also computes the rounding there.

    Raises:
        ConvertError: the text is too short, too long or not text; activations are not finite.
        LlamaError: the model cannot be loaded or run.
    """
    tensors = rounded_tensors(quantized)
    with ExitStack() as stack:
        bring = backend(gpu=runtime.n_gpu_layers != 0)
        model = stack.enter_context(runtime.load(base, writable=True))
        whole = stack.enter_context(runtime.load(base))
        chunks = read_chunks(model, text)
        if chunks.size > (most := HIDDEN_BYTES // (4 * model.n_embd)):
            raise ConvertError(f"{text}: {chunks.size:,} tokens; compensation reads at most {most:,} here")
        progress = stack.enter_context(Progress("Compensation", len(tensors), "tensors"))
        file = _File(quantized, tensors, Weights(model, runtime.n_threads), progress, bring)
        stack.callback(file.close)
        Run(model, chunks, file, runtime, bring, whole).run()


def rounded_tensors(quantized: Path) -> dict[str, TensorInfo]:
    """The tensors whose types have grids, by name."""
    return {
        name: tensor
        for name, tensor in read_header(quantized).tensors.items()
        if GGMLQuantizationType(tensor.type) in GRIDS and name.endswith(".weight")
    }


class Chooser(Protocol):
    """Gets each matrix that it wants, after all matrices that a token passes before it."""

    def __contains__(self, name: str, /) -> bool: ...

    def choose(self, names: Sequence[str], source: str, grams: Grams) -> None:
        """Gets weights that read the same input; its Gram matrices are those of `source`."""


class _File:
    """Chooses blocks of the file's tensors, and puts their values into the loaded model."""

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, TensorInfo],
        weights: Weights,
        progress: Progress,
        bring: Bring,
    ) -> None:
        self._tensors, self._weights, self._progress, self._bring = tensors, weights, progress, bring
        self._file = path.open("r+b")

    def __contains__(self, name: str) -> bool:
        return name in self._tensors and name in self._weights

    def close(self) -> None:
        self._file.close()

    def choose(self, names: Sequence[str], source: str, grams: Grams) -> None:
        """Chooses their blocks."""
        values = {name: self._weights.values(name) for name in names}
        rounded = {name: np.empty_like(values[name]) for name in names}
        matrices, _, width = values[names[0]].shape
        for matrix in range(matrices):
            inputs = grams.take(source, matrix, width)
            for name in names:
                self._progress.note(name)
                self._round(name, matrix, values[name][matrix], inputs, rounded[name][matrix])
            del inputs  # frees the memory for the next ones
        for name in names:
            self._weights.set(name, rounded[name], for_good=True)
            self._progress.advance()

    def _round(self, name: str, matrix: int, values: Floats, inputs: Inputs, out: Floats) -> None:
        """Writes one matrix [rows, width] to the file, and its quantized values to `out`."""
        tensor = self._tensors[name]
        kind = GGMLQuantizationType(tensor.type)
        self._file.seek(tensor.offset + matrix * row_bytes(tensor.type, tensor.shape[0]) * len(values))
        step = max(1, PIECE_BYTES // (4 * values.shape[1]))
        for first in range(0, len(values), step):
            piece = inputs.corrected(transposed(self._bring(values[first : first + step])))
            blocks = round_compensated(piece, inputs, GRIDS[kind])
            self._file.write(pack(kind, blocks).tobytes())
            out[first : first + step] = on_host(blocks.values().T, np.float32)


class Run:
    """Runs over the model's matrices in order. `whole`: the model without any change, read beside it."""

    def __init__(
        self,
        model: Model,
        chunks: NDArray[np.int32],
        file: Chooser,
        runtime: Runtime,
        bring: Bring,
        whole: Model | None = None,
    ) -> None:
        self._model, self._chunks, self._file, self._bring = model, chunks, file, bring
        self._whole = whole
        self._threads = runtime.n_threads
        self._hidden = np.zeros((*chunks.shape, model.n_embd), np.float32)

    def run(self) -> None:
        order = Order()
        self._read_trunk(order.add, chunks=self._chunks[:1])
        if HEAD in self._file:
            self._embedding()
        elif EMBEDDING in self._file:  # tied: it is rounded first, with the head's inputs
            self._read_trunk(None)
            self._file.choose([EMBEDDING], HEAD, self._head_grams())
        readings = [names for names in order.readings if names[0].startswith("blk.")]
        self._in_turn(readings, self._sum_trunk)
        self._read_trunk(None)
        if HEAD in self._file:
            self._file.choose([HEAD], HEAD, self._head_grams())
        if self._model.n_nextn:
            order = Order()
            self._read_mtp(order.add, chunks=self._chunks[:1])
            block = f"blk.{self._model.n_layer}."
            self._in_turn([names for names in order.readings if names[0].startswith(block)], self._sum_mtp)

    def _embedding(self) -> None:
        """Rounds an embedding that is not the head: each token reads one column, so it has no Gram matrix."""
        if EMBEDDING in self._file:
            self._file.choose([EMBEDDING], EMBEDDING, Grams((), None, self._bring))

    def _in_turn(self, readings: Sequence[Sequence[str]], read: Callable[[Grams], None]) -> None:
        """Goes block by block. The text is read once for each block, after the blocks before it are
        quantized."""
        blocks = [list(group) for _, group in groupby(readings, lambda names: names[0].split(".")[1])]
        for i, block in enumerate(blocks):
            due = {names[0]: [name for name in names if name in self._file] for names in block}
            due = {first: names for first, names in due.items() if names}
            if not due:
                continue
            end = blocks[i + 1][0][0] if i + 1 < len(blocks) else None
            grams = Grams(due, end, self._bring)
            read(grams)
            for first, names in due.items():
                self._file.choose(names, first, grams)

    def _head_grams(self) -> Grams:
        grams = Grams({HEAD}, None, self._bring)
        for rows in self._hidden:
            grams.add(HEAD, rows)
        return grams

    def _sum_trunk(self, grams: Grams) -> None:
        with ExitStack() as stack:
            whole = None
            if self._whole is not None:
                whole = stack.enter_context(self._context("trunk", grams.keep, grams.observes, self._whole))
            self._read_trunk(grams.add, grams.observes, before=whole)

    def _sum_mtp(self, grams: Grams) -> None:
        self._read_mtp(grams.add, grams.observes)

    def _read_trunk(
        self,
        observe: Observer | None,
        observes: Callable[[str], bool] = lambda name: True,
        *,
        chunks: NDArray[np.int32] | None = None,
        before: EvalContext | None = None,
    ) -> None:
        """Runs the text through the trunk; without an observer, keeps the hidden rows. Each batch is first
        decoded in `before`."""
        with self._context("trunk", observe, observes) as context:
            if observe is None:
                context.keep_hidden()
            for first, batch in _batches(self._chunks if chunks is None else chunks):
                for each in filter(None, (before, context)):
                    each.clear()
                    with suppress(EnoughError):
                        decode_chunks(each, batch)
                if observe is None:
                    hidden = context.hidden().reshape(*batch.shape, -1)
                    self._hidden[first : first + len(batch)] = hidden

    def _read_mtp(
        self,
        observe: Observer,
        observes: Callable[[str], bool] = lambda name: True,
        *,
        chunks: NDArray[np.int32] | None = None,
    ) -> None:
        with self._context("mtp", observe, observes) as context:
            for first, batch in _batches(self._chunks if chunks is None else chunks):
                context.clear()
                hidden = self._hidden[first : first + len(batch)].reshape(batch.size, -1)
                try:
                    decode_drafts(context, batch, hidden)
                except EnoughError:
                    continue

    @contextmanager
    def _context(
        self,
        kind: ContextKind,
        observe: Observer | None,
        observes: Callable[[str], bool],
        model: Model | None = None,
    ) -> Iterator[EvalContext]:
        release()
        n_seq = min(CHUNKS_PER_BATCH, len(self._chunks))
        cells = n_seq * self._chunks.shape[1]
        with EvalContext(
            model or self._model,
            n_ctx=cells,
            n_batch=cells,
            n_ubatch=cells,  # one graph for each batch, which may end early
            n_seq=n_seq,
            kind=kind,
            threads=self._threads,
            callback=Probe(observe, observes) if observe is not None else None,
        ) as context:
            yield context


def _batches(chunks: NDArray[np.int32]) -> Iterator[tuple[int, NDArray[np.int32]]]:
    for first in range(0, len(chunks), CHUNKS_PER_BATCH):
        yield first, chunks[first : first + CHUNKS_PER_BATCH]
