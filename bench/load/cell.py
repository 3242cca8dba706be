"""The smallest part of a workload: what one server does before the next has its turn.

A cell makes its prompts from the seed, its name and the round, so that every server is sent the same ones;
the commands for one server and the comparison of several share it.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from bench import provenance
from bench.arguments import PromptOptions, ServerOptions
from bench.errors import BenchError
from bench.load.client import Client
from bench.load.prompts import Kind, Prompts, find_prompts
from bench.load.vocabulary import Vocabulary, find_vocabulary
from bench.servers.counters import read_counters, record_growth
from bench.store import Run
from bench.terminal import Bar

MOST_FAILURES = 3
"""Requests in a row that may fail, each perhaps by a time-out of minutes, before a server is given up."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server under load. ``model`` stands in its requests, None: they name none."""

    name: str
    client: Client
    model: str | None = None

    @classmethod
    async def of(cls, options: ServerOptions, client: Client, *, chat: bool) -> Self:
        """As the command line says; a chat names the listed model where none is given."""
        model = options.model or (await client.model() if chat else None)
        return cls(options.name or client.url, client, model)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a cell found in a round. ``rows``: values of each request, then of the cell; ``answers``: the
    texts in the order of the prompts, None for those that failed; ``said``: the round in a few words."""

    rows: list[dict[str, float]]
    answers: list[str | None]
    said: str
    errors: list[str] = field(default_factory=list)

    @property
    def all_failed(self) -> bool:
        """Whether not one request was answered."""
        return bool(self.errors) and all(answer is None for answer in self.answers)


class Cell(ABC):
    """``workload`` and ``name`` are the store's ``workload`` and ``cell``."""

    workload: str
    name: str

    @abstractmethod
    async def prepare(self, rounds: int) -> None:
        """Make every prompt, so that nothing but requests happens while time is taken."""

    @abstractmethod
    async def warm_up(self, target: Target, *, again: bool = False) -> None:
        """Untimed requests; fewer where the target has had this cell before (``again``).

        Raises BenchError when one fails: a server that cannot answer is not measured.
        """

    @abstractmethod
    async def measure(self, target: Target, round: int, bar: Bar) -> Measured:
        """Round ``round``, from 1. A request that fails is recorded, whatever the reason."""

    def requests(self) -> int:
        """Timed requests in a round, for the progress bar."""
        return 1

    def rng(self, seed: int, round: int, *parts: object) -> random.Random:
        """Of this cell in this round, the same for every target."""
        return random.Random("/".join(map(str, (seed, self.workload, self.name, round, *parts))))


class Supply:
    """Prompts by kind and the tokenizer they are counted with, found at the first use."""

    def __init__(
        self, client: Client, vocabulary: Vocabulary | None, model: str | None, options: PromptOptions
    ):
        self.vocabulary = vocabulary
        self.options = options
        self._client = client
        self._model = model
        self._made: dict[Kind, Prompts] = {}

    @classmethod
    async def of(cls, client: Client, model: str | None, options: PromptOptions) -> Self:
        """The tokenizer that the options name, else the server's."""
        return cls(client, await find_vocabulary(options.tokenizer, client, model), model, options)

    @property
    def counted_by(self) -> str:
        """Whose token counts the figures rest on."""
        return self.vocabulary.source if self.vocabulary is not None else "the server's own usage"

    async def prompts(self, kind: Kind | None = None) -> Prompts:
        """Of a kind, else as the options say."""
        text = self.options.text if kind is None else None
        wanted = kind or self.options.prompts
        if wanted not in self._made:
            self._made[wanted] = await find_prompts(
                self._client, self.vocabulary, self._model, kind=wanted, seed=self.options.seed, text=text
            )
        return self._made[wanted]


def record(run: Run, target: Target, cell: Cell, round: int, found: Measured) -> None:
    """Append a round to the run."""
    for values in found.rows:
        run.add(target.name, cell.workload, cell.name, round, values)


async def measure_counted(run: Run, target: Target, cell: Cell, round: int, bar: Bar) -> Measured:
    """A round, recorded with what the server's own counters say of it, where it has some of ours."""
    before = await read_counters(target.client)
    found = await cell.measure(target, round, bar)
    record(run, target, cell, round, found)
    after = await read_counters(target.client) if before else {}
    record_growth(run, target.name, cell.workload, cell.name, round, before, after)
    return found


async def measure_alone(run: Run, target: Target, cells: Sequence[tuple[Cell, int]]) -> list[str]:
    """One server: cell after cell, each with its number of rounds. Returns the errors of failed requests.

    A cell that cannot be warmed up ends the run with BenchError; what was measured before is recorded.
    """
    errors: list[str] = []
    for cell, rounds in cells:
        await cell.prepare(rounds)
        await cell.warm_up(target)
        in_a_row = 0
        with Bar(f"{cell.workload}, {cell.name}", total=rounds * cell.requests()) as bar:
            for round in range(1, rounds + 1):
                found = await measure_counted(run, target, cell, round, bar)
                errors += found.errors
                in_a_row = in_a_row + len(found.errors) if found.all_failed else 0
                if in_a_row >= MOST_FAILURES:
                    raise BenchError(
                        f"{cell.workload}, {cell.name}: {in_a_row} requests in a row failed: {errors[-1]}"
                    )
    return errors


async def describe(run: Run, target: Target, supply: Supply) -> None:
    """Take down what the server says of itself, and who counts its tokens."""
    run.describe(target.name, **await provenance.about_server(target.client), counted_by=supply.counted_by)
