"""What is the same for every variant of a sweep: where things lie, and how each is measured."""

import argparse
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from qwen_serve.bench import provenance
from qwen_serve.bench.analysis.statistics import DEFAULT_ROUNDS
from qwen_serve.bench.arguments import Natural, Positive, StoreOptions, parsed_by
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.gates.gate import NANO_FOLDER
from qwen_serve.bench.gates.options import Data, GateOptions, Limit
from qwen_serve.bench.load.latency import Categories, Protocol, protocols_of
from qwen_serve.bench.load.protocol import ALL_CATEGORIES
from qwen_serve.convert.prune_vocab import label
from qwen_serve.convert.recipes import Recipe, known_recipes, load_recipe
from qwen_serve.convert.source import Source
from qwen_serve.server.variant import Variant

FORMAT = 2  # raise it when the same settings come to mean another measurement
ENDPOINT, STREAM_ENDPOINT = "/invocations", "/v1/completions"


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is timed: in each of ``rounds`` every variant in turn gets a server of its own, ``warmup``
    untimed requests a category and protocol, then ``runs`` whole ones and ``stream_runs`` streamed ones."""

    rounds: int
    runs: int
    warmup: int
    stream_runs: int


FULL = Effort(rounds=DEFAULT_ROUNDS, runs=5, warmup=2, stream_runs=1)
LIGHT = Effort(rounds=8, runs=1, warmup=1, stream_runs=0)
"""For nano: a minute or two a variant on two cores."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the variants are made and measured."""

    src: str
    """The checkpoint, a folder or a hub id."""
    models: Path = Path("models")
    """Folder of the GGUFs, those that exist and new ones."""
    name: str | None = None
    """First part of the GGUFs' names (default: the source's)."""
    convert_options: Annotated[tuple[str, ...], parsed_by(lambda text: tuple(shlex.split(text)))] = ()
    """Further options of qwen-convert: --convert-options='--no-kld --keep-vocab 100000'."""
    threads: Positive | None = None
    """CPU threads of converter and server (default: their own choice)."""
    tasks: str | None = None
    """nano, official, none, or names as in qwen-bench quality (default: nano for a source with held-out items
    of its own, official for any other)."""
    limit: Limit = 0.1
    """Items of each subtask: a share below 1, a number, or all."""
    concurrency: Positive = 8
    """Concurrent requests of a gate."""
    data: Data = ()
    """GATE=FOLDER: a dataset's local copy; may be repeated."""
    rounds: Natural | None = None
    """Timed turns of each variant, so that drift of the machine affects all alike (default: 10; 7 for nano).
    0: nothing is timed."""
    runs: Positive | None = None
    """Timed requests per category, protocol and round (default: 5; 1 for nano)."""
    warmup: Natural | None = None
    """Untimed requests before them (default: 2; 1 for nano)."""
    stream_runs: Natural | None = None
    """Streamed requests per category, protocol and round, for TTFT and ITL (default: 1; 0 for nano)."""
    protocol: Protocol = "both"
    """The same prompt again (official), another one each time (distinct), or both."""
    categories: Categories = ALL_CATEGORIES
    """One or more of short, medium and long."""
    seed: int = 0
    """Seed of the drawn items and of the prompts."""
    start_timeout: float = 900.0
    """Seconds a server may take to start."""
    timeout: float = 3600.0
    """Seconds a request may take."""
    store: StoreOptions = StoreOptions()

    @property
    def has_items(self) -> bool:
        """Whether the source has held-out items and recorded answers of its own, as nano's folder has."""
        folder = Path(self.src)
        return (folder / "heldout").is_dir() and (folder / "reference.json").is_file()

    @property
    def model(self) -> str:
        """The first part of the GGUFs' names, as the converter has it."""
        path = Path(self.src).expanduser()
        return self.name or (Source(path).name if path.exists() else self.src.rpartition("/")[2])

    @cached_property
    def effort(self) -> Effort:
        """How much is timed, by default what suits the source."""
        usual = LIGHT if self.has_items else FULL
        return Effort(
            rounds=usual.rounds if self.rounds is None else self.rounds,
            runs=usual.runs if self.runs is None else self.runs,
            warmup=usual.warmup if self.warmup is None else self.warmup,
            stream_runs=usual.stream_runs if self.stream_runs is None else self.stream_runs,
        )

    @cached_property
    def gates(self) -> GateOptions | None:
        """What is asked; None leaves the quality gates out."""
        asked = self.tasks or ("nano" if self.has_items else "official")
        if asked == "none":
            return None
        return GateOptions(
            tasks=asked,
            limit=self.limit,
            seed=self.seed,
            concurrency=self.concurrency,
            data=self.data,
            nano=Path(self.src) if self.has_items else NANO_FOLDER,
        )

    def gguf(self, variant: Variant) -> Path:
        """Where the converter puts the variant's weights. Raises as `kept_vocabulary` does."""
        kept = kept_vocabulary(self.convert_options)
        recipe = recipe_of(variant)
        # a recipe that cuts the vocabulary itself is named for what it does
        cut = None if recipe is not None and recipe.keep_vocab else kept
        return self.models / f"{'-'.join(filter(None, (self.model, label(cut), variant.level)))}.gguf"

    def server_settings(self, variant: Variant) -> dict[str, Any]:
        """What the variant's server is told."""
        return {**({"threads": self.threads} if self.threads else {}), **variant.settings}

    def timing(self) -> dict[str, Any]:
        """What decides the latencies beside the variants; the number of rounds does not."""
        return {
            "endpoint": ENDPOINT,
            "protocols": list(protocols_of(self.protocol)),
            "categories": [category.name for category in self.categories],
            "runs": self.effort.runs,
            "warmup": self.effort.warmup,
            "stream_runs": self.effort.stream_runs,
            "seed": self.seed,
        }

    def fingerprint(self, variants: Sequence[Variant], sha256: Mapping[str, str]) -> str:
        """Of a comparison: all variants, how they are timed, and on what machine. Rounds of the same
        comparison belong together, whenever they were measured."""
        served = {one.name: [sha256[one.name], self.server_settings(one)] for one in variants}
        return _digest({"source": self.src, "served": served, "timing": self.timing()})

    def gates_fingerprint(self, variant: Variant, sha256: str) -> str:
        """Of one variant's scores: they do not depend on the others', nor on its name."""
        asked = None if self.gates is None else self.gates.settings()
        return _digest({"served": [sha256, self.server_settings(variant)], "gates": asked})


def recipe_of(variant: Variant) -> Recipe | None:
    """The variant's recipe; None for the whole model in a float type."""
    if variant.recipe is not None:
        return load_recipe(variant.recipe)
    return load_recipe(variant.level) if variant.level in known_recipes() else None


def kept_vocabulary(options: Sequence[str]) -> int | None:
    """The converter's --keep-vocab among further options, which names its files.

    Raises BenchError for options that the sweep sets itself, and for a --keep-vocab that is no number.
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--keep-vocab", type=int)
    own = ("src", "quant", "recipe", "out", "name", "threads")
    for name in own:
        parser.add_argument(f"--{name}", nargs="?", const="")
    try:
        known, _ = parser.parse_known_args(list(options))
    except argparse.ArgumentError as error:
        raise BenchError(f"--convert-options: {error}") from error
    for name in own:
        if getattr(known, name) is not None:
            raise BenchError(f"--convert-options: --{name} is set by the sweep, not here")
    kept: int | None = known.keep_vocab
    return kept


def _digest(parts: Mapping[str, Any]) -> str:
    """Of these parts on this machine."""
    machine = {
        "format": FORMAT,
        "card": provenance.card(),
        "processor": provenance.host()["processor"],
        "llama-cpp-python": version("llama-cpp-python"),
    }
    return hashlib.sha256(json.dumps({**parts, **machine}, sort_keys=True).encode()).hexdigest()[:24]
