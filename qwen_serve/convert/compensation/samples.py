"""Samples of a tensor that is measured: some rows of a few of its matrices, and what rounding costs them."""

from pathlib import Path
from typing import Final

from gguf import GGMLQuantizationType as Type

from qwen_serve.convert.compensation.arrays import Array
from qwen_serve.convert.imatrix import Imatrix
from qwen_serve.llamacpp.probe import Floats
from qwen_serve.llamacpp.weights import dequantize_rows, quantize_rows

MATRICES: Final = 4
"""The most matrices of a tensor that are sampled."""


def sampled_matrices(n: int) -> range:
    """Which of a tensor's `n` matrices are sampled."""
    return range(0, n, -(-n // MATRICES))


def row_step(values: Floats, elements: int) -> int:
    """Every how many rows of its sampled matrices make `elements` of a tensor [matrices, rows, width]."""
    return max(1, int(values[0].size) * min(len(values), MATRICES) // elements)


def load_means(imatrix: Path | None) -> dict[str, Floats]:
    """By weight, the mean squares of its inputs [matrices, width]."""
    return {name: entry.means for name, entry in Imatrix.load(imatrix).entries.items()} if imatrix else {}


def nearest(rows: Floats, kind: Type, means: Floats | None, matrix: int) -> Floats:
    """Rows of a matrix as llama.cpp rounds them, with the `means` of its tensor where they fit."""
    fits = means is not None and means.shape[1:] == rows.shape[1:]
    columns = means[matrix : matrix + 1] if means is not None and fits else None
    rounded: Floats = dequantize_rows(quantize_rows(rows[None], kind, columns), kind)[0]
    return rounded


def loss(off: Array, gram: Array) -> float:
    """trace(E G E') of an error [width, rows], with the Gram matrix of the inputs."""
    return float((off * (gram @ off)).sum())
