"""Throughput and latency under load: a closed loop at levels of concurrency, or an open one at request
rates."""

import asyncio
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from bench.arguments import (
    Natural,
    Positive,
    Positives,
    PromptOptions,
    Rates,
    ServerOptions,
    StoreOptions,
    parsed_by,
)
from bench.errors import BenchError
from bench.load.cell import Cell, Measured, Supply, Target, describe, measure_alone
from bench.load.client import Client, clip
from bench.load.generator import Sender, Sent, closed_loop, open_loop, values_of
from bench.load.goodput import Limits, read_limits
from bench.load.protocol import REQUESTS, TOKENS, WARM_UPS, WEIGHTS, at_concurrency, at_rate
from bench.load.workloads import Chat, Job, SharedPrefix, SinglePrompts, Workload
from bench.provenance import is_local
from bench.report.throughput import show_throughput
from bench.store import Run
from bench.terminal import Bar

Kind = Literal["random", "distinct", "shared-prefix", "chat"]
CHATS = ("shared-prefix", "chat")
AT_A_RATE = 8
"""Requests at once in the warm-up of an open loop, whose concurrency is not known before."""
SUM_TOKENS = 64
LEAST_REQUESTS = 4


class LoadCell(Cell):
    """One level of concurrency, or one request rate: ``requests`` requests a round.

    Warm-ups run as many at once as the load will, so that what a server does once for each batch size is not
    timed; the spot checks ride along with them, under load and within its concurrency.
    """

    def __init__(
        self,
        load: Workload,
        supply: Supply,
        *,
        concurrency: int | None = None,
        rate: float | None = None,
        requests: int,
        warmup: int | None,
        output_tokens: int,
        stream: bool = True,
        endpoint: str | None = None,
        spot_checks: int = 0,
        limits: Limits | None = None,
    ) -> None:
        assert (concurrency is None) != (rate is None), "a closed loop or an open one"
        self.workload = load.name
        self.name = at_concurrency(concurrency) if concurrency is not None else at_rate(rate or 0.0)
        self._load = load
        self._supply = supply
        self._rate = rate
        self._clients = concurrency or AT_A_RATE
        self._requests = requests
        self._warmup = max(WARM_UPS, self._clients) if warmup is None else warmup
        self._output_tokens = output_tokens
        self._stream = stream
        self._endpoint = endpoint or load.endpoint
        self._spot_checks = spot_checks
        self._limits = limits
        self._jobs: dict[int, list[Job]] = {}
        self._wrong: dict[str, list[str]] = {}

    def requests(self) -> int:
        return sum(len(job.turns) for job in self._jobs[1])

    async def prepare(self, rounds: int) -> None:
        for round in range(rounds + 1):  # round 0 is the warm-up
            wanted = self._requests if round else self._warmup
            rng = self.rng(self._supply.options.seed, round)
            self._jobs[round] = await self._load.jobs(wanted, self._clients, rng) if wanted else []

    async def warm_up(self, target: Target, *, again: bool = False) -> None:
        jobs = self._jobs[0][:WARM_UPS] if again else self._jobs[0]
        checks = 0 if again else self._spot_checks
        sums = [Sum.draw(self.rng(self._supply.options.seed, 0, at)) for at in range(checks)]
        beside = min(len(sums), self._clients - 1)
        asked: list[Sent] = []

        async def ask(clients: int) -> None:
            questions = [Job((one.question,), chat=True) for one in sums]
            asked.extend(await closed_loop(self._asker(target), questions, clients, lambda _: None))

        async def load() -> list[Sent]:
            return await closed_loop(self._sender(target), jobs, self._clients - beside, lambda _: None)

        if beside:
            sent, _ = await asyncio.gather(load(), ask(beside))
        else:
            sent = await load()
            await ask(1)
        for one in sent:
            if one.error is not None:
                raise BenchError(f"{self.name}, warm-up: {one.error}")
        self._wrong[target.name] = [
            f"spot check: {one.question} got {reply.error or clip(reply.text)!r}"
            for one, reply in zip(sums, asked, strict=True)
            if not one.is_right(reply.text)
        ]

    async def measure(self, target: Target, round: int, bar: Bar) -> Measured:
        sender, jobs = self._sender(target), self._jobs[round]

        def advance(_: Sent) -> None:
            bar.advance()

        if self._rate is None:
            sent = await closed_loop(sender, jobs, self._clients, advance)
        else:
            rng = self.rng(self._supply.options.seed, round, "arrivals")
            sent = await open_loop(sender, jobs, self._rate, rng, advance)
        rows = [await values_of(one, self._supply.vocabulary) for one in sent]
        if self._limits is not None:
            rows = [{**values, "good": float(self._limits.kept_by(values))} for values in rows]
        wrong = self._wrong.pop(target.name, []) if round == 1 else []
        together = self._together(sent, rows)
        if round == 1 and self._spot_checks:
            together["spot_checks_failed"] = len(wrong)
        return Measured(
            [*rows, together],
            answers=[one.text if one.answer is not None else None for one in sent],
            said=f"{together.get('output_rate', 0.0):,.0f} tok/s",
            errors=[*(one.error for one in sent if one.error is not None), *wrong],
        )

    def _together(self, sent: list[Sent], rows: list[dict[str, float]]) -> dict[str, float]:
        """Rates over the wall time from the first request's due time to the last one's end."""
        wall = max(one.ended for one in sent) - min(one.planned for one in sent)
        verified, prompts, good = (
            sum(values.get(name, 0.0) for values in rows)
            for name in ("verified_tokens", "prompt_tokens", "good")
        )
        finished = sum(one.answer is not None for one in sent)
        return {
            "seconds": wall,
            **(
                {
                    "output_rate": verified / wall,
                    "total_rate": (verified + prompts) / wall,
                    "request_rate": finished / wall,
                }
                if finished
                else {}
            ),
            **({"goodput": good / wall} if self._limits is not None else {}),
        }

    def _sender(self, target: Target) -> Sender:
        return Sender(
            client=target.client,
            endpoint=self._endpoint,
            max_tokens=self._output_tokens,
            ignore_eos=not self._supply.options.stop_at_eos,
            stream=self._stream,
            model=target.model,
        )

    def _asker(self, target: Target) -> Sender:
        return replace(
            self._sender(target),
            endpoint="/v1/chat/completions",
            max_tokens=SUM_TOKENS,
            ignore_eos=False,
            stream=False,
        )


@dataclass(frozen=True, slots=True)
class Sum:
    """A spot check: answered rightly if the sum is the last number of the answer."""

    left: int
    right: int

    @classmethod
    def draw(cls, rng: random.Random) -> "Sum":
        return cls(rng.randint(2, 40), rng.randint(2, 40))

    @property
    def question(self) -> str:
        return f"What is {self.left}+{self.right}?"

    def is_right(self, answer: str) -> bool:
        """Whether an answer's last number is the sum."""
        numbers = re.findall(r"\d+", answer)
        return bool(numbers) and numbers[-1] == str(self.left + self.right)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """A load, for one server or for several."""

    levels: Positives | None = None
    """Concurrent requests, such as 1,4,16."""
    rate: Rates | None = None
    """Requests a second: 0.5,2,4 (conversations, for chat)."""
    goodput: Annotated[Limits | None, parsed_by(read_limits)] = None
    """Limits such as ttft=500ms,itl=50ms: also count the requests a second that keep them all."""
    requests: Positive = REQUESTS
    """In each level or rate and round."""
    waves: Natural = 0
    """Not 0: so many requests for each of a level's clients, at least 4, in place of --requests."""
    warmup: Natural | None = None
    """Untimed requests before each, as many at once as the load will be (the level; 8 for a rate)."""
    input_tokens: Positive | None = None
    """Of a prompt, question or turn (1,024; 100 for shared-prefix and chat)."""
    output_tokens: Positive | None = None
    """Of an answer (1,024; 128 for shared-prefix and chat)."""
    prefix_tokens: Positive = 2000
    """shared-prefix: of each prefix."""
    prefixes: Positive = 4
    """shared-prefix: different prefixes."""
    turns: Positive = 4
    """chat: turns of a conversation."""
    spot_checks: Natural = 2
    """Sums asked during the first warm-up of each level or rate, to see that answers are still answers."""
    endpoint: str | None = None
    """/v1/completions for random and distinct, /v1/chat/completions else."""
    stream: bool = True
    """Without it whole answers: no TTFT, no ITL."""

    def lengths(self, kind: Kind) -> tuple[int, int]:
        """Tokens in and out of a request."""
        chat = kind in CHATS
        return self.input_tokens or (100 if chat else TOKENS), self.output_tokens or (128 if chat else TOKENS)

    def chosen_levels(self, default: Sequence[int]) -> tuple[int, ...]:
        """Those named; else the default, unless rates are."""
        return self.levels if self.levels is not None else () if self.rate else tuple(default)

    def settings(self, kind: Kind, default: Sequence[int]) -> dict[str, Any]:
        """What a manifest records of it."""
        names = ["requests", "waves", "warmup", "spot_checks", "stream"]
        names += {"shared-prefix": ["prefix_tokens", "prefixes"], "chat": ["turns"]}.get(kind, [])
        tokens_in, tokens_out = self.lengths(kind)
        return {
            "levels": self.chosen_levels(default),
            "rates": self.rate or (),
            "goodput": str(self.goodput) if self.goodput is not None else None,
            "input_tokens": tokens_in,
            "output_tokens": tokens_out,
            **{name: getattr(self, name) for name in names},
        }

    async def cells(self, kind: Kind, supply: Supply, default: Sequence[int]) -> list[LoadCell]:
        """One for each level, then one for each rate."""
        load = await self._workload(kind, supply)

        def cell(concurrency: int | None, rate: float | None) -> LoadCell:
            waves = self.waves * (concurrency or 0)
            return LoadCell(
                load,
                supply,
                concurrency=concurrency,
                rate=rate,
                requests=max(LEAST_REQUESTS, waves) if waves else self.requests,
                warmup=self.warmup,
                output_tokens=self.lengths(kind)[1],
                stream=self.stream,
                endpoint=self.endpoint,
                spot_checks=self.spot_checks,
                limits=self.goodput,
            )

        levels = [cell(level, None) for level in self.chosen_levels(default)]
        return levels + [cell(None, rate) for rate in self.rate or ()]

    async def _workload(self, kind: Kind, supply: Supply) -> Workload:
        """A kind of traffic out of the supply's prompts; the hackathon's are random tokens."""
        prompts = await supply.prompts("tokens" if kind == "random" else None)
        tokens = self.lengths(kind)[0]
        if kind == "shared-prefix":
            return SharedPrefix(prompts, tokens, prefix_tokens=self.prefix_tokens, prefixes=self.prefixes)
        if kind == "chat":
            return Chat(prompts, tokens, turns=self.turns)
        return SinglePrompts(kind, prompts, tokens)


async def throughput(
    *,
    server: ServerOptions = ServerOptions(),
    store: StoreOptions = StoreOptions(),
    prompts: PromptOptions = PromptOptions(),
    workload: Kind = "random",
    load: LoadOptions = LoadOptions(),
    rounds: Positive = 1,
) -> int:
    """Throughput and latency under load, with token counts that are verified.

    A closed loop keeps --levels requests under way (1,2,4,8,16,32,64, unless --rate is given); an open one
    (--rate) sends at Poisson arrivals whatever is under way, so that queueing shows, and times a request from
    its arrival. Workloads: random is the hackathon's protocol (1,024 random tokens in, 1,024 out, 64 requests
    a level, a score); distinct sends natural prompts; shared-prefix questions behind long prefixes, as
    few-shot benchmarks do; chat holds conversations that grow turn by turn.

    Parameters
    ----------
    rounds
        Times that each level or rate is measured.
    """
    levels = tuple(WEIGHTS)
    settings = {"rounds": rounds, **load.settings(workload, levels), **prompts.settings()}
    async with Client(server.url, timeout=server.timeout, api_key=server.api_key) as client:
        target = await Target.of(server, client, chat=True)
        with Run.begin(
            store.out,
            "throughput",
            settings=settings,
            card=store.card,
            local=is_local(server.url),
            notes=store.note,
        ) as run:
            supply = await Supply.of(client, target.model, prompts)
            await describe(run, target, supply)
            cells = await load.cells(workload, supply, levels)
            try:
                errors = await measure_alone(run, target, [(one, rounds) for one in cells])
            finally:
                show_throughput(run.results())
    if errors:
        raise BenchError(f"{len(errors)} requests or spot checks failed; the first: {errors[0]}")
    return 0
