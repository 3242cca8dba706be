"""Sends jobs: in a closed loop of several clients, or in an open loop at a rate.

A closed loop sends the next request when one is done, which hides queueing: a slow server is asked
less. An open loop sends at Poisson arrivals and times a request from when it was due.
"""

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.load.client import Client, Completion
from qwen_serve.bench.load.vocabulary import Vocabulary

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
COUNT_TOLERANCE = 0.02
"""Tokenizing a text again may give a few tokens more or fewer than were generated."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server under load. ``model``: of its requests; None: they have none."""

    name: str
    client: Client
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One client's errand: its turns are sent one after the other, in a chat each with all that was said
    before, from the messages ``before`` the first on. ``fields`` stand in every request, ``pictures`` (data
    URLs) before the first turn's text."""

    turns: tuple[str, ...]
    chat: bool
    before: tuple[Mapping[str, Any], ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    pictures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that came back, or did not: ``answer`` or ``error``. ``turn``: of its conversation, from 0.

    ``planned``: seconds from the load's start to when it was to be sent; ``lateness``: how much later it was;
    ``ended``: seconds from the load's start to its end.
    """

    turn: int
    planned: float
    lateness: float
    ended: float
    answer: Completion | None = None
    error: str | None = None

    @property
    def text(self) -> str | None:
        """All generated text, thinking included; None without an answer."""
        return None if self.answer is None else self.answer.reasoning + self.answer.text


OnDone = Callable[[Sent], None]


@dataclass(frozen=True, slots=True)
class Sender:
    """How a job's requests are made: to whom, how long, streamed or not. Without an ``endpoint`` chats and
    prompts go to their own."""

    target: Target
    max_tokens: int
    ignore_eos: bool = False
    stream: bool = True
    endpoint: str | None = None

    def path(self, job: Job) -> str:
        return self.endpoint or (CHAT if job.chat else COMPLETIONS)

    def body(self, job: Job, history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A request whose prompt is the last message of ``history``."""
        asked = {"messages": list(history)} if job.chat else {"prompt": history[-1]["content"]}
        body = {**asked, "max_tokens": self.max_tokens, "temperature": 0.0, **job.fields}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.target.model is not None:
            body["model"] = self.target.model
        return body

    async def converse(
        self, job: Job, *, began: float, planned: float | None = None, on_done: OnDone | None = None
    ) -> list[Sent]:
        """All turns of a job, up to the first that fails. ``planned``: when the first was due; None: now."""
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
    """A message's content: the text, after its pictures, if any."""
    if not pictures:
        return text
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
    return [*parts, {"type": "text", "text": text}]


async def closed_loop(
    sender: Sender, jobs: Sequence[Job], clients: int = 1, on_done: OnDone | None = None
) -> list[Sent]:
    """``clients`` each do one job after the other: constant concurrency. Results in the order of the jobs."""
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
    """A job begins at each arrival of a Poisson process of ``rate`` a second. Results in the order of the
    jobs.
    """
    began = perf_counter()

    async def arrive(job: Job, at: float) -> list[Sent]:
        await asyncio.sleep(max(0.0, at - (perf_counter() - began)))
        return await sender.converse(job, began=began, planned=at, on_done=on_done)

    times = zip(jobs, arrivals(rate, rng), strict=False)
    return [one for sent in await asyncio.gather(*(arrive(job, at) for job, at in times)) for one in sent]


def arrivals(rate: float, rng: random.Random) -> Iterator[float]:
    """Endless times in seconds, from 0 on, with exponential gaps of mean 1 / ``rate``."""
    at = 0.0
    while True:
        yield at
        at += rng.expovariate(rate)


async def values_of(one: Sent, vocabulary: Vocabulary | None) -> dict[str, float]:
    """The values of a request, by the names of `bench.metrics`.

    Without a tokenizer the claimed tokens are the verified ones: views say whose counts they are.
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
