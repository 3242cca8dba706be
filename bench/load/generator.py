"""Sends jobs: as a closed loop of so many clients, or as an open loop at a rate, whatever is under way.

A closed loop waits with the next request until one is done, which hides queueing: a slow server is asked
less. An open loop sends at Poisson arrivals, and times a request from when it was to be sent.
"""

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from bench.errors import BenchError
from bench.load.client import Client, Completion
from bench.load.vocabulary import Vocabulary
from bench.load.workloads import Body, Job

COUNT_TOLERANCE = 0.02
"""Re-tokenizing a text may legitimately give a few tokens more or fewer than were generated."""

OnDone = Callable[["Sent"], None]


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that came back, or did not: ``answer`` or ``error``. ``job``: which of the load's, from 0;
    ``turn``: of its conversation, from 0.

    ``planned``: seconds from the load's start to when it was to be sent; ``lateness``: how much later it was;
    ``ended``: seconds from the load's start to its end.
    """

    job: int
    turn: int
    planned: float
    lateness: float
    ended: float
    answer: Completion | None = None
    error: str | None = None

    @property
    def seconds(self) -> float:
        """From when it was to be sent to its end."""
        return self.ended - self.planned

    @property
    def text(self) -> str:
        """All that was generated, thinking included."""
        return "" if self.answer is None else self.answer.reasoning + self.answer.text


@dataclass(frozen=True, slots=True)
class Sender:
    """How one request is made from a body: endpoint, length, sampling, streamed or not."""

    client: Client
    endpoint: str
    max_tokens: int
    ignore_eos: bool
    stream: bool
    model: str | None

    async def send(self, body: Body) -> Completion:
        """Raises BenchError when the server does not answer as it should."""
        full = {**body, "max_tokens": self.max_tokens, "temperature": 0.0}
        if self.ignore_eos:
            full["ignore_eos"] = True
        if self.model is not None:
            full["model"] = self.model
        send = self.client.stream if self.stream else self.client.complete
        return await send(self.endpoint, full)


@dataclass
class _Load:
    """One load while it runs."""

    sender: Sender
    on_done: OnDone
    began: float = field(default_factory=perf_counter)
    sent: list[Sent] = field(default_factory=list)

    async def converse(self, number: int, job: Job, planned: float | None = None) -> None:
        """All turns of a job; ``planned``: when the first was to be sent, None: now."""
        history: list[Mapping[str, str]] = []
        for turn, text in enumerate(job.turns):
            now = perf_counter() - self.began
            due = now if planned is None or turn else planned
            history.append({"role": "user", "content": text})
            body: Body = {"messages": list(history)} if job.chat else {"prompt": text}
            answer: Completion | None = None
            error: str | None = None
            try:
                answer = await self.sender.send(body)
                history.append({"role": "assistant", "content": answer.text})
            except BenchError as failure:
                error = str(failure)
            started = answer.started - self.began if answer is not None else now
            one = Sent(number, turn, due, started - due, perf_counter() - self.began, answer, error)
            self.sent.append(one)
            self.on_done(one)
            if error is not None:
                return


async def closed_loop(sender: Sender, jobs: Sequence[Job], clients: int, on_done: OnDone) -> list[Sent]:
    """``clients`` take job after job until none is left: constant concurrency. In the order of the jobs."""
    load = _Load(sender, on_done)
    left = enumerate(jobs)

    async def client() -> None:
        for number, job in left:
            await load.converse(number, job)

    await asyncio.gather(*(client() for _ in range(clients)))
    return sorted(load.sent, key=lambda one: (one.job, one.turn))


async def open_loop(
    sender: Sender, jobs: Sequence[Job], rate: float, rng: random.Random, on_done: OnDone
) -> list[Sent]:
    """A job begins at each arrival of a Poisson process of ``rate`` a second. In the order of the jobs."""
    load = _Load(sender, on_done)

    async def arrive(number: int, job: Job, at: float) -> None:
        await asyncio.sleep(max(0.0, at - (perf_counter() - load.began)))
        await load.converse(number, job, at)

    times = zip(jobs, arrivals(rate, rng), strict=False)
    await asyncio.gather(*(arrive(number, job, at) for number, (job, at) in enumerate(times)))
    return sorted(load.sent, key=lambda one: (one.job, one.turn))


def arrivals(rate: float, rng: random.Random) -> Iterator[float]:
    """Endless times in seconds, the first at 0, with exponential gaps of mean 1 / ``rate``."""
    at = 0.0
    while True:
        yield at
        at += rng.expovariate(rate)


async def values_of(one: Sent, vocabulary: Vocabulary | None) -> dict[str, float]:
    """What is recorded of a request, by the names of `bench.metrics`.

    Without a tokenizer the claimed tokens are the verified ones: views say whose counts they are.
    """
    answer = one.answer
    if answer is None:
        return {"failed": 1}
    late = 1000 * one.lateness
    values = {"latency": late + 1000 * answer.seconds, "lateness": late, "turn": float(one.turn + 1)}
    if answer.arrivals:
        gaps = [b - a for a, b in zip(answer.arrivals, answer.arrivals[1:], strict=False)]
        values |= {"ttft": late + 1000 * answer.arrivals[0], "chunks": len(answer.arrivals)}
        values |= {"longest_gap": 1000 * max(gaps)} if gaps else {}
        itl = answer.seconds_per_token
        values |= {"itl": 1000 * itl} if itl is not None else {}
    counts: list[int] = []
    if answer.usage is not None:
        values |= {
            "prompt_tokens": answer.usage.prompt_tokens,
            "claimed_tokens": answer.usage.completion_tokens,
        }
        counts.append(answer.usage.completion_tokens)
        if answer.usage.cached_tokens is not None:
            values["cached_tokens"] = answer.usage.cached_tokens
    if vocabulary is not None:
        values["recounted_tokens"] = await vocabulary.count(one.text)
        counts.append(int(values["recounted_tokens"]))
    if counts:
        values["verified_tokens"] = min(counts)
    return values


def is_miscounted(claimed: float, recounted: float) -> bool:
    """Whether a claimed token count and the tokenizer's differ by more than 2% (and by more than 2)."""
    return abs(recounted - claimed) > max(2, COUNT_TOLERANCE * claimed)
