"""Latency of one request at a time, under both protocols, and the first token's and each token's time.

The official protocol sends the same repeated filler every time, so prompt caches and lossless speculation
decide it; the distinct one sends another prompt of the exact same length every time. Both are always shown.
"""

import argparse
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.environment import header
from bench.errors import ServerError
from bench.latency_report import draw, tables
from bench.latency_result import (
    CATEGORIES,
    FILLER,
    FILLER_TOKENS,
    PROTOCOLS,
    Category,
    LatencyResult,
    Protocol,
    Run,
    mean_speedup,
    read_baseline,
    summarize,
)
from bench.load.client import Client
from bench.load.vocabulary import Vocabulary, find_vocabulary
from bench.measures import claims
from bench.options import add_prompt_options, base_parser, natural, positive
from bench.options import run as run_verb
from bench.progress import Progress
from bench.prompts import find_prompts
from bench.publish import publish


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run of each protocol and category; ``stream_runs`` 0 leaves the streamed part out."""

    warmup: int
    runs: int
    stream_runs: int
    endpoint: str
    stream_endpoint: str
    ignore_eos: bool
    model: str | None

    def passes(self) -> Iterator[tuple[bool, bool]]:
        """(streamed, warm-up) of each request in turn; one warm-up is enough for the streamed part."""
        yield from [(False, True)] * self.warmup + [(False, False)] * self.runs
        if self.stream_runs:
            yield from [(True, True)] * min(self.warmup, 1) + [(True, False)] * self.stream_runs


async def measure(
    client: Client, plan: Plan, protocol: Protocol, category: Category, prompts: list[str]
) -> list[tuple[Run, str]]:
    """Send one prompt after another; each run with the text that came back.

    A failed warm-up raises ServerError: a server that cannot answer is not measured. A later one is recorded.
    """
    done: list[tuple[Run, str]] = []
    passes = list(plan.passes())
    with Progress(f"{category.name}, {protocol}", total=len(passes)) as bar:
        for prompt, (streamed, warmup) in zip(prompts, passes, strict=True):
            body = {"prompt": prompt, "max_tokens": category.max_tokens, "temperature": 0.0}
            if protocol == "distinct" and plan.ignore_eos:
                body["ignore_eos"] = True  # the official body is kept to the letter
            if plan.model is not None:
                body["model"] = plan.model
            send = client.stream if streamed else client.complete
            about: dict[str, Any] = {
                "protocol": protocol,
                "category": category.name,
                "streamed": streamed,
                "warmup": warmup,
            }
            started = perf_counter()
            try:
                answer = await send(plan.stream_endpoint if streamed else plan.endpoint, body)
            except ServerError as error:
                if warmup:
                    raise ServerError(
                        f"{category.name}, {protocol}, warm-up: {error}", error.status
                    ) from error
                done.append((Run(**about, seconds=perf_counter() - started, error=str(error)), ""))
            else:
                arrivals = [round(arrival, 6) for arrival in answer.arrivals]
                run = Run(**about, **claims(answer), seconds=answer.seconds, arrivals=arrivals)
                done.append((run, answer.text))
            bar.advance(note=f"{done[-1][0].seconds * 1000:,.0f} ms")
    return done


async def recount(vocabulary: Vocabulary | None, done: list[tuple[Run, str]]) -> list[Run]:
    """The runs with their completion tokens counted by the tokenizer; as they are where there is none."""
    if vocabulary is None:
        return [run for run, _ in done]
    return [
        run.model_copy(update={"recounted_tokens": None if run.error else await vocabulary.count(text)})
        for run, text in done
    ]


async def latency(args: argparse.Namespace) -> int:
    """The verb: measure, print, save. Exit status 1 when any request failed."""
    baseline = read_baseline(args.baseline)
    began = perf_counter()
    async with Client(args.url, timeout=args.timeout, api_key=args.api_key) as client:
        model = args.model or await client.model()
        plan = Plan(
            warmup=args.warmup,
            runs=args.runs,
            stream_runs=args.runs if args.stream_runs is None else args.stream_runs,
            endpoint=args.endpoint,
            stream_endpoint=args.stream_endpoint,
            ignore_eos=not args.stop_at_eos,
            model=args.model,  # the official body names none: only at the user's wish
        )
        head = await header(args, client, model)
        vocabulary = await find_vocabulary(args.tokenizer, client, model)
        protocols = PROTOCOLS if args.protocol == "both" else (args.protocol,)
        supply = (
            await find_prompts(
                client, vocabulary, model, random.Random(args.seed), words=True, text=args.text
            )
            if "distinct" in protocols
            else None
        )
        count = len(list(plan.passes()))
        runs: list[Run] = []
        for category in args.categories:
            for protocol in protocols:
                if protocol == "official" or supply is None:
                    prompts = [FILLER * (category.prompt_tokens // FILLER_TOKENS)] * count
                else:
                    prompts = [await supply.make(category.prompt_tokens) for _ in range(count)]
                runs += await recount(vocabulary, await measure(client, plan, protocol, category, prompts))
    summaries = summarize(runs, baseline)
    result = LatencyResult(
        **head,
        seconds=perf_counter() - began,
        endpoint=plan.endpoint,
        stream_endpoint=plan.stream_endpoint,
        prompts=supply.source if supply is not None else "not run",
        token_counts=vocabulary.source if vocabulary is not None else "the server's own usage",
        baseline=baseline,
        settings={
            "warmup": plan.warmup,
            "runs": plan.runs,
            "stream_runs": plan.stream_runs,
            "ignore_eos (distinct)": plan.ignore_eos,
            "seed": args.seed,
        },
        summaries=summaries,
        speedup=mean_speedup(summaries),
        runs=runs,
    )
    publish(result, args, tables, draw)
    failed = [run for run in runs if run.error is not None]
    if failed:
        print(f"error: {len(failed)} requests failed; the first: {failed[0].error}", file=sys.stderr)
    return 1 if failed else 0


def parse_categories(text: str) -> list[Category]:
    """An argparse type: names of categories, comma-separated."""
    unknown = [name for name in text.split(",") if name not in CATEGORIES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]}: want some of {','.join(CATEGORIES)}")
    return [CATEGORIES[name] for name in dict.fromkeys(text.split(","))]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = base_parser(__doc__ or "")
    made.prog = "python bench/latency.py"
    group = made.add_argument_group("measurement")
    group.add_argument("--protocol", choices=("both", *PROTOCOLS), default="both")
    group.add_argument("--runs", type=positive, default=50, help="timed requests per category and protocol")
    group.add_argument("--warmup", type=natural, default=5, help="untimed requests before them")
    group.add_argument(
        "--stream-runs", type=natural, help="streamed requests, 0 for none (as many as --runs)"
    )
    group.add_argument("--categories", type=parse_categories, default=",".join(CATEGORIES))
    group.add_argument("--endpoint", default="/invocations", help="the timed endpoint")
    group.add_argument("--stream-endpoint", default="/v1/completions", help="for first-token and token times")
    group.add_argument(
        "--baseline",
        default="official",
        help="official, none, short=MS,medium=MS,long=MS, or a result file of this command",
    )
    group.add_argument("--text", type=Path, help="cut the distinct prompts from this text")
    add_prompt_options(group)
    return made


if __name__ == "__main__":
    sys.exit(run_verb(parser(), latency))
