"""``qwen-bench quality levels``: what levels lose on a model's own text, on other kinds, and at depth."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import llama_cpp  # noqa: F401 - before numpy: some CUDA builds crash at model load the other way round
import numpy as np
from cyclopts import Parameter
from numpy.typing import NDArray

from qwen_serve.bench.arguments import Positive, comma_separated
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.provenance import host
from qwen_serve.convert import cli
from qwen_serve.convert.chunks import read_chunks
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.evaluation import TEXTS, write_any
from qwen_serve.convert.kld import OWN, Candidate, Scores, compare_all, spaced
from qwen_serve.convert.stages import replacing
from qwen_serve.llamacpp import HAS_STATE_F16
from qwen_serve.llamacpp.errors import LlamaError
from qwen_serve.llamacpp.evaluation import Runtime

METHODS = ("nearest", "compensated")
RESAMPLES = 2000
Names = Annotated[tuple[str, ...], comma_separated(str)]


@dataclass(frozen=True)
class Measured:
    """A file's or a cache type's divergences [chunks, positions], by text; ``DEEP`` is one long chunk."""

    label: str
    megabytes: float
    divergence: dict[str, NDArray[np.float64]]


DEEP = "one pass"


def levels(
    sources: tuple[Path, ...],
    /,
    *,
    out: Path,
    quants: Names = ("Q4_K_M", "Q3_K_M", "Q2_K"),
    beside: Names = ("Q8_0",),
    caches: Names = ("q8_0", "q4_0"),
    calibration: Path | None = None,
    texts: Annotated[tuple[Path, ...], Parameter(name="--text", negative=())] = (),
    chunks: Positive = 8,
    depth: Positive = 16384,
    threads: Positive | None = None,
) -> int:
    """Divergence of levels by rounding method, on a model's own text, on texts unlike it, and at depth.

    - `qwen-bench quality levels models/nano --out /tmp/levels`

    Converts each source to every level, by nearest and by compensated rounding with the same calibration text
    and importance matrix, and compares the files with F16: on the model's own text, which is of the
    calibration's kind; on prose, code and chat, which no step has seen; and on --depth tokens of its own text
    without a break. Tables are printed as Markdown. Intervals are 95%, by resampling chunks. Finished
    conversions in --out are used again.

    Parameters
    ----------
    sources
        Checkpoints, as for qwen-convert --src.
    out
        Folder for the files.
    quants
        Levels that are rounded by both methods.
    beside
        Levels that are rounded by nearest alone, for the depth table.
    caches
        Types of keys and values, with F16 weights, for the depth table, which also has F16 states.
    calibration
        Text for both methods (default: the one that qwen-convert writes).
    texts
        More texts that nobody calibrated on.
    chunks
        Most chunks of 512 tokens that are read of each text, evenly spaced.
    depth
        Tokens of the long pass; less if the model's own text is shorter.
    threads
        CPU threads (default: all CPUs).
    """
    runtime = Runtime(threads)
    print(f"{datetime.now(UTC):%Y-%m-%d}, {host()['processor']}, {runtime.n_threads} threads\n")
    try:
        for source in sources:
            folder = out / source.name
            files = convert(source, folder, quants, beside, calibration, runtime.n_threads)
            of = measure(folder, source.name, files, caches, texts, chunks, depth, runtime)
            print_texts(source.name, of, quants)
            print_depth(source.name, of)
    except (ConvertError, LlamaError) as error:
        raise BenchError(str(error)) from error
    return 0


def convert(
    source: Path,
    folder: Path,
    quants: Sequence[str],
    beside: Sequence[str],
    calibration: Path | None,
    threads: int,
) -> dict[str, Path]:
    """The files by label, such as `Q2_K compensated`."""
    name = source.name
    common = ["--no-kld", "--no-vision", "--threads", str(threads)]
    text = calibration or folder / f"{name}.calibration.txt"
    runs = [["--src", source, "--quant", ",".join([*quants, *beside]), "--out", folder]]
    runs[0] += ["--calibration", calibration] if calibration else []
    base, imatrix = folder / f"{name}-F16.gguf", folder / f"{name}.imatrix.gguf"
    given = ["--imatrix", imatrix, "--calibration", text, "--method", METHODS[1]]
    runs += [["--src", base, "--quant", level, "--out", folder / level, *given] for level in quants]
    for run in runs:
        if cli.main([*map(str, run), *common]) != 0:
            raise BenchError(f"{source}: qwen-convert failed")
    files = {f"{level} {METHODS[0]}": folder / f"{name}-{level}.gguf" for level in [*quants, *beside]}
    return files | {f"{level} {METHODS[1]}": folder / level / f"{name}-{level}.gguf" for level in quants}


def measure(
    folder: Path,
    name: str,
    files: dict[str, Path],
    caches: Sequence[str],
    texts: Sequence[Path],
    most: int,
    depth: int,
    runtime: Runtime,
) -> list[Measured]:
    """All files are loaded at once, so that the F16 file runs once for all."""
    base = folder / f"{name}-F16.gguf"
    read: dict[str, Path] = {}
    for what in TEXTS:
        read[what] = folder / f"{name}.{what}.txt"
        if not read[what].exists():
            with replacing(read[what]) as part:
                write_any(base, part, purpose=what, runtime=runtime)
    read |= {text.stem: text for text in texts}
    with ExitStack() as stack:
        whole = stack.enter_context(runtime.load(base))
        models = [Candidate(stack.enter_context(runtime.load(path))) for path in files.values()]
        at_depth = {f"F16, {cache} keys and values": Candidate(whole, cache) for cache in caches}
        if HAS_STATE_F16:
            at_depth["F16, recurrent states in f16"] = Candidate(whole, state_type="f16")

        def divergences(candidates: list[Candidate], chunks: NDArray[np.int32]) -> list[Scores]:
            return compare_all(whole, candidates, chunks, threads=runtime.n_threads)

        labels = [*files, *at_depth]
        sizes = [*(path.stat().st_size for path in files.values()), *[base.stat().st_size] * len(at_depth)]
        of = [Measured(label, size / 1e6, {}) for label, size in zip(labels, sizes, strict=True)]
        for label, path in read.items():
            found = divergences(models, spaced(read_chunks(whole, path), most))
            for one, scores in zip(of, found, strict=False):  # other types only matter at depth
                one.divergence[label] = scores.divergence
        ids = read_chunks(whole, read[OWN])
        ids = ids.reshape(1, -1)[:, :depth]
        for one, scores in zip(of, divergences([*models, *at_depth.values()], ids), strict=True):
            one.divergence[DEEP] = scores.divergence
    return of


def print_texts(name: str, of: Sequence[Measured], quants: Sequence[str]) -> None:
    """A row for each level and text."""
    by = {one.label: one for one in of}
    print(f"| {name}: level | MB | text | tokens | KLD, nearest | KLD, compensated | change |")
    print("|---|---:|---|---:|---:|---:|---:|")
    for level in quants:
        nearest, compensated = (by[f"{level} {method}"] for method in METHODS)
        for text, before in nearest.divergence.items():
            if text == DEEP:
                continue
            after = compensated.divergence[text]
            change, low, high = (100 * value for value in changed(before, after))
            kind = "own" if text == OWN else text
            row = f"{level} | {nearest.megabytes:.2f} | {kind} | {before.size:,}"
            row += f" | {before.mean():.4f} | {after.mean():.4f}"
            print(f"| {row} | {change:+.0f}% [{low:+.0f}, {high:+.0f}] |")
    print()


def changed(before: NDArray[np.float64], after: NDArray[np.float64]) -> tuple[float, float, float]:
    """The relative change of the mean [chunks, positions], and its 95% interval by resampling chunks."""
    old, new = before.mean(axis=1), after.mean(axis=1)
    drawn = np.random.default_rng(0).integers(0, len(old), (RESAMPLES, len(old)))
    low, high = np.quantile(new[drawn].mean(axis=1) / old[drawn].mean(axis=1) - 1, [0.025, 0.975])
    return float(new.mean() / old.mean() - 1), float(low), float(high)


def print_depth(name: str, of: Sequence[Measured]) -> None:
    """A row for each file and cache type: the mean in each quarter of the long pass."""
    size = of[0].divergence[DEEP].size
    print(f"| {name}: one pass of {size:,} tokens | in chunks | all | quarter 1 | 2 | 3 | 4 |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for one in of:
        deep = one.divergence[DEEP][0]
        quarters = [deep, *np.array_split(deep, 4)]
        short = f"{one.divergence[OWN].mean():.5f}" if OWN in one.divergence else ""
        means = [float(part.mean()) for part in quarters]
        shown = [f"{mean:.5f}" if mean >= 1e-5 else f"{mean:.1e}" for mean in means]
        print(f"| {one.label} | {short} | {' | '.join(shown)} |")
    print(flush=True)
