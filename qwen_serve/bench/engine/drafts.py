"""``qwen-bench engine drafts``: gains of each value of speculation, and the parts of its steps."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, get_args

from cyclopts import Parameter
from cyclopts.validators import Number
from pydantic import ValidationError

from qwen_serve.bench.analysis.statistics import LEAST_ROUNDS
from qwen_serve.bench.arguments import Positive, Positives, StoreOptions, comma_separated, named_values
from qwen_serve.bench.engine.recording import begun
from qwen_serve.bench.errors import BenchError, first_problem
from qwen_serve.bench.load.counters import Counters, parse_counters, record_growth
from qwen_serve.bench.report.drafts import WORKLOAD
from qwen_serve.bench.store import Run
from qwen_serve.bench.terminal import Bar
from qwen_serve.llamacpp import devices
from qwen_serve.llamacpp.gguf import read_header
from qwen_serve.server.api.observe.metrics import Metrics
from qwen_serve.server.engine import (
    DoesNotFit,
    Engine,
    EngineSettings,
    GenerateRequest,
    Prompt,
    SamplingParams,
)
from qwen_serve.server.engine.planning.spec import ModelSpec
from qwen_serve.server.engine.settings import Speculation

ROOM = 256
"""KV cells of a sequence beyond its tokens: for drafts, and because llama.cpp allocates in multiples."""

PARAMS = SamplingParams(ignore_eos=True)

DRAFT = "draft"

OWN = ("speculation", "draft_model")
"""Settings that differ between the engines."""


def read_way(text: str) -> str:
    """Parse a value of the engine's `speculation`, with +draft to add the draft model. Raises ValueError."""
    speculation, plus, beside = text.partition("+")
    known = get_args(Speculation)
    if speculation not in known or (plus and (beside != DRAFT or speculation in ("off", DRAFT))):
        raise ValueError(f"{text}: want {', '.join(known)}, or one that drafts with +{DRAFT}")
    return text


Ways = Annotated[tuple[str, ...], comma_separated(read_way)]


@dataclass(frozen=True, slots=True)
class Cell:
    """Requests of one length. ``at_once`` requests are sent in each of ``waves``; a wave begins when the one
    before has ended.
    """

    input_tokens: int
    at_once: int
    waves: int

    @property
    def name(self) -> str:
        return f"{self.input_tokens} in, {self.at_once} at once"

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of a turn, including the untimed wave."""
        return (1 + self.waves) * self.at_once * self.input_tokens


def make_cells(input_tokens: Positives, concurrency: Positives, requests: int) -> list[Cell]:
    """A cell for each length and concurrency, with at least ``requests`` requests."""
    return [Cell(length, n, -(-requests // n)) for length in input_tokens for n in concurrency]


def drafts(
    gguf: Path,
    /,
    *,
    text: Path,
    draft_model: Path | None = None,
    speculation: Ways | None = None,
    input_tokens: Positives = (64, 2048),
    output_tokens: Annotated[int, Parameter(validator=Number(gte=2))] = 256,
    concurrency: Positives = (1, 8),
    requests: Positive = 6,
    rounds: Positive = LEAST_ROUNDS,
    set: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    store: StoreOptions = StoreOptions(),
) -> int:
    """Compare drafters: time to the first token, time per token, and the parts of a step.

    - `qwen-bench engine drafts model.gguf --text model.words.txt`
    - `qwen-bench engine drafts model.gguf --text model.words.txt --draft-model drafter.gguf --concurrency 1`

    Times are in milliseconds. Each value of --speculation has an engine of its own, without a prefix cache.
    All engines are loaded at once and answer the same requests in turns, each turn after an untimed wave.
    Ratios are against "off".

    Parameters
    ----------
    gguf
        The model's GGUF.
    text
        Text in UTF-8 from which prompts are cut without repetition, such as the one of `qwen-bench build
        synthetic`.
    draft_model
        GGUF of a draft model (default: none).
    speculation
        Drafters to compare: off, mtp, ngram or both, with +draft to add the draft model, or draft for it
        alone (default: off, and those of mtp, draft and mtp+draft that the files allow).
    input_tokens
        Tokens of a prompt; several, separated by commas.
    output_tokens
        Tokens of an answer; end-of-sequence tokens are ignored.
    concurrency
        Numbers of concurrent requests.
    requests
        Minimum number of requests in a turn; they are sent in waves of --concurrency.
    rounds
        Turns of each engine; fewer than 10 cannot settle differences below 10%.
    set
        Another setting of the engines, as NAME=VALUE, such as mtp_depth=4, draft_always=true or parallel=64;
        may be repeated.
    """
    cells = make_cells(input_tokens, concurrency, requests)
    others = named_values(set, "--set")
    if own := others.keys() & {"model", *OWN}:
        raise BenchError(f"--set {min(own)}: this command has an option for that")
    longest, most = max(input_tokens) + output_tokens, max(concurrency)
    given: dict[str, Any] = {
        "model": gguf,
        "parallel": most,
        "ctx_size": most * (longest + ROOM),
        "prefix_cache": False,
        **others,
    }
    settings = {
        "draft_model": draft_model.name if draft_model else None,
        "speculation": speculation,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "concurrency": concurrency,
        "requests": requests,
        "rounds": rounds,
        "set": set,
        "text": text.name,
    }
    with begun(gguf, "drafts", store, settings) as run, ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for way in dict.fromkeys(speculation or _possible_ways(gguf, draft_model)):
            engines[way] = engine = _start(way, given, draft_model, stack)
            chosen = engine.settings.model_dump(mode="json", exclude={"model", "draft_model"})
            run.describe(way, device=devices()[0].description, **chosen)
        if longest > engine.context_size:
            raise BenchError(f"{longest:,} tokens of a request: this model holds {engine.context_size:,}")
        if len({one.settings.ubatch_size for one in engines.values()}) > 1:
            run.note("memory was short: the engines' ubatch_size differs, and with it the time of prompts")
        prompts = _cut(engine, text, rounds * sum(cell.prompt_tokens for cell in cells))
        asyncio.run(_turns(run, engines, cells, prompts, output_tokens, rounds))
    return 0


def _possible_ways(gguf: Path, draft_model: Path | None) -> list[str]:
    mtp = ["mtp"] if ModelSpec.from_header(read_header(gguf)).mtp.weights else []
    drafts = [DRAFT, *(f"{way}+{DRAFT}" for way in mtp)] if draft_model else []
    if not (mtp or drafts):
        raise BenchError(f"{gguf} has no MTP head: want a --draft-model, or --speculation off,ngram")
    return ["off", *mtp, *drafts]


def _start(way: str, given: dict[str, Any], draft_model: Path | None, stack: ExitStack) -> Engine:
    """A warm engine with the drafter ``way``; the stack closes it."""
    speculation, _, beside = way.partition("+")
    wanted = DRAFT in (speculation, beside)
    if wanted and draft_model is None:
        raise BenchError(f"--speculation {way}: want a --draft-model")
    own = zip(OWN, (speculation, draft_model if wanted else None), strict=True)
    try:
        engine = Engine(EngineSettings(**given, **dict(own)))
    except ValidationError as error:
        raise BenchError(f"--set, {way}: {first_problem(error, 'the settings')}") from error
    except DoesNotFit as error:
        raise BenchError(f"{way}, with the engines before it: {error}\nName fewer --speculation.") from error
    stack.callback(engine.close)
    engine.start()
    engine.wait_ready()
    return engine


def _cut(engine: Engine, text: Path, count: int) -> Iterator[int]:
    """The first ``count`` tokens of the text. Raises BenchError if the text is shorter."""
    try:
        ids = engine.vocab.tokenize(text.read_text(encoding="utf-8"), special=False)
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--text {text}: {error}") from error
    if len(ids) < count:
        raise BenchError(
            f"--text {text}: {len(ids):,} tokens, and {count:,} are wanted: a longer one, or fewer --rounds"
        )
    return iter(ids)


async def _turns(
    run: Run,
    engines: dict[str, Engine],
    cells: Sequence[Cell],
    tokens: Iterator[int],
    output_tokens: int,
    rounds: int,
) -> None:
    ways = list(engines)
    a_round = sum(cell.waves * cell.at_once for cell in cells)
    with Bar("ways to draft in turns", total=rounds * len(ways) * a_round) as bar:
        for round in range(1, rounds + 1):
            for turn, cell in enumerate(cells):
                untimed, *waves = [
                    [
                        engines[ways[0]].prompt(list(islice(tokens, cell.input_tokens)))
                        for _ in range(cell.at_once)
                    ]
                    for _ in range(1 + cell.waves)
                ]
                first = (round + turn) % len(ways)
                for way in [*ways[first:], *ways[:first]]:
                    engine = engines[way]
                    await _wave(engine, untimed, output_tokens)
                    before = await _counters(engine)
                    for wave in waves:
                        for values in await _wave(engine, wave, output_tokens):
                            run.add(way, WORKLOAD, cell.name, round, values)
                        bar.advance(len(wave), note=f"{way}, {cell.name}")
                    record_growth(run, way, WORKLOAD, cell.name, round, before, await _counters(engine))


async def _wave(engine: Engine, prompts: Sequence[Prompt], tokens: int) -> list[dict[str, float]]:
    return await asyncio.gather(*(answer(engine, prompt, tokens) for prompt in prompts))


async def answer(engine: Engine, prompt: Prompt, count: int) -> dict[str, float]:
    """Send a request. Returns its TTFT and ITL, as a client measures them."""
    submitted = perf_counter()
    arrivals = [
        (perf_counter(), len(tokens))
        async for tokens in engine.submit(GenerateRequest(prompt, PARAMS, max_tokens=count))
    ]
    (first, at_first), (last, _) = arrivals[0], arrivals[-1]
    return {"ttft": 1000 * (first - submitted), "itl": 1000 * (last - first) / max(1, count - at_first)}


async def _counters(engine: Engine) -> Counters:
    """The counters of /metrics, once the last step is counted: steps are counted after their tokens are
    sent."""
    stats = engine.stats()
    while sum(totals.steps for totals in stats.step_totals) < stats.steps:
        await asyncio.sleep(0.001)
        stats = engine.stats()
    return parse_counters(Metrics().render(stats).decode())
