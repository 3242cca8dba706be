"""Sends jobs in a closed loop of several clients, or in an open loop at a rate.

A closed loop sends the next request when one is done. That hides queueing, since a slow server gets fewer
requests. An open loop sends requests at Poisson arrivals and times each from its arrival.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.load.client import Client, Completion
from qwen_serve.bench.load.vocabulary import Vocabulary

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
COUNT_TOLERANCE = 0.02
"""Allowed relative difference: tokenizing a text again may give a few tokens more or fewer than were
generated."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server under load. ``model``: the requests' model; None: requests have no such field. ``fields`` are
    in every request. ``beside``: fields of one more client's requests, which are not measured."""

    name: str
    client: Client
    model: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """Turns that one client sends one after the other. In a chat each request has all earlier messages,
    beginning with ``before``. ``fields`` are in every request. ``pictures`` (data URLs) come before the first
    turn's text."""

    turns: tuple[str, ...]
    chat: bool
    before: tuple[Mapping[str, Any], ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    pictures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that has ended, with an ``answer`` or an ``error``. ``turn``: its index in the conversation,
    from 0.

    Seconds from the load's start: ``planned``, when it was to be sent, and ``ended``. ``lateness``: seconds
    from then until it was sent.
    """

    turn: int
    planned: float
    lateness: float
    ended: float
    answer: Completion | None = None
    error: str | None = None

    @property
    def text(self) -> str | None:
        """All generated text, thinking and tool calls included; None without an answer."""
        answer = self.answer
        return None if answer is None else answer.reasoning + answer.text + answer.calls


OnDone = Callable[[Sent], None]


@dataclass(frozen=True, slots=True)
class Sender:
    """Sends the requests of jobs. ``endpoint``: None for /v1/chat/completions or /v1/completions, as the job
    needs."""

    target: Target
    max_tokens: int
    ignore_eos: bool = False
    stream: bool = True
    endpoint: str | None = None

    def path(self, job: Job) -> str:
        return self.endpoint or (CHAT if job.chat else COMPLETIONS)

    def body(self, job: Job, history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A request's body: ``history`` as messages in a chat, else its last message as prompt."""
        asked = {"messages": list(history)} if job.chat else {"prompt": history[-1]["content"]}
        body = {
            **asked,
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
            **job.fields,
            **self.target.fields,
        }
        if self.ignore_eos:
            body.setdefault("ignore_eos", True)
        if self.target.model is not None:
            body["model"] = self.target.model
        return body

    async def converse(
        self, job: Job, *, began: float, planned: float | None = None, on_done: OnDone | None = None
    ) -> list[Sent]:
        """Send all turns of a job, up to the first that fails. ``planned``: when the first is due; None:
        now."""
        send = self.target.client.stream if self.stream else self.target.client.complete
        history = list(job.before)
        sent: list[Sent] = []
        for turn, text in enumerate(job.turns):
            now = perf_counter() - began
            due = now if planned is None or turn else planned
            history.append({"role": "user", "content": shown(job.pictures, text) if turn == 0 else text})
            try:
                answer = await send(self.path(job), self.body(job, history))
            except BenchError as failure:
                sent.append(Sent(turn, due, now - due, perf_counter() - began, error=str(failure)))
            else:
                history.append({"role": "assistant", "content": answer.text})
                lateness = answer.started - began - due
                sent.append(Sent(turn, due, lateness, perf_counter() - began, answer))
            if on_done is not None:
                on_done(sent[-1])
            if sent[-1].error is not None:
                break
        return sent


def shown(pictures: Sequence[str], text: str) -> str | list[dict[str, Any]]:
    """A message's content: the pictures, if any, then the text."""
    if not pictures:
        return text
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
    return [*parts, {"type": "text", "text": text}]


async def closed_loop(
    sender: Sender, jobs: Sequence[Job], clients: int = 1, on_done: OnDone | None = None
) -> list[Sent]:
    """Let each of ``clients`` do one job after the other, at constant concurrency. Returns results in the
    order of the jobs."""
    began, left = perf_counter(), enumerate(jobs)
    sent: dict[int, list[Sent]] = {}

    async def client() -> None:
        for number, job in left:
            sent[number] = await sender.converse(job, began=began, on_done=on_done)

    await asyncio.gather(*(client() for _ in range(clients)))
    return [one for number in sorted(sent) for one in sent[number]]


async def open_loop(
    sender: Sender, jobs: Sequence[Job], rate: float, rng: random.Random, on_done: OnDone | None = None
) -> list[Sent]:
    """Begin jobs at the arrivals of a Poisson process with ``rate`` jobs a second. Returns results in the
    order of the jobs.
    """
    began = perf_counter()

    async def arrive(job: Job, at: float) -> list[Sent]:
        await asyncio.sleep(max(0.0, at - (perf_counter() - began)))
        return await sender.converse(job, began=began, planned=at, on_done=on_done)

    times = zip(jobs, arrivals(rate, rng), strict=False)
    return [one for sent in await asyncio.gather(*(arrive(job, at) for job, at in times)) for one in sent]


@asynccontextmanager
async def beside(sender: Sender, jobs: Sequence[Job]) -> AsyncIterator[None]:
    """Keep one request of the target's ``beside`` running meanwhile. Raises BenchError if one fails."""
    if sender.target.beside is None:
        yield
        return
    other = replace(sender, target=replace(sender.target, fields=sender.target.beside, beside=None))

    async def keep_on() -> None:
        while True:
            for sent in await closed_loop(other, jobs):
                if sent.error is not None:
                    raise BenchError(f"the client beside: {sent.error}")

    task = asyncio.ensure_future(keep_on())
    try:
        yield
    finally:
        if task.done():
            task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def arrivals(rate: float, rng: random.Random) -> Iterator[float]:
    """Endless arrival times in seconds, beginning with 0, with exponential gaps of mean 1 / ``rate``."""
    at = 0.0
    while True:
        yield at
        at += rng.expovariate(rate)


async def values_of(one: Sent, vocabulary: Vocabulary | None) -> dict[str, float]:
    """The values of a request, by the names of `bench.metrics`.

    Without a tokenizer the claimed tokens count as verified; tables name the source of the counts.
    """
    answer = one.answer
    if answer is None:
        return {"failed": 1}
    late = 1000 * one.lateness
    values = {"latency": late + 1000 * answer.seconds, "lateness": late}
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
        values["recounted_tokens"] = await vocabulary.count(one.text or "")
        counts.append(int(values["recounted_tokens"]))
    if counts:
        values["verified_tokens"] = min(counts)
    if values.get("verified_tokens"):
        values["ms_per_token"] = values["latency"] / values["verified_tokens"]
    return values


def is_miscounted(claimed: float, recounted: float) -> bool:
    """Whether the reported token count and the tokenizer's differ by more than 2% (and by more than 2)."""
    return abs(recounted - claimed) > max(2, COUNT_TOLERANCE * claimed)
