"""The share of a type's rounding error that remains with compensation, measured on a few rows of each
tensor."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from gguf import GGMLQuantizationType as Type

from qwen_serve.convert.chunks import read_chunks
from qwen_serve.convert.compensation.arrays import Bring, backend, transposed
from qwen_serve.convert.compensation.file import Run
from qwen_serve.convert.compensation.gram import Grams
from qwen_serve.convert.compensation.grids import GRIDS
from qwen_serve.convert.compensation.rounding import Inputs, round_compensated
from qwen_serve.convert.compensation.samples import load_means, loss, nearest, row_step, sampled_matrices
from qwen_serve.convert.progress import Progress
from qwen_serve.llamacpp.evaluation import Runtime
from qwen_serve.llamacpp.probe import Floats
from qwen_serve.llamacpp.weights import Weights

SAMPLE_ELEMENTS: Final = 1 << 15
"""Elements sampled from a tensor."""

SWEEPS: Final = 1
"""Passes over scales and codes. Later ones reduce the error little, and equally for all types."""


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
    bring = backend(gpu=runtime.n_gpu_layers != 0)
    with runtime.load(base, writable=True) as model, Progress("Gains", len(wanted), "tensors") as progress:
        gains = _Gains(wanted, load_means(imatrix), Weights(model, runtime.n_threads), progress, bring)
        Run(model, read_chunks(model, text), gains, runtime, bring).run()
    return gains.found


class _Gains:
    """Measures and does not choose: the model is not changed."""

    def __init__(
        self,
        wanted: Mapping[str, Sequence[Type]],
        means: Mapping[str, Floats],
        weights: Weights,
        progress: Progress,
        bring: Bring,
    ) -> None:
        self._wanted, self._means, self._weights = wanted, means, weights
        self._progress, self._bring = progress, bring
        self.found: dict[str, dict[Type, float]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._wanted and name in self._weights

    def choose(self, names: Sequence[str], source: str, grams: Grams) -> None:
        values = {name: self._weights.values(name) for name in names}
        matrices, _, width = values[names[0]].shape
        losses = {name: {kind: np.zeros(2) for kind in self._wanted[name] if kind in GRIDS} for name in names}
        for matrix in sampled_matrices(matrices):
            inputs = grams.take(source, matrix, width)
            for name in names:
                self._progress.note(name)
                step = row_step(values[name], SAMPLE_ELEMENTS)
                rows = np.ascontiguousarray(values[name][matrix, ::step])
                for kind, sums in losses[name].items():
                    sums += self._losses(
                        rows, nearest(rows, kind, self._means.get(name), matrix), inputs, kind
                    )
            del inputs  # frees the memory for the next ones
        for name, by_kind in losses.items():
            self.found[name] = {k: float(left / all_) if all_ else 1.0 for k, (left, all_) in by_kind.items()}
            self._progress.advance()

    def _losses(self, rows: Floats, by_llama_cpp: Floats, inputs: Inputs, kind: Type) -> tuple[float, float]:
        """The losses with compensation and of llama.cpp's rounding."""
        wanted = transposed(self._bring(rows))
        compensated = round_compensated(wanted, inputs, GRIDS[kind], sweeps=SWEEPS).values()
        off = compensated - wanted, transposed(self._bring(by_llama_cpp)) - wanted
        return loss(off[0], inputs.gram), loss(off[1], inputs.gram)
