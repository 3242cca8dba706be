"""``python scripts/grammar.py``: costs of constrained output."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np
from script import run

from qwen_serve.bench.analysis.statistics import interval
from qwen_serve.bench.arguments import Positive, Positives
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.terminal import Cell, Table
from qwen_serve.server.chat.formats import compose, json_format
from qwen_serve.server.engine import (
    Constraint,
    Engine,
    EngineSettings,
    GenerateRequest,
    Grammar,
    SamplingParams,
)
from qwen_serve.server.engine.runner import Launched
from qwen_serve.server.engine.sampling.rows import Rows

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
"""Schemas whose answers do not end within the measurement. In a string nearly every token is allowed, as in
most real answers. In the lists few tokens are allowed, and an untrained model gives hardly any of them a high
probability."""

FREE = "free"

DRAWS = {
    "greedy": SamplingParams(ignore_eos=True),
    "temperature 1, top_k 20, top_p 0.8": SamplingParams(
        temperature=1.0, top_k=20, top_p=0.8, seed=1, ignore_eos=True
    ),
}


def grammar(
    gguf: Path,
    /,
    *,
    sequences: Positives = (1, 64),
    tokens: Positive = 64,
    times: Positive = 5,
) -> None:
    """Compare steps of concurrent answers without constraints and with JSON schemas, in milliseconds, in
    turns.

    - `python scripts/grammar.py models/nano-Q4_K_M.gguf --sequences 1,8`

    Parameters
    ----------
    gguf
        The model's GGUF.
    sequences
        Numbers of concurrent answers.
    tokens
        Tokens of each answer.
    times
        Number of turns.
    """
    if not gguf.is_file():
        raise BenchError(f"{gguf}: no such file")
    options: dict[str, Any] = {"parallel": max(sequences), "ctx_size": max(sequences) * (tokens + 128)}
    engine = Engine(EngineSettings(model=gguf, speculation="off", prefix_cells=0, **options))
    engine.start()
    engine.wait_ready()
    choosing = _watch(engine)
    try:
        grammars = {
            name: engine.grammars.compile(
                compose(json_format(schema, "schema", flexible=False), thinking=False)
            ).result()
            for name, schema in SCHEMAS.items()
        }
        asyncio.run(_compare(engine, grammars, choosing, sequences, tokens, times))
    finally:
        engine.close()


def _watch(engine: Engine) -> list[float]:
    """Record the CPU seconds of choosing tokens, on the engine's thread, for each step from now on."""
    runner, speculator = engine._runner, engine._speculator
    collect, verify = runner.collect, speculator.verify
    choosing: list[float] = []
    began = 0.0

    def timed_collect(step: Launched) -> Rows | None:
        nonlocal began
        rows = collect(step)
        began = thread_time()
        return rows

    def timed_verify(*arguments: Any) -> list[int]:
        choosing.append(thread_time() - began)
        return verify(*arguments)

    runner.collect = timed_collect  # type: ignore[method-assign]
    speculator.verify = timed_verify  # type: ignore[method-assign, assignment]
    return choosing


async def _compare(
    engine: Engine,
    grammars: dict[str, Grammar],
    choosing: list[float],
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
            for way in grammars:
                cost = interval(np.log(seconds[way]) - np.log(seconds[FREE]))
                step = 1000 * float(np.median(seconds[way]))
                more = 1000 / n * float(np.median(np.subtract(chosen[way], chosen[FREE])))
                lines.append([n, draw, way, step, str(cost), round(more, 1)])
    columns = [
        "answers",
        "draw",
        "kept to",
        "step, ms",
        "step, times as long as free",
        "more processor us/token",
    ]
    Table(columns, lines, title="cost of a grammar").print()


async def _answer(
    engine: Engine, n: int, tokens: int, params: SamplingParams, begin: Callable[[], Constraint | None]
) -> float:
    """Median seconds of a step with `n` answers."""
    moments: list[float] = []

    async def one(index: int) -> None:
        prompt = engine.prompt([300 + index, 301])
        generation = engine.submit(GenerateRequest(prompt, params, tokens, constraint=begin()))
        arrivals = [perf_counter() async for _ in generation]
        if not index:
            moments.extend(arrivals)

    await asyncio.gather(*map(one, range(n)))
    return float(np.median(np.diff(moments)))


if __name__ == "__main__":
    run(grammar)
