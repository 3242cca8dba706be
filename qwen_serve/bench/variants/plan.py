"""Common settings of a sweep's variants: files, and how each variant is measured."""

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

FORMAT = 2  # increment it if the same settings give other measurements
ENDPOINT, STREAM_ENDPOINT = "/invocations", "/v1/completions"


@dataclass(frozen=True, slots=True)
class Effort:
    """Number of requests. In each of ``rounds`` every variant in turn gets a server of its own. For each
    category and protocol ``warmup`` untimed requests are sent, then ``runs`` whole ones and ``stream_runs``
    streamed ones."""

    rounds: int
    runs: int
    warmup: int
    stream_runs: int


FULL = Effort(rounds=DEFAULT_ROUNDS, runs=5, warmup=2, stream_runs=1)
LIGHT = Effort(rounds=8, runs=1, warmup=1, stream_runs=0)
"""For nano: one or two minutes for each variant on two cores."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings for making and measuring the variants."""

    src: str
    """Checkpoint: a folder or a hub id."""
    models: Path = Path("models")
    """Folder of existing and new GGUFs."""
    name: str | None = None
    """First part of the GGUFs' names (default: the source's name)."""
    convert_options: Annotated[tuple[str, ...], parsed_by(lambda text: tuple(shlex.split(text)))] = ()
    """Further options of qwen-convert, such as --convert-options='--no-kld --keep-vocab 100000'."""
    threads: Positive | None = None
    """CPU threads of converter and server (default: their own defaults)."""
    tasks: str | None = None
    """Quality gates: nano, official, none, or names as in qwen-bench quality (default: nano for a source with
    held-out items, else official)."""
    limit: Limit = 0.1
    """Number of items of each subtask, a share of them below 1, or all."""
    concurrency: Positive = 8
    """Number of concurrent requests of a gate."""
    data: Data = ()
    """Local copy of a gate's dataset, as GATE=FOLDER; may be repeated."""
    rounds: Natural | None = None
    """Timed turns of each variant; turns let drift of the machine affect all variants alike (default: 10; 8
    for nano). 0: time nothing."""
    runs: Positive | None = None
    """Timed requests of each category, protocol and round (default: 5; 1 for nano)."""
    warmup: Natural | None = None
    """Untimed requests before the timed ones (default: 2; 1 for nano)."""
    stream_runs: Natural | None = None
    """Streamed requests of each category, protocol and round, for TTFT and ITL (default: 1; 0 for nano)."""
    protocol: Protocol = "both"
    """Prompts: the same one again (official), another one each time (distinct), or both."""
    categories: Categories = ALL_CATEGORIES
    """Lengths of prompt and answer: one or more of short, medium and long, separated by commas."""
    seed: int = 0
    """Seed of the drawn items and of the prompts."""
    start_timeout: float = 900.0
    """Time limit of a server's start, in seconds."""
    timeout: float = 3600.0
    """Time limit of a request, in seconds."""
    store: StoreOptions = StoreOptions()

    @property
    def has_items(self) -> bool:
        """Whether the source has held-out items and recorded outcomes, like nano's folder."""
        folder = Path(self.src)
        return (folder / "heldout").is_dir() and (folder / "reference.json").is_file()

    @property
    def model(self) -> str:
        """The first part of the GGUFs' names, as the converter chooses it."""
        path = Path(self.src).expanduser()
        return self.name or (Source(path).name if path.exists() else self.src.rpartition("/")[2])

    @cached_property
    def effort(self) -> Effort:
        """Number of requests; the defaults depend on the source."""
        usual = LIGHT if self.has_items else FULL
        return Effort(
            rounds=usual.rounds if self.rounds is None else self.rounds,
            runs=usual.runs if self.runs is None else self.runs,
            warmup=usual.warmup if self.warmup is None else self.warmup,
            stream_runs=usual.stream_runs if self.stream_runs is None else self.stream_runs,
        )

    @cached_property
    def gates(self) -> GateOptions | None:
        """Options of the quality gates; None: no gates."""
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
        """The GGUF that the converter writes for the variant. Raises as `kept_vocabulary` does."""
        kept = kept_vocabulary(self.convert_options)
        recipe = recipe_of(variant)
        # a recipe that prunes the vocabulary has a name of its own
        cut = None if recipe is not None and recipe.keep_vocab else kept
        return self.models / f"{'-'.join(filter(None, (self.model, label(cut), variant.level)))}.gguf"

    def server_settings(self, variant: Variant) -> dict[str, Any]:
        """The settings of the variant's server."""
        return {**({"threads": self.threads} if self.threads else {}), **variant.settings}

    def timing(self) -> dict[str, Any]:
        """Settings that latencies depend on, without the number of rounds."""
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
        """Digest of a comparison: variants, timing settings and machine. Rounds with the same fingerprint
        belong together, whenever they were measured."""
        served = {one.name: [sha256[one.name], self.server_settings(one)] for one in variants}
        return _digest({"source": self.src, "served": served, "timing": self.timing()})

    def gates_fingerprint(self, variant: Variant, sha256: str) -> str:
        """Digest of what one variant's scores depend on; other variants and its name are not part of it."""
        asked = None if self.gates is None else self.gates.settings()
        return _digest({"served": [sha256, self.server_settings(variant)], "gates": asked})


def recipe_of(variant: Variant) -> Recipe | None:
    """The variant's recipe; None for an unquantized model."""
    if variant.recipe is not None:
        return load_recipe(variant.recipe)
    return load_recipe(variant.level) if variant.level in known_recipes() else None


def kept_vocabulary(options: Sequence[str]) -> int | None:
    """The value of --keep-vocab among the converter's options, which is part of its files' names.

    Raises BenchError for options that the sweep sets itself, and for a --keep-vocab that is not a number.
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
    """Digest of ``parts`` and this machine."""
    machine = {
        "format": FORMAT,
        "card": provenance.card(),
        "processor": provenance.host()["processor"],
        "llama-cpp-python": version("llama-cpp-python"),
    }
    return hashlib.sha256(json.dumps({**parts, **machine}, sort_keys=True).encode()).hexdigest()[:24]
