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
from qwen_serve.bench.load.cell import LOADED, STREAMED, WHOLE, Cell, PromptSource, measure_alone, measuring
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
"""Lengths of questions about pictures and of their answers. Both are short, since a picture's cost comes
before the first token."""
QUESTIONS = ("first question", "second question")
ImageSizes = Annotated[tuple[Resolution, ...], comma_separated(Resolution.read)]
IMAGE_SIZES = (DEFAULT_SIZE,)
Categories = Annotated[tuple[Category, ...], comma_separated(category)]


def latency_cell(
    one: Category,
    protocol: str,
    source: PromptSource,
    *,
    endpoint: str,
    streamed: bool,
    warmup: int,
    rounds: int,
    count: int = 1,
) -> Cell:
    """The cell of a category under a protocol: ``count`` requests a round, one after the other.

    Under the distinct protocol each request has another prompt. ``streamed`` requests give TTFT and ITL, the
    others the latency; the two are separate cells under one name.
    """
    seed = source.options.seed

    async def make(round: int) -> list[Job]:
        return [Job((await prompt(round, at),), chat=False) for at in range(count if round else warmup)]

    async def prompt(round: int, at: int) -> str:
        if protocol == OFFICIAL:
            return one.filler
        rng = random.Random(f"{seed}/{protocol}/{one.name}/{round}/{at}/{streamed}")
        return await (await source.prompts()).make(one.prompt_tokens, rng)

    return Cell(
        workload=protocol,
        name=one.name,
        rounds=rounds,
        make=make,
        source=source,
        max_tokens=one.max_tokens,
        # the official body is exactly as published, without ignore_eos
        ignore_eos=protocol == DISTINCT and not source.options.stop_at_eos,
        stream=streamed,
        endpoint=endpoint,
        kept=STREAMED if streamed else WHOLE,
    )


def picture_cells(size: Resolution, source: PromptSource, *, warmup: int, rounds: int) -> list[Cell]:
    """Cells of two streamed questions about a new picture in each round. For the second question the server
    has the picture cached.
    """

    async def ask(round: int, number: int) -> list[Job]:
        rng = random.Random(f"{source.options.seed}/{IMAGES}/{size}/{QUESTIONS[number]}/{round}")
        question = await (await source.prompts()).make(QUESTION_TOKENS, rng)
        shown = random.Random(f"{source.options.seed}/{IMAGES}/{size}/{round}")
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
            source=source,
            max_tokens=ANSWER_TOKENS,
            ignore_eos=not source.options.stop_at_eos,
            stream=True,
            kept=LOADED,
            prime=make(0) if number else None,
        )
        for number, name in enumerate(QUESTIONS)
    ]


def latency_cells(
    categories: Sequence[Category],
    protocol: Protocol,
    source: PromptSource,
    *,
    endpoints: tuple[str, str],
    warmup: int,
    rounds: tuple[int, int],
    counts: tuple[int, int] = (1, 1),
    images: Sequence[Resolution] = (),
) -> list[Cell]:
    """For each category and protocol a cell of whole answers and one of streamed ones. ``endpoints``,
    ``rounds`` and ``counts``: for whole and for streamed answers. The images protocol has the cells of
    `picture_cells`.
    """
    if protocol == IMAGES:
        return [
            cell for size in images for cell in picture_cells(size, source, warmup=warmup, rounds=rounds[1])
        ]
    return [
        latency_cell(
            one,
            name,
            source,
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
    """The protocols that a value of --protocol stands for."""
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

    The official protocol sends the same repeated filler every time, so the result depends on prompt caches
    and lossless speculation. The distinct protocol sends another prompt of exactly the same length each time.
    The images protocol asks two questions about each of --stream-runs pictures; for the second question the
    picture is cached.

    Parameters
    ----------
    protocol
        Protocol, see above; both: official and distinct.
    runs
        Timed requests of each category and protocol.
    warmup
        Untimed requests before the timed ones.
    stream_runs
        Streamed requests, for TTFT and ITL; 0: none (default: as many as --runs).
    categories
        Lengths of prompt and answer: one or more of short, medium and long, separated by commas.
    endpoint
        Endpoint whose latency is measured.
    stream_endpoint
        Endpoint of the streamed requests.
    baseline
        Latencies that speed-ups refer to: official (BF16 on an A10G), none, or short=MS,medium=MS,long=MS.
    image_resolution
        images: size of pictures, WIDTHxHEIGHT in pixels; several, separated by commas.
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
    async with measuring("latency", server, store, prompts, settings, chat=chat) as (run, target, source):
        cells = latency_cells(
            categories,
            protocol,
            source,
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
    """Milliseconds by category, from "official", "none", or a text such as short=2582,medium=5441,long=6576.
    Raises BenchError for any other text.
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
