"""Mixed load for minutes or hours: does anything fail, slow down, or leak?

Clients send chats that grow, prompts that are new and prompts behind a shared prefix, of random lengths; some
go away in the middle of a stream, as browsers do. A round is a window of time. In the end the last quarter of
the windows is compared with the first after the warm-up; memory that the server shows on /metrics, too.
With ``--deterministic`` a number of requests is answered one by one first, and every one of them that comes
again under load must be answered with the same text.
"""

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from time import perf_counter
from typing import Annotated

import pandas as pd
from cyclopts import Parameter
from cyclopts.validators import Number

from bench.analysis.statistics import LEAST_ROUNDS, Ratio, unpaired
from bench.arguments import Positive, PromptOptions, ServerOptions, StoreOptions
from bench.errors import BenchError
from bench.load.cell import Supply, Target, describe
from bench.load.client import Client
from bench.load.generator import Sender, Sent, closed_loop, values_of
from bench.load.prompts import Prompts
from bench.load.protocol import at_concurrency
from bench.load.workloads import Job
from bench.metrics import METRICS
from bench.provenance import is_local
from bench.report.peers import verdict
from bench.servers.counters import RESIDENT_MEMORY, read_counters
from bench.store import Results, Run
from bench.terminal import Bar, Cell, Table

WORKLOAD = "soak"
PREFIXES = 4
REFERENCES = 150
"""Jobs that are done alone first, to be compared with."""
KNOWN = 0.7
"""Share of these under load; the rest is new, so that the server's caches change."""
MOST_FAILURES = 100
"""In a row, at which the server counts as gone."""

Minutes = Annotated[float, Parameter(validator=Number(gt=0))]
Share = Annotated[float, Parameter(validator=Number(gte=0, lte=1))]


@dataclass
class Window:
    """What happened in a round."""

    sent: list[Sent] = field(default_factory=list)
    aborted: int = 0
    compared: int = 0
    same: int = 0
    """Answers that are those of the reference, of so many compared."""


@dataclass(frozen=True)
class Reference:
    """A job that was done while nothing else was, and what the server answered to each turn."""

    job: Job
    tokens: int
    texts: tuple[str, ...]


@dataclass
class Mixture:
    """Endless jobs of all kinds, the same for a seed."""

    prompts: Prompts
    input_tokens: int
    rng: random.Random
    prefixes: list[str] = field(default_factory=list)

    async def prepare(self) -> None:
        """Make the prefixes that questions share."""
        self.prefixes = [await self.prompts.make(self.input_tokens, self.rng) for _ in range(PREFIXES)]

    async def job(self) -> Job:
        """A chat of one to four turns, a question behind a prefix, or a prompt of its own."""
        length = self.rng.randint(max(1, self.input_tokens // 8), self.input_tokens)
        kind = self.rng.choice(("chat", "shared", "alone"))
        if kind == "chat":
            turns = self.rng.randint(1, 4)
            texts = [await self.prompts.make(max(1, length // turns), self.rng) for _ in range(turns)]
            return Job(tuple(texts), chat=True)
        text = await self.prompts.make(length, self.rng)
        if kind == "shared":
            return Job((f"{self.rng.choice(self.prefixes)}\n\n{text}",), chat=True)
        return Job((text,), chat=False)


async def _reference(target: Target, mixture: Mixture, output_tokens: int) -> Reference:
    """Do a new job alone. Raises BenchError where the server fails."""
    job, tokens = await mixture.job(), mixture.rng.randint(1, output_tokens)
    sent = await closed_loop(_sender(target, job, tokens), [job], 1, _ignore)
    if sent[-1].error is not None:
        raise BenchError(f"a request of the reference failed: {sent[-1].error}")
    return Reference(job, tokens, tuple(one.text for one in sent))


def _sender(target: Target, job: Job, tokens: int) -> Sender:
    path = "/v1/chat/completions" if job.chat else "/v1/completions"
    return Sender(target.client, path, tokens, ignore_eos=False, stream=True, model=target.model)


async def soak(
    *,
    server: ServerOptions = ServerOptions(),
    store: StoreOptions = StoreOptions(),
    prompts: PromptOptions = PromptOptions(),
    minutes: Minutes = 30.0,
    window: Annotated[float, Parameter(validator=Number(gt=0))] = 60.0,
    concurrency: Positive = 8,
    input_tokens: Positive = 512,
    output_tokens: Positive = 128,
    aborts: Share = 0.1,
    deterministic: bool = False,
) -> int:
    """Mixed load for minutes or hours: does anything fail, slow down, or leak?

    Fails when a request does, or when the last quarter of the windows is slower than the first, or takes more
    memory, by more than chance and a tenth. With --deterministic also when an answer depends on the load.

    Parameters
    ----------
    minutes
        How long.
    window
        Seconds of a window, which is a round of the record.
    concurrency
        Clients.
    input_tokens
        Of the longest prompt.
    output_tokens
        Of an answer at most; each draws its own.
    aborts
        Share of requests whose client goes away in the middle of the answer.
    deterministic
        Compare answers with those that were given to the same requests alone, which takes some minutes first:
        for a server that runs with --deterministic.
    """
    settings = {
        "minutes": minutes,
        "window": window,
        "concurrency": concurrency,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "aborts": aborts,
        "deterministic": deterministic,
        **prompts.settings(),
    }
    async with Client(server.url, timeout=server.timeout, api_key=server.api_key) as client:
        target = await Target.of(server, client, chat=True)
        local = is_local(server.url)
        with Run.begin(
            store.out, "soak", settings=settings, card=store.card, local=local, notes=store.note
        ) as run:
            supply = await Supply.of(client, target.model, prompts)
            await describe(run, target, supply)
            mixture = Mixture(await supply.prompts(), input_tokens, random.Random(prompts.seed))
            await mixture.prepare()
            references: list[Reference] = []
            if deterministic:
                with Bar("answers alone", total=REFERENCES, unit="jobs") as bar:
                    for _ in range(REFERENCES):
                        references.append(await _reference(target, mixture, output_tokens))
                        bar.advance()
            errors: list[str] = []
            other = 0
            rounds = max(1, round(60 * minutes / window))
            try:
                with Bar("soak", total=rounds, unit="windows") as bar:
                    for number in range(1, rounds + 1):
                        found = await _window(
                            target, mixture, window, concurrency, output_tokens, aborts, references
                        )
                        other += found.compared - found.same
                        errors += [one.error for one in found.sent if one.error is not None]
                        await _record(run, target, supply, concurrency, number, found, window)
                        told = f"{len(found.sent)} requests, {len(errors)} failures in all"
                        bar.advance(note=told + (f", {other} other answers" if deterministic else ""))
                        if found.sent and all(one.error for one in found.sent):
                            raise BenchError(f"every request of a window failed: {errors[-1]}")
            finally:
                results = run.results()
                for table in soak_tables(results):
                    table.print()
            worse = list(drifts(results))
    if errors:
        raise BenchError(f"{len(errors)} requests failed; the first: {errors[0]}")
    if other:
        raise BenchError(f"{other} answers are not those that the same requests got alone")
    if worse:
        raise BenchError("; ".join(worse))
    return 0


async def _window(
    target: Target,
    mixture: Mixture,
    seconds: float,
    clients: int,
    output_tokens: int,
    aborts: float,
    references: Sequence[Reference],
) -> Window:
    found, until, failures = Window(), perf_counter() + seconds, 0

    async def client() -> None:
        nonlocal failures
        while perf_counter() < until and failures < MOST_FAILURES:
            known = mixture.rng.choice(references) if references and mixture.rng.random() < KNOWN else None
            job = known.job if known else await mixture.job()
            tokens = known.tokens if known else mixture.rng.randint(1, output_tokens)
            if mixture.rng.random() < aborts:
                found.aborted += await _abort(target, job, tokens, mixture.rng.randint(1, 8))
                continue
            sent = await closed_loop(_sender(target, job, tokens), [job], 1, _ignore)
            found.sent += sent
            if known:
                answered = [one for one in sent if one.error is None]
                found.compared += len(answered)
                found.same += sum(one.text == known.texts[one.turn] for one in answered)
            failures = failures + 1 if sent[-1].error is not None else 0

    await asyncio.gather(*(client() for _ in range(clients)))
    return found


async def _abort(target: Target, job: Job, tokens: int, events: int) -> int:
    """Leave after so many events of the stream. Returns 1; 0 where the server did not even begin."""
    path = "/v1/chat/completions" if job.chat else "/v1/completions"
    said = {"messages": [{"role": "user", "content": job.turns[0]}]} if job.chat else {"prompt": job.turns[0]}
    body = {**said, "max_tokens": tokens, "stream": True, **({"model": target.model} if target.model else {})}
    try:
        async with aclosing(target.client.events(path, body)) as stream:
            async for _ in stream:
                events -= 1
                if events <= 0:
                    return 1
    except BenchError:
        return 0
    return 1


async def _record(
    run: Run, target: Target, supply: Supply, clients: int, round: int, found: Window, seconds: float
) -> None:
    cell = at_concurrency(clients)
    tokens = 0.0
    for one in found.sent:
        values = await values_of(one, supply.vocabulary)
        tokens += values.get("verified_tokens", 0.0)
        run.add(target.name, WORKLOAD, cell, round, values)
    whole = {"output_rate": tokens / seconds, "aborted": float(found.aborted)}
    if found.compared:
        whole |= {"compared_answers": float(found.compared), "same_answers": float(found.same)}
    memory = (await read_counters(target.client)).get((RESIDENT_MEMORY, ()))
    whole |= {"resident_memory": memory / 2**20} if memory is not None else {}
    run.add(target.name, WORKLOAD, cell, round, whole)


DRIFTS = ("output_rate", "itl", "ttft", "resident_memory")
TOLERATED = 1.1


def drift(rows: pd.DataFrame, metric: str) -> Ratio | None:
    """The last quarter of the windows against the first after the first window: above 1 is better."""
    medians = rows[rows["metric"] == metric].groupby("round")["value"].median().iloc[1:]
    quarter = len(medians) // 4
    if quarter < LEAST_ROUNDS:
        return None
    lower = METRICS[metric].better == "lower"
    return unpaired(medians.iloc[-quarter:], medians.iloc[:quarter], lower_is_better=lower)


def drifts(results: Results) -> Iterator[str]:
    """What has become worse by more than chance and a tenth, in words."""
    rows = results.frame[results.frame["workload"] == WORKLOAD]
    for metric in DRIFTS:
        ratio = drift(rows, metric)
        if ratio is not None and ratio.high is not None and ratio.high < 1 / TOLERATED:
            yield f"{METRICS[metric].title}: the last quarter is {ratio} times as good as the first"


def soak_tables(results: Results) -> list[Table]:
    """One table: each quantity over all windows, in the first quarter and the last."""
    rows = results.frame[results.frame["workload"] == WORKLOAD]
    if not len(rows):
        return []
    lines: list[list[Cell]] = []
    for metric in DRIFTS:
        medians = rows[rows["metric"] == metric].groupby("round")["value"].median()
        if len(medians):
            told = verdict(drift(rows, metric))
            spread = [float(medians.min()), float(medians.median()), float(medians.max())]
            lines.append([f"{METRICS[metric].title}, {METRICS[metric].unit}", *spread, told])
    sums = {name: int(rows[rows["metric"] == name]["value"].sum()) for name in ("failed", "aborted")}
    requests = int((rows["metric"] == "latency").sum())
    notes = [f"{requests:,} requests answered, {sums['failed']} FAILED, {sums['aborted']} given up by us"]
    compared, same = (
        int(rows[rows["metric"] == name]["value"].sum()) for name in ("compared_answers", "same_answers")
    )
    if compared:
        notes.append(f"{compared:,} answers compared with those given alone: {compared - same} are OTHERS")
    notes.append(
        f"last / first: times as good, the last quarter of the windows against the first; from "
        f"{4 * LEAST_ROUNDS + 1} windows on"
    )
    header = ["by window", "least", "median", "most", "last / first"]
    return [Table(header, lines, title="Soak", notes=notes)]


def _ignore(_: Sent) -> None:
    pass
