"""How much compensation reduces the error of each matrix, on text of the calibration's kind and of others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from gguf import GGMLQuantizationType as Type

from qwen_serve.convert.chunks import read_chunks
from qwen_serve.convert.compensation.arrays import Bring, backend, transposed
from qwen_serve.convert.compensation.file import Run, rounded_tensors
from qwen_serve.convert.compensation.gram import Grams
from qwen_serve.convert.compensation.samples import load_means, loss, nearest, row_step, sampled_matrices
from qwen_serve.convert.kld import spaced
from qwen_serve.convert.progress import Progress
from qwen_serve.llamacpp.devices import row_bytes
from qwen_serve.llamacpp.evaluation import Runtime
from qwen_serve.llamacpp.gguf import TensorInfo
from qwen_serve.llamacpp.probe import Floats
from qwen_serve.llamacpp.weights import Weights, dequantize_rows

CHUNKS: Final = 8
"""Chunks of 512 tokens that are read of each text."""

SAMPLE_ELEMENTS: Final = 1 << 18
"""Elements sampled from a tensor."""


@dataclass(frozen=True)
class Errors:
    """The squared error of a matrix's product with its inputs, relative to the square of the product: by
    llama.cpp's rounding, and in the compensated file."""

    nearest: float
    compensated: float


def measure_errors(
    base: Path,
    quantized: Path,
    *,
    texts: Mapping[str, Sequence[Path]],
    imatrix: Path | None,
    runtime: Runtime,
) -> dict[str, dict[str, Errors]]:
    """By matrix and kind of text; inputs are those of the whole model. A matrix that reads nothing is left
    out.

    Args:
        texts: by kind.

    Raises:
        ConvertError: a text is too short, or activations are not finite.
        LlamaError: the model cannot be loaded or run.
    """
    bring, tensors = backend(gpu=runtime.n_gpu_layers != 0), rounded_tensors(quantized)
    means = load_means(imatrix)
    found: dict[str, dict[str, Errors]] = {}
    with (
        runtime.load(base, writable=True) as model,
        Progress("Errors of matrices", len(texts) * len(tensors), "tensors") as progress,
    ):
        weights = Weights(model, runtime.n_threads)
        for kind, paths in texts.items():
            chunks = np.concatenate([spaced(read_chunks(model, path), CHUNKS) for path in paths])
            meter = _Errors(quantized, tensors, means, weights, progress, bring)
            Run(model, chunks, meter, runtime, bring).run()
            for name, errors in meter.found.items():
                found.setdefault(name, {})[kind] = errors
    return found


class _Errors:
    """Measures and does not choose: the model is not changed."""

    def __init__(
        self,
        quantized: Path,
        tensors: Mapping[str, TensorInfo],
        means: Mapping[str, Floats],
        weights: Weights,
        progress: Progress,
        bring: Bring,
    ) -> None:
        self._quantized, self._tensors, self._means = quantized, tensors, means
        self._weights, self._progress, self._bring = weights, progress, bring
        self.found: dict[str, Errors] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors and name in self._weights

    def choose(self, names: Sequence[str], source: str, grams: Grams) -> None:
        values = {name: self._weights.values(name) for name in names}
        sums = {name: np.zeros(3) for name in names}
        matrices, _, width = values[names[0]].shape
        for matrix in sampled_matrices(matrices):
            gram = grams.total(source, matrix, width)
            for name in names:
                self._progress.note(name)
                step, kind = row_step(values[name], SAMPLE_ELEMENTS), Type(self._tensors[name].type)
                rows = np.ascontiguousarray(values[name][matrix, ::step])
                whole = transposed(self._bring(rows))
                by_llama_cpp = nearest(rows, kind, self._means.get(name), matrix)
                rounded = by_llama_cpp, self._in_file(name, matrix)[::step]
                off = [whole, *(transposed(self._bring(values)) - whole for values in rounded)]
                sums[name] += [loss(each, gram) for each in off]
        for name, (square, by_nearest, compensated) in sums.items():
            if square:
                self.found[name] = Errors(float(by_nearest / square), float(compensated / square))
            self._progress.advance()

    def _in_file(self, name: str, matrix: int) -> Floats:
        """A matrix's values in the file."""
        tensor = self._tensors[name]
        size, rows = row_bytes(tensor.type, tensor.shape[0]), tensor.shape[1]
        data = np.memmap(self._quantized, np.uint8, "r", tensor.offset + matrix * size * rows, (rows, size))
        return dequantize_rows(data, Type(tensor.type))
