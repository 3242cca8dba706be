"""Latency of one request at a time, under both protocols."""

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal

from qwen_serve.bench.arguments import (
    Natural,
    Positive,
    PromptOptions,
    ServerOptions,
    StoreOptions,
    comma_separated,
    positive_number,
)
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.load.cell import LOADED, STREAMED, WHOLE, Cell, Supply, measure_alone, measuring
from qwen_serve.bench.load.generator import Job
from qwen_serve.bench.load.images import DEFAULT_SIZE, Resolution, data_url
from qwen_serve.bench.load.protocol import (
    ALL_CATEGORIES,
    CATEGORIES,
    DISTINCT,
    IMAGES,
    OFFICIAL,
    Category,
    category,
)
from qwen_serve.bench.report.views import show

Protocol = Literal["both", "official", "distinct", "images"]
QUESTION_TOKENS, ANSWER_TOKENS = 32, 16
"""Metrics of questions about pictures: a picture's cost comes before the first token."""
QUESTIONS = ("first question", "second question")
ImageSizes = Annotated[tuple[Resolution, ...], comma_separated(Resolution.read)]
IMAGE_SIZES = (DEFAULT_SIZE,)
Categories = Annotated[tuple[Category, ...], comma_separated(category)]


def latency_cell(
    one: Category,
    protocol: str,
    supply: Supply,
    *,
    endpoint: str,
    streamed: bool,
    warmup: int,
    rounds: int,
    count: int = 1,
) -> Cell:
    """One category under one protocol, ``count`` requests a round, one after the other.

    Distinct prompts are other ones for every request. ``streamed`` requests bring TTFT and ITL, the others
    the latency; the two are cells of their own under one name.
    """
    seed = supply.options.seed

    async def make(round: int) -> list[Job]:
        return [Job((await prompt(round, at),), chat=False) for at in range(count if round else warmup)]

    async def prompt(round: int, at: int) -> str:
        if protocol == OFFICIAL:
            return one.filler
        rng = random.Random(f"{seed}/{protocol}/{one.name}/{round}/{at}/{streamed}")
        return await (await supply.prompts()).make(one.prompt_tokens, rng)

    return Cell(
        workload=protocol,
        name=one.name,
        rounds=rounds,
        make=make,
        supply=supply,
        max_tokens=one.max_tokens,
        # the official body is sent exactly as published
        ignore_eos=protocol == DISTINCT and not supply.options.stop_at_eos,
        stream=streamed,
        endpoint=endpoint,
        kept=STREAMED if streamed else WHOLE,
    )


def picture_cells(size: Resolution, supply: Supply, *, warmup: int, rounds: int) -> list[Cell]:
    """Two questions about a new picture in each round: the second finds the picture read. Streamed, for the
    time to the first token.
    """

    async def ask(round: int, number: int) -> list[Job]:
        rng = random.Random(f"{supply.options.seed}/{IMAGES}/{size}/{QUESTIONS[number]}/{round}")
        question = await (await supply.prompts()).make(QUESTION_TOKENS, rng)
        shown = random.Random(f"{supply.options.seed}/{IMAGES}/{size}/{round}")
        return [Job((question,), chat=True, pictures=(data_url(size, shown),))]

    def make(number: int) -> Callable[[int], Awaitable[list[Job]]]:
        async def jobs(round: int) -> list[Job]:
            return await ask(round, number) if round or warmup else []

        return jobs

    return [
        Cell(
            workload=IMAGES,
            name=f"{size}, {name}",
            rounds=rounds,
            make=make(number),
            supply=supply,
            max_tokens=ANSWER_TOKENS,
            ignore_eos=not supply.options.stop_at_eos,
            stream=True,
            kept=LOADED,
            prime=make(0) if number else None,
        )
        for number, name in enumerate(QUESTIONS)
    ]


def latency_cells(
    categories: Sequence[Category],
    protocol: Protocol,
    supply: Supply,
    *,
    endpoints: tuple[str, str],
    warmup: int,
    rounds: tuple[int, int],
    counts: tuple[int, int] = (1, 1),
    images: Sequence[Resolution] = (),
) -> list[Cell]:
    """For every category and protocol a cell of whole answers and one of streamed ones, if any;
    ``endpoints``, ``rounds`` and ``counts`` are for either. For pictures the cells of `picture_cells`.
    """
    if protocol == IMAGES:
        return [
            cell for size in images for cell in picture_cells(size, supply, warmup=warmup, rounds=rounds[1])
        ]
    return [
        latency_cell(
            one,
            name,
            supply,
            endpoint=endpoints[streamed],
            streamed=bool(streamed),
            warmup=min(warmup, 1) if streamed else warmup,
            rounds=rounds[streamed],
            count=counts[streamed],
        )
        for one in categories
        for name in protocols_of(protocol)
        for streamed in (0, 1)
        if rounds[streamed] and counts[streamed]
    ]


def protocols_of(protocol: Protocol) -> Sequence[str]:
    """The protocols that --protocol means."""
    return (OFFICIAL, DISTINCT) if protocol == "both" else (protocol,)


async def latency(
    *,
    server: ServerOptions = ServerOptions(),
    store: StoreOptions = StoreOptions(),
    prompts: PromptOptions = PromptOptions(),
    protocol: Protocol = "both",
    runs: Positive = 50,
    warmup: Natural = 5,
    stream_runs: Natural | None = None,
    categories: Categories = ALL_CATEGORIES,
    endpoint: str = "/invocations",
    stream_endpoint: str = "/v1/completions",
    baseline: str = "official",
    image_resolution: ImageSizes = IMAGE_SIZES,
) -> int:
    """Latency of one request at a time: the same prompt again (official), another one each time (distinct),
    or questions about pictures (images).

    - `qwen-bench latency --url http://127.0.0.1:8080 --runs 50`
    - `qwen-bench latency --protocol distinct --categories short --stream-runs 0`
    - `qwen-bench latency --protocol images --image-resolution 1024x1024`

    The official protocol sends the same repeated filler every time, so prompt caches and lossless speculation
    decide the result. The distinct protocol sends another prompt of exactly the same length each time. The
    images protocol asks two questions about each of --stream-runs pictures; for the second question the
    picture is cached.

    Parameters
    ----------
    protocol
        See above; both: official and distinct.
    runs
        Timed requests per category and protocol.
    warmup
        Untimed requests before them.
    stream_runs
        Streamed requests, for TTFT and ITL; 0: none (default: as many as --runs).
    categories
        One or more of short, medium and long.
    endpoint
        The timed endpoint.
    stream_endpoint
        The endpoint for TTFT and ITL.
    baseline
        Reference of speed-ups: official (BF16 on an A10G), none, or short=MS,medium=MS,long=MS.
    image_resolution
        images: WIDTHxHEIGHT of pictures, in pixels; several with commas.
    """
    streams = runs if stream_runs is None else stream_runs
    settings: dict[str, Any] = {
        "runs": runs,
        "warmup": warmup,
        "stream_runs": streams,
        "endpoint": endpoint,
        "stream_endpoint": stream_endpoint,
        "baseline": read_baseline(baseline),
    }
    if protocol == IMAGES:
        settings |= {"input_tokens": QUESTION_TOKENS, "output_tokens": ANSWER_TOKENS}
    chat = protocol == IMAGES
    async with measuring("latency", server, store, prompts, settings, chat=chat) as (run, target, supply):
        cells = latency_cells(
            categories,
            protocol,
            supply,
            endpoints=(endpoint, stream_endpoint),
            warmup=warmup,
            rounds=(runs, streams),
            images=image_resolution,
        )
        try:
            errors = await measure_alone(run, target, cells)
        finally:
            show(run)
    if errors:
        raise BenchError(f"{len(errors)} requests failed; the first: {errors[0]}")
    return 0


def read_baseline(text: str) -> dict[str, float]:
    """Milliseconds by category: "official", "none", or short=2582,medium=5441,long=6576. Raises
    BenchError.
    """
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
