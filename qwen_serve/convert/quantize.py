"""Quantization by llama.cpp, in a process of its own.

`llama_model_quantize` runs for minutes and cannot be interrupted from Python. A child process can be
interrupted, and its crash becomes an error message.
"""

import signal
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from qwen_serve.common.children import end_with_parent
from qwen_serve.convert.compensation.file import compensate
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.grids import Kept
from qwen_serve.convert.imatrix import Imatrix
from qwen_serve.convert.progress import Progress
from qwen_serve.convert.recipes import Recipe
from qwen_serve.llamacpp.errors import LlamaError
from qwen_serve.llamacpp.evaluation import Runtime
from qwen_serve.llamacpp.quantize import quantize_file

DISTILLATION_VERSION: Final = 1
"""Raise it when the same file and text would be trained differently."""


class QuantizeError(ConvertError):
    """llama.cpp could not quantize the file."""


@dataclass(frozen=True)
class Tensor:
    """From the child: the next of `total` tensors begins."""

    total: int
    name: str


@dataclass(frozen=True)
class Outcome:
    """From the child: the end, successful if `error` is None."""

    error: str | None


@dataclass(frozen=True)
class Rewriting:
    """Changes of llama.cpp's blocks with the calibration text: compensation, then steps of distillation."""

    text: Path
    compensate: bool = True
    distill: int = 0


@dataclass(frozen=True)
class Job:
    """The child's job."""

    source: Path
    out: Path
    recipe: Recipe
    imatrix: Path | None
    rewriting: Rewriting | None
    exact: Sequence[tuple[str, int]]
    """Patterns and types of the matrices that keep a checkpoint's own integers."""
    threads: int


def quantize(
    source: Path,
    out: Path,
    recipe: Recipe,
    imatrix: Path | None,
    runtime: Runtime,
    rewriting: Rewriting | None = None,
    exact: Kept | None = None,
) -> None:
    """Writes `source` (F16, BF16 or F32) to `out` by the recipe, weighing errors with the imatrix file.

    Rewriting then replaces llama.cpp's blocks by better ones of the same types, `exact` by the checkpoint's
    own integers. The metadata names the imatrix as llama-quantize does (`quantize.imatrix.*`), a method that
    is not llama.cpp's (`quantize.method`), and distillation (`quantize.distillation.*`). On any failure or
    interrupt, no file is left at `out`.

    Raises:
        QuantizeError: llama.cpp's message.
        ConvertError: the text is too short or too long, activations are not finite, or training did not help.
    """
    kept = exact.overrides if exact is not None else ()
    job = Job(source, out, recipe, imatrix, rewriting, kept, runtime.n_threads)
    spawn = get_context("spawn")  # the child must not inherit llama.cpp's threads
    messages, sender = spawn.Pipe(duplex=False)
    child = spawn.Process(target=_work, args=(job, sender), daemon=True)
    child.start()
    sender.close()  # so that the stream ends if the child dies
    try:
        _follow(messages, f"Quantizing to {recipe.type}", source)
    except BaseException:
        child.terminate()
        child.join()
        out.unlink(missing_ok=True)
        raise
    child.join()
    try:
        if rewriting is not None and rewriting.compensate:
            compensate(source, out, text=rewriting.text, runtime=runtime)
        if rewriting is not None and rewriting.distill:
            from qwen_serve.convert.distillation import distill  # torch is optional, and slow to import

            distill(source, out, text=rewriting.text, steps=rewriting.distill, runtime=runtime)
        if exact is not None:
            exact.write(out)
    except BaseException:
        out.unlink(missing_ok=True)
        raise


def _follow(messages: Connection, what: str, source: Path) -> None:
    """Shows the child's progress until it ends, and raises its error."""
    with ExitStack() as stack:
        progress: Progress | None = None
        while True:
            try:
                message = messages.recv()
            except EOFError:
                raise QuantizeError(f"{source}: llama.cpp crashed while quantizing it") from None
            match message:
                case Tensor(total=total, name=name):
                    progress = progress or stack.enter_context(Progress(what, total, "tensors"))
                    progress.note(name)
                    progress.advance()
                case Outcome(error=None):
                    return
                case Outcome(error=error):
                    raise QuantizeError(error)


def _work(job: Job, parent: Connection) -> None:
    """Runs in the child: quantizes, reports each tensor to the parent, and then the outcome."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets the interrupt too, and ends this process
    end_with_parent(job.out)

    def send(message: Tensor | Outcome) -> None:
        with suppress(BrokenPipeError):  # the parent is gone, and this process ends soon
            parent.send(message)

    try:
        imatrix = Imatrix.load(job.imatrix) if job.imatrix else None
        quantize_file(
            job.source,
            job.out,
            file_type=job.recipe.file_type,
            overrides=[*job.exact, *job.recipe.overrides],
            mixture=job.recipe.mixture,
            imatrix={name: entry.means for name, entry in imatrix.entries.items()} if imatrix else None,
            metadata=_provenance(job, imatrix),
            threads=job.threads,
            on_tensor=lambda total, name: send(Tensor(total, name)),
        )
    except (ConvertError, LlamaError) as error:
        send(Outcome(str(error)))
    else:
        send(Outcome(None))


def _provenance(job: Job, imatrix: Imatrix | None) -> dict[str, str | int]:
    """The metadata in which llama-quantize records an imatrix (`tools/quantize/quantize.cpp`), and this
    converter's."""
    found: dict[str, str | int] = {}
    if job.imatrix and imatrix:
        found |= {
            "quantize.imatrix.file": job.imatrix.name,
            "quantize.imatrix.dataset": imatrix.datasets[0] if imatrix.datasets else "",
            "quantize.imatrix.entries_count": len(imatrix.entries),
            "quantize.imatrix.chunks_count": imatrix.chunk_count,
        }
    if job.rewriting and job.rewriting.compensate:
        found |= {"quantize.method": "compensated", "quantize.method.dataset": job.rewriting.text.name}
    if job.rewriting and (steps := job.rewriting.distill):
        found |= {
            "quantize.distillation.steps": steps,
            "quantize.distillation.dataset": job.rewriting.text.name,
        }
    return found
