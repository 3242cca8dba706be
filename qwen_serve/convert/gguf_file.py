"""Writes a checkpoint as one GGUF file, in chunks, so that the whole model is never in memory.

gguf's writer writes the header, key-value pairs and tensor table. Every tensor's size follows from its shape,
so its place in the file is known. A few threads read, convert and write the data in parallel, with positioned
reads and writes.
"""

import os
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from qwen_serve.common.interrupts import held
from qwen_serve.convert.checkpoint import Checkpoint
from qwen_serve.convert.config import ModelConfig
from qwen_serve.convert.dequantize import Dequantized, Words
from qwen_serve.convert.errors import CheckpointError
from qwen_serve.convert.floats import RangeError, convert, first_not_finite, to_f32
from qwen_serve.convert.metadata import add_general, add_hyperparameters, add_tokenizer
from qwen_serve.convert.progress import BYTES, Progress
from qwen_serve.convert.prune_vocab import SOURCE_TOKENS, prune
from qwen_serve.convert.safetensors import NUMPY_TYPES
from qwen_serve.convert.source import Source
from qwen_serve.convert.tensors import FloatType, PlannedTensor, TensorPlan
from qwen_serve.convert.vocab import Vocab
from qwen_serve.llamacpp.gguf import ALIGNMENT

CHUNK_ELEMENTS = 1 << 18  # half a megabyte, which fits the cache and is not mapped again each time
DEFAULT_THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class _Job:
    """A part of one tensor: elements `start` to `start + count`, written from byte `position` on."""

    tensor: PlannedTensor
    start: int
    count: int
    position: int


def write_gguf(
    path: Path,
    checkpoint: Checkpoint,
    source: Source,
    plan: TensorPlan,
    kept_layers: tuple[int, ...],
    outtype: FloatType,
) -> None:
    """Writes the GGUF that `plan` describes to `path`.

    Raises: CheckpointError: the tokenizer cannot be converted, a shard changed meanwhile, or a weight is
        not finite or does not fit `outtype`.
    """
    writer = _metadata(checkpoint, source, plan, kept_layers, outtype)
    write_file(path, writer, plan, checkpoint.config)


def write_header(
    path: Path,
    checkpoint: Checkpoint,
    source: Source,
    plan: TensorPlan,
    kept_layers: tuple[int, ...],
    outtype: FloatType,
) -> None:
    """Writes the file of `write_gguf` with a hole in place of the weights. Raises CheckpointError."""
    start = _write_head(_metadata(checkpoint, source, plan, kept_layers, outtype), path, plan)
    os.truncate(path, start + sum(_padded(tensor.nbytes) for tensor in plan.tensors))


def _metadata(
    checkpoint: Checkpoint,
    source: Source,
    plan: TensorPlan,
    kept_layers: tuple[int, ...],
    outtype: FloatType,
) -> gguf.GGUFWriter:
    vocab = Vocab.load(checkpoint.folder, checkpoint.config)
    n_tokens = len(vocab.tokens)
    if plan.kept_tokens is not None:
        vocab = prune(vocab, plan.kept_tokens)
    writer = gguf.GGUFWriter(path=None, arch=checkpoint.config.arch)
    add_general(writer, checkpoint.folder, source, plan)
    add_hyperparameters(writer, checkpoint.config, plan, kept_layers, outtype)
    add_tokenizer(writer, vocab)
    if plan.kept_tokens is not None:
        writer.add_uint32(SOURCE_TOKENS, n_tokens)
    return writer


def write_file(
    path: Path, writer: gguf.GGUFWriter, plan: TensorPlan, config: ModelConfig, threads: int = DEFAULT_THREADS
) -> None:
    """Writes `writer`'s key-value pairs, which are cleared, and the tensors of `plan` to `path`.

    Raises: CheckpointError: reading a tensor failed, or a weight is not finite or does not fit its type.
    """
    data_start = _write_head(writer, path, plan)
    writer.kv_data.clear()  # frees the vocabulary and merges: as much memory as the rest of the work
    with Progress(f"Writing {path.name}", plan.nbytes, BYTES) as progress:
        _write_data(path, plan, config, data_start, threads, progress)


def _write_head(writer: gguf.GGUFWriter, path: Path, plan: TensorPlan) -> int:
    """Writes everything before the data; returns where the data starts."""
    for tensor in plan.tensors:
        writer.add_tensor_info(
            tensor.name,
            tensor.shape,
            NUMPY_TYPES["F32"],  # for bytes, gguf would take the shape as one of blocks
            tensor.nbytes,
            raw_dtype=gguf.GGMLQuantizationType[tensor.type],
        )
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return _padded(path.stat().st_size)


def _write_data(
    path: Path, plan: TensorPlan, config: ModelConfig, data_start: int, threads: int, progress: Progress
) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        # threads write in any order, and the file's final size, with padding, is known
        os.truncate(fd, data_start + sum(_padded(t.nbytes) for t in plan.tensors))
        with ThreadPoolExecutor(threads, thread_name_prefix="convert") as pool:
            pending: set[Future[int]] = set()
            try:
                for job in _jobs(plan, data_start):
                    with held():
                        pending.add(pool.submit(_run, job, config, fd))
                    if len(pending) >= 2 * threads:
                        pending = _collect(pending, progress)
                while pending:
                    pending = _collect(pending, progress)
            except BaseException:
                with held():
                    pool.shutdown(cancel_futures=True)
                raise
    finally:
        os.close(fd)


def _collect(pending: set[Future[int]], progress: Progress) -> set[Future[int]]:
    with held():
        done, rest = wait(pending, return_when=FIRST_COMPLETED)
        n_bytes = sum(future.result() for future in done)
    progress.advance(n_bytes)
    return rest


def _jobs(plan: TensorPlan, data_start: int) -> Iterator[_Job]:
    position = data_start
    for tensor in plan.tensors:
        n = tensor.n_elements
        # reordering and computing need the whole tensor, but are rare for the largest, embedding and FFN
        computed = isinstance(tensor.stored, Dequantized) and isinstance(tensor.stored.weight, Words)
        whole = tensor.reorder or tensor.compute or computed
        step = n if whole else CHUNK_ELEMENTS
        for start in range(0, n, step):
            yield _Job(tensor, start, min(step, n - start), position + tensor.n_bytes(start))
        position += _padded(tensor.nbytes)


def _run(job: _Job, config: ModelConfig, fd: int) -> int:
    tensor, stored = job.tensor, job.tensor.stored
    values, dtype = stored.read(job.start, job.count), stored.dtype
    if dtype not in NUMPY_TYPES:  # quantized already
        _pwrite(fd, values, job.position)
        return values.nbytes
    if dtype == "F64":  # as torch converts it, by way of F32
        with np.errstate(over="ignore"):
            values, dtype = to_f32(values, dtype), "F32"
    if tensor.reorder:
        values = tensor.reorder(values.reshape(stored.shape), config).reshape(-1)
    if tensor.compute:
        values, dtype = tensor.compute(to_f32(values, dtype), config), "F32"
    written = 0
    for start in range(0, job.count, CHUNK_ELEMENTS):
        given = values[start : start + CHUNK_ELEMENTS]
        if tensor.type != "I64" and (place := first_not_finite(given, dtype)) is not None:
            does = "becomes" if tensor.compute else "holds"
            raise not_finite(
                f"{stored.path}: tensor {stored.name} {does} {to_f32(given[place : place + 1], dtype)[0]}"
            )
        try:
            piece = convert(given, dtype, tensor.type)
        except RangeError as error:
            wider = "BF16 or F32" if tensor.type == "F16" else "F32"
            raise CheckpointError(
                f"{stored.path}: tensor {stored.name}: {error}; convert with --outtype {wider}"
            ) from None
        _pwrite(fd, piece, job.position + written)
        written += piece.nbytes
    return written


def not_finite(what: str) -> CheckpointError:
    """The error for a weight that is an infinity or NaN. `what` names the tensor and the value."""
    return CheckpointError(
        f"{what}, and every weight must be finite: the file is damaged, or the training that wrote it "
        "diverged; download it again, or take an earlier checkpoint"
    )


def _pwrite(fd: int, values: npt.NDArray[Any], position: int) -> None:
    view = np.ascontiguousarray(values).view(np.uint8).data
    while view:
        n = os.pwrite(fd, view, position)
        view, position = view[n:], position + n


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT
