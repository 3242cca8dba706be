"""Where a server's time goes, step by step, at several levels of concurrency.

Reads the server's /metrics before and after a load of streamed answers that ignore the end of generation.
Only servers of this repository say so much about their steps.
"""

import argparse
import asyncio
import random
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Literal

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from prometheus_client.parser import text_string_to_metric_families

from bench.environment import header
from bench.errors import BenchError, ServerError
from bench.load.client import Client
from bench.options import base_parser, positive, positives, run
from bench.prompts import WORDS, read_text
from bench.results import Record, ResultFile
from bench.table import Table

DEVICE = ("decode", "wait")
"""Phases in which the engine's thread sits in llama.cpp; the others are the host's own."""


class Steps(Record):
    """All steps of a kind at a level of concurrency; ``milliseconds`` a step, by phase."""

    level: int
    kind: str
    rows: int
    steps: int
    tokens: int
    milliseconds: dict[str, float]

    @property
    def device_ms(self) -> float:
        """In llama_decode, and waiting for what it started."""
        return sum(self.milliseconds.get(phase, 0.0) for phase in DEVICE)

    @property
    def host_ms(self) -> float:
        """Everything else that the engine's thread does in a step."""
        return sum(self.milliseconds.values()) - self.device_ms


class Rate(Record):
    """What the clients saw at a level."""

    level: int
    completion_tokens: int
    seconds: float
    ms_per_token: float
    """Mean time between the tokens of one stream."""


class PhasesResult(ResultFile):
    """A run of this verb."""

    kind: Literal["phases"] = "phases"
    input_words: int
    output_tokens: int
    steps: list[Steps]
    rates: list[Rate]


Totals = Mapping[tuple[str, int], Mapping[str, float]]
"""(kind, rows) -> steps, tokens, and seconds by phase."""


def parse(text: str) -> Totals:
    """The engine's step counters in Prometheus' text format. Raises ServerError when there are none."""
    totals: dict[tuple[str, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sample.labels
            if sample.name in ("qwen_steps_total", "qwen_step_tokens_total", "qwen_step_seconds_total"):
                key = labels["kind"], int(labels["rows"])
                name = labels.get("phase") or ("steps" if sample.name == "qwen_steps_total" else "tokens")
                totals[key][name] = sample.value
    if not totals and "qwen_kv_cells" not in text:
        raise ServerError(
            "/metrics says nothing about steps: this verb needs a server of this repository", 200
        )
    return totals


def difference(level: int, before: Totals, after: Totals) -> list[Steps]:
    """What was counted in between, by kind and number of rows."""
    found = []
    for (kind, rows), now in sorted(after.items()):
        then = before.get((kind, rows), {})
        grown = {name: value - then.get(name, 0.0) for name, value in now.items()}
        steps, tokens = round(grown.pop("steps")), round(grown.pop("tokens"))
        if steps:
            milliseconds = {phase: 1000 * seconds / steps for phase, seconds in grown.items()}
            found.append(
                Steps(
                    level=level, kind=kind, rows=rows, steps=steps, tokens=tokens, milliseconds=milliseconds
                )
            )
    return found


async def totals(client: Client) -> Totals:
    reply = await client.request("GET", "/metrics")
    if reply.status != 200:
        raise ServerError(f"GET /metrics answered {reply.status}", reply.status)
    return parse(reply.text)


async def load(client: Client, args: argparse.Namespace, level: int, rng: random.Random) -> Rate:
    """``level`` streams at once, ``args.rounds`` times."""
    tokens, gaps = 0, []
    began = perf_counter()
    for _ in range(args.rounds):
        bodies = [
            {
                "prompt": " ".join(rng.choices(args.words, k=args.input_words)),
                "max_tokens": args.output_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                **({"model": args.model} if args.model else {}),
            }
            for _ in range(level)
        ]
        answers = await asyncio.gather(*(client.stream("/v1/completions", body) for body in bodies))
        tokens += sum(answer.usage.completion_tokens for answer in answers if answer.usage)
        gaps += [answer.seconds_per_token for answer in answers if answer.seconds_per_token]
    mean = sum(gaps) / len(gaps) if gaps else 0.0
    return Rate(
        level=level, completion_tokens=tokens, seconds=perf_counter() - began, ms_per_token=1000 * mean
    )


def tables(result: PhasesResult) -> list[Table]:
    """Milliseconds a step, by phase."""
    phases = list(dict.fromkeys(phase for steps in result.steps for phase in steps.milliseconds))
    rows = [
        (s.level, s.kind, s.rows, s.steps, s.host_ms, *(s.milliseconds.get(phase) for phase in phases))
        for s in result.steps
    ]
    return [
        Table(
            ("streams", "kind", "rows up to", "steps", "host", *phases),
            rows,
            "Milliseconds a step",
            (f"host: all but {' and '.join(DEVICE)}",),
        ),
        Table(
            ("streams", "tokens", "tokens/s", "ms a token"),
            [
                (rate.level, rate.completion_tokens, rate.completion_tokens / rate.seconds, rate.ms_per_token)
                for rate in result.rates
            ],
            "As the clients saw it",
        ),
    ]


async def main(args: argparse.Namespace) -> int:
    began, rng = perf_counter(), random.Random(args.seed)
    args.words = read_text(args.text).split()
    if not args.words:
        raise BenchError(f"--text {args.text}: there is no word in it")
    steps: list[Steps] = []
    rates: list[Rate] = []
    async with Client(args.url, timeout=args.timeout, api_key=args.api_key) as client:
        head = await header(args, client, args.model)
        for level in args.levels:
            await load(client, argparse.Namespace(**{**vars(args), "rounds": 1}), level, rng)  # warm-up
            before = await totals(client)
            rates.append(await load(client, args, level, rng))
            steps += difference(level, before, await totals(client))
    result = PhasesResult(
        **head,
        seconds=perf_counter() - began,
        input_words=args.input_words,
        output_tokens=args.output_tokens,
        steps=steps,
        rates=rates,
    )
    if args.out is not None:
        result.save(args.out)
    print("\n\n".join(str(table) for table in tables(result)))
    return 0


def parser() -> argparse.ArgumentParser:
    result = base_parser(__doc__ or "")
    result.prog = "python bench/phases.py"
    group = result.add_argument_group("load")
    group.add_argument("--levels", type=positives, default=[1, 8, 64], help="streams at once")
    group.add_argument("--rounds", type=positive, default=2, help="answers of each stream")
    group.add_argument("--input-words", type=positive, default=32, help="words in a prompt")
    group.add_argument("--text", type=Path, default=WORDS, metavar="FILE", help="where the words are from")
    group.add_argument("--output-tokens", type=positive, default=128, help="tokens in an answer")
    group.add_argument("--seed", type=int, default=0, help="of the prompts")
    return result


if __name__ == "__main__":
    sys.exit(run(parser(), main))
