"""What the scripts of this folder share: errors in one line, and times of the engine's parts in a table."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from cyclopts import App

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.terminal import Cell, Table
from qwen_serve.llamacpp import Context, ContextOptions, Model, devices, supports_gpu
from qwen_serve.llamacpp.errors import LlamaError
from qwen_serve.server.engine.errors import EngineError

UNTIMED = 3
"""Number of untimed runs of each shape. They load kernels, and build and capture graphs."""


def run(command: Callable[..., object]) -> None:
    """Run a script's command line and exit: with 1 after an error that the user can fix."""
    app = App(result_action="return_value", version_flags=())
    app.default(command)
    try:
        app(sys.argv[1:])
    except (BenchError, EngineError, LlamaError) as error:
        sys.exit(f"error: {error}")


@dataclass
class Timings:
    """Values of each case, in milliseconds or another unit."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, case: str, value: float) -> None:
        self.values.setdefault(case, []).append(value)

    def once(self, case: str, action: Callable[[], object]) -> None:
        """Run ``action`` once and add its milliseconds."""
        started = perf_counter()
        action()
        self.add(case, 1000 * (perf_counter() - started))

    def time(self, case: str, action: Callable[[], object], times: int) -> None:
        """Run ``action`` untimed, then ``times`` times."""
        for _ in range(UNTIMED):
            action()
        for _ in range(times):
            self.once(case, action)

    def print(self, title: str) -> None:
        rows: list[list[Cell]] = [
            [case, *(float(value) for value in np.quantile(values, [0.5, 0.1, 0.9])), len(values)]
            for case, values in self.values.items()
        ]
        Table(["what", "ms: median", "10%", "90%", "times"], rows, title=title).print()


@contextmanager
def loaded(gguf: Path) -> Iterator[tuple[Model, Timings]]:
    """The model, on the GPU if there is one, and its timings, which are printed at the end.

    Raises BenchError if there is no such file, LlamaError if it cannot be loaded.
    """
    if not gguf.is_file():
        raise BenchError(f"{gguf}: no such file")
    timings, model = Timings(), Model(gguf, n_gpu_layers=-1 if supports_gpu() else 0)
    try:
        yield model, timings
    finally:
        model.close()
    timings.print(f"{gguf.stem}, {devices()[0].description}")


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
