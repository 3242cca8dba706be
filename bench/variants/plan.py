"""What is the same for every variant of a sweep: where things lie, and how each is measured."""

import argparse
import hashlib
import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench import latency, quality
from bench.gates.gate import NANO_FOLDER
from bench.variants.result import Values
from bench.variants.variant import Variant

FORMAT = 1  # raise it when the same settings come to mean another measurement
SOME = 0.1  # of each benchmark's items
NONE = "none"


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is timed. Runs are spread over ``rounds``, each of which visits all variants in turn."""

    runs: int
    warmup: int
    stream_runs: int
    rounds: int

    def share(self, runs: int, number: int) -> int:
        """How many of ``runs`` fall to round ``number``, from 1."""
        return runs // self.rounds + (number <= runs % self.rounds)


FULL = Effort(runs=50, warmup=5, stream_runs=10, rounds=1)
LIGHT = Effort(runs=3, warmup=1, stream_runs=0, rounds=3)  # a minute or two a variant for nano on two cores


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of one sweep. ``tasks`` "none" leaves the gates out; ``limit`` None asks every item."""

    command: list[str]
    source: str
    model: str
    models: Path
    out: Path
    tasks: str
    limit: float | None
    seed: int
    concurrency: int
    data: tuple[tuple[str, Path], ...]
    nano: Path
    protocol: str
    categories: str
    effort: Effort
    threads: int | None
    convert_options: tuple[str, ...]
    start_timeout: float
    timeout: float
    card: str | None
    notes: tuple[str, ...]

    def gguf(self, variant: Variant) -> Path:
        """Where the converter puts the variant's weights."""
        return self.models / f"{self.model}-{variant.level}.gguf"

    def result(self, variant: Variant) -> Path:
        """The variant's result file."""
        return self.out / f"{variant.name}.json"

    def raw(self, variant: Variant) -> Path:
        """The folder of the variant's single measurements and of its server's log."""
        return self.out / "raw" / variant.name

    def quality_settings(self) -> Values:
        """What decides the gates' scores beside the variant."""
        return {
            "tasks": self.tasks,
            "limit": self.limit,
            "seed": self.seed,
            "concurrency": self.concurrency,
        }

    def latency_settings(self) -> Values:
        """What decides the latencies beside the variant."""
        return {
            "protocol": self.protocol,
            "categories": self.categories,
            "runs": self.effort.runs,
            "warmup": self.effort.warmup,
            "stream_runs": self.effort.stream_runs,
            "rounds": self.effort.rounds,
            "seed": self.seed,
        }

    def fingerprint(self, variant: Variant, sha256: str) -> str:
        """Of everything that makes the variant's figures what they are, its name and prose left out."""
        parts = {
            "format": FORMAT,
            "weights": sha256,
            "server": self.server_settings(variant),
            "quality": self.quality_settings(),
            "data": sorted((name, str(path)) for name, path in self.data),
            "latency": self.latency_settings(),
            "llama-cpp-python": version("llama-cpp-python"),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]

    def server_settings(self, variant: Variant) -> dict[str, Any]:
        """What the variant's server is told."""
        return {**({"threads": self.threads} if self.threads else {}), **variant.server}

    def latency_arguments(self, url: str, out: Path, number: int) -> argparse.Namespace:
        """Options of ``bench.latency`` for the server at ``url`` in round ``number``, from 1."""
        effort = self.effort
        arguments = ["--url", url, "--out", str(out), "--timeout", str(self.timeout)]
        arguments += ["--protocol", self.protocol, "--categories", self.categories, "--baseline", "none"]
        arguments += ["--runs", str(effort.share(effort.runs, number)), "--warmup", str(effort.warmup)]
        arguments += ["--stream-runs", str(effort.share(effort.stream_runs, number))]
        arguments += ["--seed", str(self.seed + number)]
        return self._parse(latency.parser(), arguments)

    def quality_arguments(self, url: str, out: Path) -> argparse.Namespace:
        """Options of ``bench.quality`` for the server at ``url``."""
        arguments = ["--url", url, "--out", str(out), "--timeout", str(self.timeout)]
        arguments += ["--tasks", self.tasks, "--seed", str(self.seed), "--nano", str(self.nano)]
        arguments += ["--concurrency", str(self.concurrency)]
        if self.limit is not None:
            arguments += ["--limit", str(self.limit)]
        for name, folder in self.data:
            arguments += ["--data", f"{name}={folder}"]
        return self._parse(quality.parser(), arguments)

    def _parse(self, parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
        if self.card is not None:
            arguments = [*arguments, "--card", self.card]
        parsed = parser.parse_args(arguments)
        parsed.command = self.command
        return parsed


def default_tasks(source: str) -> tuple[str, Path]:
    """The gates that suit a checkpoint, nano's if it brings held-out items; and the folder of those."""
    folder = Path(source)
    if (folder / "heldout").is_dir() and (folder / "reference.json").is_file():
        return "nano", folder
    return "official", NANO_FOLDER


def model_name(source: str) -> str:
    """The first part of the GGUFs' names: a folder's own, or the last part of a hub id."""
    folder = Path(source).expanduser()
    return folder.resolve().name if folder.is_dir() else source.rpartition("/")[2]
