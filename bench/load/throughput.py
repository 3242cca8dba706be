"""Throughput and latency under load: a closed loop at levels of concurrency, or an open one at request
rates."""

import asyncio
import random
import re
from dataclasses import dataclass, replace
from typing import Annotated, Literal

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
from bench.load.protocol import TOKENS, WARM_UPS, WEIGHTS, at_concurrency, at_rate
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


async def throughput(
    *,
    server: ServerOptions = ServerOptions(),
    store: StoreOptions = StoreOptions(),
    prompts: PromptOptions = PromptOptions(),
    workload: Kind = "random",
    levels: Positives | None = None,
    rate: Rates | None = None,
    goodput: Annotated[Limits | None, parsed_by(read_limits)] = None,
    requests: Positive = 64,
    rounds: Positive = 1,
    warmup: Natural | None = None,
    input_tokens: Positive | None = None,
    output_tokens: Positive | None = None,
    prefix_tokens: Positive = 2000,
    prefixes: Positive = 4,
    turns: Positive = 4,
    spot_checks: Natural = 2,
    endpoint: str | None = None,
    stream: bool = True,
) -> int:
    """Throughput and latency under load, with token counts that are verified.

    A closed loop keeps --levels requests under way; an open one (--rate) sends at Poisson arrivals whatever
    is under way, so that queueing shows, and times a request from its arrival. Workloads: random is the
    hackathon's protocol (1,024 random tokens in, 1,024 out, 64 requests a level, a score); distinct sends
    natural prompts; shared-prefix questions behind long prefixes, as few-shot benchmarks do; chat holds
    conversations that grow turn by turn.

    Parameters
    ----------
    levels
        Concurrent requests: 1,4,16 (1,2,4,8,16,32,64, unless --rate is given).
    rate
        Requests a second: 0.5,2,4 (conversations, for chat).
    goodput
        Limits such as ttft=500ms,itl=50ms: also count the requests a second that keep them all.
    requests
        In each level or rate and round.
    rounds
        Times that each level or rate is measured.
    warmup
        Untimed requests before each, as many at once as the load will be (the level; 8 for a rate).
    input_tokens
        Of a prompt, question or turn (1,024; 100 for shared-prefix and chat).
    output_tokens
        Of an answer (1,024; 128 for shared-prefix and chat).
    prefix_tokens
        shared-prefix: of each prefix.
    prefixes
        shared-prefix: different prefixes.
    turns
        chat: turns of a conversation.
    spot_checks
        Sums asked during each warm-up, to see that answers are still answers.
    endpoint
        /v1/completions for random and distinct, /v1/chat/completions else.
    stream
        Without it whole answers: no TTFT, no ITL.
    """
    chat = workload in CHATS
    tokens_in, tokens_out = (
        input_tokens or (100 if chat else TOKENS),
        output_tokens or (128 if chat else TOKENS),
    )
    chosen = levels if levels is not None else () if rate else tuple(WEIGHTS)
    shape = {
        "shared-prefix": {"prefix_tokens": prefix_tokens, "prefixes": prefixes},
        "chat": {"turns": turns},
    }
    settings = {
        "levels": chosen,
        "rates": rate or (),
        "goodput": str(goodput) if goodput is not None else None,
        "requests": requests,
        "rounds": rounds,
        "warmup": warmup,
        "input_tokens": tokens_in,
        "output_tokens": tokens_out,
        **shape.get(workload, {}),
        "spot_checks": spot_checks,
        "stream": stream,
        **prompts.settings(),
    }
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
            load = await make_workload(
                workload,
                supply,
                tokens_in,
                prefix_tokens=prefix_tokens,
                prefixes=prefixes,
                turns=turns,
            )

            def cell(concurrency: int | None, rate: float | None) -> LoadCell:
                return LoadCell(
                    load,
                    supply,
                    concurrency=concurrency,
                    rate=rate,
                    requests=requests,
                    warmup=warmup,
                    output_tokens=tokens_out,
                    stream=stream,
                    endpoint=endpoint,
                    spot_checks=spot_checks,
                    limits=goodput,
                )

            cells = [*(cell(level, None) for level in chosen), *(cell(None, one) for one in rate or ())]
            try:
                errors = await measure_alone(run, target, [(one, rounds) for one in cells])
            finally:
                show_throughput(run.results())
    if errors:
        raise BenchError(f"{len(errors)} requests or spot checks failed; the first: {errors[0]}")
    return 0


async def make_workload(
    kind: Kind, supply: Supply, input_tokens: int, *, prefix_tokens: int, prefixes: int, turns: int
) -> Workload:
    """A kind of traffic out of the supply's prompts; the hackathon's are random tokens."""
    prompts = await supply.prompts("tokens" if kind == "random" else None)
    if kind == "shared-prefix":
        return SharedPrefix(prompts, input_tokens, prefix_tokens=prefix_tokens, prefixes=prefixes)
    if kind == "chat":
        return Chat(prompts, input_tokens, turns=turns)
    return SinglePrompts(kind, prompts, input_tokens)
