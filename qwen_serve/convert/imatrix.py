"""Importance matrices: the mean square of each column of a matmul's inputs, by which a quantizer weights
errors.

The file format is llama.cpp's GGUF imatrix (`tools/imatrix/imatrix.cpp`, `common/imatrix-loader.cpp`). For
each weight it has the tensors `<name>.in_sum2` [matrices, width] and `<name>.counts` [matrices, 1]. Routed
experts are the matrices of one weight, each with the number of rows that the router sent to it. This
converter also collects entries that llama-imatrix cannot collect: those of the MTP block and of the output
head.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from gguf import GGUFReader, GGUFWriter
from numpy.typing import NDArray

from qwen_serve.convert.chunks import decode_chunks, decode_drafts, read_chunks
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.progress import Progress
from qwen_serve.convert.stages import replacing
from qwen_serve.llamacpp.evaluation import ContextKind, EvalContext, Runtime
from qwen_serve.llamacpp.gguf import read_header
from qwen_serve.llamacpp.probe import Floats, Probe, Routing

SUMS, COUNTS = ".in_sum2", ".counts"
EXPERTS = ".ffn_down_exps.weight"  # gate and up projection are routed alike
DATASETS, CHUNK_COUNT, CHUNK_SIZE = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"

CHUNKS_PER_BATCH = 4
FEW_ROWS = 32
"""An entry of fewer rows is unreliable: a mean square over n rows has a relative error of about sqrt(2 / n),
which is a quarter at 32."""


SAVE_INTERVAL_S = 20.0
"""Most seconds of work lost on an interrupt; saving takes under one second for a large model."""


@dataclass(frozen=True)
class Resume:
    """Where an unfinished matrix is saved, and the fingerprint of its inputs."""

    path: Path
    made_from: str


class ImatrixError(ConvertError):
    """A file is not an importance matrix, or does not fit."""


@dataclass(frozen=True)
class Entry:
    """One weight's statistics: `sums` [matrices, width] of squared inputs over `counts` [matrices] rows."""

    sums: Floats
    counts: Floats

    @property
    def means(self) -> Floats:
        """[matrices, width]; 1 for a matrix without rows, as in llama-quantize."""
        counts = self.counts[:, None]
        return np.where(counts > 0, self.sums / np.maximum(counts, 1), np.float32(1)).astype(np.float32)


@dataclass(frozen=True)
class Imatrix:
    """Entries by weight name, and their origin."""

    entries: Mapping[str, Entry]
    datasets: tuple[str, ...]
    chunk_count: int
    chunk_size: int

    def save(self, path: Path) -> None:
        """Writes llama.cpp's GGUF imatrix file, entries in the order of their names."""
        writer = GGUFWriter(path, arch="imatrix")
        writer.add_type("imatrix")
        writer.add_array(DATASETS, list(self.datasets))
        writer.add_uint32(CHUNK_COUNT, self.chunk_count)
        writer.add_uint32(CHUNK_SIZE, self.chunk_size)
        for name, entry in sorted(self.entries.items()):
            writer.add_tensor(name + SUMS, entry.sums)
            writer.add_tensor(name + COUNTS, entry.counts[:, None])
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()

    @classmethod
    def load(cls, path: Path) -> Imatrix:
        """Reads llama.cpp's GGUF imatrix file, written here or by llama-imatrix.

        Raises:
            ImatrixError: not such a file, a key missing, or sums without counts.
        """
        try:
            reader = GGUFReader(path)
        except (OSError, ValueError) as error:
            raise ImatrixError(f"{path}: not a GGUF imatrix file ({error})") from None
        keys: dict[str, Any] = {}
        for key in (DATASETS, CHUNK_COUNT, CHUNK_SIZE):
            if (field := reader.get_field(key)) is None:
                raise ImatrixError(
                    f"{path}: no key {key}; an imatrix file has {DATASETS}, {CHUNK_COUNT}, {CHUNK_SIZE}"
                )
            keys[key] = field.contents()
        tensors = {tensor.name: np.array(tensor.data, np.float32) for tensor in reader.tensors}
        entries = {}
        for name in [key.removesuffix(SUMS) for key in tensors if key.endswith(SUMS)]:
            if name + COUNTS not in tensors:
                raise ImatrixError(f"{path}: {name}{SUMS} has no {name}{COUNTS}")
            counts = tensors[name + COUNTS].reshape(-1)
            entries[name] = Entry(tensors[name + SUMS].reshape(counts.size, -1), counts)
        return cls(entries, tuple(keys[DATASETS]), keys[CHUNK_COUNT], keys[CHUNK_SIZE])


def check_fits(path: Path, pruned: Sequence[tuple[int, ...]] = (), *, model: Path | None = None) -> None:
    """Checks that a file is an importance matrix, and that of `model` if it exists.

    `pruned`: layers that recipes leave out.

    Raises:
        ImatrixError: not an importance matrix, or one of another model.
    """
    imatrix = Imatrix.load(path)
    if any(pruned):
        raise ImatrixError(f"--imatrix {path}: numbers the layers of the whole model; a recipe prunes some")
    if model is None:
        return
    tensors = read_header(model).tensors
    fitting = [name for name in imatrix.entries if name in tensors]
    for name in fitting:
        width, found = tensors[name].shape[0], imatrix.entries[name].sums.shape[1]
        if width != found:
            raise ImatrixError(f"--imatrix {path}: {name} has {found} columns, and {width} in {model}")
    if not fitting:
        raise ImatrixError(f"--imatrix {path}: names no tensor of {model}: it is another model's")


@dataclass(frozen=True)
class Coverage:
    """How many calibration rows the routed experts of all blocks have read.

    `rare` and `unreached` map blocks, such as `blk.7`, to the experts that read fewer than FEW_ROWS, or none.
    """

    experts: int
    median_rows: float
    rare: Mapping[str, list[int]]
    unreached: Mapping[str, list[int]]


def expert_coverage(imatrix: Imatrix) -> Coverage | None:
    """The routed experts' coverage by the counts; None for a dense model."""
    counts = {
        name.removesuffix(EXPERTS): entry.counts
        for name, entry in imatrix.entries.items()
        if name.endswith(EXPERTS)
    }
    if not counts:
        return None
    blocks = sorted(counts, key=lambda block: int(block.rpartition(".")[2]))

    def where(holds: Callable[[Floats], NDArray[np.bool_]]) -> dict[str, list[int]]:
        found = {block: np.flatnonzero(holds(counts[block])).tolist() for block in blocks}
        return {block: experts for block, experts in found.items() if experts}

    everyone = np.concatenate([counts[block] for block in blocks])
    return Coverage(
        experts=everyone.size,
        median_rows=float(np.median(everyone)),
        rare=where(lambda rows: (rows > 0) & (rows < FEW_ROWS)),
        unreached=where(lambda rows: rows == 0),
    )


class _Collector:
    """Sums of squares over all rows that the matmuls of the selected weights read."""

    def __init__(self) -> None:
        self._sums: dict[str, NDArray[np.float64]] = {}
        self._counts: dict[str, NDArray[np.int64]] = {}
        self._source: tuple[Floats, Routing | None] | None = None
        self._squares = np.empty((0, 0), np.float32)
        self._seen = np.empty(0, np.int64)

    def add(self, name: str, rows: Floats, routing: Routing | None = None) -> None:
        """`rows` [n, width]: inputs of weight `name`; with `routing`, of the matrices in it.

        Weights that read the same tensor share its sum.
        """
        if self._source is None or rows is not self._source[0] or routing is not self._source[1]:
            self._source = rows, routing
            if routing is None:
                self._squares, self._seen = np.einsum("ij,ij->j", rows, rows)[None], np.array([len(rows)])
            else:
                self._squares, self._seen = _routed_squares(rows, routing)
        if name not in self._sums:
            self._sums[name] = np.zeros(self._squares.shape)
            self._counts[name] = np.zeros(self._seen.shape, np.int64)
        self._sums[name] += self._squares
        self._counts[name] += self._seen

    def save(self, resume: Resume, n_chunks: int) -> None:
        """Saves the sums after `n_chunks` of the text for `load`."""
        arrays: dict[str, Any] = {f"{name}{SUMS}": sums for name, sums in self._sums.items()}
        arrays |= {f"{name}{COUNTS}": counts for name, counts in self._counts.items()}
        with replacing(resume.path) as part, part.open("wb") as file:
            np.savez(file, made_from=resume.made_from, n_chunks=n_chunks, **arrays)

    def load(self, resume: Resume) -> int:
        """Loads the sums of an interrupted run; returns its number of chunks, 0 if its inputs differ."""
        try:
            with np.load(resume.path) as found:
                arrays = dict(found)
        except (OSError, ValueError, BadZipFile):
            return 0
        if str(arrays.get("made_from")) != resume.made_from:
            return 0
        for key, values in arrays.items():
            if key.endswith(SUMS):
                self._sums[key.removesuffix(SUMS)] = values
            elif key.endswith(COUNTS):
                self._counts[key.removesuffix(COUNTS)] = values
        return int(arrays["n_chunks"])

    def entries(self) -> dict[str, Entry]:
        """The entries. Raises `ImatrixError` if a sum is not finite, since such a model cannot be quantized
        usefully."""
        for name, sums in self._sums.items():
            if not np.isfinite(sums).all():
                raise ImatrixError(f"the inputs of {name} are not finite; is the checkpoint intact?")
        return {
            name: Entry(sums.astype(np.float32), self._counts[name].astype(np.float32))
            for name, sums in self._sums.items()
        }


def _routed_squares(rows: Floats, routing: Routing) -> tuple[Floats, NDArray[np.int64]]:
    """[experts, width]: the squares of `rows`, summed over the rows that each expert read; [experts]: how
    many rows."""
    tokens, used = routing.ids.shape
    row = np.arange(tokens)[:, None] * routing.slots + np.arange(used) % routing.slots
    # expert-by-row matrix: one product is faster than a loop over experts
    reads = np.zeros((routing.experts, len(rows)), np.float32)
    reads[routing.ids, row] = 1
    squares: Floats = reads @ np.square(rows)
    return squares, np.bincount(routing.ids.ravel(), minlength=routing.experts)


def collect_imatrix(
    gguf: Path, out: Path, *, text: Path, runtime: Runtime, resume: Resume | None = None
) -> None:
    """Runs `text` through the model in chunks of 512 tokens and writes the imatrix file `out`.

    Trunk and MTP block are observed through llama.cpp's eval callback, each in its own context. The MTP block
    reads the trunk's hidden rows. These are also the input of the output head, so no logits are computed. The
    head's entry has the name that quantization looks up, `token_embd.weight` if the head is tied.

    With `resume` an interrupted run continues. Sums are saved exactly, so the file is the same.

    Raises:
        ConvertError: the text is too short, or not text.
        LlamaError: the model cannot be loaded or run.
        ImatrixError: activations are not finite.
    """
    collector = _Collector()
    with ExitStack() as stack:
        model = stack.enter_context(runtime.load(gguf))
        chunks = read_chunks(model, text)
        n_chunks, size = chunks.shape
        cells = min(CHUNKS_PER_BATCH, n_chunks) * size

        def open_context(kind: ContextKind, observes: Callable[[str], bool]) -> EvalContext:
            context = EvalContext(
                model,
                n_ctx=cells,
                n_batch=cells,
                n_seq=cells // size,
                kind=kind,
                threads=runtime.n_threads,
                callback=Probe(collector.add, observes),
            )
            return stack.enter_context(context)

        untied = "output.weight" in read_header(gguf).tensors
        head = "output.weight" if untied else "token_embd.weight"
        mtp_block = f"blk.{model.n_layer}."
        trunk = open_context("trunk", lambda name: name.startswith("blk."))
        trunk.keep_hidden()
        mtp = open_context("mtp", lambda name: name.startswith(mtp_block)) if model.n_nextn else None
        done = collector.load(resume) if resume else 0
        progress = stack.enter_context(Progress("Importance matrix", n_chunks, "chunks"))
        progress.advance(done)
        saved = time.monotonic()
        for first in range(done, n_chunks, CHUNKS_PER_BATCH):
            if resume and time.monotonic() - saved > SAVE_INTERVAL_S:
                collector.save(resume, first)
                saved = time.monotonic()
            batch = chunks[first : first + CHUNKS_PER_BATCH]
            trunk.clear()
            decode_chunks(trunk, batch)
            hidden = trunk.hidden()
            collector.add(head, hidden)
            if mtp is not None:
                mtp.clear()
                decode_drafts(mtp, batch, hidden)
            progress.advance(len(batch))
    Imatrix(collector.entries(), (text.name,), n_chunks, size).save(out)
    if resume:
        resume.path.unlink(missing_ok=True)
