"""Measures a model's divergence with some tensors quantized, in place, so that memory holds one model."""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from qwen_serve.common.interrupts import held
from qwen_serve.convert.chunks import CHUNK_SIZE, decode_chunks, decode_drafts, read_chunks
from qwen_serve.convert.imatrix import Imatrix
from qwen_serve.convert.kld import LOGIT_BYTES, MAX_BATCH, ROWS_AT_ONCE, Part, parts
from qwen_serve.convert.search.groups import Matrix, Type
from qwen_serve.llamacpp.evaluation import EvalContext, Runtime
from qwen_serve.llamacpp.model import Model
from qwen_serve.llamacpp.probe import Floats
from qwen_serve.llamacpp.weights import Bytes, Weights, dequantize_rows, quantize_rows

CHUNKS: Final = 8
"""Chunks of 512 tokens that a probe reads: half of them the text's first, the model's own, half its last, of
other kinds. Probes are compared on the same tokens, so a few suffice."""

REFERENCE_BYTES: Final = 2 * 2**30
"""Most bytes of the whole model's stored logits and those of its drafts. A text that needs more is
shortened."""

SAMPLE_ELEMENTS: Final = 1 << 18
"""Elements sampled from a tensor to measure a type's error."""


@dataclass(frozen=True)
class Reading:
    """KL(whole model || quantized) in nats: of the next token, and of the MTP block's drafts of the token
    after it.

    None for drafts if no tensor of the MTP block is quantized, or there is no such block.
    """

    mean: float
    p99: float
    same_top: float
    draft: float | None = None


def ends(chunks: NDArray[np.int32], most: int) -> NDArray[np.int32]:
    """At most so many chunks: half from the beginning, half from the end."""
    if len(chunks) <= most:
        return chunks
    return np.concatenate([chunks[: most - most // 2], chunks[len(chunks) - most // 2 :]])


class Meter:
    """The whole model with its logits on a text; use as a context manager.

    Raises:
        ConvertError: the text or the imatrix cannot be used.
        LlamaError: the model cannot be loaded or run.
    """

    def __init__(self, gguf: Path, text: Path, imatrix: Path | None, runtime: Runtime) -> None:
        self._entries = Imatrix.load(imatrix).entries if imatrix else {}
        self._threads = runtime.n_threads
        self._standing: dict[str, Type] = {}
        self._quantized: dict[str, tuple[Type, Bytes]] = {}  # the last of each tensor
        with ExitStack() as stack:
            model = stack.enter_context(runtime.load(gguf, writable=True))
            self._weights = Weights(model, self._threads)
            chunks = read_chunks(model, text)
            room = max(1, REFERENCE_BYTES // (4 * model.n_vocab * CHUNK_SIZE))
            self._chunks = ends(chunks, min(CHUNKS, room))
            n_batch = max(1, min(MAX_BATCH, LOGIT_BYTES // (4 * model.n_vocab)))
            self._n_seq = max(1, min(len(self._chunks), n_batch // CHUNK_SIZE))
            self._n_step = min(CHUNK_SIZE, n_batch)
            cells = self._n_seq * CHUNK_SIZE
            self._trunk = stack.enter_context(
                self._context(model, n_ctx=cells, n_batch=self._n_seq * self._n_step)
            )
            self._trunk.keep_hidden()
            self._mtp: EvalContext | None = None
            if model.n_nextn:
                self._mtp = stack.enter_context(self._context(model, n_ctx=cells, n_batch=cells, kind="mtp"))
            self._pool = stack.enter_context(ThreadPoolExecutor(self._threads))
            self._reference: list[Floats] = []
            self._drafts: list[Floats] = []
            self._hidden = np.zeros((*self._chunks.shape, model.n_embd), np.float32)
            self._run_trunk(self._hidden)
            self._run_drafts(self._hidden)
            self._stack = stack.pop_all()

    def _context(self, model: Model, **options: Any) -> EvalContext:
        return EvalContext(model, n_seq=self._n_seq, threads=self._threads, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def tokens(self) -> int:
        """Tokens that a probe reads."""
        return int(self._chunks.size)

    def errors(self, matrix: Matrix, kinds: Iterable[Type]) -> dict[Type, float]:
        """By type: the squared error of the tensor's product with its inputs, relative to the square of the
        product.

        The inputs are modelled by the imatrix, as uncorrelated columns of known mean square.
        """
        values = self._weights.values(matrix.name)
        values = values[:, :: max(1, values.size // SAMPLE_ELEMENTS)]  # at least one row of every expert
        weights, columns = self._columns(matrix.name, values.shape)
        whole = float(np.einsum("mij,mj->", np.square(values), weights, dtype=np.float64))
        found = {}
        for kind in kinds:
            rounded = quantize_rows(values, kind, columns, self._threads)
            off = dequantize_rows(rounded, kind, self._threads) - values
            error = float(np.einsum("mij,mj->", np.square(off), weights, dtype=np.float64))
            found[kind] = error / whole if whole else 0.0
        return found

    def measure(self, types: Mapping[str, Type], *, mtp: Iterable[str] = ()) -> Reading:
        """The reading with these tensors at these types and all others unquantized. `mtp`: the tensors of the
        MTP block."""
        for name in [name for name in self._standing if name not in types]:
            self._weights.restore(name)
            del self._standing[name]
        for name, kind in types.items():
            if self._standing.get(name) != kind:
                self._weights.set(name, self._rounded(name, kind))
                self._standing[name] = kind
        drafted = set(mtp) & set(types)
        divergence, same = np.zeros(1), np.ones(1, np.bool_)
        hidden = self._hidden
        if set(types) - drafted:
            hidden = np.zeros_like(self._hidden)
            divergence, same = self._run_trunk(hidden)
        draft = float(self._run_drafts(hidden).mean()) if drafted else None
        return Reading(
            float(divergence.mean()), float(np.quantile(divergence, 0.99)), float(same.mean()), draft
        )

    def _rounded(self, name: str, kind: Type) -> Floats:
        """A tensor's values at a type."""
        last, data = self._quantized.get(name, (None, None))
        if data is None or last != kind:
            values = self._weights.values(name)
            columns = self._columns(name, values.shape)[1]
            data = quantize_rows(values, kind, columns, self._threads)
            self._quantized[name] = kind, data
        return dequantize_rows(data, kind, self._threads)

    def _columns(self, name: str, shape: tuple[int, ...]) -> tuple[Floats, Floats | None]:
        """[matrices, width] sums of squared inputs, to weigh errors by, and their means, as quantizers do."""
        if (entry := self._entries.get(name)) is None or entry.means.shape != (shape[0], shape[2]):
            return np.ones((shape[0], shape[2]), np.float32), None
        return entry.sums, entry.means

    def _run_trunk(self, hidden: Floats) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Divergence and agreement by token; fills in `hidden`. The first run becomes the reference."""
        known = bool(self._reference)
        found, same = [], []
        steps = parts(len(self._chunks), CHUNK_SIZE, 0, self._n_seq, self._n_step)
        for i, (rows, positions) in enumerate(steps):
            if positions.start == 0:
                self._trunk.clear()
            part = self._chunks[rows, positions]
            decode_chunks(self._trunk, part, start=positions.start, output=True)
            hidden[rows, positions] = self._trunk.hidden().reshape(*part.shape, -1)
            if known:
                divergence, top = self._compare(self._reference[i], self._trunk.logits())
                found.append(divergence)
                same.append(top)
            else:
                self._reference.append(self._trunk.logits().copy())
        if not known:
            return np.zeros(0), np.zeros(0, np.bool_)
        return np.concatenate(found), np.concatenate(same)

    def _run_drafts(self, hidden: Floats) -> NDArray[np.float64]:
        """Divergence by token of the MTP block, with the trunk's rows."""
        if self._mtp is None:
            return np.zeros(1)
        known, found = len(self._drafts) * self._n_seq >= len(self._chunks), []
        for i, first in enumerate(range(0, len(self._chunks), self._n_seq)):
            rows = slice(first, first + self._n_seq)
            self._mtp.clear()
            decode_drafts(self._mtp, self._chunks[rows], hidden[rows], output=True)
            if known:
                found.append(self._compare(self._drafts[i], self._mtp.logits())[0])
            else:
                self._drafts.append(self._mtp.logits().copy())
        return np.concatenate(found) if found else np.zeros(0)

    def _compare(self, p: Floats, q: Floats) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        none = np.full(len(p), -1, np.int32)
        part = Part(p, q, none, none, None)
        blocks = [slice(i, i + ROWS_AT_ONCE) for i in range(0, len(p), ROWS_AT_ONCE)]
        with held():
            results = list(self._pool.map(part.compare, blocks))
        divergence = np.concatenate([np.asarray(r[0], np.float64) for r in results])
        return divergence, np.concatenate([np.asarray(r[1], np.bool_) for r in results])
