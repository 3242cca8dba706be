"""The variants' GGUFs: runs `qwen-convert` for missing ones, and reads size and divergence from its
reports."""

import json
import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.report.perplexity import positions
from qwen_serve.bench.servers.launch import PYTHON_PATH
from qwen_serve.bench.variants.plan import Plan
from qwen_serve.common.children import sigterm_with_parent
from qwen_serve.convert.chunks import CHUNK_SIZE
from qwen_serve.server.variant import Variant

LAST_LINES = 6
EVERY_POSITION = positions(0, CHUNK_SIZE - 1, CHUNK_SIZE)
"""The store's cell of the converter's divergence."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A GGUF, and figures from the converter's report.

    ``values`` and ``divergence``: by metric; the divergence is from the unquantized model, at
    `EVERY_POSITION`, and empty if the converter did not measure it.
    """

    path: Path
    sha256: str
    values: dict[str, float]
    divergence: dict[str, float]


def make_weights(plan: Plan, variants: Sequence[Variant]) -> dict[str, Weights | BenchError]:
    """Convert the variants. Returns the weights or the error of each, by name.

    All quants are made by one run of the converter, so that common steps run once. If it fails, each quant
    gets a run of its own, so that one failure does not affect the others. Raises BenchError if all quants
    fail for the same reason, which is then the source's.
    """
    levels = list(dict.fromkeys(variant.quant for variant in variants if variant.quant is not None))
    recipes = list(dict.fromkeys(variant.recipe for variant in variants if variant.recipe is not None))
    failed: dict[str | Path, BenchError] = {}
    made: set[str] = set()
    if levels:
        try:
            made |= convert(plan, ["--quant", ",".join(levels)])
        except BenchError as error:
            if len(levels) == 1:
                failed[levels[0]] = error
            else:
                for level in levels:
                    made |= _alone(plan, "--quant", level, level, failed)
    for recipe in recipes:
        made |= _alone(plan, "--recipe", str(recipe), recipe, failed)
    if len(failed) == len(levels) + len(recipes) and len({str(error) for error in failed.values()}) == 1:
        raise next(iter(failed.values()))
    found: dict[str, Weights | BenchError] = {}
    for variant in variants:
        key = variant.quant if variant.quant is not None else Path(str(variant.recipe))
        try:
            found[variant.name] = failed[key] if key in failed else read_weights(plan.gguf(variant), made)
        except BenchError as error:
            found[variant.name] = error
    return found


def _alone(
    plan: Plan, option: str, value: str, key: str | Path, failed: dict[str | Path, BenchError]
) -> set[str]:
    try:
        return convert(plan, [option, value])
    except BenchError as error:
        failed[key] = error
        return set()


def convert(plan: Plan, what: Sequence[str]) -> set[str]:
    """Run the converter once. Its progress is shown, and its tables are appended to the store's convert.log.

    Returns the names of the GGUFs in its tables, both new and finished ones. Raises BenchError with its last
    line, and KeyboardInterrupt if it was interrupted.
    """
    command = [sys.executable, "-m", "qwen_serve.convert", "--src", plan.src, "--name", plan.model]
    command += ["--out", str(plan.models), *what]
    command += ["--threads", str(plan.threads)] if plan.threads else []
    log = plan.store.out / "convert.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    start = log.stat().st_size if log.exists() else 0
    words: deque[str] = deque(maxlen=LAST_LINES)
    with log.open("ab") as tables:
        process = subprocess.Popen(
            [*command, *plan.convert_options],
            env={**os.environ, **PYTHON_PATH},
            stdout=tables,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=sigterm_with_parent(),
        )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            words.append(line.rstrip())
            say(f"    {line.rstrip()}")
    except BaseException:
        # the terminal's Ctrl-C reaches the converter; a SIGTERM to this process does not
        process.send_signal(signal.SIGTERM)
        raise
    finally:
        status = process.wait()
    if status == 130 or status == -signal.SIGINT:
        raise KeyboardInterrupt
    if status != 0:
        _, _, reason = "\n".join(words).rpartition("error: ")
        raise BenchError(f"convert: {reason or f'ended with status {status}'}")
    with log.open("rb") as tables:
        tables.seek(start)
        return reported(tables.read().decode("utf-8", "replace"))


def reported(tables: str) -> set[str]:
    """The GGUFs in the converter's tables, each at the beginning of a line."""
    return set(re.findall(r"^(\S.*?\.gguf)(?:  |$)", tables, re.MULTILINE))


def read_weights(gguf: Path, made: Set[str]) -> Weights:
    """Read the converter's report of a GGUF. Raises BenchError if it cannot be read, or if the GGUF is not in
    ``made``, since an existing file may be another run's."""
    if gguf.name not in made:
        raise BenchError(
            f"{gguf}: the converter made {', '.join(sorted(made)) or 'nothing'} instead (--convert-options)"
        )
    file = gguf.with_suffix(".json")
    try:
        report = json.loads(file.read_bytes())
        values = {"size": report["n_bytes"] / 1e6, "bits_per_weight": report["bits_per_weight"]}
        found, divergence = report["divergence"], {}
        if found is not None:
            divergence = {"scored_tokens": found["tokens"], "same_top": 100 * found["same_top"]}
            divergence |= {"kld_mean": found["mean"], "kld_p99": found["p99"]}
        return Weights(gguf, report["sha256"], values, divergence)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{file}: not a report of the converter: {error!r}") from error


def say(text: str) -> None:
    """Print a line about the progress on stderr."""
    print(text, file=sys.stderr, flush=True)
