"""Throughput at several levels of concurrency, with token counts that are verified.

Workloads: random is the hackathon's protocol (1,024 tokens in, 1,024 out, 64 requests a level, a score);
shared-prefix sends questions behind long prefixes, as few-shot benchmarks do; chat holds conversations that
grow turn by turn. Two sums ride along in every level, to see that the answers are still answers.
"""

import argparse
import asyncio
import random
import re
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.environment import header
from bench.errors import BenchError, ServerError
from bench.load.client import Client, Completion
from bench.load.vocabulary import Vocabulary, find_vocabulary
from bench.measures import claims
from bench.options import add_prompt_options, base_parser, natural, positive, positives, run
from bench.progress import Progress
from bench.prompts import Prompts, find_prompts
from bench.publish import publish
from bench.throughput_report import draw, tables
from bench.throughput_result import (
    WEIGHTS,
    Level,
    Request,
    SpotCheck,
    ThroughputResult,
    score,
    summarize_level,
    summarize_turns,
)
from bench.workloads import Body, ChatWorkload, Job, RandomWorkload, SharedPrefixWorkload, Workload

Sent = tuple[Request, str]


@dataclass(frozen=True, slots=True)
class Sender:
    """How one request is made from a body: endpoint, length, sampling, streamed or not."""

    client: Client
    endpoint: str
    max_tokens: int
    ignore_eos: bool
    stream: bool
    model: str | None

    async def send(self, body: Body) -> Completion:
        """Raises BenchError when the server does not answer as it should."""
        full = {**body, "max_tokens": self.max_tokens, "temperature": 0.0}
        if self.ignore_eos:
            full["ignore_eos"] = True
        if self.model is not None:
            full["model"] = self.model
        sender: Callable[[str, Body], Awaitable[Completion]] = (
            self.client.stream if self.stream else self.client.complete
        )
        return await sender(self.endpoint, full)


async def run_jobs(sender: Sender, jobs: Iterator[Job], level: int, bar: Progress) -> list[Sent]:
    """``level`` workers take job after job until none is left: a closed loop of constant concurrency."""
    began = perf_counter()
    sent: list[Sent] = []

    async def worker() -> None:
        for job in jobs:
            for turn in range(len(job.turns)):
                body = job.body(turn)
                at = perf_counter()
                try:
                    answer = await sender.send(body)
                except BenchError as error:
                    spent = perf_counter() - at
                    lost = Request(
                        level=level, turn=turn, started=at - began, seconds=spent, error=str(error)
                    )
                    sent.append((lost, ""))
                    bar.advance(len(job.turns) - turn)
                    break
                job.hear(answer.text)
                sent.append((_request(level, turn, answer, began), answer.reasoning + answer.text))
                bar.advance()

    await asyncio.gather(*(worker() for _ in range(level)))
    return sent


async def spot_check(sender: Sender, level: int, rng: random.Random) -> SpotCheck:
    """Ask for a sum; passed when it is the last number of the answer."""
    left, right = rng.randint(2, 40), rng.randint(2, 40)
    question, expected = f"What is {left}+{right}?", str(left + right)
    body: Body = {"messages": [{"role": "user", "content": question}], "max_tokens": 64, "temperature": 0.0}
    if sender.model is not None:
        body["model"] = sender.model
    try:
        answer = (await sender.client.complete("/v1/chat/completions", body)).text
    except BenchError as error:
        answer = f"error: {error}"
    numbers = re.findall(r"\d+", answer)
    passed = bool(numbers) and numbers[-1] == expected
    return SpotCheck(level=level, question=question, expected=expected, answer=answer[:200], passed=passed)


async def run_level(
    sender: Sender, workload: Workload, level: int, args: argparse.Namespace, rng: random.Random
) -> tuple[list[Sent], list[SpotCheck]]:
    """Warm up, then measure one level. Raises ServerError when a warm-up or every request fails."""
    warmups = await workload.jobs(args.warmup, 1) if args.warmup else []
    jobs = await workload.jobs(args.requests, level)
    total = sum(len(job.turns) for job in (*warmups, *jobs))
    with Progress(f"{workload.name}, {level} at once", total=total) as bar:
        for request, _ in await run_jobs(sender, iter(warmups), level, bar):
            if request.error is not None:
                raise ServerError(f"level {level}, warm-up: {request.error}", 200)
        asked = [asyncio.create_task(spot_check(sender, level, rng)) for _ in range(args.spot_checks)]
        sent = await run_jobs(sender, iter(jobs), level, bar)
        checks = list(await asyncio.gather(*asked))
    if all(request.error is not None for request, _ in sent):
        raise ServerError(
            f"level {level}: all {len(sent)} requests failed, the first: {sent[0][0].error}", 200
        )
    return sent, checks


async def recount(vocabulary: Vocabulary | None, sent: list[Sent]) -> list[Request]:
    """The requests with their output counted by the tokenizer; as they are where there is none."""
    if vocabulary is None:
        return [request for request, _ in sent]
    return [
        request.model_copy(
            update={"recounted_tokens": None if request.error else await vocabulary.count(text)}
        )
        for request, text in sent
    ]


def make_workload(args: argparse.Namespace, prompts: Prompts) -> Workload:
    """The workload that the command line asks for, with its own default lengths."""
    if args.workload == "shared-prefix":
        return SharedPrefixWorkload(
            prompts, args.input_tokens or 100, prefix_tokens=args.prefix_tokens, subjects=args.subjects
        )
    if args.workload == "chat":
        return ChatWorkload(prompts, args.input_tokens or 100, turns=args.turns)
    return RandomWorkload(prompts, args.input_tokens or 1024)


async def throughput(args: argparse.Namespace) -> int:
    """The verb: measure level by level, print, save. Exit status 1 when anything failed."""
    began = perf_counter()
    rng = random.Random(args.seed)
    failure: BenchError | None = None
    async with Client(args.url, timeout=args.timeout, api_key=args.api_key) as client:
        model = args.model or await client.model()
        head = await header(args, client, model)
        vocabulary = await find_vocabulary(args.tokenizer, client, model)
        workload = make_workload(
            args, await find_prompts(client, vocabulary, model, rng, words=args.workload != "random")
        )
        sender = Sender(
            client=client,
            endpoint=args.endpoint or workload.endpoint,
            max_tokens=args.output_tokens or (1024 if args.workload == "random" else 128),
            ignore_eos=not args.stop_at_eos,
            stream=not args.no_stream,
            model=model,
        )
        levels: list[Level] = []
        requests: list[Request] = []
        checks: list[SpotCheck] = []
        for level in args.levels:
            try:
                sent, asked = await run_level(sender, workload, level, args, rng)
            except BenchError as error:
                failure = error
                break
            counted = await recount(vocabulary, sent)
            levels.append(summarize_level(counted, asked, sender.max_tokens))
            requests += counted
            checks += asked
    if failure is not None and not levels:
        raise failure
    result = ThroughputResult(
        **head,
        seconds=perf_counter() - began,
        notes=[f"STOPPED: {failure}"] if failure is not None else [],
        workload=workload.name,
        endpoint=sender.endpoint,
        token_counts=vocabulary.source if vocabulary is not None else "the server's own usage",
        settings={
            **workload.settings(),
            "output_tokens": sender.max_tokens,
            "requests": args.requests,
            "warmup": args.warmup,
            "ignore_eos": sender.ignore_eos,
            "stream": sender.stream,
            "seed": args.seed,
        },
        levels=levels,
        turns=summarize_turns(requests),
        score=score(
            levels,
            input_tokens=workload.input_tokens,
            output_tokens=sender.max_tokens,
            recounted=vocabulary is not None,
        )
        if workload.name == "random"
        else None,
        spot_checks=checks,
        requests=requests,
    )
    publish(result, args, tables, draw)
    return verdict(result)


def verdict(result: ThroughputResult) -> int:
    """The exit status; what was wrong goes to stderr."""
    errors = [request.error for request in result.requests if request.error is not None]
    wrong = [check for check in result.spot_checks if not check.passed]
    if errors:
        print(f"error: {len(errors)} requests failed; the first: {errors[0]}", file=sys.stderr)
    if wrong:
        print(f"error: {len(wrong)} of {len(result.spot_checks)} spot checks failed", file=sys.stderr)
    for note in result.notes:
        print(f"error: {note}", file=sys.stderr)
    return 1 if errors or wrong or result.notes else 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = base_parser(__doc__ or "")
    made.prog = "python bench/throughput.py"
    group = made.add_argument_group("measurement")
    group.add_argument("--workload", choices=("random", "shared-prefix", "chat"), default="random")
    group.add_argument("--levels", type=positives, default=list(WEIGHTS), help="concurrent requests")
    group.add_argument("--requests", type=positive, default=64, help="a level")
    group.add_argument("--warmup", type=natural, default=2, help="untimed requests before each level")
    group.add_argument("--input-tokens", type=positive, help="a prompt, question or turn (1024; else 100)")
    group.add_argument("--output-tokens", type=positive, help="an answer (1024; else 128)")
    group.add_argument(
        "--prefix-tokens", type=positive, default=2000, help="shared-prefix: a subject's prefix"
    )
    group.add_argument("--subjects", type=positive, default=4, help="shared-prefix: different prefixes")
    group.add_argument("--turns", type=positive, default=4, help="chat: turns of a conversation")
    group.add_argument("--spot-checks", type=natural, default=2, help="sums asked in each level")
    group.add_argument("--endpoint", help="/v1/completions for random, /v1/chat/completions else")
    group.add_argument("--no-stream", action="store_true", help="whole answers: no first-token times")
    add_prompt_options(group)
    return made


def _request(level: int, turn: int, answer: Completion, began: float) -> Request:
    gaps = [b - a for a, b in zip(answer.arrivals, answer.arrivals[1:], strict=False)]
    return Request(
        **claims(answer),
        level=level,
        turn=turn,
        started=answer.started - began,
        seconds=answer.seconds,
        first_token_seconds=answer.first_token_seconds,
        seconds_per_token=answer.seconds_per_token,
        longest_gap=max(gaps, default=None),
    )


if __name__ == "__main__":
    sys.exit(run(parser(), throughput))
