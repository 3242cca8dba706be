"""Common parts of the engine's measurements: the model, timing, and rows in the store."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from qwen_serve.bench.arguments import StoreOptions
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.report.views import show
from qwen_serve.bench.store import Run
from qwen_serve.llamacpp import Context, ContextOptions, Model, devices, supports_gpu
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

    def time(self, cell: str, action: Callable[[], object], times: int) -> None:
        """Run ``action`` untimed, then time it ``times`` times; each time is a round."""
        for _ in range(UNTIMED):
            action()
        for round in range(1, times + 1):
            self.once(cell, action, round)

    def once(
        self, cell: str, action: Callable[[], object], round: int = 1, *, metric: str = "step_time"
    ) -> None:
        """Run ``action`` once and record its time, in milliseconds."""
        started = perf_counter()
        action()
        self.add(cell, round, metric, 1000 * (perf_counter() - started))

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


def make_context(model: Model, *, n_seq: int, n_ctx: int, **options: Any) -> Context:
    """A context like the engine's, with f16 keys and values and one thread."""
    given = {"n_batch": 512, "n_ubatch": 512, "n_outputs": n_seq, **options}
    return Context(
        model,
        ContextOptions(
            n_ctx=n_ctx,
            n_seq=n_seq,
            threads=1,
            threads_batch=1,
            flash_attn="auto",
            type_k="f16",
            type_v="f16",
            **given,
        ),
    )
