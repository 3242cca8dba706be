"""Throughput and latency under load, in a closed loop at levels of concurrency or an open loop at request
rates.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from qwen_serve.bench.arguments import (
    LOAD_GROUP,
    Natural,
    Positive,
    Positives,
    PromptOptions,
    Rates,
    ServerOptions,
    StoreOptions,
    parsed_by,
)
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.load.cell import LOADED, Cell, PromptSource, measure_alone, measuring
from qwen_serve.bench.load.generator import Job
from qwen_serve.bench.load.goodput import Limits, read_limits
from qwen_serve.bench.load.images import DEFAULT_SIZE, Resolution, data_url
from qwen_serve.bench.load.protocol import REQUESTS, TOKENS, WARM_UPS, WEIGHTS, at_concurrency, at_rate
from qwen_serve.bench.load.tenants import TenantOptions, measure_tenants
from qwen_serve.bench.report.views import show

Kind = Literal["random", "distinct", "shared-prefix", "chat", "images"]
CHATS = ("shared-prefix", "chat", "images")
ImageSize = Annotated[Resolution, parsed_by(Resolution.read)]
AT_A_RATE = 8
"""Concurrency of an open loop's warm-up."""
LEAST_REQUESTS = 4


@Parameter(name="*", group=LOAD_GROUP)
@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """A load, for one server or for several."""

    levels: Positives | None = None
    """Numbers of concurrent requests, such as 1,4,16."""
    rate: Rates | None = None
    """Rates in requests a second, such as 0.5,2,4 (for chat: conversations a second)."""
    goodput: Annotated[Limits | None, parsed_by(read_limits)] = None
    """Limits such as ttft=500ms,itl=50ms; also reports the requests a second that stay within all of them."""
    requests: Positive = REQUESTS
    """Requests in each round of each level or rate."""
    waves: Natural = 0
    """Requests for each client of a level, instead of --requests; at least 4 in all. 0: use --requests."""
    warmup: Natural | None = None
    """Untimed requests before each level or rate (default: 2, or the level if that is more). They are sent at
    the level's concurrency; for a rate, 8 at once."""
    input_tokens: Positive | None = None
    """Tokens of a prompt, question or turn (default 1,024; 100 for shared-prefix, chat and images)."""
    output_tokens: Positive | None = None
    """Tokens of an answer (default 1,024; 128 for shared-prefix, chat and images)."""
    range_ratio: Annotated[float, Parameter(validator=Number(gte=0, lt=1))] = 0.0
    """Lengths vary between requests, uniformly, by up to this share of --input-tokens and --output-tokens
    (vLLM: --random-range-ratio)."""
    prefix_tokens: Positive = 2000
    """shared-prefix: tokens of each prefix."""
    prefixes: Positive = 4
    """shared-prefix: number of different prefixes."""
    turns: Positive = 4
    """chat: turns of a conversation."""
    image_resolution: ImageSize = DEFAULT_SIZE
    """images: size of each picture, WIDTHxHEIGHT in pixels."""
    image_count: Positive = 1
    """images: pictures in each request."""
    spot_checks: Natural = 2
    """Sums to ask during the first warm-up of each level or rate, to check that answers are right under
    load."""
    endpoint: str | None = None
    """Endpoint of the requests (default: /v1/completions for random and distinct, else
    /v1/chat/completions)."""
    stream: bool = True
    """Stream answers; TTFT and ITL are measured only with streaming."""
    temperature: Annotated[float, Parameter(validator=Number(gte=0))] = 0.0
    """Temperature of the requests; above 0 with top-k 20, top-p 0.95 and a seed."""
    predict_replicas: Literal[2, 4, 8] | None = None
    """random: also predict the throughput of this number of replicas behind a router, from this server's
    levels."""

    def sampling(self, seed: int) -> dict[str, float]:
        """A request's fields of sampling; none if it is greedy."""
        fields = {"temperature": self.temperature, "top_k": 20, "top_p": 0.95, "seed": seed}
        return fields if self.temperature else {}

    def lengths(self, kind: Kind) -> tuple[int, int]:
        """Tokens in and out of a request, on average."""
        chat = kind in CHATS
        return self.input_tokens or (100 if chat else TOKENS), self.output_tokens or (128 if chat else TOKENS)

    def bounds(self, tokens: int) -> tuple[int, int]:
        """The shortest and the longest length by --range-ratio."""
        return max(1, round(tokens * (1 - self.range_ratio))), round(tokens * (1 + self.range_ratio))

    def longest(self, kind: Kind) -> int:
        """Maximum tokens in and out of a request together."""
        return sum(self.bounds(tokens)[1] for tokens in self.lengths(kind))

    def varied(self, tokens: int, rng: random.Random) -> int:
        """A length by --range-ratio; without it `rng` is not used."""
        return rng.randint(*self.bounds(tokens)) if self.range_ratio else tokens

    def chosen_levels(self, default: Sequence[int]) -> tuple[int, ...]:
        """The levels of --levels; without --levels and --rate the default ones."""
        return self.levels if self.levels is not None else () if self.rate else tuple(default)

    def settings(self, kind: Kind, default: Sequence[int]) -> dict[str, Any]:
        """The settings that a manifest records."""
        names = ["requests", "waves", "warmup", "range_ratio", "spot_checks", "stream", "temperature"]
        names += ["predict_replicas"]
        names += {
            "shared-prefix": ["prefix_tokens", "prefixes"],
            "chat": ["turns"],
            "images": ["image_count"],
        }.get(kind, [])
        tokens_in, tokens_out = self.lengths(kind)
        return {
            "levels": self.chosen_levels(default),
            "rates": self.rate or (),
            "goodput": str(self.goodput) if self.goodput is not None else None,
            "input_tokens": tokens_in,
            "output_tokens": tokens_out,
            **({"image_resolution": str(self.image_resolution)} if kind == "images" else {}),
            **{name: getattr(self, name) for name in names},
        }

    def cells(self, kind: Kind, source: PromptSource, default: Sequence[int], rounds: int) -> list[Cell]:
        """A cell for each level and for each rate."""
        levels = [self._cell(kind, source, rounds, level, None) for level in self.chosen_levels(default)]
        return levels + [self._cell(kind, source, rounds, AT_A_RATE, rate) for rate in self.rate or ()]

    def _cell(self, kind: Kind, source: PromptSource, rounds: int, clients: int, rate: float | None) -> Cell:
        requests = max(LEAST_REQUESTS, self.waves * clients) if self.waves and not rate else self.requests
        warmup = max(WARM_UPS, clients) if self.warmup is None else self.warmup
        tokens_out = self.lengths(kind)[1]

        async def make(round: int) -> list[Job]:
            wanted = requests if round else warmup
            jobs = await self._jobs(kind, source, wanted, clients, cell.rng(round)) if wanted else []
            lengths = cell.rng(round, "answers")
            return [
                replace(job, fields={**self.sampling(n), "max_tokens": self.varied(tokens_out, lengths)})
                for n, job in enumerate(jobs)
            ]

        cell = Cell(
            workload=kind,
            name=at_concurrency(clients) if rate is None else at_rate(rate),
            rounds=rounds,
            make=make,
            source=source,
            max_tokens=tokens_out,
            ignore_eos=not source.options.stop_at_eos,
            stream=self.stream,
            endpoint=self.endpoint,
            kept=LOADED,
            clients=clients,
            rate=rate,
            load=True,
            spot_checks=self.spot_checks,
            limits=self.goodput,
        )
        return cell

    async def _jobs(
        self, kind: Kind, source: PromptSource, requests: int, clients: int, rng: random.Random
    ) -> list[Job]:
        """Jobs of one kind with ``requests`` requests in all. They depend only on the state of ``rng``,
        except with --text.
        """
        prompts = await source.prompts("tokens" if kind == "random" else None)
        tokens = self.lengths(kind)[0]

        async def make() -> str:
            return await prompts.make(self.varied(tokens, rng), rng)

        if kind == "chat":  # at least one conversation for each client
            count = max(-(-requests // self.turns), clients)
            turns = [[await make() for _ in range(self.turns)] for _ in range(count)]
            return [Job(tuple(texts), chat=True) for texts in turns]
        if kind == "shared-prefix":  # like few-shot benchmarks, which ask about one subject after the other
            count = min(self.prefixes, requests)
            prefixes = [await prompts.make(self.prefix_tokens, rng) for _ in range(count)]
            questions = [await make() for _ in range(requests)]
            return [
                Job((f"{prefixes[index * count // requests]}\n\n{question}",), chat=True)
                for index, question in enumerate(questions)
            ]
        if kind == "images":
            return [
                Job(
                    (await make(),),
                    chat=True,
                    pictures=tuple(data_url(self.image_resolution, rng) for _ in range(self.image_count)),
                )
                for _ in range(requests)
            ]
        return [Job((await make(),), chat=False) for _ in range(requests)]


def refuse_text(workload: str, prompts: PromptOptions) -> None:
    """Raises BenchError for --text with the workload random, whose prompts are random tokens."""
    if workload == "random" and prompts.text is not None:
        raise BenchError(
            f"--text {prompts.text}: the prompts of --workload random are random tokens; "
            "--workload distinct cuts them from a text"
        )


async def throughput(
    *,
    server: ServerOptions = ServerOptions(),
    store: StoreOptions = StoreOptions(),
    prompts: PromptOptions = PromptOptions(),
    workload: Literal[Kind, "tenants"] = "random",
    load: LoadOptions = LoadOptions(),
    rounds: Positive = 1,
    tenants: TenantOptions = TenantOptions(),
) -> int:
    """Throughput and latency under load, with verified token counts.

    - `qwen-bench throughput --url http://127.0.0.1:8080 --levels 1,8,64`
    - `qwen-bench throughput --workload distinct --input-tokens 512 --output-tokens 128 --rate 0.5,2,4`
    - `qwen-bench throughput --workload shared-prefix --prefixes 16 --prefix-tokens 600 --levels 32`
    - `qwen-bench throughput --workload tenants --keys keys.txt`

    A closed loop keeps --levels requests running (default 1,2,4,8,16,32,64, unless --rate is given). An open
    loop (--rate) sends requests at random times (Poisson arrivals), so that queueing shows, and times each
    request from its arrival.

    Workloads:

    - random: the hackathon's protocol, with 1,024 random tokens in, 1,024 out, 64 requests a level, a score
    - distinct: natural prompts
    - shared-prefix: questions behind long prefixes, as in few-shot benchmarks
    - chat: conversations that grow turn by turn
    - images: questions about new pictures (--image-count in each request)
    - tenants: requests of ten API keys (--keys), to see how clients delay each other; it has options of its
      own

    Parameters
    ----------
    workload
        Kind of requests, see above.
    rounds
        How often each level or rate is measured.
    """
    if workload == "tenants":
        return await measure_tenants(server, store, prompts, tenants)
    refuse_text(workload, prompts)
    levels = tuple(WEIGHTS)
    settings = {"rounds": rounds, **load.settings(workload, levels)}
    async with measuring("throughput", server, store, prompts, settings, chat=True) as (run, target, source):
        try:
            errors = await measure_alone(run, target, load.cells(workload, source, levels, rounds))
        finally:
            show(run)
    if errors:
        raise BenchError(f"{len(errors)} requests or spot checks failed; the first: {errors[0]}")
    return 0
