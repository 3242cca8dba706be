"""The variants' GGUFs: `python -m convert` makes what is missing, its reports tell size and divergence."""

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from bench.errors import BenchError
from bench.report.perplexity import positions
from bench.variants.plan import Plan
from bench.variants.variant import Variant
from convert.chunks import CHUNK_SIZE

ROOT = Path(__file__).resolve().parents[2]
LAST_LINES = 6
EVERY_POSITION = positions(0, CHUNK_SIZE - 1, CHUNK_SIZE)
"""What the converter's divergence is over."""


class Divergence(BaseModel):
    """The part of a converter's report that is read here."""

    tokens: int
    mean: float
    p99: float
    same_top: float


class Report(BaseModel):
    """The converter's report beside a GGUF; what else is in it does not matter here."""

    file: str
    n_bytes: int
    sha256: str
    bits_per_weight: float
    divergence: Divergence | None


@dataclass(frozen=True, slots=True)
class Weights:
    """The GGUF, as the converter's report has it."""

    path: Path
    report: Report

    @property
    def values(self) -> dict[str, float]:
        """As a row of the store has them."""
        return {"size": self.report.n_bytes / 1e6, "bits_per_weight": self.report.bits_per_weight}

    @property
    def divergence(self) -> dict[str, float]:
        """From the whole model, at `EVERY_POSITION`; empty where the converter measured none."""
        found = self.report.divergence
        if found is None:
            return {}
        return {
            "scored_tokens": found.tokens,
            "kld_mean": found.mean,
            "kld_p99": found.p99,
            "same_top": 100 * found.same_top,
        }


def make_weights(plan: Plan, variants: Sequence[Variant]) -> dict[str, Weights | BenchError]:
    """Every variant's weights, or why there are none.

    All levels are one run of the converter, so that what they share is made once; if it fails, each has a run
    of its own, so that one's failure is not the others'. Raises BenchError when no level can be made, all for
    one reason: then it is the source's.
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
    """One run of the converter, its progress passed on, its tables kept in the store's convert.log.

    Returns the names of the GGUFs it reported on, made now or found finished. Raises BenchError with its
    last words, KeyboardInterrupt when it was interrupted.
    """
    command = [sys.executable, "-m", "convert", "--src", plan.source, "--name", plan.model]
    command += ["--out", str(plan.models), *what]
    if plan.threads:
        command += ["--threads", str(plan.threads)]
    command += plan.convert_options
    log = plan.store / "convert.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    start = log.stat().st_size if log.exists() else 0
    with log.open("ab") as tables:
        process = subprocess.Popen(
            command,
            env={**os.environ, **import_paths()},
            stdout=tables,
            stderr=subprocess.PIPE,
            text=True,
        )
    words: deque[str] = deque(maxlen=LAST_LINES)
    reader = threading.Thread(target=_pass_on, args=(process, words))
    reader.start()
    try:
        status = process.wait()
    except BaseException:
        # Ctrl-C has reached it too; a SIGTERM to us has not
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    finally:
        reader.join()
    if status == 130 or status == -signal.SIGINT:
        raise KeyboardInterrupt
    if status != 0:
        _, _, reason = "\n".join(words).rpartition("error: ")
        raise BenchError(f"convert: {reason or f'ended with status {status}'}")
    with log.open("rb") as tables:
        tables.seek(start)
        lines = tables.read().decode("utf-8", "replace").splitlines()
    return {line for line in lines if line.endswith(".gguf") and not line[:1].isspace()}


def import_paths() -> dict[str, str]:
    """The environment in which a child finds this repository's packages, wherever it runs."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}


def _pass_on(process: "subprocess.Popen[str]", words: deque[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        words.append(line.rstrip())
        print(f"    {line.rstrip()}", file=sys.stderr, flush=True)


def read_weights(gguf: Path, made: Set[str]) -> Weights:
    """The converter's report of a GGUF. Raises BenchError when it is not among those that were ``made``, or
    cannot be read: what lies there may be another run's."""
    if gguf.name not in made:
        raise BenchError(
            f"{gguf}: the converter made {', '.join(sorted(made)) or 'nothing'} instead (--convert-options)"
        )
    report_file = gguf.with_suffix(".json")
    try:
        report = Report.model_validate_json(report_file.read_bytes())
    except (OSError, ValidationError) as error:
        raise BenchError(f"{report_file}: not a report of the converter: {error}") from error
    return Weights(gguf, report)
