"""What constrained output costs a token, and how many of other people's JSON schemas it takes."""

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter, sleep, thread_time
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter
from cyclopts.validators import Number

from bench.analysis.statistics import interval
from bench.arguments import Positive, Positives, StoreOptions
from bench.engine.recording import Recorder, recorded
from bench.terminal import Cell, Table
from server.chat.constraints import compose, json_format
from server.chat.errors import PromptError
from server.engine import Constraint, Engine, EngineSettings, Grammar, InvalidGrammar, SamplingParams
from server.engine.batch import Batch
from server.engine.grammar import GrammarCompiler
from server.engine.llama import Model, Rows
from server.engine.llama.tokenizer import llguidance_tokenizer

SCHEMAS: dict[str, dict[str, Any]] = {
    "a text": {
        "type": "object",
        "properties": {"text": {"type": "string", "minLength": 10_000}},
        "required": ["text"],
        "additionalProperties": False,
    },
    "nested lists": {
        "type": "array",
        "items": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "string"}]}},
        "minItems": 100_000,
    },
}
"""Neither has an end within reach. In a text nearly every token may come, as in most of real answers; in the
lists few may, among them hardly one of those that an untrained model thinks the best."""

FREE = "free"

DRAWS = {
    "greedy": SamplingParams(ignore_eos=True),
    "temperature 1, top_k 20, top_p 0.8": SamplingParams(
        temperature=1.0, top_k=20, top_p=0.8, seed=1, ignore_eos=True
    ),
}


def grammar_cost(
    gguf: Path,
    /,
    *,
    sequences: Positives = (1, 64),
    tokens: Positive = 64,
    times: Positive = 5,
    least_ms: Annotated[float, Parameter(validator=Number(gte=0))] = 0.0,
    store: StoreOptions = StoreOptions(),
) -> int:
    """Milliseconds a step of so many answers together, free and kept to JSON schemas, turn by turn.

    Parameters
    ----------
    gguf
        The model.
    sequences
        Answers at once.
    tokens
        Tokens of each.
    times
        Turns.
    least_ms
        Steps shorter than so many milliseconds are held back until then, after the computation: a small model
        on a processor then costs what it would on a card whose step is as long.
    """
    settings = {"sequences": sequences, "tokens": tokens, "times": times, "least_ms": least_ms}
    with recorded(gguf, "grammar-cost", "grammar", store, settings) as (_, recorder):
        options: dict[str, Any] = {"parallel": max(sequences), "ctx_size": max(sequences) * (tokens + 128)}
        engine = Engine(EngineSettings(model=gguf, speculation="off", prefix_cells=0, **options))
        engine.start()
        engine.wait_ready()
        choosing = _watch(engine, least_ms / 1000)
        try:
            grammars = {
                name: engine.grammars.compile(
                    compose(json_format(schema, "schema", flexible=False), thinking=False)
                ).result()
                for name, schema in SCHEMAS.items()
            }
            asyncio.run(_compare(engine, grammars, choosing, recorder, sequences, tokens, times))
        finally:
            engine.close()
    return 0


def _watch(engine: Engine, least: float) -> list[float]:
    """Have every step of the engine last `least` seconds before its tokens are chosen; for each step from now
    on, the processor's seconds that the choice takes of the engine's thread."""
    runner, speculator = engine._runner, engine._speculator
    launch, collect, verify = runner.launch, runner.collect, speculator.verify
    choosing: list[float] = []
    launched = began = 0.0

    def late_launch(batch: Batch) -> None:
        nonlocal launched
        launched = perf_counter()
        launch(batch)

    def late_collect(batch: Batch) -> Rows | None:
        nonlocal began
        rows = collect(batch)
        sleep(max(0.0, launched + least - perf_counter()))
        began = thread_time()
        return rows

    def late_verify(*arguments: Any) -> list[int]:
        choosing.append(thread_time() - began)
        return verify(*arguments)

    runner.launch, runner.collect = late_launch, late_collect  # type: ignore[method-assign]
    speculator.verify = late_verify  # type: ignore[method-assign, assignment]
    return choosing


async def _compare(
    engine: Engine,
    grammars: dict[str, Grammar],
    choosing: list[float],
    recorder: Recorder,
    counts: Positives,
    tokens: int,
    times: int,
) -> None:
    lines: list[list[Cell]] = []
    for n in counts:
        for draw, params in DRAWS.items():
            ways: dict[str, Callable[[], Constraint | None]] = {FREE: lambda: None}
            ways |= {name: grammar.begin for name, grammar in grammars.items()}
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            chosen: dict[str, list[float]] = {way: [] for way in ways}
            for turn in range(times + 1):
                for way, begin in ways.items():
                    choosing.clear()
                    took = await _answer(engine, n, tokens, params, begin)
                    if turn:
                        seconds[way].append(took)
                        chosen[way].append(1000 * float(np.median(choosing)))
                        cell = f"{n} answers, {draw}, {way}"
                        recorder.add(cell, turn, "step_time", 1000 * took)
                        recorder.add(cell, turn, "sample_time", chosen[way][-1])
            for way in grammars:
                cost = interval(np.log(seconds[way]) - np.log(seconds[FREE]))
                more = 1000 / n * float(np.median(np.subtract(chosen[way], chosen[FREE])))
                lines.append([n, draw, way, str(cost), round(more, 1)])
    columns = ["answers", "draw", "kept to", "step, times as long as free", "more processor us/token"]
    Table(columns, lines, title="cost of a grammar").print()


async def _answer(
    engine: Engine, n: int, tokens: int, params: SamplingParams, begin: Callable[[], Constraint | None]
) -> float:
    """Seconds of a step of `n` answers: median."""
    moments: list[float] = []

    async def one(index: int) -> None:
        prompt = engine.prompt([300 + index, 301])
        generation = engine.submit(prompt, params, tokens, constraint=begin())
        arrivals = [perf_counter() async for _ in generation]
        if not index:
            moments.extend(arrivals)

    await asyncio.gather(*map(one, range(n)))
    return float(np.median(np.diff(moments)))


# --- other people's schemas --------------------------------------------------------------------------------


def schema_suite(
    gguf: Path,
    folder: Path,
    /,
    *,
    documents: Positive = 3,
    longest: Positive = 400,
    seed: int = 1,
) -> int:
    """How many JSON schemas compile, and whether documents written at random within them are all valid.

    No model is asked: any token that may come next is as likely as any other, which finds more corners than a
    model would. A schema that is refused is one that a request would get a 400 for.

    Parameters
    ----------
    gguf
        Whose vocabulary is used.
    folder
        JSON files: each a schema, or the JSON Schema Test Suite's lists of {"schema": ...}.
    documents
        Documents for each schema.
    longest
        Tokens after which a document is given up.
    seed
        Of the draws.
    """
    import jsonschema_rs

    model = Model(gguf, n_gpu_layers=0)
    grammars = GrammarCompiler(lambda: llguidance_tokenizer(model), model.eos)
    counts = dict.fromkeys(
        ("schemas", "compiled", "refused", "documents", "unfinished", "not judged", "invalid"), 0
    )
    reasons: dict[str, int] = {}
    rng = random.Random(seed)
    for name, schema in _schemas(folder):
        counts["schemas"] += 1
        try:
            text = compose(json_format(schema, "schema"), thinking=False)
            grammar = grammars.compile(text).result()
        except (InvalidGrammar, PromptError) as error:
            counts["refused"] += 1
            reason = str(error).splitlines()[0].rpartition("JSON schema: ")[2][:60]
            reasons[reason] = reasons.get(reason, 0) + 1
            continue
        counts["compiled"] += 1
        try:
            validator = jsonschema_rs.validator_for(schema)
        except ValueError:  # refers to documents that are not at hand
            counts["not judged"] += 1
            continue
        for _ in range(documents):
            document = _write(model, grammar, rng, longest)
            if document is None:
                counts["unfinished"] += 1
                continue
            counts["documents"] += 1
            if not _is_valid(document, validator):
                counts["invalid"] += 1
                print(f"invalid by {name}: {json.dumps(schema)[:300]}\n  {document[:300]}")
    grammars.close()
    model.close()
    Table([*counts], [[*counts.values()]], title=f"{folder.name}: schemas").print()
    most = sorted(reasons.items(), key=lambda item: -item[1])[:12]
    Table(["refused for", "schemas"], [[reason, count] for reason, count in most], title="refused").print()
    return 1 if counts["invalid"] else 0


def _schemas(folder: Path) -> Iterator[tuple[str, Any]]:
    for path in sorted(folder.rglob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        if isinstance(content, list):
            for case in content:
                if isinstance(case, dict) and "schema" in case:
                    yield f"{path.name}: {case.get('description')}", case["schema"]
        elif isinstance(content, dict):
            yield path.name, content


def _write(model: Model, grammar: Grammar, rng: random.Random, longest: int) -> str | None:
    """A document of random tokens; None where it has no end within reach."""
    constraint, tokens = grammar.begin(), grammar.begin().forced()
    constraint.forced()
    while len(tokens) < longest:
        if tokens and tokens[-1] in model.eog_ids:
            return b"".join(model.piece(token, special=False) for token in tokens[:-1]).decode()
        ids = np.flatnonzero(constraint.mask()[: model.n_real])
        ends = np.intersect1d(ids, sorted(model.eog_ids))
        # an end is one of very many tokens: sooner, or few documents would ever have one
        token = int(ends[0]) if ends.size and rng.random() < 0.5 else int(rng.choice(ids))
        try:
            if not constraint.accept(token):
                raise AssertionError(f"token {token} is allowed, and refused")
            tokens += [token, *constraint.forced()]
        except RuntimeError:  # more than the limits allow: a request would fail with an error
            return None
    return None


def _is_valid(document: str, validator: Any) -> bool:
    def finite(text: str) -> float:
        """JSON has no largest number; those who check do."""
        return min(max(float(text), -1e300), 1e300)

    try:
        return bool(validator.is_valid(json.loads(document, parse_float=finite)))
    except ValueError:
        return False
