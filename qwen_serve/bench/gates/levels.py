"""``qwen-bench quality levels``: what levels lose on a model's own text, on other kinds, and at depth."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Annotated, NamedTuple

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
from qwen_serve.convert.kld import OWN, Candidate, compare_all, spaced
from qwen_serve.convert.stages import fingerprint, replacing
from qwen_serve.llamacpp import HAS_STATE_F16
from qwen_serve.llamacpp.errors import LlamaError
from qwen_serve.llamacpp.evaluation import Runtime
from qwen_serve.llamacpp.model import Model

RESAMPLES = 2000
DEEP = "one pass"
RECIPE = ".toml"
F16 = "f16"
Names = Annotated[tuple[str, ...], comma_separated(str)]
Ids = NDArray[np.int32]


@dataclass(frozen=True)
class Measured:
    """A file's or a cache type's divergences [chunks, positions], by text; ``DEEP`` is one long chunk."""

    label: str
    megabytes: float
    divergence: dict[str, NDArray[np.float64]]


class Tried(NamedTuple):
    """A file, and the types of its keys and values and of its recurrent states."""

    path: Path
    cache: str = F16
    state_type: str = "f32"


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
    without a break. Tables are printed as Markdown, a level's rows as soon as it is measured. Intervals are
    95%, by resampling chunks. Finished conversions and measurements in --out are used again.

    Parameters
    ----------
    sources
        Checkpoints, as for qwen-convert --src.
    out
        Folder for the files.
    quants
        Levels, or recipes (TOML files), that are rounded by both methods.
    beside
        Levels or recipes that are rounded by nearest alone.
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
            folder, of = out / source.name, list[Measured]()
            base = folder / f"{source.name}-F16.gguf"
            for level in (*quants, *beside):
                files = {
                    f"{name_of(level)} nearest": Tried(convert(source, folder, level, calibration, runtime))
                }
                if level in quants:
                    path = compensate(source, folder, level, calibration, runtime)
                    files[f"{name_of(level)} compensated"] = Tried(path)
                if not of:
                    ids = read_texts(base, source.name, texts, chunks, depth, runtime)
                found = measure(base, files, ids, runtime)
                print_texts(name_of(level), found, head=source.name if not of else None)
                of += found
            types = {f"F16, {cache} keys and values": Tried(base, cache) for cache in caches}
            if HAS_STATE_F16:
                types["F16, recurrent states in f16"] = Tried(base, state_type=F16)
            of += measure(base, types, {DEEP: ids[DEEP]}, runtime)
            print_depth(source.name, of)
    except (ConvertError, LlamaError) as error:
        raise BenchError(str(error)) from error
    return 0


def name_of(level: str) -> str:
    """The level's name in files and tables."""
    return Path(level).stem if level.endswith(RECIPE) else level


def convert(source: Path, folder: Path, level: str, calibration: Path | None, runtime: Runtime) -> Path:
    """The level's file by nearest; also writes what all levels need: F16, the texts, the importance
    matrix."""
    given = ["--calibration", calibration] if calibration else []
    return _convert(source, source.name, folder, level, given, runtime)


def compensate(source: Path, folder: Path, level: str, calibration: Path | None, runtime: Runtime) -> Path:
    """The level's compensated file, with the text and importance matrix of the one by nearest."""
    name = source.name
    text = calibration or folder / f"{name}.calibration.txt"
    given = ["--imatrix", folder / f"{name}.imatrix.gguf", "--calibration", text, "--method", "compensated"]
    return _convert(folder / f"{name}-F16.gguf", name, folder / name_of(level), level, given, runtime)


def _convert(
    source: Path, name: str, out: Path, level: str, given: Sequence[object], runtime: Runtime
) -> Path:
    kind = "--recipe" if level.endswith(RECIPE) else "--quant"
    words = ["--src", source, kind, level, "--out", out, "--threads", runtime.n_threads, *given]
    if cli.main([*map(str, words), "--no-kld", "--no-vision"]) != 0:
        raise BenchError(f"{source}: qwen-convert {kind} {level} failed")
    return out / f"{name}-{name_of(level)}.gguf"


def read_texts(
    base: Path, name: str, more: Sequence[Path], most: int, depth: int, runtime: Runtime
) -> dict[str, Ids]:
    """The chunks by text, and the long one; texts that do not exist yet are written."""
    read: dict[str, Path] = {}
    for what in TEXTS:
        read[what] = base.parent / f"{name}.{what}.txt"
        if not read[what].exists():
            with replacing(read[what]) as part:
                write_any(base, part, purpose=what, runtime=runtime)
    read |= {text.stem: text for text in more}
    with runtime.load(base) as whole:
        found = {label: read_chunks(whole, path) for label, path in read.items()}
    deep = found[OWN].reshape(1, -1)[:, :depth]
    return {label: spaced(chunks, most) for label, chunks in found.items()} | {DEEP: deep}


def measure(
    base: Path, files: Mapping[str, Tried], texts: Mapping[str, Ids], runtime: Runtime
) -> list[Measured]:
    """Files with their types, by label. What was measured is kept beside the base."""
    of = [Measured(label, path.stat().st_size / 1e6, {}) for label, (path, *_) in files.items()]
    with ExitStack() as stack:
        loaded: dict[Path, Model] = {}

        def load(path: Path) -> Model:
            if path not in loaded:
                loaded[path] = stack.enter_context(runtime.load(path))
            return loaded[path]

        for text, ids in texts.items():
            kept = [_kept(base, tried, ids) for tried in files.values()]
            if not all(path.exists() for path in kept):
                candidates = [Candidate(load(path), *types) for path, *types in files.values()]
                scores = compare_all(load(base), candidates, ids, threads=runtime.n_threads)
                for path, score in zip(kept, scores, strict=True):
                    path.parent.mkdir(exist_ok=True)
                    with replacing(path) as part, part.open("wb") as file:
                        np.save(file, score.divergence)
            for one, path in zip(of, kept, strict=True):
                one.divergence[text] = np.load(path)
    return of


def _kept(base: Path, tried: Tried, ids: Ids) -> Path:
    """Where a divergence is kept: by everything that it depends on."""
    stamps = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in (base, tried.path)]
    parts = {"files": stamps, "types": tried[1:], "ids": sha256(ids.tobytes()).hexdigest()}
    return base.parent / "divergences" / f"{fingerprint(parts)}.npy"


def print_texts(level: str, found: Sequence[Measured], head: str | None = None) -> None:
    """A level's rows, one for each text: by nearest, and compensated if that was measured. `head` begins the
    table with a model's name."""
    if head is not None:
        print(f"\n| {head}: level | MB | text | tokens | KLD, nearest | KLD, compensated | change |")
        print("|---|---:|---|---:|---:|---:|---:|")
    for text, before in found[0].divergence.items():
        if text == DEEP:
            continue
        row = f"{level} | {found[0].megabytes:.2f} | {'own' if text == OWN else text} | {before.size:,}"
        row += f" | {before.mean():.4f}"
        for other in found[1:]:
            after = other.divergence[text]
            change, low, high = (100 * value for value in changed(before, after))
            row += f" | {after.mean():.4f} | {change:+.0f}% [{low:+.0f}, {high:+.0f}]"
        print(f"| {row} |" if found[1:] else f"| {row} | | |")
    sys.stdout.flush()


def changed(before: NDArray[np.float64], after: NDArray[np.float64]) -> tuple[float, float, float]:
    """The relative change of the mean [chunks, positions], and its 95% interval by resampling chunks."""
    old, new = before.mean(axis=1), after.mean(axis=1)
    drawn = np.random.default_rng(0).integers(0, len(old), (RESAMPLES, len(old)))
    low, high = np.quantile(new[drawn].mean(axis=1) / old[drawn].mean(axis=1) - 1, [0.025, 0.975])
    return float(new.mean() / old.mean() - 1), float(low), float(high)


def print_depth(name: str, of: Sequence[Measured]) -> None:
    """A row for each file and cache type: the mean in each quarter of the long pass."""
    size = of[0].divergence[DEEP].size
    print(f"\n| {name}: one pass of {size:,} tokens | in chunks | all | quarter 1 | 2 | 3 | 4 |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for one in of:
        deep = one.divergence[DEEP][0]
        quarters = [deep, *np.array_split(deep, 4)]
        short = f"{one.divergence[OWN].mean():.5f}" if OWN in one.divergence else ""
        means = [float(part.mean()) for part in quarters]
        shown = [f"{mean:.5f}" if mean >= 1e-5 else f"{mean:.1e}" for mean in means]
        print(f"| {one.label} | {short} | {' | '.join(shown)} |")
    print(flush=True)
