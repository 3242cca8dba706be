"""The competition's rules that can be checked before the upload of an image.

They are size, quality gates, number of parameters (drafter included) and a start without a network. A rule
that cannot be checked counts as broken, unless --skip names it.
"""

import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from time import monotonic, sleep

import gguf

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.gates.score import WORKLOAD, gate_scores
from qwen_serve.bench.store import load
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.safetensors import read_header
from qwen_serve.convert.source import resolve

COMPETITION = ("mmlu_pro", "ifeval", "gpqa_diamond")
"""The gates that must pass; GSM8K is only the hackathon's."""

LARGEST_IMAGE = 20_000_000_000
"""Maximum size of image.tar.gz, in bytes."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule's outcome, and what was found."""

    name: str
    kept: bool
    found: str


def check(rules: Mapping[str, Callable[[], Rule]], skip: tuple[str, ...]) -> list[Rule]:
    """The outcomes of all rules except those in `skip`. Raises BenchError if `skip` has an unknown name."""
    if unknown := [name for name in skip if name not in rules]:
        raise BenchError(f"--skip {unknown[0]}: want some of {', '.join(rules)}")
    return [rule() for name, rule in rules.items() if name not in skip]


def size_rule(image: Path) -> Rule:
    """The image is at most `LARGEST_IMAGE` bytes."""
    size = image.stat().st_size
    return Rule("size", size <= LARGEST_IMAGE, f"{size / 1e9:.2f} GB of {LARGEST_IMAGE / 1e9:.0f} GB")


def gates_rule(store: Path | None) -> Rule:
    """The newest run of each gate of `COMPETITION` in the store passed."""
    if store is None:
        return Rule("gates", False, "no --gates: the store of `qwen-bench quality --tasks official`")
    results = load([store])
    asked = results.of(workload=WORKLOAD)
    verdicts: dict[str, str] = {}
    for run in results.manifests:  # oldest first
        for _, rows in asked[asked["run"] == run].groupby("subject"):
            verdicts |= {score.gate: str(score.verdict) for score in gate_scores(rows)}
    wanted = {name: verdicts.get(name, "not measured") for name in COMPETITION}
    found = ", ".join(f"{name}: {verdict}" for name, verdict in wanted.items())
    return Rule("gates", all(verdict == "pass" for verdict in wanted.values()), found)


def parameters_rule(models: tuple[Path, ...], original: str | None) -> Rule:
    """All GGUFs together have at most as many parameters as the original checkpoint."""
    if not models or original is None:
        missing = "--model" if not models else "--original"
        return Rule("parameters", False, f"no {missing}: every GGUF of the image, and the checkpoint")
    ours, allowed = sum(map(gguf_parameters, models)), checkpoint_parameters(original)
    return Rule("parameters", ours <= allowed, f"{ours:,} of {allowed:,}")


def gguf_parameters(path: Path) -> int:
    """The number of elements of all tensors of a GGUF."""
    try:
        tensors = gguf.GGUFReader(path).tensors
    except (OSError, ValueError) as error:
        raise BenchError(f"--model {path}: {error}") from error
    return sum(int(tensor.n_elements) for tensor in tensors)


def checkpoint_parameters(original: str) -> int:
    """The number of elements of all tensors of a checkpoint, with vision tower and MTP head.

    `original`: a folder or a hub id. Files that a conversion downloaded are read from the hub's cache.
    """
    try:
        files = sorted(resolve(original).path.glob("*.safetensors"))
        if not files:
            raise BenchError(f"--original {original}: no *.safetensors there")
        return sum(prod(tensor.shape) for file in files for tensor in read_header(file))
    except (ConvertError, OSError) as error:
        why = str(error).removeprefix(f"--src {original}: ")
        raise BenchError(f"--original {original}: {why}") from error


def offline_rule(image: Path, timeout: float) -> Rule:
    """Under docker, without a network, the image becomes healthy within ``timeout`` seconds."""
    docker = shutil.which("docker")
    if docker is None:
        return Rule("offline", False, "docker is not here; --skip offline leaves this rule to you")

    def run(*words: str) -> str:
        done = subprocess.run([docker, *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchError(f"docker {words[0]}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout.strip()

    try:
        loaded = run("load", "--quiet", "--input", str(image)).rpartition(": ")[2]
        container = run("run", "--detach", "--network", "none", "--gpus", "all", loaded, "serve")
    except BenchError as error:
        return Rule("offline", False, str(error))
    began, state = monotonic(), ""
    try:
        while monotonic() - began < timeout:
            state = run("inspect", "--format", "{{.State.Status}} {{.State.Health.Status}}", container)
            if state == "running healthy":
                return Rule("offline", True, f"healthy after {monotonic() - began:.0f} s")
            if not state.startswith("running"):
                break
            sleep(1)
        last = run("logs", "--tail", "3", container).replace("\n", " | ")
        return Rule("offline", False, f"{state} after {monotonic() - began:.0f} s: {last}")
    finally:
        run("rm", "--force", container)
