"""The share of a type's rounding error that compensation leaves, measured on a few rows of each tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from qwen_serve.convert.chunks import read_chunks
from qwen_serve.convert.compensation.arrays import backend, transposed
from qwen_serve.convert.compensation.file import Run
from qwen_serve.convert.compensation.grids import GRIDS
from qwen_serve.convert.compensation.rounding import Inputs, round_compensated
from qwen_serve.convert.imatrix import Imatrix
from qwen_serve.convert.progress import Progress
from qwen_serve.llamacpp.weights import Weights, dequantize_rows, quantize_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from gguf import GGMLQuantizationType as Type

    from qwen_serve.convert.compensation.arrays import Array
    from qwen_serve.llamacpp.evaluation import Runtime
    from qwen_serve.llamacpp.probe import Floats

SAMPLE_ELEMENTS: Final = 1 << 15
"""Elements sampled from a tensor, in at most `MATRICES` of its matrices."""

MATRICES: Final = 4

SWEEPS: Final = 1
"""Passes over scales and codes; later ones take off little, of all types alike."""


def measure_gains(
    base: Path,
    wanted: Mapping[str, Sequence[Type]],
    *,
    text: Path,
    imatrix: Path | None,
    runtime: Runtime,
) -> dict[str, dict[Type, float]]:
    """By tensor and type in `GRIDS`: the loss `trace(E G E')` of compensated rounding, relative to that of
    llama.cpp's with the importance matrix. Inputs are those of the whole model.

    Raises:
        ConvertError: the text is too short, or activations are not finite.
        LlamaError: the model cannot be loaded or run.
    """
    bring = backend(card=runtime.n_gpu_layers != 0)
    with runtime.load(base, writable=True) as model, Progress("Gains", len(wanted), "tensors") as progress:
        means = {n: e.means for n, e in Imatrix.load(imatrix).entries.items()} if imatrix else {}
        gains = _Gains(wanted, means, Weights(model, runtime.n_threads), progress, bring)
        Run(model, read_chunks(model, text), gains, runtime, bring).run()
    return gains.found


class _Gains:
    """Measures instead of choosing: the model stays as it is."""

    def __init__(
        self,
        wanted: Mapping[str, Sequence[Type]],
        means: Mapping[str, Floats],
        weights: Weights,
        progress: Progress,
        bring: Callable[[Floats], Array],
    ) -> None:
        self._wanted, self._means, self._weights = wanted, means, weights
        self._progress, self._bring = progress, bring
        self.found: dict[str, dict[Type, float]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._wanted and name in self._weights

    def choose(self, names: Sequence[str], grams: Array) -> None:
        some = slice(None, None, -(-len(grams) // MATRICES))
        inputs = [Inputs(gram) for gram in grams[some]]
        for name in names:
            self._progress.note(name)
            values = self._weights.values(name)[some]
            values = np.ascontiguousarray(values[:, :: max(1, values.size // SAMPLE_ELEMENTS)])
            means = self._means.get(name)
            columns = means[some] if means is not None and len(means) == len(grams) else None
            self.found[name] = {
                kind: _gain(values, columns, inputs, kind, self._bring)
                for kind in self._wanted[name]
                if kind in GRIDS
            }
            self._progress.advance()


def _gain(
    values: Floats,
    columns: Floats | None,
    inputs: Sequence[Inputs],
    kind: Type,
    bring: Callable[[Floats], Array],
) -> float:
    """`values` [matrices, rows, width]."""
    nearest = dequantize_rows(quantize_rows(values, kind, columns), kind)
    before = after = 0.0
    for matrix, rounded, one in zip(values, nearest, inputs, strict=True):
        wanted = transposed(bring(matrix))
        before += _loss(transposed(bring(rounded)) - wanted, one.gram)
        after += _loss(round_compensated(wanted, one, GRIDS[kind], sweeps=SWEEPS).values() - wanted, one.gram)
    return after / before if before else 1.0


def _loss(off: Array, gram: Array) -> float:
    """trace(E G E') of an error [width, rows]."""
    return float((off * (gram @ off)).sum())
