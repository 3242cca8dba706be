"""Mixed load for minutes or hours: does anything fail, slow down, or leak?

Clients send growing chats, new prompts and prompts behind a shared prefix, of random lengths. Some disconnect
in the middle of a stream. Each window of time is a round. At the end the last quarter of the windows is
compared with the first quarter after the warm-up: rates, latencies, and the server's memory from /metrics.
With ``--deterministic`` half of the requests are of the kinds of `kinds.py`, with schemas, grammars, tools,
penalties, biases and log-probabilities. Some requests are first answered one by one; under load their answers
must have the same text and tool calls.
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

from qwen_serve.bench.analysis.statistics import LEAST_ROUNDS, Ratio, unpaired
from qwen_serve.bench.arguments import Positive, PromptOptions, ServerOptions, StoreOptions
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.load.cell import LOADED, PromptSource, measuring
from qwen_serve.bench.load.counters import RESIDENT_MEMORY, read_counters
from qwen_serve.bench.load.generator import Job, Sender, Sent, Target, closed_loop, values_of
from qwen_serve.bench.load.kinds import KINDS, job_of, prefixes_of
from qwen_serve.bench.load.prompts import Prompts
from qwen_serve.bench.load.protocol import at_concurrency
from qwen_serve.bench.metrics import METRICS
from qwen_serve.bench.report.requests import total
from qwen_serve.bench.report.views import show
from qwen_serve.bench.store import Results, Run
from qwen_serve.bench.terminal import Bar, Table

WORKLOAD = "soak"
REFERENCES = 150
"""Jobs that are first answered alone, as references."""
KNOWN = 0.7
"""Share of references under load. The other jobs are new, so that the server's caches change."""
MOST_FAILURES = 100
"""The load stops after this many failures in a row."""
DRIFTS = ("output_rate", "itl", "ttft", "resident_memory")
TOLERATED = 1.1

AboveZero = Annotated[float, Parameter(validator=Number(gt=0))]
Share = Annotated[float, Parameter(validator=Number(gte=0, lte=1))]


@dataclass
class Window:
    """Results of a round. ``same``: how many of the ``compared`` answers equal the reference's."""

    sent: list[Sent] = field(default_factory=list)
    aborted: int = 0
    compared: int = 0
    same: int = 0

    @property
    def errors(self) -> list[str]:
        return [one.error for one in self.sent if one.error is not None]


@dataclass(frozen=True)
class Task:
    """A job and its ``max_tokens``. ``texts``: the answer to each turn, alone; empty for a new job."""

    job: Job
    tokens: int
    texts: tuple[str | None, ...] = ()


@dataclass
class MixedLoad:
    """Endless tasks of all kinds, new ones and references. They depend only on the seed."""

    target: Target
    prompts: Prompts
    input_tokens: int
    output_tokens: int
    rng: random.Random
    prefixes: Sequence[str] = ()
    all_kinds: bool = False
    """Whether half of the jobs are of any kind of ``KINDS``, which only this server has."""
    references: list[Task] = field(default_factory=list)

    async def task(self) -> Task:
        """A reference, or a new task."""
        if self.references and self.rng.random() < KNOWN:
            return self.rng.choice(self.references)
        return Task(await self._job(), self.rng.randint(1, self.output_tokens))

    async def _job(self) -> Job:
        """A chat of one to four turns, a question behind a shared prefix, a new prompt, or any kind."""
        if self.all_kinds and self.rng.random() < 0.5:
            name, seed = self.rng.choice([*KINDS]), self.rng.getrandbits(31)
            return await job_of(name, self.prompts, self.input_tokens, self.prefixes, self.rng, seed)
        make, length = self.prompts.make, self.rng.randint(max(1, self.input_tokens // 8), self.input_tokens)
        kind = self.rng.choice(("chat", "shared", "alone"))
        if kind == "chat":
            turns = self.rng.randint(1, 4)
            return Job(
                tuple([await make(max(1, length // turns), self.rng) for _ in range(turns)]), chat=True
            )
        text = await make(length, self.rng)
        if kind == "shared":
            return Job((f"{self.rng.choice(self.prefixes)}\n\n{text}",), chat=True)
        return Job((text,), chat=False)

    async def add_reference(self) -> None:
        """Run a new task alone and keep it as a reference. Raises BenchError if the server fails."""
        job, tokens = await self._job(), self.rng.randint(1, self.output_tokens)
        sent = await closed_loop(self.sender(tokens), [job])
        if sent[-1].error is not None:
            raise BenchError(f"a request of the reference failed: {sent[-1].error}")
        self.references.append(Task(job, tokens, tuple(one.text for one in sent)))

    def sender(self, tokens: int) -> Sender:
        return Sender(self.target, tokens)


async def soak(
    *,
    server: ServerOptions = ServerOptions(),
    store: StoreOptions = StoreOptions(),
    prompts: PromptOptions = PromptOptions(),
    minutes: AboveZero = 30.0,
    window: AboveZero = 45.0,
    concurrency: Positive = 8,
    input_tokens: Positive = 512,
    output_tokens: Positive = 128,
    aborts: Share = 0.1,
    deterministic: bool = False,
) -> int:
    """Mixed load for minutes or hours: does anything fail, slow down, or leak?

    - `qwen-bench soak --url http://127.0.0.1:8080 --minutes 30 --concurrency 32`
    - `qwen-bench soak --deterministic`

    The command fails if a request fails, or if the last quarter of the windows is slower than the first or
    takes more memory, significantly and by more than a tenth. With --deterministic it also fails if an answer
    depends on the load.

    Parameters
    ----------
    minutes
        Duration, in minutes.
    window
        Length of a window, in seconds; each window is recorded as a round.
    concurrency
        Concurrent clients.
    input_tokens
        Maximum tokens of a prompt; each has a random length.
    output_tokens
        Maximum tokens of an answer; each has a random limit.
    aborts
        Share of requests whose client disconnects in the middle of the answer.
    deterministic
        Compare answers with those to the same requests sent alone, which takes some minutes at the start.
        Half of the requests have schemas, grammars, tools, penalties, biases or log-probabilities. The server
        must run with --deterministic.
    """
    settings = {
        "minutes": minutes,
        "window": window,
        "concurrency": concurrency,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "aborts": aborts,
        "deterministic": deterministic,
    }
    errors: list[str] = []
    other = 0
    async with measuring("soak", server, store, prompts, settings, chat=True) as (run, target, source):
        made, rng = await source.prompts(), random.Random(prompts.seed)
        prefixes = await prefixes_of(made, input_tokens, rng)
        mixed = MixedLoad(target, made, input_tokens, output_tokens, rng, prefixes, all_kinds=deterministic)
        if deterministic:
            with Bar("answers alone", total=REFERENCES, unit="jobs") as bar:
                for _ in range(REFERENCES):
                    await mixed.add_reference()
                    bar.advance()
        rounds = max(1, round(60 * minutes / window))
        try:
            with Bar("soak", total=rounds, unit="windows") as bar:
                for number in range(1, rounds + 1):
                    found = await _window(mixed, window, concurrency, aborts)
                    other += found.compared - found.same
                    errors += found.errors
                    await _record(run, target, source, concurrency, number, found, window)
                    told = f"{len(found.sent)} requests, {len(errors)} failures in all"
                    bar.advance(note=told + (f", {other} other answers" if deterministic else ""))
                    if found.sent and len(found.errors) == len(found.sent):
                        raise BenchError(f"every request of a window failed: {errors[-1]}")
        finally:
            show(run)
        worse = list(drifts(run.results()))
    if errors:
        raise BenchError(f"{len(errors)} requests failed; the first: {errors[0]}")
    if other:
        raise BenchError(f"{other} answers are not those that the same requests got alone")
    if worse:
        raise BenchError("; ".join(worse))
    return 0


async def _window(mixed: MixedLoad, seconds: float, clients: int, aborts: float) -> Window:
    found, until, failures = Window(), perf_counter() + seconds, 0

    async def client() -> None:
        nonlocal failures
        while perf_counter() < until and failures < MOST_FAILURES:
            task = await mixed.task()
            sender = mixed.sender(task.tokens)
            if mixed.rng.random() < aborts:
                found.aborted += await leave(sender, task.job, mixed.rng.randint(1, 8))
                continue
            sent = await closed_loop(sender, [task.job])
            found.sent += sent
            if task.texts:
                answered = [one for one in sent if one.error is None]
                found.compared += len(answered)
                found.same += sum(one.text == task.texts[one.turn] for one in answered)
            failures = failures + 1 if sent[-1].error is not None else 0

    await asyncio.gather(*(client() for _ in range(clients)))
    return found


async def leave(sender: Sender, job: Job, events: int) -> int:
    """Send a request and disconnect after ``events`` events of its stream. Returns 1, or 0 if the request
    failed."""
    body = {**sender.body(job, [{"role": "user", "content": job.turns[0]}]), "stream": True}
    try:
        async with aclosing(sender.target.client.events(sender.path(job), body)) as stream:
            async for _ in stream:
                events -= 1
                if events <= 0:
                    return 1
    except BenchError:
        return 0
    return 1


async def _record(
    run: Run, target: Target, source: PromptSource, clients: int, round: int, found: Window, seconds: float
) -> None:
    cell = at_concurrency(clients)
    tokens = 0.0
    for one in found.sent:
        values = await values_of(one, source.vocabulary)
        tokens += values.get("verified_tokens", 0.0)
        kept = {name: value for name, value in values.items() if name in LOADED}
        run.add(target.name, WORKLOAD, cell, round, kept)
    whole = {"output_rate": tokens / seconds, "aborted": float(found.aborted)}
    if found.compared:
        whole |= {"compared_answers": float(found.compared), "same_answers": float(found.same)}
    memory = (await read_counters(target.client)).get((RESIDENT_MEMORY, ()))
    whole |= {"resident_memory": memory / 2**20} if memory is not None else {}
    run.add(target.name, WORKLOAD, cell, round, whole)


def by_window(rows: pd.DataFrame, metric: str) -> "pd.Series[float]":
    """The median of a metric in each window."""
    return rows[rows["metric"] == metric].groupby("round")["value"].median()


def drift(rows: pd.DataFrame, metric: str) -> Ratio | None:
    """The last quarter of the windows against the first quarter, without the first window. Above 1 is
    better."""
    medians = by_window(rows, metric).iloc[1:]
    quarter = len(medians) // 4
    if quarter < LEAST_ROUNDS:
        return None
    lower = METRICS[metric].better == "lower"
    return unpaired(medians.iloc[-quarter:], medians.iloc[:quarter], lower_is_better=lower)


def drifts(results: Results) -> Iterator[str]:
    """A sentence for each metric that became worse, significantly and by more than a tenth."""
    for metric in DRIFTS:
        ratio = drift(results.frame, metric)
        if ratio is not None and ratio.high is not None and ratio.high < 1 / TOLERATED:
            yield f"{METRICS[metric].title}: the last quarter is {ratio} times as good as the first"


def soak_tables(results: Results) -> list[Table]:
    """A table of each metric over all windows, in the first quarter and in the last."""
    rows = results.frame
    lines = [
        {
            "by window": f"{METRICS[metric].title}, {METRICS[metric].unit}",
            "least": float(medians.min()),
            "median": float(medians.median()),
            "most": float(medians.max()),
            "last / first": ratio.verdict if (ratio := drift(rows, metric)) is not None else None,
        }
        for metric in DRIFTS
        if len(medians := by_window(rows, metric))
    ]
    requests = int((rows["metric"] == "latency").sum())
    failed, aborted, compared, same = (
        round(total(rows, name)) for name in ("failed", "aborted", "compared_answers", "same_answers")
    )
    notes = [f"{requests:,} requests answered, {failed} FAILED, {aborted} given up by us"]
    if compared:
        notes.append(f"{compared:,} answers compared with those given alone: {compared - same} are OTHERS")
    notes.append(
        f"last / first: times as good, the last quarter of the windows against the first; from "
        f"{4 * LEAST_ROUNDS + 1} windows on"
    )
    return [Table.of(lines, title="Soak", notes=notes)]
