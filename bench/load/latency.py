"""Latency of one request at a time, under both protocols."""

from typing import Annotated, Literal

from bench.arguments import (
    Natural,
    Positive,
    PromptOptions,
    ServerOptions,
    StoreOptions,
    comma_separated,
    positive_number,
)
from bench.errors import BenchError
from bench.load.cell import Cell, Measured, Supply, Target, describe, measure_alone
from bench.load.client import Client
from bench.load.generator import Sender, closed_loop, values_of
from bench.load.protocol import CATEGORIES, DISTINCT, OFFICIAL, Category, category
from bench.load.workloads import Job
from bench.provenance import is_local
from bench.report.latency import show_latency
from bench.store import Run
from bench.terminal import Bar

TOKENS = ("prompt_tokens", "cached_tokens", "claimed_tokens", "recounted_tokens", "verified_tokens")
WHOLE = {"failed", "latency", *TOKENS}
STREAMED = {"failed", "ttft", "itl", "longest_gap", "chunks"}
"""What is recorded of requests that are answered in one piece, and of streamed ones."""


class LatencyCell(Cell):
    """One category under one protocol, ``count`` requests a round, one after the other.

    Distinct prompts are other ones for every request. ``streamed`` requests bring TTFT and ITL, the others
    the latency; the two are cells of their own under one name.
    """

    def __init__(
        self,
        category: Category,
        protocol: str,
        supply: Supply,
        *,
        endpoint: str,
        streamed: bool,
        warmup: int,
        count: int = 1,
    ) -> None:
        self.workload = protocol
        self.name = category.name
        self._category = category
        self._supply = supply
        self._endpoint = endpoint
        self._streamed = streamed
        self._warmup = warmup
        self._count = count
        self._jobs: dict[int, list[Job]] = {}

    def requests(self) -> int:
        return self._count

    async def prepare(self, rounds: int) -> None:
        for round in range(rounds + 1):  # round 0 is the warm-up
            wanted = self._count if round else self._warmup
            self._jobs[round] = [Job((await self._prompt(round, at),), chat=False) for at in range(wanted)]

    async def warm_up(self, target: Target, *, again: bool = False) -> None:
        for job in self._jobs[0][: 1 if again else None]:
            (sent,) = await closed_loop(self._sender(target), [job], 1, lambda _: None)
            if sent.error is not None:
                raise BenchError(f"{self.name}, {self.workload}, warm-up: {sent.error}")

    async def measure(self, target: Target, round: int, bar: Bar) -> Measured:
        sent = await closed_loop(
            self._sender(target),
            self._jobs[round],
            1,
            lambda one: bar.advance(note=f"{1000 * one.seconds:,.0f} ms"),
        )
        kept = STREAMED if self._streamed else WHOLE
        rows = [
            {
                name: value
                for name, value in (await values_of(one, self._supply.vocabulary)).items()
                if name in kept
            }
            for one in sent
        ]
        return Measured(
            rows,
            answers=[one.text if one.answer is not None else None for one in sent],
            said=", ".join(f"{1000 * one.seconds:,.0f} ms" for one in sent),
            errors=[one.error for one in sent if one.error is not None],
        )

    def _sender(self, target: Target) -> Sender:
        return Sender(
            client=target.client,
            endpoint=self._endpoint,
            max_tokens=self._category.max_tokens,
            # the official body is kept to the letter
            ignore_eos=self.workload == DISTINCT and not self._supply.options.stop_at_eos,
            stream=self._streamed,
            model=target.model,
        )

    async def _prompt(self, round: int, at: int) -> str:
        if self.workload == OFFICIAL:
            return self._category.filler
        prompts = await self._supply.prompts()
        rng = self.rng(self._supply.options.seed, round, at, self._streamed)
        return await prompts.make(self._category.prompt_tokens, rng)


async def latency(
    *,
    server: ServerOptions = ServerOptions(),
    store: StoreOptions = StoreOptions(),
    prompts: PromptOptions = PromptOptions(),
    protocol: Literal["both", "official", "distinct"] = "both",
    runs: Positive = 50,
    warmup: Natural = 5,
    stream_runs: Natural | None = None,
    categories: Annotated[tuple[Category, ...], comma_separated(category)] = tuple(CATEGORIES.values()),
    endpoint: str = "/invocations",
    stream_endpoint: str = "/v1/completions",
    baseline: str = "official",
) -> int:
    """Latency of one request at a time: the same prompt again (official), and another one each time
    (distinct).

    The official protocol sends the same repeated filler every time, so prompt caches and lossless speculation
    decide it; the distinct one sends another prompt of the exact same length every time. Both are always
    shown.

    Parameters
    ----------
    runs
        Timed requests per category and protocol.
    warmup
        Untimed requests before them.
    stream_runs
        Streamed requests, for TTFT and ITL; 0 for none (as many as --runs).
    categories
        Some of short, medium and long.
    endpoint
        The timed endpoint.
    stream_endpoint
        Where TTFT and ITL are taken.
    baseline
        What speed-ups are against: official (BF16 on an A10G), none, or short=MS,medium=MS,long=MS.
    """
    against = read_baseline(baseline)
    chosen = (OFFICIAL, DISTINCT) if protocol == "both" else (protocol,)
    streams = runs if stream_runs is None else stream_runs
    settings = {
        "runs": runs,
        "warmup": warmup,
        "stream_runs": streams,
        "endpoint": endpoint,
        "stream_endpoint": stream_endpoint,
        "baseline": against,
        **prompts.settings(),
    }
    async with Client(server.url, timeout=server.timeout, api_key=server.api_key) as client:
        target = await Target.of(server, client, chat=False)
        with Run.begin(
            store.out,
            "latency",
            settings=settings,
            card=store.card,
            local=is_local(server.url),
            notes=store.note,
        ) as run:
            supply = await Supply.of(client, target.model or await client.model(), prompts)
            await describe(run, target, supply)
            cells: list[tuple[Cell, int]] = []
            for one in categories:
                for name in chosen:
                    cells.append((_cell(one, name, supply, endpoint, warmup), runs))
                    if streams:
                        cells.append(
                            (_cell(one, name, supply, stream_endpoint, min(warmup, 1), True), streams)
                        )
            try:
                errors = await measure_alone(run, target, cells)
            finally:
                show_latency(run.results())
    if errors:
        raise BenchError(f"{len(errors)} requests failed; the first: {errors[0]}")
    return 0


def read_baseline(text: str) -> dict[str, float]:
    """Milliseconds by category: "official", "none", or short=2582,medium=5441,long=6576. Raises
    BenchError."""
    if text == "official":
        return {name: one.official_ms for name, one in CATEGORIES.items()}
    found: dict[str, float] = {}
    for part in [] if text == "none" else text.split(","):
        name, _, value = part.partition("=")
        try:
            found[category(name.strip()).name] = positive_number(value)
        except ValueError as error:
            raise BenchError(f"--baseline {part}: {error}; want official, none or short=MS,...") from error
    return found


def _cell(
    one: Category, protocol: str, supply: Supply, endpoint: str, warmup: int, streamed: bool = False
) -> LatencyCell:
    return LatencyCell(one, protocol, supply, endpoint=endpoint, streamed=streamed, warmup=warmup)
