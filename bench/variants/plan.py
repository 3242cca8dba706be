"""What is the same for every variant of a sweep: where things lie, and how each is measured."""

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench import provenance
from bench.analysis.statistics import DEFAULT_ROUNDS
from bench.errors import BenchError
from bench.gates.gate import NANO_FOLDER
from bench.gates.options import GateOptions
from bench.load.protocol import Category
from bench.variants.variant import Variant
from convert.prune_vocab import label
from convert.recipes import Recipe, known_recipes, load_recipe

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
LIGHT = Effort(rounds=7, runs=1, warmup=1, stream_runs=0)
"""For nano: a minute or two a variant on two cores. Intervals of fewer rounds are somewhat too narrow."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of one sweep. ``gates`` None leaves the quality gates out."""

    source: str
    model: str
    models: Path
    store: Path
    gates: GateOptions | None
    protocols: tuple[str, ...]
    categories: tuple[Category, ...]
    effort: Effort
    seed: int
    threads: int | None
    convert_options: tuple[str, ...]
    start_timeout: float
    timeout: float

    def gguf(self, variant: Variant) -> Path:
        """Where the converter puts the variant's weights. Raises as `kept_vocabulary` does."""
        kept = kept_vocabulary(self.convert_options)
        recipe = recipe_of(variant)
        # a recipe that cuts the vocabulary itself is named for what it does
        cut = None if recipe is not None and recipe.keep_vocab else kept
        return self.models / f"{'-'.join(filter(None, (self.model, label(cut), variant.level)))}.gguf"

    def server_settings(self, variant: Variant) -> dict[str, Any]:
        """What the variant's server is told."""
        return {**({"threads": self.threads} if self.threads else {}), **variant.server}

    def timing(self) -> dict[str, Any]:
        """What decides the latencies beside the variants; the number of rounds does not."""
        return {
            "endpoint": ENDPOINT,
            "protocols": list(self.protocols),
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
        return _digest({"source": self.source, "served": served, "timing": self.timing(), **_machine()})

    def gates_fingerprint(self, variant: Variant, sha256: str) -> str:
        """Of one variant's scores: they do not depend on the others', nor on its name."""
        asked = None if self.gates is None else self.gates.settings()
        served = [sha256, self.server_settings(variant)]
        return _digest({"served": served, "gates": asked, **_machine()})


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


def brings_items(source: str) -> bool:
    """Whether a checkpoint's folder has held-out items and recorded answers of its own, as nano's has."""
    folder = Path(source)
    return (folder / "heldout").is_dir() and (folder / "reference.json").is_file()


def items_folder(source: str) -> Path:
    """Where the nano gates' items are: beside the checkpoint, else the bundled model's."""
    return Path(source) if brings_items(source) else NANO_FOLDER


def model_name(source: str) -> str:
    """The first part of the GGUFs' names: a folder's own, or the last part of a hub id."""
    folder = Path(source).expanduser()
    return folder.resolve().name if folder.is_dir() else source.rpartition("/")[2]


def _machine() -> dict[str, Any]:
    return {
        "format": FORMAT,
        "card": provenance.card(),
        "processor": provenance.host()["processor"],
        "llama-cpp-python": version("llama-cpp-python"),
    }


def _digest(parts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]
