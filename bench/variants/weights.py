"""The variants' GGUFs: `python -m convert` makes what is missing, its reports tell size and divergence."""

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ValidationError

from bench.errors import BenchError
from bench.variants.plan import Plan
from bench.variants.result import Weights
from bench.variants.variant import Variant

ROOT = Path(__file__).resolve().parents[2]
LAST_LINES = 6


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


def make_weights(plan: Plan, variants: Sequence[Variant]) -> dict[str, Weights | BenchError]:
    """Every variant's weights, or why there are none.

    All levels are one run of the converter, so that what they share is made once; if it fails, each has a run
    of its own, so that one's failure is not the others'. Raises BenchError when no level can be made, all for
    one reason: then it is the source's.
    """
    levels = list(dict.fromkeys(variant.quant for variant in variants if variant.quant is not None))
    recipes = list(dict.fromkeys(variant.recipe for variant in variants if variant.recipe is not None))
    failed: dict[str | Path, BenchError] = {}
    if levels:
        try:
            convert(plan, ["--quant", ",".join(levels)])
        except BenchError as error:
            if len(levels) == 1:
                failed[levels[0]] = error
            else:
                failed.update(_one_by_one(plan, levels))
    for recipe in recipes:
        try:
            convert(plan, ["--recipe", str(recipe)])
        except BenchError as error:
            failed[recipe] = error
    if len(failed) == len(levels) + len(recipes) and len({str(error) for error in failed.values()}) == 1:
        raise next(iter(failed.values()))
    found: dict[str, Weights | BenchError] = {}
    for variant in variants:
        key = variant.quant if variant.quant is not None else Path(str(variant.recipe))
        try:
            found[variant.name] = failed[key] if key in failed else read_weights(plan.gguf(variant))
        except BenchError as error:
            found[variant.name] = error
    return found


def _one_by_one(plan: Plan, levels: Sequence[str]) -> dict[str | Path, BenchError]:
    failed: dict[str | Path, BenchError] = {}
    for level in levels:
        try:
            convert(plan, ["--quant", level])
        except BenchError as error:
            failed[level] = error
    return failed


def convert(plan: Plan, what: Sequence[str]) -> None:
    """One run of the converter, its progress passed on, its tables kept in raw/convert.log.

    Raises BenchError with its last words, KeyboardInterrupt when it was interrupted.
    """
    command = [sys.executable, "-m", "convert", "--src", plan.source, "--name", plan.model]
    command += ["--out", str(plan.models), *what]
    if plan.threads:
        command += ["--threads", str(plan.threads)]
    command += plan.convert_options
    log = plan.out / "raw" / "convert.log"
    log.parent.mkdir(parents=True, exist_ok=True)
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


def import_paths() -> dict[str, str]:
    """The environment in which a child finds this repository's packages, wherever it runs."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}


def _pass_on(process: "subprocess.Popen[str]", words: deque[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        words.append(line.rstrip())
        print(f"    {line.rstrip()}", file=sys.stderr, flush=True)


def read_weights(gguf: Path) -> Weights:
    """The converter's report of a GGUF. Raises BenchError when one of the two is missing or unreadable."""
    report_file = gguf.with_suffix(".json")
    if not gguf.is_file():
        raise BenchError(f"{gguf}: not there after the conversion")
    try:
        report = Report.model_validate_json(report_file.read_bytes())
    except (OSError, ValidationError) as error:
        raise BenchError(f"{report_file}: not a report of the converter: {error}") from error
    divergence = report.divergence
    return Weights(
        file=gguf.name,
        bytes=report.n_bytes,
        sha256=report.sha256,
        bits=report.bits_per_weight,
        divergence=divergence.mean if divergence else None,
        divergence_p99=divergence.p99 if divergence else None,
        same_top=divergence.same_top if divergence else None,
        divergence_tokens=divergence.tokens if divergence else None,
    )
