"""Common parts of the engine's measurements: the model, timing, and rows in the store."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_serve.bench.arguments import StoreOptions
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.report.views import show
from qwen_serve.bench.store import Run
from qwen_serve.llamacpp import Model, devices, supports_gpu
from qwen_serve.llamacpp.errors import LlamaError, ModelLoadError
from qwen_serve.server.engine.errors import EngineError

UNTIMED = 3
"""Number of untimed runs of each shape. They load kernels, and build and capture graphs."""


@dataclass(frozen=True, slots=True)
class Recorder:
    """Records timings of one workload in a run."""

    run: Run
    subject: str
    workload: str

    def add(self, cell: str, round: int, metric: str, value: float) -> None:
        """Record a value."""
        self.run.add(self.subject, self.workload, cell, round, {metric: value})


@contextmanager
def begun(gguf: Path, verb: str, store: StoreOptions, settings: dict[str, Any]) -> Iterator[Run]:
    """A run for measurements of a model. Its tables are printed at the end.

    Raises BenchError if the file is missing or cannot be loaded, or llama.cpp refuses a call.
    """
    if not gguf.is_file():
        raise BenchError(f"{gguf}: no such file")
    with store.begin(verb, {"gguf": gguf.name, **settings}) as run:
        try:
            yield run
        except (EngineError, LlamaError, ModelLoadError) as error:
            raise BenchError(f"{gguf}: {error}") from error
        show(run)


@contextmanager
def recorded(
    gguf: Path, verb: str, workload: str, store: StoreOptions, settings: dict[str, Any]
) -> Iterator[tuple[Model, Recorder]]:
    """The model, on the GPU if there is one, and a recorder of its measurements. Raises as `begun` does."""
    with begun(gguf, verb, store, settings) as run:
        model = Model(gguf, n_gpu_layers=-1 if supports_gpu() else 0)
        try:
            run.describe(gguf.stem, device=devices()[0].description)
            yield model, Recorder(run, gguf.stem, workload)
        finally:
            model.close()
