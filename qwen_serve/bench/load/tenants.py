"""Several clients of one server, each with an API key, to see how they delay each other.

- A short request every second, beside a few long ones of another key, then beside hundreds.
- Two tenants with equal load.
- Ten tenants with equal load, then with hundreds of additional requests from one of them.

All tokens that are generated in a window of time count, including those of answers that end after it. Each
client's first answer has a random length. Otherwise all answers would end together, and a window would
contain one round of prompts more or less. To compare two values of `--scheduling-policy`, measure one server
after the other, and compare rates and the share of cached prompts; on a busy machine also steps and their
tokens.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Self

import numpy as np
import pandas as pd
from cyclopts import Parameter
from cyclopts.validators import Number

from qwen_serve.bench.arguments import (
    TENANTS_GROUP,
    Positive,
    Positives,
    PromptOptions,
    ServerOptions,
    StoreOptions,
)
from qwen_serve.bench.errors import BenchError, ServerError
from qwen_serve.bench.load.cell import PromptSource, measuring
from qwen_serve.bench.load.client import Client, read_usage
from qwen_serve.bench.load.counters import read_counters, record_growth
from qwen_serve.bench.load.generator import COMPLETIONS
from qwen_serve.bench.report.views import show
from qwen_serve.bench.store import Results, Run
from qwen_serve.bench.terminal import Cell, Table

WORKLOAD = "tenants"
TENANTS = 10
PREFIXES, TAILS = 4, 8
"""Number of different beginnings and of different ends of each tenant's prompts. Each is half of a prompt; a
request's number stands between them."""
AGAIN_S = 1.0
"""Seconds until a refused request is sent again."""
RAMP = 0.5
"""Length of the warm-up, as a share of the window."""
RUNNING = ("qwen_running_sequences", ())

AboveZero = Annotated[float, Parameter(validator=Number(gt=0))]


@Parameter(name="*", group=TENANTS_GROUP)
@dataclass(frozen=True, kw_only=True)
class TenantOptions:
    """The tenants' loads."""

    keys: Path | None = None
    """File of API keys, the same as the server's --api-key-file; the first ten are used."""
    window: AboveZero = 20.0
    """Seconds for which each load is measured, after a warm-up of half that time."""
    flood: Positive = 200
    """Concurrent requests of the busiest tenant."""
    beside: Positive = 8
    """Concurrent long requests in the reference load for the latency of short requests."""
    clients: Positive = 8
    """Concurrent requests of each of ten tenants."""
    long_tokens: Positives = (2048, 512)
    """Tokens in and out of a long request."""
    short_tokens: Positives = (64, 32)
    """Tokens in and out of a short request."""
    even_tokens: Positives = (512, 128)
    """Tokens in and out of a request in the loads of equal tenants."""
    every: AboveZero = 1.0
    """Seconds between two short requests."""

    def __post_init__(self) -> None:
        for name in ("long_tokens", "short_tokens", "even_tokens"):
            if len(getattr(self, name)) != 2:
                raise BenchError(f"--{name.replace('_', '-')}: want tokens in and out, such as 64,32")

    def read_keys(self) -> list[str]:
        """The API keys. Raises BenchError if there are too few."""
        if self.keys is None or not self.keys.is_file():
            raise BenchError("--workload tenants needs --keys FILE, the server's --api-key-file")
        lines = (line.partition("#")[0].split() for line in self.keys.read_text("utf-8").splitlines())
        keys = [words[0] for words in lines if words]
        if len(keys) < TENANTS:
            raise BenchError(f"--keys {self.keys}: {len(keys)} keys; want {TENANTS}")
        return keys[:TENANTS]


@dataclass
class Tenant:
    """One API key, its prompts, and counts of its answers so far."""

    client: Client
    prefixes: Sequence[str]
    tails: Sequence[str]
    numbers: Iterator[int]
    written: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    refused: int = 0
    ended: int = 0
    ttfts: list[float] = field(default_factory=list)
    """Times to the first token, in milliseconds."""
    failures: list[str] = field(default_factory=list)

    @classmethod
    async def of(
        cls, client: Client, source: PromptSource, tokens: int, numbers: Iterator[int], rng: random.Random
    ) -> Self:
        """A tenant whose prompts have ``tokens`` tokens."""
        prompts = await source.prompts()
        prefixes = [await prompts.make(max(1, tokens // 2), rng) for _ in range(PREFIXES)]
        tails = [await prompts.make(max(1, tokens - tokens // 2), rng) for _ in range(TAILS)]
        return cls(client, prefixes, tails, numbers)

    async def ask(self, max_tokens: int) -> None:
        """Send one request and wait until it ends."""
        number = next(self.numbers)
        prefix, tail = self.prefixes[number % PREFIXES], self.tails[number % TAILS]
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {
            "prompt": f"{prefix}\n\n{number}. {tail}",
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": options,
        }
        had = 0
        try:
            async with aclosing(self.client.events(COMPLETIONS, body)) as events:
                async for at, data in events:
                    chunk = json.loads(data) if data != "[DONE]" else {}
                    if "error" in chunk:
                        raise ServerError(str(chunk["error"]), 200)
                    usage = read_usage(chunk)
                    if usage is None or usage.completion_tokens == had:
                        continue
                    if not had:
                        self.ttfts.append(1000 * at)
                        self.prompt_tokens += usage.prompt_tokens
                        self.cached_tokens += usage.cached_tokens or 0
                    self.written += usage.completion_tokens - had
                    had = usage.completion_tokens
            self.ended += 1
        except ServerError as error:
            if error.status != 429:
                self.failures.append(str(error))
                return
            self.refused += 1
            await asyncio.sleep(AGAIN_S)
        except (BenchError, ValueError) as error:
            self.failures.append(str(error))

    async def keep_asking(self, max_tokens: int, rng: random.Random) -> None:
        """Send one request after the other. The first answer has a random length of up to ``max_tokens``."""
        await self.ask(rng.randint(1, max_tokens))
        while len(self.failures) < 3:
            await self.ask(max_tokens)

    async def ask_every(self, seconds: float, max_tokens: int) -> None:
        """Send a request every ``seconds`` seconds, even if others are running."""
        began = perf_counter()
        async with asyncio.TaskGroup() as group:
            for turn in count():
                await asyncio.sleep(max(0.0, began + turn * seconds - perf_counter()))
                group.create_task(self.ask(max_tokens))


@dataclass
class Stage:
    """The server, the run, and the tenants by number."""

    run: Run
    name: str
    options: TenantOptions
    admin: Client
    make: Callable[[int, Sequence[int]], Coroutine[Any, Any, Tenant]]
    rng: random.Random
    errors: list[str] = field(default_factory=list)

    async def measure(self, cell: str, tenants: dict[str, Tenant], loads: Sequence[Any]) -> None:
        """Run the loads: first for the warm-up, then for a window of time, which is recorded."""
        tasks = [asyncio.create_task(load) for load in loads]
        await asyncio.sleep(RAMP * self.options.window)
        counters = await read_counters(self.admin)
        before = {who: replace(tenant, ttfts=[*tenant.ttfts]) for who, tenant in tenants.items()}
        began = perf_counter()
        await asyncio.sleep(self.options.window)
        seconds = perf_counter() - began
        after = {who: replace(tenant, ttfts=[*tenant.ttfts]) for who, tenant in tenants.items()}
        later = await read_counters(self.admin)
        record_growth(self.run, self.name, WORKLOAD, cell, 1, counters, later)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        sums = {"output_rate": 0.0, "total_rate": 0.0, "prompt_tokens": 0.0, "cached_tokens": 0.0}
        for who, now in after.items():
            then = before[who]
            written, read, cached = (
                getattr(now, name) - getattr(then, name)
                for name in ("written", "prompt_tokens", "cached_tokens")
            )
            values = {"output_rate": written / seconds, "total_rate": (written + read) / seconds}
            values |= {"prompt_tokens": read, "cached_tokens": cached, "refused": now.refused - then.refused}
            sums = {name: sums[name] + values[name] for name in sums}
            self.run.add(self.name, WORKLOAD, f"{cell}, {who}", 1, {**values, "seconds": seconds})
            for ttft in now.ttfts[len(then.ttfts) :]:
                self.run.add(self.name, WORKLOAD, f"{cell}, {who}", 1, {"ttft": ttft})
            self.errors += now.failures
        self.run.add(self.name, WORKLOAD, f"{cell}, all", 1, {**sums, "seconds": seconds})
        await self.idle()

    async def idle(self) -> None:
        """Wait until no cancelled request runs."""
        for _ in range(100):
            await asyncio.sleep(0.2)
            if not (await read_counters(self.admin)).get(RUNNING, 0.0):
                return


async def measure_tenants(
    server: ServerOptions, store: StoreOptions, prompts: PromptOptions, options: TenantOptions
) -> int:
    """Measure all loads, one after the other. Raises BenchError if a request fails."""
    keys = options.read_keys()
    server = replace(server, api_key=server.api_key or keys[0])
    settings = {**vars(options), "keys": str(options.keys)}
    async with (
        measuring(WORKLOAD, server, store, prompts, settings, chat=False) as (run, target, source),
        _clients(server, keys) as clients,
    ):
        numbers = count()

        async def make(number: int, tokens: Sequence[int]) -> Tenant:
            rng = random.Random(f"{prompts.seed} {number} {tokens[0]}")
            return await Tenant.of(clients[number], source, tokens[0], numbers, rng)

        stage = Stage(run, target.name, options, target.client, make, random.Random(prompts.seed))
        try:
            await _short_beside_long(stage)
            await _two(stage)
            await _ten(stage)
        finally:
            show(run)
    if stage.errors:
        raise BenchError(f"{len(stage.errors)} requests failed; the first: {stage.errors[0]}")
    return 0


@asynccontextmanager
async def _clients(server: ServerOptions, keys: Sequence[str]) -> AsyncIterator[list[Client]]:
    async with AsyncExitStack() as stack:
        made = [Client(server.url, timeout=server.timeout, api_key=key) for key in keys]
        yield [await stack.enter_async_context(client) for client in made]


async def _short_beside_long(stage: Stage) -> None:
    options = stage.options
    for at_once in (options.beside, options.flood):
        long = await stage.make(0, options.long_tokens)
        short = await stage.make(1, options.short_tokens)
        loads = [long.keep_asking(options.long_tokens[1], stage.rng) for _ in range(at_once)]
        loads.append(short.ask_every(options.every, options.short_tokens[1]))
        await stage.measure(f"short beside {at_once} long", {"short": short, "long": long}, loads)


async def _two(stage: Stage) -> None:
    options = stage.options
    both = {f"tenant {number}": await stage.make(number, options.even_tokens) for number in (0, 1)}
    each = max(1, options.flood // 2)
    loads = [one.keep_asking(options.even_tokens[1], stage.rng) for one in both.values() for _ in range(each)]
    await stage.measure("two equal", both, loads)


async def _ten(stage: Stage) -> None:
    options = stage.options
    for cell, most in (("ten equal", options.clients), ("one of ten hostile", options.flood)):
        ten = {f"tenant {number}": await stage.make(number, options.even_tokens) for number in range(TENANTS)}
        at_once = [most, *[options.clients] * (TENANTS - 1)]
        pairs = zip(ten.values(), at_once, strict=True)
        loads = [one.keep_asking(options.even_tokens[1], stage.rng) for one, n in pairs for _ in range(n)]
        await stage.measure(cell, ten, loads)


def tenant_tables(results: Results) -> list[Table]:
    """Tables of the results of each load, and of figures computed from them."""
    frame = results.frame[results.frame["workload"] == WORKLOAD]
    cells = {str(cell): rows for cell, rows in frame.groupby("cell", sort=False)}
    lines: list[dict[str, Cell]] = []
    for cell, rows in cells.items():
        ttft = rows[rows["metric"] == "ttft"]["value"]
        read = _of(rows, "prompt_tokens")
        lines.append(
            {
                "load": cell,
                "output tok/s": _of(rows, "output_rate"),
                "total tok/s": _of(rows, "total_rate"),
                "cached": f"{_of(rows, 'cached_tokens') / read:.1%}" if read else None,
                "refused": round(_of(rows, "refused")),
                "first tokens": len(ttft),
                "TTFT ms p50": float(ttft.median()) if len(ttft) else None,
                "p95": float(np.percentile(ttft, 95)) if len(ttft) else None,
            }
        )
    tables = [Table.of(lines, title="tenants: what each load gave in its window")]
    if found := list(_findings(cells)):
        tables.append(Table.of(found, title="tenants: what that comes to"))
    return tables


def _findings(cells: dict[str, pd.DataFrame]) -> Iterator[dict[str, Cell]]:
    shorts = [rows for cell, rows in cells.items() if cell.endswith(", short")]
    p95 = [
        np.percentile(ttfts, 95) for rows in shorts if len(ttfts := rows[rows["metric"] == "ttft"]["value"])
    ]
    if len(p95) == 2:
        yield {
            "figure": "TTFT p95 of short ones beside the flood, by that beside few",
            "value": p95[1] / p95[0],
        }
    two = [_of(rows, "output_rate") for cell, rows in cells.items() if cell.startswith("two equal, tenant")]
    if len(two) == 2 and max(two):
        yield {"figure": "two equal tenants: output tokens apart", "value": f"{1 - min(two) / max(two):.1%}"}
    nine = [
        sum(
            _of(cells[name], "output_rate")
            for number in range(1, TENANTS)
            if (name := f"{cell}, tenant {number}") in cells
        )
        for cell in ("ten equal", "one of ten hostile")
    ]
    if nine[0] and nine[1]:
        yield {"figure": "nine of ten lose to a hostile tenth", "value": f"{1 - nine[1] / nine[0]:.1%}"}


def _of(rows: pd.DataFrame, metric: str) -> float:
    return float(rows[rows["metric"] == metric]["value"].sum())
