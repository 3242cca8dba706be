"""The smallest part of a workload: what one server does before the next server is measured.

The prompts of a cell depend only on the seed, its name and the round, so all servers get the same ones. The
commands for one server and the comparison of several servers share this code.
"""

import asyncio
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

from qwen_serve.bench import provenance
from qwen_serve.bench.arguments import PromptOptions, ServerOptions, StoreOptions
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.load.client import Client, clip
from qwen_serve.bench.load.counters import read_counters, record_growth
from qwen_serve.bench.load.generator import (
    Job,
    Sender,
    Sent,
    Target,
    beside,
    closed_loop,
    open_loop,
    values_of,
)
from qwen_serve.bench.load.goodput import Limits
from qwen_serve.bench.load.prompts import Kind, Prompts, find_prompts
from qwen_serve.bench.load.protocol import WARM_UPS
from qwen_serve.bench.load.vocabulary import Vocabulary, find_vocabulary
from qwen_serve.bench.store import Run
from qwen_serve.bench.terminal import Bar

MOST_FAILURES = 3
"""Measuring a server ends after this many failed requests in a row, since each may be a timeout of
minutes."""
SUM_TOKENS = 64

TOKENS = {"prompt_tokens", "cached_tokens", "claimed_tokens", "recounted_tokens", "verified_tokens"}
WHOLE = {"failed", "latency", *TOKENS}
STREAMED = {"failed", "ttft", "itl", "longest_gap", "chunks"}
"""`WHOLE`: metrics of requests that are not streamed. `STREAMED`: additional metrics of streamed ones."""
LOADED = {*WHOLE, *STREAMED, "lateness"}


@dataclass
class PromptSource:
    """Prompts by kind, and the tokenizer that counts their tokens (None: the server's usage is the only
    count)."""

    vocabulary: Vocabulary | None
    options: PromptOptions
    _made: dict[Kind, Prompts] = field(default_factory=dict)

    @classmethod
    async def of(cls, client: Client, model: str | None, options: PromptOptions) -> Self:
        """Prompts with the tokenizer that the options name, else the server's."""
        return cls(await find_vocabulary(options.tokenizer, client, model), options)

    @property
    def counter(self) -> Vocabulary | None:
        """What counts the answers' tokens beside the server."""
        return self.vocabulary if self.options.recount else None

    @property
    def counted_by(self) -> str:
        """The source of the token counts."""
        return self.counter.source if self.counter is not None else "the server's own usage"

    async def prompts(self, kind: Kind | None = None) -> Prompts:
        """The source of prompts of a kind (default: the options')."""
        text = self.options.text if kind is None else None
        wanted = kind or self.options.prompts
        if wanted not in self._made:
            self._made[wanted] = await find_prompts(
                self.vocabulary, kind=wanted, seed=self.options.seed, text=text
            )
        return self._made[wanted]


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of a cell in one round. ``rows``: the values of each request, then those of the cell.
    ``answers``: texts in the order of the prompts, None for failed requests."""

    rows: list[dict[str, float]]
    answers: list[str | None]
    errors: list[str]

    @property
    def all_failed(self) -> bool:
        return bool(self.errors) and all(answer is None for answer in self.answers)


@dataclass(kw_only=True)
class Cell:
    """One load. ``workload`` and ``name``: as in the store; ``rounds``: how often it is measured.

    ``make``: makes the jobs of a round; round 0 is the warm-up. ``clients`` send them, or they are sent at a
    ``rate`` in requests a second (then ``clients`` is the concurrency of the warm-up). ``kept``: the metrics
    of a request that are recorded. ``load``: also record the rates of the whole cell. ``spot_checks``: number
    of sums asked during the warm-up. ``prime``: makes untimed requests before a round's jobs.
    """

    workload: str
    name: str
    rounds: int
    make: Callable[[int], Awaitable[Sequence[Job]]]
    source: PromptSource
    max_tokens: int
    ignore_eos: bool = False
    stream: bool = False
    endpoint: str | None = None
    kept: Set[str] = field(default_factory=lambda: WHOLE)
    clients: int = 1
    rate: float | None = None
    load: bool = False
    spot_checks: int = 0
    limits: Limits | None = None
    prime: Callable[[int], Awaitable[Sequence[Job]]] | None = None
    _jobs: list[Sequence[Job]] = field(default_factory=list)
    _primes: list[Sequence[Job]] = field(default_factory=list)
    _wrong: dict[str, list[str]] = field(default_factory=dict)

    async def prepare(self) -> None:
        """Make all prompts, so that making them is not timed."""
        self._jobs = [await self.make(round) for round in range(self.rounds + 1)]
        if self.prime is not None:
            self._primes = [await self.prime(round) for round in range(self.rounds + 1)]

    @property
    def requests(self) -> int:
        """Number of timed requests in a round."""
        return sum(len(job.turns) for job in self._jobs[1])

    async def warm_up(self, target: Target, *, again: bool = False) -> None:
        """Send untimed requests at the concurrency of the load, so that a server's one-time work for a batch
        size is not timed. ``again``: the target has had this cell before, so fewer are enough.

        Spot checks are sent within that concurrency. Raises BenchError if a request fails.
        """
        jobs = self._jobs[0][: min(WARM_UPS, self.clients)] if again else self._jobs[0]
        checks = [] if again else [Sum.draw(self.rng(0, at)) for at in range(self.spot_checks)]
        beside = min(len(checks), self.clients - 1)
        sender = self._sender(target)
        asker = replace(sender, max_tokens=SUM_TOKENS, ignore_eos=False, stream=False, endpoint=None)
        questions = [Job((check.question,), chat=True) for check in checks]
        if beside:
            sent, asked = await asyncio.gather(
                closed_loop(sender, jobs, self.clients - beside), closed_loop(asker, questions, beside)
            )
        else:
            sent = await closed_loop(sender, jobs, self.clients)
            asked = await closed_loop(asker, questions)
        if failed := [one.error for one in sent if one.error is not None]:
            raise BenchError(f"{self.workload}, {self.name}, warm-up: {failed[0]}")
        self._wrong[target.name] = [
            f"spot check: {check.question} got {reply.error or clip(reply.text or '')!r}"
            for check, reply in zip(checks, asked, strict=True)
            if not check.is_right(reply.text or "")
        ]

    async def measure(self, target: Target, round: int, bar: Bar) -> Measured:
        """Measure round ``round`` (from 1). Failed requests are recorded as such."""
        sender, jobs = self._sender(target), self._jobs[round]
        if self._primes:
            await closed_loop(sender, self._primes[round])

        def advance(one: Sent) -> None:
            bar.advance(note=f"{1000 * (one.ended - one.planned):,.0f} ms")

        async with beside(sender, self._jobs[0] or jobs):
            if self.rate is None:
                sent = await closed_loop(sender, jobs, self.clients, advance)
            else:
                sent = await open_loop(sender, jobs, self.rate, self.rng(round, "arrivals"), advance)
        rows = []
        for one in sent:
            values = await values_of(one, self.source.counter)
            rows.append({name: value for name, value in values.items() if name in self.kept})
            if self.limits is not None:
                rows[-1]["good"] = float(self.limits.kept_by(values))
        wrong = self._wrong.pop(target.name, []) if round == 1 else []
        if self.load:
            together = self._together(sent, rows)
            if round == 1 and self.spot_checks:
                together["spot_checks_failed"] = len(wrong)
            rows.append(together)
        errors = [one.error for one in sent if one.error is not None]
        return Measured(rows, [one.text for one in sent], [*errors, *wrong])

    def rng(self, round: int, *parts: object) -> random.Random:
        """A random generator for this cell and round, the same for every target."""
        seed = self.source.options.seed
        return random.Random("/".join(map(str, (seed, self.workload, self.name, round, *parts))))

    def _sender(self, target: Target) -> Sender:
        return Sender(target, self.max_tokens, self.ignore_eos, self.stream, self.endpoint)

    def _together(self, sent: list[Sent], rows: list[dict[str, float]]) -> dict[str, float]:
        """Rates over the wall time from the first planned start to the last end of a request."""
        wall = max(one.ended for one in sent) - min(one.planned for one in sent)
        verified, prompts, good = (
            sum(values.get(name, 0.0) for values in rows)
            for name in ("verified_tokens", "prompt_tokens", "good")
        )
        found = {"seconds": wall}
        if finished := sum(one.answer is not None for one in sent):
            found |= {"output_rate": verified / wall, "total_rate": (verified + prompts) / wall}
            found |= {"request_rate": finished / wall}
        return found | ({"goodput": good / wall} if self.limits is not None else {})


@dataclass(frozen=True, slots=True)
class Sum:
    """A spot check: a sum to compute. The answer is right if its last number is the sum."""

    left: int
    right: int

    @classmethod
    def draw(cls, rng: random.Random) -> Self:
        return cls(rng.randint(2, 40), rng.randint(2, 40))

    @property
    def question(self) -> str:
        return f"What is {self.left}+{self.right}?"

    def is_right(self, answer: str) -> bool:
        """Whether the last number in ``answer`` is the sum."""
        numbers = re.findall(r"\d+", answer)
        return bool(numbers) and numbers[-1] == str(self.left + self.right)


@asynccontextmanager
async def measuring(
    verb: str,
    server: ServerOptions,
    store: StoreOptions,
    prompts: PromptOptions,
    settings: Mapping[str, Any],
    *,
    chat: bool,
) -> AsyncIterator[tuple[Run, Target, PromptSource]]:
    """Connect to a server and begin a run. ``chat``: requests name a model, by default the first in
    /v1/models."""
    async with Client(server.url, timeout=server.timeout, api_key=server.api_key) as client:
        listed = server.model or await client.model()
        target = Target(server.name or client.url, client, listed if chat else server.model)
        local = provenance.is_local(server.url)
        with store.begin(verb, {**settings, **prompts.settings()}, local=local) as run:
            source = await PromptSource.of(client, listed, prompts)
            about = await provenance.about_server(client)
            run.describe(target.name, **about, counted_by=source.counted_by)
            yield run, target, source


async def measure_counted(run: Run, target: Target, cell: Cell, round: int, bar: Bar) -> Measured:
    """Measure and record a round, and the growth of the server's counters if it has qwen-serve's."""
    before = await read_counters(target.client)
    found = await cell.measure(target, round, bar)
    for values in found.rows:
        run.add(target.name, cell.workload, cell.name, round, values)
    after = await read_counters(target.client) if before else {}
    record_growth(run, target.name, cell.workload, cell.name, round, before, after)
    return found


async def measure_alone(run: Run, target: Target, cells: Sequence[Cell]) -> list[str]:
    """Measure one server, one cell after the other. Returns the errors of failed requests.

    Raises BenchError if the warm-up of a cell fails; earlier measurements stay recorded.
    """
    errors: list[str] = []
    for cell in cells:
        await cell.prepare()
        await cell.warm_up(target)
        in_a_row = 0
        with Bar(f"{cell.workload}, {cell.name}", total=cell.rounds * cell.requests) as bar:
            for round in range(1, cell.rounds + 1):
                found = await measure_counted(run, target, cell, round, bar)
                errors += found.errors
                in_a_row = in_a_row + len(found.errors) if found.all_failed else 0
                if in_a_row >= MOST_FAILURES:
                    raise BenchError(
                        f"{cell.workload}, {cell.name}: {in_a_row} requests in a row failed: {errors[-1]}"
                    )
    return errors
